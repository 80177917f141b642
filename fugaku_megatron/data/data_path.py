"""What --data-path and --split say: prefixes with weights, and which documents are for training, validation and test.

Test: pytest tests/test_dataset.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights as shares that sum to 1. ValueError for one that is not positive."""
    wrong = [weight for weight in weights if not (weight > 0 and math.isfinite(weight))]
    if wrong:
        raise ValueError(
            f"--data-path: weight {wrong[0]:g} is not a positive number; to weigh a dataset 0, leave it out"
        )
    total = sum(weights)
    return [weight / total for weight in weights]


def parse_split(split: str) -> list[float]:
    """Shares of train, valid and test, summing to 1, of e.g. "969,30,1"; missing ones are 0."""
    parts = split.split(",")
    number = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*", re.ASCII)
    if not 1 <= len(parts) <= 3 or not all(number.fullmatch(part) for part in parts):
        raise ValueError(
            f"--split {split!r}: give one to three numbers, none negative, such as 969,30,1 (train,valid,test)"
        )
    shares = [float(part) for part in parts] + [0.0] * (3 - len(parts))
    if sum(shares) == 0:
        raise ValueError(f"--split {split!r}: all shares are 0; give train a part, such as 969,30,1")
    return [share / sum(shares) for share in shares]


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights) of --data-path: one prefix (weights None) or pairs of weight and prefix."""
    if len(data_path) == 1:
        return list(data_path), None
    pairs = "give one prefix, or pairs: weight prefix weight prefix ..."
    if not data_path or len(data_path) % 2:
        raise ValueError(f"--data-path: {len(data_path)} items ({' '.join(data_path)}); {pairs}")
    weights = []
    for weight in data_path[::2]:
        try:
            weights.append(float(weight))
        except ValueError:
            raise ValueError(f"--data-path: {weight!r} stands where a weight is due; {pairs}") from None
    normalize(weights)
    return list(data_path[1::2]), weights


def split_documents(num_documents: int, shares: Sequence[float], split: int) -> range:
    """Ids of the documents of train (0), valid (1) or test (2): consecutive ranges with Megatron's rounding."""
    ends = [0.0, *accumulate(shares)]
    return range(round(ends[split] * num_documents), round(ends[split + 1] * num_documents))
