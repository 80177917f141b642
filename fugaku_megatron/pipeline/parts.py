"""Which part of the model is on which stage of a pipeline, the numbers of layers of the parts, and the instructions.

A stage owns one or more chunks of layers; each is one part of the model. Left out: the order of the instructions in time
(`schedule`), what a layer costs (`costs.accounting`).
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
RECV_FORWARD, SEND_FORWARD = "recv_forward", "send_forward"
RECV_BACKWARD, SEND_BACKWARD = "recv_backward", "send_backward"
SENDS, RECEIVES = (SEND_FORWARD, SEND_BACKWARD), (RECV_FORWARD, RECV_BACKWARD)
LOOP, V = "loop", "v"
ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV = NAMES = (
    "1f1b",
    "interleaved",
    "zb-h1",
    "zbv",
)  # of schedules
AUTO = "auto"  # the schedule is chosen when the run starts
CHUNKED = INTERLEAVED, ZB_H1  # schedules whose stages may have any number of chunks
SPLITS_BACKWARD = ZB_H1, ZBV  # into gradients of inputs and gradients of weights


SplitCosts = tuple[
    int, int, int
]  # of a forward, of the gradients of its input and of its weights, relative to each other
PartCosts = tuple[SplitCosts, ...]  # of each part of the model
ALIKE: SplitCosts = (1, 1, 1)


def receives_ahead(name: str) -> int:
    """How many receives of each kind a stage has posted before it comes to them in its list, so that even blocking sends go on.

    One is enough for every list but those with more freedom: made for parts that cost different amounts.
    """
    return 2 if name in SPLITS_BACKWARD else 1


@dataclass(frozen=True)
class Instruction:
    """Do `op` for micro-batch `microbatch` on the stage's own chunk of layers `chunk`, from 0."""

    op: str
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class Placement:
    """The model cut into stages x chunks parts, numbered from 0 along the model, and the stage that owns each.

    kind: LOOP, part after part around the stages; or V, with two chunks, down the stages and up again, so that the first and the
    last part share stage 0.
    """

    stages: int
    chunks: int = 1
    kind: str = LOOP

    def __post_init__(self) -> None:
        assert (
            self.stages >= 1
            and self.chunks >= 1
            and (self.kind == LOOP or (self.kind, self.chunks) == (V, 2))
        ), self

    @property
    def parts(self) -> int:
        """Parts of the model."""
        return self.stages * self.chunks

    @property
    def last_stage(self) -> int:
        """The stage with the end of the model."""
        return self.owner(self.parts - 1)[0]

    def part(self, stage: int, chunk: int) -> int:
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
        part = self.part(stage, chunk) + step
        return self.owner(part) if 0 <= part < self.parts else None

    def peer(self, stage: int, message: Instruction) -> tuple[int, int]:
        """(other stage, tag) of a send or receive on `stage`.

        The tag names the direction and the cut between two parts that the tensor crosses, so messages of different kinds between
        the same two stages never mix; those of one tag follow the order of the micro-batches.
        """
        down = message.op in (SEND_FORWARD, RECV_BACKWARD)  # the other part comes after this one
        cut = self.part(stage, message.chunk) + down
        other, _ = self.owner(cut if down else cut - 1)
        return other, 2 * cut + (message.op in (SEND_BACKWARD, RECV_BACKWARD))

    def forward_slot(self, microbatch: int, part: int) -> int:
        """When a part runs a forward if there is nothing but forwards, all of one slot: no stage has two in one slot.

        LOOP: `stages` micro-batches pass each chunk before the next chunk begins. V: a micro-batch starts in every second slot.
        """
        if self.kind == V:
            return 2 * microbatch + part
        group, place = divmod(microbatch, self.stages)
        return group * self.parts + place + part


def placement_of(name: str, stages: int, chunks: int) -> Placement:
    """The placement that the schedule of that name needs. chunks: of each stage; 1 for 1F1B, 2 for ZBV."""
    assert chunks == {ONE_F_ONE_B: 1, INTERLEAVED: chunks, ZB_H1: chunks, ZBV: 2}[name], (
        name,
        chunks,
    )
    return Placement(stages, chunks, V if name == ZBV else LOOP)


@dataclass(frozen=True)
class Held:
    """What a stage holds at one moment, in micro-batches of each chunk.

    activations: between F and I or B. weight_inputs: between I and W, what W still needs.
    """

    activations: tuple[int, ...]
    weight_inputs: tuple[int, ...]


def even_cut(layers: int, placement: Placement) -> tuple[int, ...]:
    """The same number of layers in every part."""
    return (layers // placement.parts,) * placement.parts


def balanced_cut(layers: int, placement: Placement, layer: float, head: float) -> tuple[int, ...]:
    """Layers of each part, such that the costliest stage is cheapest. layer, head: the cost of a layer and of the logits.

    The stage that has the logits, too, gets its number of layers by cost; the others share the rest evenly, the later ones taking
    what does not divide. Then each stage cuts its layers into chunks by the same rule.
    """
    with_head, _ = placement.owner(placement.parts - 1)
    mine = _with_head(layers, placement.stages - 1, placement.chunks, layer, head)
    others = evenly(layers - mine, placement.stages - 1)
    return cut_of_stages((*others[:with_head], mine, *others[with_head:]), placement, layer, head)


def cut_of_stages(
    totals: tuple[int, ...], placement: Placement, layer: float, head: float
) -> tuple[int, ...]:
    """Layers of each part where the stages' layers are given: chunks of a stage cost the same, as far as the layers divide."""
    with_head, _ = placement.owner(placement.parts - 1)
    chunks = [evenly(total, placement.chunks) for total in totals]
    last = _with_head(totals[with_head], placement.chunks - 1, 1, layer, head)
    chunks[with_head] = (*evenly(totals[with_head] - last, placement.chunks - 1), last)
    return tuple(
        chunks[stage][chunk] for stage, chunk in map(placement.owner, range(placement.parts))
    )


def _with_head(layers: int, others: int, least: int, layer: float, head: float) -> int:
    """Layers, at least `least`, of the one that has the head, too, where `others` share the rest evenly.

    The number for which the costliest is cheapest; of equals the largest, which leaves the others least.
    """
    if others == 0:
        return layers
    numbers = range(layers - others * least, least - 1, -1)
    return min(numbers, key=lambda n: max(-(-(layers - n) // others) * layer, n * layer + head))


def evenly(layers: int, shares: int) -> tuple[int, ...]:
    """Shares that differ by at most one, the later ones being larger: what comes first in a model is held longest."""
    return tuple((layers + i) // shares for i in range(shares))
