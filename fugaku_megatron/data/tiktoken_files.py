"""Megatron-LM's TikTokenizer: byte-level BPE of a JSON list of tokens, without the library that it is named after.

Source: megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py. The first ids are special tokens, which stand for no text;
the file's tokens follow them, in the order in which they are merged. Left out: chat templates, special tokens of one's own.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import regex

from .files import read_text
from .library_tokenizers import clean

DEFAULT_SIZE = 2**17  # of the vocabulary
SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_WORD_V2 = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*")
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": "|".join([*(r"[^\r\n\p{L}\p{N}]?" + word for word in _WORD_V2),
                    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"]),
}
CACHE_ENTRIES = 2**16


class TikTokenizer:
    """`vocab_size` tokens, of which `special` stand for no text; `eod` is the id of "</s>".

    vocab_size: --vocab-size, by default 131,072. Raises ValueError for a file that is missing, ill-formed or too short.
    """

    name = "TikTokenizer"

    def __init__(self, path: str | Path, vocab_size: int | None = None, pattern: str = "v2", special: int = 1000):
        self.vocab_size = vocab_size or DEFAULT_SIZE
        if not len(SPECIAL) <= special < self.vocab_size:
            raise ValueError(f"--tiktoken-num-special-tokens is {special}: pass a number from {len(SPECIAL)} to below the "
                             f"vocabulary size, {self.vocab_size}")
        names = [*SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(SPECIAL), special))]
        self._special = {name: i for i, name in enumerate(names)}
        self._tokens = _read_tokens(path, self.vocab_size - special)
        self._ids = {token: special + i for i, token in enumerate(self._tokens)}
        self._pieces, self.eod = regex.compile(PATTERNS[pattern]), SPECIAL.index("</s>")
        self._special_in_text = regex.compile("|".join(map(regex.escape, names)))
        self.checksum = zlib.crc32(repr((self._tokens, special, pattern)).encode())
        self._merged = lru_cache(CACHE_ENTRIES)(self._merge)

    def encode(self, text: str | bytes) -> list[int]:
        """Token ids of `text`, in which names of special tokens are these tokens."""
        text, ids, end = clean(text), [], 0
        for match in self._special_in_text.finditer(text):
            ids += [*self._encode_part(text[end : match.start()]), self._special[match[0]]]
            end = match.end()
        return ids + self._encode_part(text[end:])

    def _encode_part(self, text: str) -> list[int]:
        return [token for piece in self._pieces.findall(text) for token in self._merged(piece.encode())]

    def _merge(self, piece: bytes) -> tuple[int, ...]:
        """BPE of one piece: the pair that makes the first token of the file is merged, until no pair makes one."""
        parts = [piece[i : i + 1] for i in range(len(piece))]
        if piece in self._ids:
            return (self._ids[piece],)
        while len(parts) > 1:
            made = [self._ids.get(a + b, self.vocab_size) for a, b in zip(parts, parts[1:])]
            first = min(range(len(made)), key=made.__getitem__)
            if made[first] == self.vocab_size:
                break
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        return tuple(self._ids[part] for part in parts)

    def _bytes(self, ids: Iterable[int]) -> bytes:
        special, found = self.vocab_size - len(self._tokens), []
        for token in map(int, ids):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}: is this --tokenizer-model the "
                                 "model's?")
            found.append(b"" if token < special else self._tokens[token - special])
        return b"".join(found)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out. ValueError for an id outside the vocabulary."""
        return self._bytes(ids).decode("utf-8", "replace")

    def count_bytes(self, ids: Iterable[int]) -> int:
        """UTF-8 bytes of the text of `ids`."""
        return len(self._bytes(ids))


def _read_tokens(path: str | Path, count: int) -> list[bytes]:
    """The first `count` tokens of the file, in the order of their ranks, of which the first 256 are the bytes."""
    where, text = f"--tokenizer-model {path}", read_text(path, "--tokenizer-model")
    try:
        rows = json.loads(text)[:count]
        tokens = [base64.b64decode(row["token_bytes"]) for row in rows]
        ranked = [row["rank"] for row in rows] == [*range(len(rows))]
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise ValueError(f"{where}: not a JSON list of tokens with token_bytes and rank ({error}); give "
                         "TikTokenizer's file") from None
    if not ranked or tokens[:256] != [bytes([i]) for i in range(256)] or len(set(tokens)) != len(tokens):
        raise ValueError(f"{where}: its tokens are not ranked from 0 on, each once and the 256 bytes first")
    if len(tokens) < count:
        raise ValueError(f"{where}: it has {len(tokens)} tokens, and --vocab-size without the special ones asks for "
                         f"{count}: lower it")
    return tokens
