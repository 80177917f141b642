"""Refuse token ids outside a vocabulary."""

from __future__ import annotations

import numpy as np

REMEDY = ": use the tokenizer that was passed to fugaku-megatron preprocess"
MODEL_REMEDY = "is this --tokenizer-model the model's?"


def check_tokens(tokens: np.ndarray, vocab_size: int, source: str, remedy: str = REMEDY) -> None:
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ValueError(
            f"{source}: token id {wrong} is outside the vocabulary of {vocab_size}{remedy}"
        )


def check_range(ids: list[int], vocab_size: int, remedy: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size}: {remedy}")
