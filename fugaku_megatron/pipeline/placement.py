"""Division of a model into virtual stages: the stage of each, its neighbours and its layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .instructions import RECV_BACKWARD, SEND_BACKWARD, SEND_FORWARD, Instruction
from .schedule_names import LOOP, V, row

FIRST_STAGE = 0  # has the first virtual stage


@dataclass(frozen=True)
class Placement:
    """A model divided into virtual stages, numbered from 0 along the model.

    kind: LOOP, round-robin over the stages; or V, two chunks, down the stages and up again, so that stage 0 has the first and the last.
    """

    stages: int
    model_chunks: int = 1
    kind: str = LOOP

    def __post_init__(self) -> None:
        assert self.stages >= 1 and self.model_chunks >= 1, self
        assert self.kind == LOOP or (self.kind, self.model_chunks) == (V, 2), self

    @cached_property
    def virtual_stages(self) -> int:
        return self.stages * self.model_chunks

    @cached_property
    def last_stage(self) -> int:
        return self.owner(self.virtual_stages - 1)[0]

    def virtual_stage(self, stage: int, model_chunk: int) -> int:
        if self.kind == V and model_chunk == 1:
            stage = self.stages - 1 - stage
        return model_chunk * self.stages + stage

    @cached_property
    def virtual_stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Virtual stages of each stage."""
        chunks = range(self.model_chunks)
        return tuple(
            tuple(self.virtual_stage(stage, chunk) for chunk in chunks)
            for stage in range(self.stages)
        )

    def owner(self, virtual_stage: int) -> tuple[int, int]:
        model_chunk, stage = divmod(virtual_stage, self.stages)
        if self.kind == V and model_chunk == 1:
            stage = self.stages - 1 - stage
        return stage, model_chunk

    def neighbour(self, stage: int, model_chunk: int, step: int) -> tuple[int, int] | None:
        """Return (stage, model chunk) of the next (step 1) or previous (step -1) virtual stage, or None."""
        near = self.virtual_stage(stage, model_chunk) + step
        return self.owner(near) if 0 <= near < self.virtual_stages else None

    def peer(self, stage: int, message: Instruction) -> tuple[int, int]:
        """Return (other stage, tag) of a send or receive on `stage`.

        Tags encode direction and boundary: messages of different kinds never match; equal tags follow the order of micro-batches.
        """
        here = self.virtual_stage(stage, message.model_chunk)
        if message.op in (SEND_FORWARD, RECV_BACKWARD):  # with the following virtual stage
            other = here + 1
        else:
            other = here - 1
        direction = 1 if message.op in (SEND_BACKWARD, RECV_BACKWARD) else 0
        return self.owner(other)[0], 2 * max(here, other) + direction

    def forward_slot(self, microbatch: int, virtual_stage: int) -> int:
        """Return a forward's time slot in a schedule with only forwards of one slot each.

        LOOP: `stages` micro-batches pass a model chunk before the next one. V: a micro-batch starts in every second slot.
        """
        if self.kind == V:
            return 2 * microbatch + virtual_stage
        group, place = divmod(microbatch, self.stages)
        return group * self.virtual_stages + place + virtual_stage


def placement_of(name: str, stages: int, chunks: int) -> Placement:
    schedule = row(name)
    assert schedule.chunks in (None, chunks), (name, chunks)
    return Placement(stages, chunks, schedule.kind)


SplitCosts = tuple[int, int, int]  # relative costs of F, I and W
VirtualStageCosts = tuple[SplitCosts, ...]
ALIKE: SplitCosts = (1, 1, 1)


def even_cut(layers: int, placement: Placement) -> tuple[int, ...]:
    stages = placement.virtual_stages
    return tuple(layers // stages for _ in range(stages))


def balanced_cut(layers: int, placement: Placement, layer: float, head: float) -> tuple[int, ...]:
    """Return each virtual stage's layers such that the costliest pipeline stage is cheapest.

    layer, head: cost of a layer and of the logits. The other stages share the remaining layers evenly, later stages first, and so do
    the model chunks of a stage.
    """
    others = placement.stages - 1
    with_head = _with_head(layers, others, placement.model_chunks, layer, head)
    totals = list(evenly(layers - with_head, others))
    totals.insert(placement.last_stage, with_head)
    return cut_of_stages(tuple(totals), placement, layer, head)


def cut_of_stages(
    totals: tuple[int, ...], placement: Placement, layer: float, head: float
) -> tuple[int, ...]:
    chunks = [evenly(total, placement.model_chunks) for total in totals]
    total = totals[placement.last_stage]
    others = placement.model_chunks - 1
    with_head = _with_head(total, others, 1, layer, head)
    chunks[placement.last_stage] = (*evenly(total - with_head, others), with_head)
    owners = map(placement.owner, range(placement.virtual_stages))
    return tuple(chunks[stage][chunk] for stage, chunk in owners)


def _with_head(layers: int, others: int, least: int, layer: float, head: float) -> int:
    """Return the layers (at least `least`) of the share with the head, so that the costliest share is cheapest."""
    if others == 0:
        return layers

    def costliest(with_head: int) -> float:
        largest = -(-(layers - with_head) // others)
        return max(largest * layer, with_head * layer + head)

    return min(range(layers - others * least, least - 1, -1), key=costliest)


def evenly(layers: int, shares: int) -> tuple[int, ...]:
    """Return shares that differ by at most one, later ones larger, because early layers are in flight longest."""
    return tuple((layers + i) // shares for i in range(shares))
