"""Tokenizers of SentencePiece models."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..text.foreign_models import hub_note
from ..text.named_files import unreadable
from ..text.optional_packages import optional_package
from .token_range import MODEL_REMEDY, check_range
from .utf8 import clean

TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def pieces_kind(path: Path) -> str | None:
    """Detect the program that wrote a tokenizer.model; None if unknown."""
    with open(path, "rb") as file:
        begin = file.read(512)
    if begin.startswith(b"\n"):  # the tag of the first field of a SentencePiece model, a piece
        return "SentencePiece"
    return "tiktoken" if TIKTOKEN_LINE.match(begin) else None


def load_pieces(path: str | Path, user: str) -> tuple[Any, bytes]:
    """Return a SentencePiece processor, and the file's bytes."""
    package = optional_package("sentencepiece", "sentencepiece", user)
    where = f"--tokenizer-model {path}"
    if reason := unreadable(path):
        raise ValueError(f"{where}: cannot be read ({reason}); pass a .model file")
    kind = pieces_kind(Path(path))
    model = Path(path).read_bytes()
    if kind == "SentencePiece":
        with suppress(RuntimeError):
            processor = package.SentencePieceProcessor(model_proto=model)
            if len(processor):
                return processor, model
    found = ", but a file of tiktoken" if kind == "tiktoken" else ""
    raise ValueError(
        f"{where}: not a SentencePiece model{found}; pass the .model file that its training wrote"
    )


class SentencePieceTokenizer:
    """SentencePiece model. `vocab_size` is its number of pieces, `eod` its end of sentence.

    `eod` is None without an end of sentence (Megatron-core uses -1, not a token id).
    Sources: sentencepiece_tokenizer.py and, for `eod`, abstract_tokenizer.py in Megatron-LM's
        megatron/core/tokenizers/text/libraries.
    """

    name = "SentencePieceTokenizer"
    needs = ("tokenizer_model",)
    options: tuple[str, ...] = ()

    def __init__(self, path: str | Path):
        if reason := unreadable(path):
            raise ValueError(
                f"--tokenizer-model {path}: cannot be read ({reason}); pass the path of an existing model{hub_note(path)}"
            )
        self._processor, model = load_pieces(path, f"--tokenizer-type {self.name}")
        self.vocab_size = len(self._processor)
        end = self._processor.eos_id()
        self.eod: int | None = end if end >= 0 else None
        self.checksum = zlib.crc32(model)

    def encode(self, text: str | bytes) -> list[int]:
        """Tokenize. Models may normalize white space."""
        return list(self._processor.encode(clean(text)))

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(map(int, ids))
        check_range(ids, self.vocab_size, MODEL_REMEDY)
        return str(self._processor.decode(ids))

    def count_bytes(self, ids: Iterable[int]) -> int:
        return len(self.decode(ids).encode())


class JapaneseSentencePiece(SentencePieceTokenizer):
    """SentencePiece model with piece "</s>" at the end of documents, and lines that end with a line
    feed alone.

    Source: megatron/tokenizer/tokenizer.py of Fugaku-LLM/DeepSpeedFugaku.
    """

    name = "JapaneseSentencePiece"

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.eod = self._processor.piece_to_id("</s>")

    def encode(self, text: str | bytes) -> list[int]:
        return super().encode(clean(text).replace("\r\n", "\n"))
