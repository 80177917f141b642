"""Byte-level BPE of a JSON list of tokens, by the library tiktoken, after special tokens (Megatron-core's tiktoken_tokenizer.py)."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from pathlib import Path

import regex

from ..text.named_files import read_text
from ..text.optional_packages import optional_package
from .byte_level_bpe import ByteLevelBPE

_WORD_V2 = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)

DEFAULT_SIZE = 2**17  # of the vocabulary
SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")

PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": "|".join(
        [
            *(r"[^\r\n\p{L}\p{N}]?" + word for word in _WORD_V2),
            r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ]
    ),
}


class TikTokenizer(ByteLevelBPE):
    """Tiktoken BPE of `vocab_size` tokens, `special` of them without text; `eod` is the id of
    "</s>".
    """

    name = "TikTokenizer"
    needs = ("tokenizer_model",)
    options = ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens")

    def __init__(
        self,
        path: str | Path,
        vocab_size: int | None,
        pattern: str,
        special: int,
    ):
        tiktoken = optional_package("tiktoken", "tiktoken", f"--tokenizer-type {self.name}")
        size = vocab_size or DEFAULT_SIZE
        if not len(SPECIAL) <= special < size:
            raise ValueError(
                f"--tiktoken-num-special-tokens is {special}: pass a number from {len(SPECIAL)} to below the "
                f"vocabulary size, {size}"
            )
        names = [*SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(SPECIAL), special))]
        tokens = _read_tokens(path, size - special)
        # Pieces are cut here: a pattern of tiktoken's ends the process at a million spaces.
        self._whole = tiktoken.Encoding(
            "piece",
            pat_str="(?s:.+)",
            mergeable_ranks={token: special + i for i, token in enumerate(tokens)},
            special_tokens={},
        )
        self.eod = SPECIAL.index("</s>")
        self.checksum = zlib.crc32(repr((tokens, special, pattern)).encode())
        super().__init__(
            [*(b"" for _ in names), *tokens],
            {name: i for i, name in enumerate(names)},
            regex.compile(PATTERNS[pattern]),
        )

    def _merge(self, piece: str) -> tuple[int, ...]:
        return tuple(self._whole.encode_ordinary(piece))


def _read_tokens(path: str | Path, count: int) -> list[bytes]:
    where = f"--tokenizer-model {path}"
    text = read_text(path, "--tokenizer-model")
    try:
        contents = json.loads(text)
        if not isinstance(contents, list):
            raise TypeError(f"it holds a {type(contents).__name__}")
        rows = contents[:count]
        tokens = [base64.b64decode(row["token_bytes"]) for row in rows]
        ranked = [row["rank"] for row in rows] == [*range(len(rows))]
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise ValueError(
            f"{where}: not a JSON list of tokens with token_bytes and rank ({error}); pass "
            "TikTokenizer's file"
        ) from None
    if (
        not ranked
        or tokens[:256] != [bytes([i]) for i in range(256)]
        or len(set(tokens)) != len(tokens)
    ):
        raise ValueError(
            f"{where}: its tokens are not ranked from 0 on, each once and the 256 bytes first"
        )
    if len(tokens) < count:
        raise ValueError(
            f"{where}: it has {len(tokens)} tokens, and --vocab-size without the special ones asks for "
            f"{count}: lower it"
        )
    return tokens
