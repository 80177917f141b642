"""Gradient buckets of a pipeline stage: units, sizes and collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from ..config.layout import Layout
from ..config.run_config import RunConfig
from .mixers import Segments
from .optimizer_states import unit_segments
from .records import Collective
from .sizes import BF16_BYTES, FP32_BYTES, round_up, vocabulary_rows
from .stages import TIED, Unit, holds_tied_copy, stage_records

FLAT_ALIGNMENT = 64  # elements; a shard of a flat buffer starts on a 256-byte line
# Megatron's default of --ddp-bucket-size, large enough for rings over many ranks
BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_RANK = 1_000_000


def bucket_minimum(run: RunConfig, dp: int) -> int:
    """Return the minimum elements per bucket; without reductions every unit is a bucket."""
    if run.parallel.ddp_bucket_size:
        return run.parallel.ddp_bucket_size
    return max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * dp) if dp > 1 else 1


def bucket_ranges(units: Sequence[int], minimum: int, tied: bool) -> list[range]:
    """Return each bucket's units: as few as have `minimum` elements together; the last bucket takes the rest.

    tied: the last unit is a word embedding that another stage also has, and its own bucket.
    """
    buckets = []
    start = 0
    end = len(units) - tied
    for i in range(end):
        if sum(units[start : i + 1]) >= minimum:
            buckets.append(range(start, i + 1))
            start = i + 1
    if start < end:
        buckets.append(range(start, end))
    if len(buckets) > 1 and not sum(units[buckets[-1].start : end]):  # nothing trained
        last = buckets.pop()
        buckets[-1] = range(buckets[-1].start, last.stop)
    return [*buckets, range(end, len(units))] if tied else buckets


@lru_cache(maxsize=64)
def unit_elements(run: RunConfig, stage: int) -> Mapping[Unit, int]:
    """Return trained elements on one rank by unit, in the order of `units`."""
    segments = unit_segments(run, stage)
    return {unit: _elements(divided + others) for unit, (divided, others) in segments.items()}


def _elements(segments: Segments) -> int:
    return sum(count * length for count, length in segments)


def bucket_units(run: RunConfig, layout: Layout, stage: int) -> list[list[Unit]]:
    elements = unit_elements(run, stage)
    minimum = bucket_minimum(run, layout.replicas)
    names = list(elements)
    buckets = bucket_ranges(list(elements.values()), minimum, tied=TIED in elements)
    return [names[bucket.start : bucket.stop] for bucket in buckets]


@lru_cache(maxsize=64)
def bucket_sizes(run: RunConfig, layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
    """Return (elements, divided expert elements) for each bucket, padded so that every ZeRO shard is aligned.

    Divided experts in the same units form their own bucket.
    """
    segments = unit_segments(run, stage)
    sizes = []
    for bucket in bucket_units(run, layout, stage):
        divided = sum(_elements(segments[unit][0]) for unit in bucket)
        others = sum(_elements(segments[unit][1]) for unit in bucket)
        sizes.append(
            (
                round_up(others, layout.replicas * FLAT_ALIGNMENT),
                round_up(divided, layout.edp * FLAT_ALIGNMENT),
            )
        )
    return tuple(sizes)


def bucket_elements(run: RunConfig, layout: Layout, stage: int) -> list[int]:
    return [others + divided for others, divided in bucket_sizes(run, layout, stage)]


def zero_shards(run: RunConfig, layout: Layout) -> int:
    return layout.replicas if run.parallel.zero_stage else 1


def updated_elements(run: RunConfig, layout: Layout, stage: int) -> list[int]:
    """Return the elements that a rank updates: each bucket, or with ZeRO-1 its shard; divided experts last."""
    sizes = bucket_sizes(run, layout, stage)
    expert_shards = layout.edp if run.parallel.zero_stage else 1
    others = [size // zero_shards(run, layout) for size, _ in sizes]
    return others + [divided // expert_shards for _, divided in sizes]


def gradient_bytes(run: RunConfig) -> int:
    return BF16_BYTES if run.parallel.grad_reduce_in_bf16 else FP32_BYTES


def gradient_collectives(run: RunConfig, layout: Layout, stage: int) -> list[Collective]:
    """Return all gradient collectives of a stage in an iteration: tied embedding, tp, dp, edp."""
    collectives = []
    size = gradient_bytes(run)
    if holds_tied_copy(run, stage):
        elements = vocabulary_rows(run) * run.model.hidden_size
        collectives.append(Collective("all_reduce", "embedding", elements * size))
    if run.tp > 1:
        records = stage_records(run, stage)
        if run.sequence_shards > 1:
            partial = sum(record.replicated for record in records)
        else:
            partial = sum(record.of_heads for record in records)
        if partial:
            collectives.append(Collective("all_reduce", "tp", partial * FP32_BYTES))
    for others, divided in bucket_sizes(run, layout, stage):
        collectives += _bucket_collectives(run, "dp", layout.replicas, others)
        collectives += _bucket_collectives(run, "edp", layout.edp, divided)
    return collectives


def _bucket_collectives(
    run: RunConfig, group: str, replicas: int, elements: int
) -> list[Collective]:
    size = gradient_bytes(run)
    if replicas == 1 or not elements:
        return []
    if not run.parallel.zero_stage:
        return [Collective("all_reduce", group, elements * size)]
    return [
        Collective("reduce_scatter", group, elements * size),
        Collective("all_gather", group, elements // replicas * run.element_bytes),
    ]
