"""Marks: which labels count in the loss, and where documents begin.

A marked sample is int64 (2, s + 1): the token ids, and the marks of each, a sum of COUNTED, FIRST and PADDED. Position 0 of a sample begins
a document whether or not it is marked so. A pretraining run derives its marks from the tokens when it reads them, so files and the
index of samples know nothing of them. Rules of Megatron-LM's megatron/core/datasets/gpt_dataset.py
(_get_ltor_masks_and_position_ids): the token that ends a document belongs to it, the next one begins a document, and with
--eod-mask-loss nothing is predicted from the token that ends a document.
Left out: what attention and positions make of documents (`nn.forward_context.Documents`).
Legend: s sequence, b micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .dataset import Dataset, ValidationSets

COUNTED = 1  # the loss of predicting this token is summed; says nothing at position 0
FIRST = 2  # this token begins a document
PADDED = 4  # nothing is predicted from this token: it is padding, or the last one of a chat


class MarkedDataset:
    """The samples of a data set with their marks, int64 (2, s + 1). eod: the token that ends a document.

    masks_loss: the label that follows this token does not count. The data set's other attributes are its own.
    """

    def __init__(self, dataset: Dataset, eod: int, masks_loss: bool):
        self.dataset, self.eod, self.masks_loss = dataset, eod, masks_loss

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = self.dataset[index]
        marks = np.full_like(tokens, COUNTED)
        ends = tokens[:-1] == self.eod
        marks[1:][ends] = FIRST if self.masks_loss else FIRST | COUNTED
        return np.stack([tokens, marks])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


def mark(dataset: Dataset | None, eod: int, masks_loss: bool) -> Dataset | None:
    """The data set with marks, or each of several validation sets; arguments as of `MarkedDataset`."""
    if isinstance(dataset, ValidationSets):
        return ValidationSets([MarkedDataset(each, eod, masks_loss) for each in dataset.datasets])
    return None if dataset is None else MarkedDataset(dataset, eod, masks_loss)


# What a micro-batch's marks mean ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What there is to do in some samples. counted: labels that count. squares: the sum of (document length)^2.

    Attention over documents takes time in proportion to the latter; a sample of one document has s^2. samples: how many they are.
    share: the squares of this rank over the mean of the data-parallel ranks. padded: tokens from which nothing is predicted.
    """

    counted: int
    squares: int
    samples: int
    share: float = 1.0
    padded: int = 0

    @staticmethod
    def of(samples: np.ndarray) -> Work:
        """That of samples (..., 2, s + 1, b) with tokens and marks."""
        marks = np.moveaxis(samples[..., 1, :, :], -2, -1).reshape(
            -1, samples.shape[-2]
        )  # (samples, s + 1)
        counted = int(np.count_nonzero(marks[:, 1:] & COUNTED))
        begins = marks[:, :-1] & FIRST != 0
        begins[:, 0] = True
        places = np.append(np.flatnonzero(begins), begins.size)
        squares = int(np.square(np.diff(places)).sum())
        padded = int(np.count_nonzero(marks[:, :-1] & PADDED))
        return Work(counted, squares, len(marks), padded=padded)


def labels(tokens: Tensor, marks: Tensor) -> Tensor:
    """tokens and marks (s + 1, b) -> (s, b): of each token the one that follows, -1 where that does not count."""
    return tokens[1:].masked_fill(marks[1:] & COUNTED == 0, -1)


def document_starts(marks: Tensor) -> Tensor:
    """marks (s + 1, b) -> int32 (b, s): where the document of each position begins."""
    places = torch.arange(len(marks) - 1, dtype=torch.int32)
    begins = torch.where(marks[:-1].t() & FIRST != 0, places, 0)
    return begins.cummax(1).values.contiguous()


def padding(marks: Tensor) -> Tensor | None:
    """Return bool (s, b) of marks (s + 1, b): the tokens from which nothing is predicted; None unless the samples are of chats.

    Each sample of chats has such a token, if only in place s, which is no input.
    """
    padded = marks & PADDED != 0
    return padded[:-1] if bool(padded.any()) else None
