"""Fields for silent faults: replica comparison, audits, repeated iterations."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    NOT_NEGATIVE,
    cached_hash,
    free_option,
    free_switch,
)
from .rules import CheckedFields

COMPARISON_INTERVAL = 100  # iterations
AUDIT_INTERVAL = 400  # iterations, of which an audit repeats one


@cached_hash
@dataclass(frozen=True, kw_only=True)
class NumbersConfig(CheckedFields):
    """Checks for silent faults; replicas are compared and iterations audited by default."""

    check_weight_hash_across_dp_replicas_interval: int | None = free_option(
        COMPARISON_INTERVAL,
        "iterations between bitwise comparisons of replicated state: weights and, without --zero-stage 1, "
        "optimizer states of data-parallel ranks, parameters replicated over tensor-parallel ranks, and tied "
        "embeddings. They are also compared before every save. 0: never",
        range=NOT_NEGATIVE,
    )
    audit_interval: int = free_option(
        AUDIT_INTERVAL,
        "iterations between audits: the next data-parallel rank repeats a rank's iteration and a sixteenth of the "
        "update of state without a copy, and their bits are compared. In every iteration, as far as it costs 0.3 %, "
        "weights are compared, and state without a copy with its last update. 0: never",
        range=NOT_NEGATIVE,
    )
    rerun_on_spike: bool = free_switch(
        "rerun an iteration with a loss spike, Inf or NaN before its update, to distinguish a broken "
        "machine (different bits) from a bad batch (the same bits)",
        aliases=("--check-for-spiky-loss",),
    )
    loss_spike_deviations: float = free_option(
        6.0,
        "a loss spike exceeds the median of the last 50 losses by more than this many standard "
        "deviations, and by 1 %",
        needs="rerun_on_spike",
    )

    def _derive(self) -> None:
        name = "check_weight_hash_across_dp_replicas_interval"
        if getattr(self, name) is None:  # as saved by earlier versions
            object.__setattr__(self, name, COMPARISON_INTERVAL)
