"""A run's spans, under Megatron-LM's names.

The names are in its megatron/training/training.py, core/pipeline_parallel and core/distributed.
"""

from __future__ import annotations

from typing import NamedTuple

from ...config import span_groups


class SpanRow(NamedTuple):
    """A row in SPANS. goodput: True if Megatron-LM's accounting of useful time reads the span"""

    group: str
    goodput: bool = True


STARTUP = "megatron.startup"
MODEL_INIT = "megatron.startup.model_init"
DATALOADER = "megatron.startup.dataloader"
LOAD = "megatron.checkpoint.load"
TRAIN = "megatron.train"
FIRST_ITERATION = "megatron.train.first_iteration"
ITERATION = "megatron.train.iteration"
SAVE = "megatron.checkpoint.save"
FINALIZE = "megatron.checkpoint.save.finalize"
EVALUATE = "megatron.evaluate"
SPANS = {
    STARTUP: SpanRow(span_groups.JOB),
    MODEL_INIT: SpanRow(span_groups.MODEL_INIT),
    DATALOADER: SpanRow(span_groups.DATA_LOADING),
    LOAD: SpanRow(span_groups.LOAD_CHECKPOINT),
    TRAIN: SpanRow(span_groups.JOB),
    FIRST_ITERATION: SpanRow(span_groups.FIRST_ITERATION),
    ITERATION: SpanRow(span_groups.STEP),
    f"{ITERATION}.forward_backward": SpanRow(span_groups.FORWARD_BACKWARD, goodput=False),
    f"{ITERATION}.optimizer": SpanRow(span_groups.OPTIMIZER, goodput=False),
    SAVE: SpanRow(span_groups.CHECKPOINT),
    FINALIZE: SpanRow(span_groups.CHECKPOINT),
    EVALUATE: SpanRow(span_groups.EVALUATE, goodput=False),
    f"{EVALUATE}.step": SpanRow(span_groups.EVALUATE, goodput=False),
    "megatron.microbatch.forward": SpanRow(span_groups.MICROBATCH, goodput=False),
    "megatron.microbatch.backward": SpanRow(span_groups.MICROBATCH, goodput=False),
    "megatron.p2p.recv_forward": SpanRow(span_groups.COMMUNICATION, goodput=False),
    "megatron.p2p.send_forward": SpanRow(span_groups.COMMUNICATION, goodput=False),
    "megatron.p2p.recv_backward": SpanRow(span_groups.COMMUNICATION, goodput=False),
    "megatron.p2p.send_backward": SpanRow(span_groups.COMMUNICATION, goodput=False),
}
# Phase that the trainer marks -> its span.
PHASE_SPANS = {
    "forward_backward": f"{ITERATION}.forward_backward",
    "optimizer": f"{ITERATION}.optimizer",
    "evaluate": f"{EVALUATE}.step",
}
# Instruction of a schedule -> its span. Both halves of a backward are spans of a backward.
INSTRUCTION_SPANS = {
    "forward": "megatron.microbatch.forward",
    "backward": "megatron.microbatch.backward",
    "backward_input": "megatron.microbatch.backward",
    "backward_weight": "megatron.microbatch.backward",
    "recv_forward": "megatron.p2p.recv_forward",
    "send_forward": "megatron.p2p.send_forward",
    "recv_backward": "megatron.p2p.recv_backward",
    "send_backward": "megatron.p2p.send_backward",
}
