"""Instructions of a pipeline schedule: an operation, a micro-batch and a model chunk."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"


BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"


RECV_FORWARD, SEND_FORWARD = "recv_forward", "send_forward"


RECV_BACKWARD, SEND_BACKWARD = "recv_backward", "send_backward"


SENDS, RECEIVES = (SEND_FORWARD, SEND_BACKWARD), (RECV_FORWARD, RECV_BACKWARD)


@dataclass(frozen=True)
class Instruction:
    """Do `op` for micro-batch `microbatch` on the stage's own chunk of layers `chunk`, from 0."""

    op: str
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class Held:
    """What a stage holds at one moment, in micro-batches of each chunk.

    activations: between F and I or B. weight_inputs: between I and W, what W still needs.
    """

    activations: tuple[int, ...]
    weight_inputs: tuple[int, ...]
