"""Documents in memory, or of a map-style torch data set, with the interface of files (indexed.py).

A document is a one-dimensional array or list of token ids. Samples equal training on files of the
same documents.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import numpy as np

from ..comm.agreement import on_root
from ..comm.base import Comm
from ..text.named_files import JsonObject
from ..tokenizers.vocabulary import check_tokens


class Documents(Protocol):
    """Documents by index: a sequence, or a map-style torch data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def _tokens(document: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(document)
    except (
        ValueError,
        TypeError,
        RuntimeError,
    ):  # rows of different lengths; a tensor that needs gradients
        array = np.empty((), object)
    if array.ndim != 1 or array.size and array.dtype.kind not in "iu":
        kind = f"{type(document).__name__} of shape {array.shape} and type {array.dtype}"
        raise ValueError(
            f"{where} is a {kind}: pass a sequence of documents, each a one-dimensional array of token ids"
        )
    return array.astype(np.int64, copy=False)


class TokenArrays:
    """In-memory documents with `indexed.IndexedDataset`'s interface, equal on every reader rank.

    sequence_lengths: int32 (n,), after `measure`
    """

    def __init__(self, documents: Documents, prefix: str) -> None:
        self.documents = documents
        self.prefix = self.path = prefix
        self.sequence_lengths = np.empty(0, np.int32)

    def measure(self, vocab_size: int | None = None, comm: Comm | None = None) -> TokenArrays:
        """Read every document's length once, on rank 0. Collective over `comm`.

        Raises ValueError on every rank unless every document is an array with token ids in the
        vocabulary.
        """
        if not len(self.sequence_lengths):
            self.sequence_lengths = on_root(comm, lambda: self._read(vocab_size))
        return self

    def _read(self, vocab_size: int | None) -> np.ndarray:
        lengths = np.zeros(len(self.documents), np.int32)
        for index in range(len(lengths)):
            tokens = self.get(index)
            lengths[index] = len(tokens)
            if vocab_size is not None:
                check_tokens(tokens, vocab_size, f"document {index} of {self.prefix}", remedy="")
        return lengths

    def __len__(self) -> int:
        return len(self.documents)

    def description(self) -> JsonObject:
        return {
            "class": "GPTDataset",
            "dataset_path": self.prefix,
            "sequences": len(self),
            "tokens": int(self.sequence_lengths.sum(dtype=np.int64)),
            "lengths_crc32": f"{zlib.crc32(self.sequence_lengths.data):08x}",
        }

    def read_lengths(self, start: int, stop: int) -> np.ndarray:
        return self.sequence_lengths[start:stop]

    def check_open(self) -> None:
        """Do nothing: no file is open."""

    check = check_open

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        tokens = _tokens(self.documents[int(index)], f"document {index} of {self.prefix}")
        return tokens[offset : None if length is None else offset + length]
