"""Values of --data-path, --split and the data arguments files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate

from ..text.named_files import read_text, unique_keys
from .dataset import normalize, shares_of


def parse_split(split: str) -> list[float]:
    """Parse "969,30,1" into shares that sum to 1; missing ones are 0."""
    parts = split.split(",")
    number = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*", re.ASCII)
    if not 1 <= len(parts) <= 3 or not all(number.fullmatch(part) for part in parts):
        raise ValueError(
            f"--split {split!r}: pass one to three numbers, none negative, such as 969,30,1 (train,valid,test)"
        )
    shares = [float(part) for part in parts] + [0.0] * (3 - len(parts))
    if sum(shares) == 0:
        raise ValueError(
            f"--split {split!r}: all shares are 0; pass a share for train, such as 969,30,1"
        )
    return shares_of(shares)


def listed_data(
    data_args_path: str | None, per_split_data_args_path: str | None
) -> dict[str, tuple[str, ...]]:
    """Read the file of a data arguments flag.

    Rules: Megatron-LM's get_blend_and_blend_per_split (megatron/training/utils.py).
    """
    if data_args_path:
        return {"data_path": tuple(read_text(data_args_path, "--data-args-path").split())}
    if not per_split_data_args_path:
        return {}
    text = read_text(per_split_data_args_path, "--per-split-data-args-path")
    where = f"--per-split-data-args-path {per_split_data_args_path}"
    try:
        given = json.loads(text, object_pairs_hook=unique_keys)
        words = {name: given.get(name) or () for name in ("train", "valid")}
        found = {
            f"{name}_data_path": tuple(value.split() if isinstance(value, str) else map(str, value))
            for name, value in words.items()
        }
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{where}: not a JSON object with lists of words as train, valid and test ({error})"
        ) from None
    if not found["train_data_path"]:
        raise ValueError(f"{where}: it has no words for train: add some")
    return {name: words for name, words in found.items() if words}


def parse_data_path(
    data_path: Sequence[str], flag: str = "--data-path"
) -> tuple[list[str], list[float] | None]:
    """Return (prefixes, weights), weights None if not passed. Raises ValueError for incomplete pairs."""
    first = data_path[::2]
    numbers = [_number(item) for item in data_path]
    pairs = "pass prefixes, or pairs: weight prefix weight prefix ..."
    if len(data_path) == 1 or data_path and not any(number is not None for number in numbers):
        return list(data_path), None
    if not data_path or len(data_path) % 2:
        raise ValueError(f"{flag}: {len(data_path)} items ({' '.join(data_path)}); {pairs}")
    wrong = [item for item, number in zip(first, numbers[::2]) if number is None]
    if wrong:
        raise ValueError(f"{flag}: expected a weight, got {wrong[0]!r}; {pairs}")
    weights = [float(item) for item in first]
    normalize(weights, flag)
    return list(data_path[1::2]), weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def split_documents(
    num_documents: int, shares: Sequence[float], split: int, legacy: bool = False
) -> range:
    """Return a split's document ids, with Megatron's rounding. split: 0 train, 1 valid, 2 test

    legacy: round each share, then move all borders by the surplus
    """
    if not legacy:
        ends = [0.0, *accumulate(shares)]
        return range(round(ends[split] * num_documents), round(ends[split + 1] * num_documents))
    borders = [0, *accumulate(round(share * num_documents) for share in shares)]
    moved = [0, *(max(0, border - (borders[-1] - num_documents)) for border in borders[1:])]
    return range(moved[split], moved[split + 1])
