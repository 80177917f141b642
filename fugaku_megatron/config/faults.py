"""Fields that check a run's numbers: replicas, checksums, repeated iterations."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    check,
    check_numbers,
    check_positive,
    flag,
    hashed_once,
    opt,
)

COMPARISON_INTERVAL = 100  # iterations


@hashed_once
@dataclass(frozen=True, kw_only=True)
class NumbersConfig:
    """Checks of what the machine computes. Apart from the comparison of replicas they cost nothing
    without their flags.
    """

    check_weight_hash_across_dp_replicas_interval: int | None = opt(
        COMPARISON_INTERVAL,
        "iterations between comparisons of all that several ranks hold alike, bit by bit: weights "
        "and, without --zero-stage 1, "
        "optimizer states of data-parallel replicas, what tensor-parallel ranks do not split, tied "
        "embeddings. They are "
        "compared before every save, too. 0: never",
        type=int,
    )
    rerun_on_spike: bool = opt(
        False,
        "repeat an iteration whose loss is a spike, Inf or NaN before its update, and tell a broken "
        "machine (other bits) from a bad batch (the same bits)",
        aliases=("--check-for-spiky-loss",),
    )
    loss_spike_deviations: float = opt(
        6.0,
        "a loss is a spike above the median of the last 50 by more than this many standard "
        "deviations, and by 1 %",
    )
    abft: tuple[str, ...] | None = opt(
        None,
        "layers whose matmuls are checked by checksums, with their experts: numbers from 0, or "
        "all, which includes the "
        "logits and Muon. Attention's own matmuls and routers are not checked. A rank whose "
        "matmuls are wrong in three "
        "iterations of 100 ends the run",
        type=str,
        nargs="+",
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(self, "loss_spike_deviations")
        name = "check_weight_hash_across_dp_replicas_interval"
        if getattr(self, name) is None:  # as saved by earlier versions
            object.__setattr__(self, name, COMPARISON_INTERVAL)
        value = getattr(self, name)
        check(value >= 0, f"{flag(name)} is {value}: pass 0 or more")
        wrong = next(
            (
                layer
                for layer in self.abft or ()
                if layer != "all" and not (layer.isascii() and layer.isdecimal())
            ),
            None,
        )
        check(wrong is None, f"--abft {wrong}: pass numbers of layers, from 0, or all")
