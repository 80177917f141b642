"""Model chunks of each pipeline stage, and their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from .instructions import RECV_BACKWARD, SEND_BACKWARD, SEND_FORWARD, Instruction
from .schedule_names import INTERLEAVED, ONE_F_ONE_B, ZB_H1, ZBV

LOOP = "loop"
V = "v"


@dataclass(frozen=True)
class Placement:
    """The model cut into stages x chunks parts, numbered from 0 along the model, and the stage that owns each.

    kind: LOOP, part after part around the stages; or V, with two chunks, down the stages and up again, so that the first and the
    last part share stage 0.
    """

    stages: int
    model_chunks: int = 1
    kind: str = LOOP

    def __post_init__(self) -> None:
        assert (
            self.stages >= 1
            and self.model_chunks >= 1
            and (self.kind == LOOP or (self.kind, self.model_chunks) == (V, 2))
        ), self

    @property
    def virtual_stages(self) -> int:
        """Parts of the model."""
        return self.stages * self.model_chunks

    @property
    def last_stage(self) -> int:
        """The stage with the end of the model."""
        return self.owner(self.virtual_stages - 1)[0]

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """The number of the part that is `chunk` of `stage`."""
        turned = self.kind == V and chunk == 1
        return chunk * self.stages + (self.stages - 1 - stage if turned else stage)

    def owner(self, part: int) -> tuple[int, int]:
        """(stage, chunk) of a part: the inverse of `part`."""
        chunk, place = divmod(part, self.stages)
        return (self.stages - 1 - place if self.kind == V and chunk == 1 else place), chunk

    def neighbour(self, stage: int, chunk: int, step: int) -> tuple[int, int] | None:
        """(stage, chunk) of the part that follows (step 1) or precedes (step -1) this one; None at the ends of the model.

        Where it is a chunk of the same stage, no message is sent: the executor hands the tensor over.
        """
        part = self.virtual_stage(stage, chunk) + step
        return self.owner(part) if 0 <= part < self.virtual_stages else None

    def peer(self, stage: int, message: Instruction) -> tuple[int, int]:
        """(other stage, tag) of a send or receive on `stage`.

        The tag names the direction and the cut between two parts that the tensor crosses, so messages of different kinds between
        the same two stages never mix; those of one tag follow the order of the micro-batches.
        """
        down = message.op in (SEND_FORWARD, RECV_BACKWARD)  # the other part comes after this one
        cut = self.virtual_stage(stage, message.model_chunk) + down
        other, _ = self.owner(cut if down else cut - 1)
        return other, 2 * cut + (message.op in (SEND_BACKWARD, RECV_BACKWARD))

    def forward_slot(self, microbatch: int, part: int) -> int:
        """When a part runs a forward if there is nothing but forwards, all of one slot: no stage has two in one slot.

        LOOP: `stages` micro-batches pass each chunk before the next chunk begins. V: a micro-batch starts in every second slot.
        """
        if self.kind == V:
            return 2 * microbatch + part
        group, place = divmod(microbatch, self.stages)
        return group * self.virtual_stages + place + part


def placement_of(name: str, stages: int, chunks: int) -> Placement:
    """The placement that the schedule of that name needs. chunks: of each stage; 1 for 1F1B, 2 for ZBV."""
    assert chunks == {ONE_F_ONE_B: 1, INTERLEAVED: chunks, ZB_H1: chunks, ZBV: 2}[name], (
        name,
        chunks,
    )
    return Placement(stages, chunks, V if name == ZBV else LOOP)
