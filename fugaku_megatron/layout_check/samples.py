"""Random samples with the marks that a run's data would have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config.run_config import RunConfig
from ..data.dataset import Dataset, MockDataset
from ..data.marks import COUNTED, FIRST, PADDED

DOCUMENT = 8  # mean tokens of a document
UNCOUNTED = 0.3  # share of labels that the loss leaves out


@dataclass(frozen=True)
class MarkedSamples:
    """Random tokens in random documents, int64 (2, s + 1).

    masks_loss: some labels do not count
    pads: the last tokens are padding, as in a sample of chats
    """

    tokens: MockDataset
    masks_loss: bool
    pads: bool

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = self.tokens[index]
        rng = np.random.default_rng([self.tokens.seed, index])
        marks = np.full_like(tokens, COUNTED)
        if self.masks_loss:
            marks[rng.random(len(marks)) < UNCOUNTED] = 0
        marks[rng.random(len(marks)) < 1 / DOCUMENT] |= FIRST
        if self.pads:
            marks[-1 - len(marks) // DOCUMENT :] = PADDED
        return np.stack([tokens, marks])


def samples_of(run: RunConfig, count: int) -> Dataset:
    model = run.model
    assert model.vocab_size is not None, "shrink sets it"
    tokens = MockDataset(model.vocab_size, model.seq_length, count, run.training.seed)
    if not run.data.marked:
        return tokens
    data = run.data
    return MarkedSamples(tokens, data.sft or data.eod_mask_loss, data.sft)
