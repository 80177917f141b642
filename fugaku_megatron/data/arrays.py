"""Documents in memory, or of a map-style data set of torch, read as the files of indexed.py are read.

A document is a one-dimensional array of token ids: of numpy, of torch, or a list. The samples are those of training on the files
that `indexed.IndexedDatasetWriter` writes of the same documents, one sequence each.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..comm.agreement import on_root

if TYPE_CHECKING:
    from ..comm.base import Comm


class Documents(Protocol):
    """A sequence, or a map-style data set of torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def _tokens(document: Any, where: str) -> np.ndarray:
    """The token ids of a document, int64 (n,)."""
    try:
        array = np.asarray(document)
    except (ValueError, TypeError, RuntimeError):  # rows of different lengths; a tensor that needs gradients
        array = np.empty((), object)
    if array.ndim != 1 or array.size and array.dtype.kind not in "iu":
        kind = f"{type(document).__name__} of shape {array.shape} and type {array.dtype}"
        raise ValueError(f"{where} is a {kind}: pass a sequence of documents, each a one-dimensional array of token ids")
    return array.astype(np.int64, copy=False)


class TokenArrays:
    """The interface of `indexed.IndexedDataset` over documents, which every rank that reads data holds alike.

    prefix: what messages call them. sequence_lengths: int32 (n,), once `measure` was called.
    """

    def __init__(self, documents: Documents, prefix: str) -> None:
        self.documents, self.prefix = documents, prefix
        self.sequence_lengths = np.empty(0, np.int32)

    def measure(self, vocab_size: int | None = None, comm: Comm | None = None) -> TokenArrays:
        """Read every document once, on rank 0 alone, for the lengths. Collective over `comm`.

        Raises ValueError on every rank for a document that is no array of token ids, or has one outside the vocabulary.
        """
        if not len(self.sequence_lengths):
            self.sequence_lengths = on_root(comm, lambda: self._read(vocab_size))
        return self

    def _read(self, vocab_size: int | None) -> np.ndarray:
        lengths = np.zeros(len(self.documents), np.int32)
        for index in range(len(lengths)):
            tokens = self.get(index)
            lengths[index] = len(tokens)
            if vocab_size is not None and len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                wrong = tokens.min() if tokens.min() < 0 else tokens.max()
                raise ValueError(f"document {index} of {self.prefix}: token id {wrong} is outside the vocabulary of {vocab_size}")
        return lengths

    def __len__(self) -> int:
        return len(self.documents)

    def description(self) -> dict[str, Any]:
        """As of `indexed.IndexedDataset`."""
        return {"class": "GPTDataset", "dataset_path": self.prefix, "sequences": len(self),
                "tokens": int(self.sequence_lengths.sum(dtype=np.int64)),
                "lengths_crc32": f"{zlib.crc32(self.sequence_lengths.data):08x}"}

    def read_lengths(self, start: int, stop: int) -> np.ndarray:
        """int32 (stop - start,): lengths of consecutive documents."""
        return self.sequence_lengths[start:stop]

    def release(self) -> None:
        """Nothing is mapped."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens (default: all that follow) of a document from token `offset` on, int64 (n,)."""
        tokens = _tokens(self.documents[int(index)], f"document {index} of {self.prefix}")
        return tokens[offset : None if length is None else offset + length]
