"""Samples with several documents, and Megatron-LM's masks and positions."""

import numpy as np

from fugaku_megatron.data.dataset import MockDataset

EOD = 3
RESETS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
S = 24


def left_to_right(tokens, reset_position_ids, reset_attention_mask, eod_mask_loss):
    """Return (visible pairs (s, s), counted labels (s), positions (s)) for tokens (s)."""
    seen = np.tril(np.ones((len(tokens), len(tokens)), bool))
    loss_mask = np.ones(len(tokens))
    positions = np.arange(len(tokens))
    if eod_mask_loss:
        loss_mask[tokens == EOD] = 0.0
    before = 0
    for i in np.flatnonzero(tokens == EOD):
        if reset_attention_mask:
            seen[i + 1 :, : i + 1] = False
        if reset_position_ids:
            positions[i + 1 :] -= i + 1 - before
            before = i + 1
    return seen, loss_mask, positions


class Texts(MockDataset):
    """Random tokens. Documents end never, sometimes or nearly always in sample i, by i."""

    def __getitem__(self, index):
        tokens = super().__getitem__(index)
        return np.where(tokens < index % 11 * 5, EOD, tokens % 20)
