"""Gradient buckets: the parts of a stage's parameters whose gradients are reduced, and whose weights are gathered, at once.

A stage's parameters come in units, in the order in which backward finishes them: the final norm (with the head's weight, where that
is its own), the layers from the last to the first, the embeddings. A bucket is a run of whole units. Left out: their memory
(`training.flat`), when a bucket is reduced (`training.buckets`). Pure integers, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config.layout import Layout, placement, sequence_parts
from ..config.run_config import RunConfig
from .accounting import (
    FLAT_ALIGNMENT,
    FP32_BYTES,
    embedding_records,
    head_records,
    layer_records,
    padded_vocab_size,
    round_up,
    stage_layers,
    stage_records,
)
from .activations import Collective, element_bytes

# Megatron's default of --ddp-bucket-size: large enough for the chunks of a ring over many ranks
BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK = 40_000_000, 1_000_000
BF16_BYTES = 2


def bucket_minimum(run: RunConfig, dp: int) -> int:
    """Elements that a bucket has at least: where nothing is reduced, each unit is a bucket."""
    return run.parallel.ddp_bucket_size or (max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * dp) if dp > 1 else 1)


def cut(units: Sequence[int], minimum: int, tied: bool) -> list[range]:
    """Which units form each bucket: as few as have `minimum` elements together; the last bucket takes what remains.

    units: elements of each. tied: the last unit is the word embedding that another stage holds as well; it is a bucket of its own,
    because its reduction waits for that stage.
    """
    buckets, start, end = [], 0, len(units) - tied
    for i in range(end):
        if sum(units[start : i + 1]) >= minimum:
            buckets.append(range(start, i + 1))
            start = i + 1
    if start < end:
        buckets.append(range(start, end))
    return [*buckets, range(end, len(units))] if tied else buckets


def holds_tied_copy(run: RunConfig, stage: int) -> bool:
    """Whether this stage's word embedding is one of two copies, whose gradients are reduced together."""
    first, last = placement(run).owner(0)[0], placement(run).last_stage
    return run.model.tied and first != last and stage in (first, last)


def stage_units(run: RunConfig, layout: Layout, stage: int) -> list[int]:
    """Elements of each unit of a stage, in the order in which backward finishes them; a tied copy is the last."""
    tp, tied = layout.tp, holds_tied_copy(run, stage)
    head = sum(r.parameters for r in head_records(run, tp, tied=True))
    layer = sum(r.parameters for r in layer_records(run, tp))
    table = padded_vocab_size(run.model, tp) // tp * run.model.hidden_size
    embedding = sum(r.parameters for r in embedding_records(run, tp)) - table * tied
    layers = sum(map(len, stage_layers(run, stage)))
    first, last = placement(run).owner(0)[0], placement(run).last_stage
    return [*[head] * (stage == last), *[layer] * layers, *[embedding] * (stage == first), *[table] * tied]


def bucket_units(run: RunConfig, layout: Layout, stage: int) -> list[range]:
    """The units of each bucket."""
    return cut(stage_units(run, layout, stage), bucket_minimum(run, layout.dp), holds_tied_copy(run, stage))


def bucket_elements(run: RunConfig, layout: Layout, stage: int) -> list[int]:
    """Elements of each bucket in a rank's flat buffers, padded so that every data-parallel rank's part is aligned."""
    units, padding = stage_units(run, layout, stage), layout.dp * FLAT_ALIGNMENT
    return [round_up(sum(units[i] for i in bucket), padding) for bucket in bucket_units(run, layout, stage)]


def flat_elements(run: RunConfig, layout: Layout, stage: int) -> int:
    """Elements of a rank's flat buffers: its parameters with the padding of their buckets."""
    return sum(bucket_elements(run, layout, stage))


def gradient_bytes(run: RunConfig) -> int:
    """Bytes of a gradient element on the wire."""
    return BF16_BYTES if run.parallel.grad_reduce_in_bf16 else FP32_BYTES


def gradient_collectives(run: RunConfig, layout: Layout, stage: int) -> list[Collective]:
    """Once per iteration: all-reduces of tied embeddings and of partial gradients, gradient reduction, ZeRO-1's all-gather."""
    collectives, size = [], gradient_bytes(run)
    if holds_tied_copy(run, stage):
        vocabulary = padded_vocab_size(run.model, layout.tp) // layout.tp
        collectives.append(Collective("all_reduce", "embedding", vocabulary * run.model.hidden_size * size))
    parts = sequence_parts(run, layout.tp) > 1
    if partial := sum(r.replicated if parts else r.of_heads for _, r in stage_records(run, layout, stage)) * (layout.tp > 1):
        collectives.append(Collective("all_reduce", "tp", partial * FP32_BYTES))  # every rank's, of its part of sequence or heads
    for elements in bucket_elements(run, layout, stage) if layout.dp > 1 else ():
        if run.parallel.zero_stage:
            collectives += [Collective("reduce_scatter", "dp", elements * size),
                            Collective("all_gather", "dp", elements // layout.dp * element_bytes(run))]
        else:
            collectives.append(Collective("all_reduce", "dp", elements * size))
    return collectives
