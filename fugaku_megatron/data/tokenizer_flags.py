"""The flags that name a tokenizer, as every command takes them, and what a file says of the tokenizer that made it.

Beside PREFIX.bin and PREFIX.idx preprocess writes PREFIX.tokenizer.json, and a checkpoint's manifest has the same in its state:
type, number of tokens, id that ends a document, CRC-32 of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from .library_tokenizers import NullTokenizer
from .tokenizer import TOKENIZERS, GPT2BPETokenizer, Tokenizer

SUFFIX = ".tokenizer.json"


class TokenizerFlags(NamedTuple):
    """Arguments of `build_tokenizer`. vocab_size: --vocab-size, which only NullTokenizer reads."""

    tokenizer_type: str = GPT2BPETokenizer.name
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_num_special_tokens: int = 1000

    @classmethod
    def of(cls, owner: Any, vocab_size: int | None = None) -> TokenizerFlags:
        """From an object with attributes of these names: parsed flags, or a run's data."""
        found = {name: getattr(owner, name, None) for name in cls._fields}
        values = {name: value for name, value in found.items() if value is not None}
        return cls(**{"vocab_size": vocab_size, **values})

    @property
    def named(self) -> bool:
        """Whether they say which tokenizer it is, and not only of which kind."""
        return bool(self.vocab_file or self.tokenizer_model or self.tokenizer_type == NullTokenizer.name)

    def words(self) -> str:
        """As a shell reads them; the type only where it is not the default."""
        given = {name: value for name, value in zip(self._fields, self) if value != self._field_defaults[name]}
        return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items())


def add_tokenizer_flags(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """--tokenizer-type, --vocab-file, --merge-file and --tokenizer-model. otherwise: what is taken where none is given."""
    add = parser.add_argument
    add("--tokenizer-type", default=GPT2BPETokenizer.name, help=f"{', '.join(TOKENIZERS)} (default: %(default)s)")
    add("--vocab-file", help=f"vocab.json of GPT2BPETokenizer; default: {otherwise}")
    add("--merge-file", help="merges.txt of the same vocabulary")
    add("--tokenizer-model", help="folder of HuggingFaceTokenizer, .model file of SentencePiece, or .json file of TikTokenizer")
    add("--tiktoken-pattern", choices=("v1", "v2"), help="how TikTokenizer cuts a text into pieces (default: v2)")
    add("--tiktoken-num-special-tokens", type=int, help="tokens of TikTokenizer that stand for no text (default: 1000)")


def identity(tokenizer: Tokenizer) -> dict[str, Any]:
    """What tells one tokenizer from another, for JSON."""
    return {"tokenizer_type": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod,
            "crc32": f"{tokenizer.checksum:08x}"}


def mismatch(own: dict[str, Any] | None, other: dict[str, Any] | None) -> str | None:
    """Both tokenizers in words, where both are known and differ; a NullTokenizer stands for any."""
    if not own or not other or own == other or NullTokenizer.name in (own.get("tokenizer_type"), other.get("tokenizer_type")):
        return None
    words = "{tokenizer_type} of {vocab_size} tokens, CRC-32 {crc32}, end of document {eod}"
    return " and not ".join(words.format_map(_Known(one)) for one in (other, own))


class _Known(dict):
    """A record that may lack fields."""

    def __missing__(self, name: str) -> str:
        return "?"


def write_identity(prefix: str, tokenizer: Tokenizer) -> None:
    """PREFIX.tokenizer.json. Raises OSError."""
    Path(prefix + SUFFIX).write_text(json.dumps(identity(tokenizer)) + "\n", encoding="utf-8")


def read_identity(prefix: str) -> dict[str, Any] | None:
    """What PREFIX.tokenizer.json says; None where there is none that could be read, as beside files of Megatron-LM."""
    try:
        record = json.loads(Path(prefix + SUFFIX).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
