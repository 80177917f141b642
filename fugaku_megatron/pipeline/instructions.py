"""Instructions of a pipeline schedule.

F, B, I and W are forward, backward, and backward's halves: input gradient and weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INPUT = "backward_input"
BACKWARD_WEIGHT = "backward_weight"
RECV_FORWARD = "recv_forward"
SEND_FORWARD = "send_forward"
RECV_BACKWARD = "recv_backward"
SEND_BACKWARD = "send_backward"
SENDS = (SEND_FORWARD, SEND_BACKWARD)
RECEIVES = (RECV_FORWARD, RECV_BACKWARD)


@dataclass(frozen=True)
class Instruction:
    """model_chunk: from 0"""

    op: str
    microbatch: int
    model_chunk: int = 0


Instructions = list[Instruction]
