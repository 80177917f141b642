"""Checks of the numbers that a run computes: a group of `config`'s fields."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check, check_numbers, check_positive, hashed_once, opt


@hashed_once
@dataclass(frozen=True, kw_only=True)
class NumbersConfig:
    """Checks of what the machine computes; without these flags they cost nothing."""

    check_weight_hash_across_dp_replicas_interval: int | None = opt(
        None, "iterations between comparisons of the weights of all data-parallel replicas, bit by bit (default: none)", type=int)
    rerun_on_spike: bool = opt(False, "repeat an iteration whose loss is a spike, Inf or NaN before its update, and tell a broken "
                               "machine (other bits) from a bad batch (the same bits)", aliases=("--check-for-spiky-loss",))
    loss_spike_deviations: float = opt(6.0, "a loss is a spike above the median of the last 50 by more than this many standard "
                                       "deviations, and by 1 %")
    abft: tuple[str, ...] | None = opt(None, "layers whose matrix products are checked by checksums: numbers from 0, or all",
                                       type=str, nargs="+")

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(self, "check_weight_hash_across_dp_replicas_interval", "loss_spike_deviations")
        wrong = next((layer for layer in self.abft or () if layer != "all" and not (layer.isascii() and layer.isdecimal())), None)
        check(wrong is None, f"--abft {wrong}: give numbers of layers, from 0, or all")
