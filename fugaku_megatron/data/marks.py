"""Loss mask and document starts of samples.

A marked sample is int64 (2, s + 1): token ids, and marks, sums of COUNTED, FIRST and PADDED.
Position 0 begins a document, marked or not. Pretraining derives marks from tokens on reading. Rules
of Megatron-LM's megatron/core/datasets/gpt_dataset.py (_get_ltor_masks_and_position_ids): a
document includes its end token, and --eod-mask-loss masks the label after it. Legend: s sequence, b
micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .dataset import ChangedDataset, Dataset, GPTDataset, each_set

COUNTED = 1  # the loss of predicting this token is summed; says nothing at position 0
FIRST = 2  # this token begins a document
PADDED = 4  # nothing is predicted from this token: it is padding, or the last one of a chat


class DocumentDataset(GPTDataset):
    """Samples of --dataloader-inter-document-masking, int64 (2, s + 1), with marks at the documents of the data files.

    Rule: Megatron-LM's megatron/core/datasets/gpt_dataset.py, inter_document_masking.
    """

    def __getitem__(self, index: int) -> np.ndarray:
        documents = self.by_document(index)
        tokens = self.joined(documents)
        marks = np.full_like(tokens, COUNTED)
        starts = np.cumsum([len(each) for each in documents[:-1]], dtype=np.int64)
        marks[starts] |= FIRST
        return np.stack([tokens, marks])


@dataclass
class MarkedDataset(ChangedDataset):
    """Samples with marks, int64 (2, s + 1). The data set has tokens, or samples whose documents are marked already.

    masks_loss: mask the label after it
    """

    eod: int
    masks_loss: bool

    def __getitem__(self, index: int) -> np.ndarray:
        sample = self.dataset[index]
        if sample.ndim == 1:
            sample = np.stack([sample, np.full_like(sample, COUNTED)])
            sample[1, 1:][sample[0, :-1] == self.eod] |= FIRST
        if self.masks_loss:
            sample[1, 1:][sample[0, :-1] == self.eod] &= ~COUNTED
        return sample


def mark(dataset: Dataset | None, eod: int, masks_loss: bool) -> Dataset | None:
    return each_set(dataset, lambda each, _: MarkedDataset(each, eod, masks_loss))


@dataclass(frozen=True)
class TokenCounts:
    """Counts of samples.

    counted: labels in the loss
    predicted: labels in the loss of each MTP module
    squares: sum of (document length)^2, to which attention time is proportional
    share: this rank's squares over the data-parallel ranks' mean
    """

    counted: int
    squares: int
    samples: int
    share: float = 1.0
    padded: int = 0
    predicted: tuple[int, ...] = ()

    @staticmethod
    def of(
        samples: np.ndarray, predictions: int = 0, inside_documents: bool = False
    ) -> TokenCounts:
        """Count samples (..., 2, s + 1, b). predictions: MTP modules; the rest as in `predicted`"""
        marks = np.moveaxis(samples[..., 1, :, :], -2, -1).reshape(
            -1, samples.shape[-2]
        )  # (samples, s + 1)
        counted = int(np.count_nonzero(marks[:, 1:] & COUNTED))
        begins = marks[:, :-1] & FIRST != 0
        begins[:, 0] = True
        places = np.append(np.flatnonzero(begins), begins.size)
        squares = int(np.square(np.diff(places)).sum())
        padded = int(np.count_nonzero(marks[:, :-1] & PADDED))
        pairs = samples.reshape(-1, *samples.shape[-3:])
        further: list[int] = []
        for depth in range(1, predictions + 1):
            found = [
                predicted(tokens, own, depth, inside_documents)[1]
                for tokens, own in torch.from_numpy(pairs)
            ]
            further.append(sum(int(torch.count_nonzero(each >= 0)) for each in found))
        return TokenCounts(counted, squares, len(marks), padded=padded, predicted=tuple(further))


def labels(tokens: Tensor, marks: Tensor) -> Tensor:
    """Return next tokens, -1 if masked: (s + 1, b) -> (s, b)."""
    return tokens[1:].masked_fill(marks[1:] & COUNTED == 0, -1)


def predicted(
    tokens: Tensor, marks: Tensor | None, depth: int, inside_documents: bool
) -> tuple[Tensor, Tensor]:
    """Return the tokens and the labels of the MTP module at a depth: (s + 1, b) -> (s, b), (s, b).

    Both are rolled left, as by roll_tensor of Megatron-core's multi_token_prediction.py: a position without a token reads
    token 0, and its label is -1. Megatron-core rolls documents apart if the data files say where they begin.
    """
    inputs = _rolled(tokens[:-1], depth, 0)
    found = tokens[1:] if marks is None else labels(tokens, marks)
    found = _rolled(found, depth, -1)
    if marks is None or not inside_documents:
        return inputs, found
    starts = document_starts(marks).t()
    outside = _rolled(starts, depth, -1) != starts
    return inputs.masked_fill(outside, 0), found.masked_fill(outside, -1)


def _rolled(x: Tensor, depth: int, filler: int) -> Tensor:
    return torch.cat((x[depth:], x.new_full((depth, x.shape[1]), filler)))


def document_starts(marks: Tensor) -> Tensor:
    """Return each position's document start: (s + 1, b) -> int32 (b, s)."""
    places = torch.arange(len(marks) - 1, dtype=torch.int32)
    begins = torch.where(marks[:-1].t() & FIRST != 0, places, 0)
    return begins.cummax(1).values.contiguous()


def padding(marks: Tensor) -> Tensor | None:
    """Return tokens that predict nothing, bool (s, b), from marks (s + 1, b); None unless samples
    are chats.

    Each chat sample has such a token, if only in place s, which is no input.
    """
    padded = marks & PADDED != 0
    return padded[:-1] if bool(padded.any()) else None
