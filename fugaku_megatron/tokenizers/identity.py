"""The record of a tokenizer next to data and in a checkpoint."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from ..text.named_files import JsonObject
from ..text.written_files import write_text
from .null_tokenizer import NullTokenizer
from .tokenizer import Tokenizer

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
