"""A pipeline schedule as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pkgutil import resolve_name

from . import zero_bubble
from .instructions import InFlight, Instructions, peaks_in_flight
from .placement import Placement, VirtualStageCosts, placement_of
from .schedule_names import FORWARD_ONLY, row

STEADY_ROUNDS = 3  # times the micro-batches in flight of all model chunks, then a list is periodic


@dataclass(frozen=True)
class Schedule:
    """Instruction lists for all stages in an iteration. name: in `SCHEDULES`, or FORWARD_ONLY.

    costs: for F, I and W per virtual stage, if backward is split; empty: all alike. compared: see `zero_bubble.lists`.
    pending: micro-batches between F and W per model chunk; default: one per stage. H1 with twice as many is ZB-H2, without a bubble.
    """

    name: str
    placement: Placement
    microbatches: int
    costs: VirtualStageCosts = ()
    compared: VirtualStageCosts = ()
    pending: int | None = None

    @cached_property
    def splits_backward(self) -> bool:
        return row(self.name).splits_backward

    def forward_only(self) -> Schedule:
        return replace(self, name=FORWARD_ONLY)

    def instructions(self, stage: int) -> Instructions:
        made: Instructions = resolve_name(row(self.name).lists)(self, stage)
        return made

    def shortened(self) -> Schedule:
        """Return the schedule with the fewest micro-batches that reach the steady state."""
        stages = self.placement.stages
        few = zero_bubble.shortened_microbatches(self.placement.stages, self.microbatches)
        enough = STEADY_ROUNDS * self.placement.model_chunks * max(stages, self.pending or 0)
        rounds = max(0, -(-(enough - few) // stages))
        return replace(self, microbatches=min(self.microbatches, few + rounds * stages))

    def in_flight(self, stage: int) -> tuple[InFlight, ...]:
        """Return a stage's `peaks_in_flight` from a shortened list; a longer one has no higher peaks."""
        if row(self.name).is_1f1b:  # planners ask thousands of times
            return (InFlight((min(self.placement.stages - stage, self.microbatches),), (0,)),)
        return peaks_in_flight(self.shortened().instructions(stage), self.placement.model_chunks)


def build(name: str, stages: int, chunks: int, microbatches: int) -> Schedule:
    """chunks: per stage; 1 for 1F1B and ZB-H1, 2 for ZBV."""
    return Schedule(name, placement_of(name, stages, chunks), microbatches)
