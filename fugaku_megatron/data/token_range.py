"""Refuse token ids outside a vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    pass

REMEDY = ": use the tokenizer that was passed to fugaku-megatron preprocess"


def check_tokens(tokens: np.ndarray, vocab_size: int, source: str, remedy: str = REMEDY) -> None:
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ValueError(
            f"{source}: token id {wrong} is outside the vocabulary of {vocab_size}{remedy}"
        )
