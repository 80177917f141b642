"""Tokenizers by their type's name, a command's flags that choose one, and the record of a tokenizer next to data."""

from __future__ import annotations

import argparse
import difflib
import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..text.named_files import JsonObject
from ..text.written_files import write_text
from .byte_level_bpe import GPT2BPETokenizer, TikTokenizer, gpt2_package
from .hugging_face import (
    HuggingFaceTokenizer,
    JapaneseSentencePiece,
    SentencePieceTokenizer,
    has_tokenizer,
    is_described,
)
from .vocabulary import NULL_REMEDY, check_range, clean


class NullTokenizer:
    """Space-separated numbers, for data tokenized elsewhere. `eod` is vocab_size - 1.

    Source: megatron/core/tokenizers/text/libraries/null_tokenizer.py.
    """

    name = "NullTokenizer"
    needs = ("vocab_size",)
    options: tuple[str, ...] = ()
    checksum = 0  # every one of a size is the same

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str | bytes) -> list[int]:
        words = clean(text).split()
        wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
        if wrong is not None:
            raise ValueError(
                f"--tokenizer-type NullTokenizer reads texts of numbers, and {wrong[:40]!r} is not one: pass another "
                "type"
            )
        ids = [int(word[:20]) for word in words]
        check_range(ids, self.vocab_size, NULL_REMEDY)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def count_bytes(self, ids: Iterable[int]) -> int:
        return len(self.decode(ids))

    def token_id(self, token: str) -> int | None:
        """Return a token's number from its text, or None."""
        known = token.isascii() and token.isdigit() and int(token) < self.vocab_size
        return int(token) if known else None


Tokenizer = (
    GPT2BPETokenizer | HuggingFaceTokenizer | SentencePieceTokenizer | TikTokenizer | NullTokenizer
)
TOKENIZERS: dict[str, type[Tokenizer]] = {
    **{
        kind.name: kind for kind in (GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer)
    },
    "GPTSentencePieceTokenizer": SentencePieceTokenizer,  # other names of Megatron-LM for it
    "Llama2Tokenizer": SentencePieceTokenizer,
    JapaneseSentencePiece.name: JapaneseSentencePiece,
    TikTokenizer.name: TikTokenizer,
    NullTokenizer.name: NullTokenizer,
}


class TokenizerFlags(NamedTuple):
    """Flags that name a tokenizer. vocab_size: --vocab-size, used by NullTokenizer."""

    tokenizer_type: str = GPT2BPETokenizer.name
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_num_special_tokens: int = 1000

    @classmethod
    def of(cls, owner: Any, vocab_size: int | None = None) -> TokenizerFlags:
        found = {name: getattr(owner, name, None) for name in cls._fields}
        values = {name: value for name, value in found.items() if value is not None}
        return cls(**{"vocab_size": vocab_size, **values})

    @property
    def named(self) -> bool:
        """True if the flags identify a tokenizer, not only its type."""
        return bool(
            self.vocab_file or self.tokenizer_model or self.tokenizer_type == NullTokenizer.name
        )

    def build(self) -> Tokenizer:
        """Build the tokenizer. Raises ValueError for an unknown type and missing or invalid files."""
        name = self.tokenizer_type
        if name not in TOKENIZERS:
            names = {known.lower(): known for known in TOKENIZERS}
            close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
            hint = (
                f"did you mean {names[close[0]]}?" if close else f"known: {', '.join(TOKENIZERS)}"
            )
            raise ValueError(f"--tokenizer-type {name}: unknown; {hint}")
        kind = TOKENIZERS[name]
        given = self._asdict()
        origin = ", as in Megatron-LM"
        if kind is GPT2BPETokenizer:
            origin = f"; GPT-2's own files come with {gpt2_package()}"
            if self.tokenizer_model:
                raise ValueError(
                    f"--tokenizer-model {self.tokenizer_model}, but --tokenizer-type is {name}: pass the type of that "
                    f"model, {HuggingFaceTokenizer.name} or {SentencePieceTokenizer.name}"
                )
        elif issubclass(kind, SentencePieceTokenizer):
            given["tokenizer_model"] = self.tokenizer_model or self.vocab_file
        for needed in kind.needs:
            if not given[needed]:
                raise ValueError(f"{name} needs --{needed.replace('_', '-')}{origin}")
        return kind(*(given[argument] for argument in (*kind.needs, *kind.options)))

    def words(self) -> str:
        return " ".join(
            f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
            for name, value in self._asdict().items()
            if value != self._field_defaults[name]
        )


# Files of a folder without a description for transformers, as Megatron-LM saves its tokenizers: argument -> file.
_FILES_ALONE = {
    GPT2BPETokenizer.name: {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    SentencePieceTokenizer.name: {"tokenizer_model": "tokenizer.model"},
}


def model_tokenizer(
    saved: Mapping[str, Any], carried: Path, size: int | None
) -> TokenizerFlags | None:
    """Return the tokenizer of the run that wrote a model, or one shipped with the model.

    saved: data flags of that run
    carried: directory with Hugging Face files
    """
    flags = TokenizerFlags.of(SimpleNamespace(**saved), size)
    if flags.named:
        return flags
    if has_tokenizer(carried):
        for name, files in _FILES_ALONE.items():
            places = {each: carried / file for each, file in files.items()}
            if all(file.is_file() for file in places.values()) and not is_described(carried):
                found = {each: str(file) for each, file in places.items()}
                return TokenizerFlags.of(SimpleNamespace(tokenizer_type=name, **found), size)
        return TokenizerFlags(HuggingFaceTokenizer.name, tokenizer_model=str(carried))
    return None


def add_tokenizer_flags(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Add the tokenizer's flags. otherwise: the default of --vocab-file, in words"""
    add = parser.add_argument
    add(
        "--tokenizer-type",
        default=GPT2BPETokenizer.name,
        help=f"{', '.join(TOKENIZERS)} (default: %(default)s)",
    )
    add("--vocab-file", help=f"vocab.json of GPT2BPETokenizer; default: {otherwise}")
    add("--merge-file", help="merges.txt of the same vocabulary")
    add(
        "--tokenizer-model",
        help="folder of HuggingFaceTokenizer, .model file of SentencePiece, or .json file of TikTokenizer",
    )
    add(
        "--tiktoken-pattern",
        choices=("v1", "v2"),
        help="how TikTokenizer cuts a text into pieces (default: v2)",
    )
    add(
        "--tiktoken-num-special-tokens",
        type=int,
        help="tokens of TikTokenizer that stand for no text (default: 1000)",
    )


SUFFIX = ".tokenizer.json"  # preprocess writes it next to PREFIX.bin; a checkpoint's manifest has the same record in its state


def identity(tokenizer: Tokenizer) -> JsonObject:
    return {
        "tokenizer_type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "crc32": f"{tokenizer.checksum:08x}",
    }


def mismatch(own: JsonObject | None, other: JsonObject | None) -> str | None:
    """Name both tokenizers if both are known and differ; a NullTokenizer equals any."""
    if (
        not own
        or not other
        or own == other
        or NullTokenizer.name in (own.get("tokenizer_type"), other.get("tokenizer_type"))
    ):
        return None
    words = "{tokenizer_type} of {vocab_size} tokens, CRC-32 {crc32}, end of document {eod}"
    return " and not ".join(words.format_map(defaultdict(lambda: "?", one)) for one in (other, own))


def write_identity(prefix: str, tokenizer: Tokenizer) -> None:
    write_text(prefix + SUFFIX, json.dumps(identity(tokenizer)) + "\n")


def read_identity(prefix: str) -> JsonObject | None:
    """Read PREFIX.tokenizer.json; None if missing or unreadable."""
    try:
        record = json.loads(Path(prefix + SUFFIX).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
