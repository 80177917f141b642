"""A run's spans, under Megatron-LM's names.

The names are in its megatron/training/training.py, core/pipeline_parallel and core/distributed.
"""

from __future__ import annotations

from typing import NamedTuple

from ...pipeline.instructions import RECEIVES, SENDS


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
AUDIT = f"{ITERATION}.audit"  # of this program alone
SAVE = "megatron.checkpoint.save"
FINALIZE = "megatron.checkpoint.save.finalize"
COPY = "megatron.checkpoint.copy"  # of --save-memory, which Megatron-LM does not have
COPY_FINALIZE = "megatron.checkpoint.copy.finalize"
EVALUATE = "megatron.evaluate"
SPANS = {
    STARTUP: SpanRow("job"),
    MODEL_INIT: SpanRow("model_init"),
    DATALOADER: SpanRow("data_loading"),
    LOAD: SpanRow("load_checkpoint"),
    TRAIN: SpanRow("job"),
    FIRST_ITERATION: SpanRow("first_iteration"),
    ITERATION: SpanRow("step"),
    f"{ITERATION}.forward_backward": SpanRow("forward_backward", goodput=False),
    f"{ITERATION}.optimizer": SpanRow("optimizer", goodput=False),
    AUDIT: SpanRow("step", goodput=False),
    SAVE: SpanRow("checkpoint"),
    FINALIZE: SpanRow("checkpoint"),
    COPY: SpanRow("checkpoint"),
    COPY_FINALIZE: SpanRow("checkpoint"),
    EVALUATE: SpanRow("evaluate", goodput=False),
    f"{EVALUATE}.step": SpanRow("evaluate", goodput=False),
}
# Phase that the trainer marks -> its span.
PHASE_SPANS = {
    "forward_backward": f"{ITERATION}.forward_backward",
    "optimizer": f"{ITERATION}.optimizer",
    "audit": AUDIT,
    "evaluate": f"{EVALUATE}.step",
}
# Instruction of a schedule -> its span. Both halves of a backward are spans of a backward.
INSTRUCTION_SPANS = {
    "forward": "megatron.microbatch.forward",
    "backward": "megatron.microbatch.backward",
    "backward_input": "megatron.microbatch.backward",
    "backward_weight": "megatron.microbatch.backward",
    **{name: f"megatron.p2p.{name}" for name in (*RECEIVES, *SENDS)},
}
SPANS |= {
    span: SpanRow("communication" if ".p2p." in span else "microbatch", goodput=False)
    for span in INSTRUCTION_SPANS.values()
}
