"""Checks of the numbers that a run computes: a group of `config`'s fields. Test: pytest tests/test_config.py"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_numbers, check_positive, opt


@dataclass(frozen=True, kw_only=True)
class NumbersConfig:
    """Checks of what the machine computes; without these flags they cost nothing."""

    check_weight_hash_across_dp_replicas_interval: int | None = opt(
        None, "iterations between comparisons of the weights of all data-parallel replicas, bit by bit (default: none)", type=int)

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(self, "check_weight_hash_across_dp_replicas_interval")
