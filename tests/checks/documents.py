"""Samples of several documents, and Megatron-LM's masks and positions of them."""

import numpy as np

from fugaku_megatron.data.dataset import MockDataset

EOD = 3
S = 24


def left_to_right(tokens, reset_position_ids, reset_attention_mask, eod_mask_loss):
    """Return (visible pairs (s, s), counted labels (s), positions (s)) of tokens (s)."""
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
    """Random tokens. Sample i has ends of documents never, sometimes or nearly always, by i."""

    def __getitem__(self, index):
        tokens = super().__getitem__(index)
        return np.where(tokens < index % 11 * 5, EOD, tokens % 20)
