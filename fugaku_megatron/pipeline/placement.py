"""Virtual stages of each pipeline stage, and their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from .instructions import RECV_BACKWARD, SEND_BACKWARD, SEND_FORWARD, Instruction
from .schedule_names import LOOP, V, row


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

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.model_chunks

    @property
    def last_stage(self) -> int:
        return self.owner(self.virtual_stages - 1)[0]

    def virtual_stage(self, stage: int, model_chunk: int) -> int:
        if self.kind == V and model_chunk == 1:
            stage = self.stages - 1 - stage
        return model_chunk * self.stages + stage

    def virtual_stages_of(self, stage: int) -> list[int]:
        return [self.virtual_stage(stage, chunk) for chunk in range(self.model_chunks)]

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
