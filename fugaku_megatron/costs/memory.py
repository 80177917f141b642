"""One rank's memory at a step's peak: weights, gradients, optimizer state, activations and logits,
in bytes. No torch.

MPI's buffers and other software: `planner.memory`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..config.layer_kinds import LayerKind
from ..config.layout import Layout, cp_comm_types, group_copies, placement
from ..config.model import ACTIVATIONS, MLP_OF_EXPERTS
from ..config.optimizer import MOMENT_BYTES
from ..config.parallel import A2A, P2P
from ..config.run_config import RunConfig
from ..pipeline.in_flight import InFlight
from ..pipeline.schedule_names import row
from .accounting import (
    FLAT_ALIGNMENT,
    embedding_records,
    end_records,
    head_records,
    layer_parameters,
    layer_records,
    of_layers,
    quantized_weights,
    round_up,
    stage_layers,
    stage_parameters,
    stage_records,
    virtual_stage_layers,
    virtual_stage_recompute_groups,
    vocabulary_rows,
    zero_shards,
)
from .activations import (
    FP32_BYTES,
    Collective,
    activation_bytes,
    key_working_bytes,
    residual_bytes,
    sequence_shards,
    typical_cp_comm_type,
)
from .experts import mlp_width, pair_working_bytes, waiting_bytes
from .int8_moments import scales, unit_segments
from .linear_layers import q8_savings
from .mixers import mixer_costs
from .muon import matrix_elements
from .units import EMBEDDING, HEAD, TIED, Unit, holds_tied_copy, units

# Megatron's default of --ddp-bucket-size, large enough for rings over many ranks
BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_RANK = 1_000_000
BF16_BYTES = 2
INT8_COPIES = 2  # of a weight, for forward and for data gradients


def bucket_minimum(run: RunConfig, dp: int) -> int:
    """Return the minimum elements per bucket; without reductions every unit is a bucket."""
    if run.parallel.ddp_bucket_size:
        return run.parallel.ddp_bucket_size
    return max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * dp) if dp > 1 else 1


def cut(units: Sequence[int], minimum: int, tied: bool) -> list[range]:
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


def adapter_parameters(run: RunConfig) -> tuple[int, ...]:
    return of_layers(
        run, lambda kind: sum(r.parameters for r in layer_records(run, kind) if r.adapts)
    )


def frozen_elements(run: RunConfig, layout: Layout, stage: int) -> int:
    if not run.lora.on:
        return 0
    return stage_parameters(run, layout, stage) - sum(unit_elements(run, layout, stage).values())


def frozen_bytes(run: RunConfig, layout: Layout, stage: int) -> int:
    saved = q8_savings(run, layout, stage)
    return run.element_bytes * frozen_elements(run, layout, stage) - saved


def unit_elements(run: RunConfig, layout: Layout, stage: int) -> dict[Unit, int]:
    per_layer = adapter_parameters(run) if run.lora.on else layer_parameters(run)
    others = {HEAD: 0, EMBEDDING: 0}
    if not run.lora.on:
        table = vocabulary_rows(run) * run.model.hidden_size
        embedding = sum(r.parameters for r in embedding_records(run))
        others = {
            HEAD: sum(r.parameters for r in head_records(run, tied=True)),
            EMBEDDING: embedding,
            TIED: table,
        }
        if holds_tied_copy(run, layout.placement, stage):
            others[EMBEDDING] -= table
    return {
        unit: per_layer[unit] if isinstance(unit, int) else others[unit]
        for unit in units(run, layout, stage)
    }


def bucket_units(run: RunConfig, layout: Layout, stage: int) -> list[list[Unit]]:
    elements = unit_elements(run, layout, stage)
    minimum = bucket_minimum(run, layout.replicas)
    names = list(elements)
    buckets = cut(list(elements.values()), minimum, tied=TIED in elements)
    return [names[bucket.start : bucket.stop] for bucket in buckets]


@lru_cache(maxsize=64)
def bucket_sizes(run: RunConfig, layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
    """Return (elements, divided expert elements) for each bucket, padded so that every ZeRO shard is aligned.

    Divided experts in the same units form their own bucket.
    """
    experts = of_layers(run, lambda kind: sum(r.divided for r in layer_records(run, kind)))
    elements = unit_elements(run, layout, stage)
    sizes = []
    for bucket in bucket_units(run, layout, stage):
        divided = sum(experts[unit] for unit in bucket if isinstance(unit, int))
        others = sum(elements[unit] for unit in bucket) - divided
        sizes.append(
            (
                round_up(others, layout.replicas * FLAT_ALIGNMENT),
                round_up(divided, layout.edp * FLAT_ALIGNMENT),
            )
        )
    return tuple(sizes)


def bucket_elements(run: RunConfig, layout: Layout, stage: int) -> list[int]:
    return [others + divided for others, divided in bucket_sizes(run, layout, stage)]


def updated_elements(run: RunConfig, layout: Layout, stage: int) -> list[int]:
    """Return the elements that a rank updates: each bucket, or with ZeRO-1 its shard; divided experts last."""
    sizes = bucket_sizes(run, layout, stage)
    expert_shards = layout.edp if run.parallel.zero_stage else 1
    others = [size // zero_shards(run, layout) for size, _ in sizes]
    return others + [divided // expert_shards for _, divided in sizes]


def _second_moment_of_muon(run: RunConfig, layout: Layout, stage: int) -> int:
    shards = zero_shards(run, layout)
    matrices = matrix_elements(run)
    sizes = bucket_elements(run, layout, stage)
    elements = 0
    for size, bucket in zip(sizes, bucket_units(run, layout, stage), strict=True):
        without = sum(matrices[unit] for unit in bucket if isinstance(unit, int))
        elements += min(size // shards, size - without)
    return elements


def _scales(run: RunConfig, layout: Layout, stage: int) -> int:
    """Return the most scales per 8-bit moment on a rank; with ZeRO-1 an upper limit."""
    segments = unit_segments(run, layout, stage)
    updated = updated_elements(run, layout, stage)
    buckets = bucket_units(run, layout, stage)
    found = 0
    for i, bucket in enumerate(buckets):
        experts, others = zip(*(segments[unit] for unit in bucket), strict=True)
        found += scales(itertools.chain(*others), updated[i])
        found += scales(itertools.chain(*experts), updated[len(buckets) + i])
    return found


def moment_bytes(run: RunConfig, layout: Layout, stage: int) -> tuple[int, int]:
    """Return the bytes of both moments on a rank and in a checkpoint, which saves 8-bit moments as FP32."""
    optimizer = run.optimizer
    first = sum(updated_elements(run, layout, stage))
    if optimizer.exp_avg_dtype == "int8":
        each = first + FP32_BYTES * _scales(run, layout, stage)
        return 2 * each, 2 * FP32_BYTES * first
    second = _second_moment_of_muon(run, layout, stage) if optimizer.muon else first
    both = int(
        first * MOMENT_BYTES[optimizer.exp_avg_dtype]
        + second * MOMENT_BYTES[optimizer.exp_avg_sq_dtype]
    )
    return both, both


def gradient_bytes(run: RunConfig) -> int:
    return BF16_BYTES if run.parallel.grad_reduce_in_bf16 else FP32_BYTES


def gradient_collectives(run: RunConfig, layout: Layout, stage: int) -> list[Collective]:
    collectives = []
    size = gradient_bytes(run)
    if holds_tied_copy(run, layout.placement, stage):
        elements = vocabulary_rows(run) * run.model.hidden_size
        collectives.append(Collective("all_reduce", "embedding", elements * size))
    if run.tp > 1:
        records = stage_records(run, layout, stage)
        if sequence_shards(run) > 1:
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


# Memory at the peak --------------------------------------------------------------------------------------------------------------

# Limits of a block of FP32 logits: these bytes, or 1 / LOGITS_SHARE of the layers' saved bytes.
LOGITS_MIN_BYTES = 36 << 20
LOGITS_SHARE = 4
LOGITS_MAX_ROWS = 1024  # more rows are not faster
# Bytes of a data reader's index: per sample, with its documents; and at most.
INDEX_SAMPLE_BYTES = 16
INDEX_MAX_BYTES = 128 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at a step's peak, by use.

    saving: the copy that --async-save writes.
    reused: activations whose memory gradients reuse later in the step.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    saving: int = 0
    reused: int = 0

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.saving
            - self.reused
        )


def data_index_bytes(run: RunConfig, samples: int) -> int:
    """Return the index bytes on a data reader: 117 MiB for 146 million samples (measured)."""
    return min(INDEX_SAMPLE_BYTES * samples, INDEX_MAX_BYTES) if run.data.files else 0


@lru_cache(maxsize=64)
def layer_saved_bytes(run: RunConfig) -> tuple[int, ...]:
    """Return the bytes that each layer saves for backward."""

    def saved(kind: LayerKind) -> int:
        records = layer_records(run, kind, typical_cp_comm_type(run))
        total = sum(r.saved_bytes for r in records)
        if run.training.recompute_granularity == "selective" and kind.mixer is not None:
            total -= mixer_costs(kind.mixer).recomputed_bytes(run, kind)
        return total

    return of_layers(run, saved)


def layers_kept_bytes(run: RunConfig, layers: range, groups: Sequence[range]) -> tuple[int, int]:
    """Return (bytes that layers keep per micro-batch, additional recompute bytes in backward).

    groups: layers recomputed together, counted from the first of `layers`. Backward has freed other layers by then.
    """
    saved = layer_saved_bytes(run)[layers.start : layers.stop]
    recomputed = [sum(saved[group.start : group.stop]) for group in groups]
    plain = sum(saved) - sum(recomputed)
    kept = len(groups) * residual_bytes(run) + plain
    return kept, max(0, max(recomputed, default=0) - plain)


def weight_input_bytes(run: RunConfig) -> tuple[int, ...]:
    """Return the bytes that each layer keeps between the halves of a split backward.

    Whole (s, b, h): QKV and MLP inputs, projection and MLP output gradients. Sharded: the context, QKV's gradient, and the MLP's
    pre-activation with its gradient.
    """

    def kept(kind: LayerKind) -> int:
        mixer = 0 if kind.mixer is None else mixer_costs(kind.mixer).weight_input_bytes(run)
        if kind.mlp is None:
            return mixer
        if kind.mlp == MLP_OF_EXPERTS:
            return mixer + waiting_bytes(run)
        inner = inner_bytes(run, run.model.ffn_hidden_size)
        return mixer + 2 * activation_bytes(run) + 2 * run.model.fc1_widths * inner

    return of_layers(run, kept)


# Attention kernels (kernels_sve/attention/attention_shape.h): rows of a block, dQ sums per head, and the length from which heads are few.
ATTENTION_BLOCK = 96
QUERY_SUMS = 6
LONG_SEQUENCE = 32768
CAPPED_SCORES = 6  # tensors of scores that torch holds at once in the backward of capped attention


def attention_bytes(run: RunConfig, threads: int) -> int:
    """Return the FP32 bytes for the attention kernels' packed operands and sums.

    threads: per rank. About 12 matrices (s, d) per head in progress; with a sequence segment's s if ranks exchange keys.
    """
    return max(
        _attention_bytes(run, threads, cp_comm_type) for cp_comm_type in set(cp_comm_types(run))
    )


def _attention_bytes(run: RunConfig, threads: int, cp_comm_type: str) -> int:
    model = run.model
    cp = run.parallel.context_parallel_size
    queries = keys = model.seq_length
    heads = model.num_attention_heads // run.tp
    groups = model.query_groups // run.tp
    if model.attn_logit_softcapping is not None:
        scores = run.tokens_per_microbatch * heads * queries // cp
        return FP32_BYTES * CAPPED_SCORES * scores
    if cp > 1 and cp_comm_type == A2A:
        heads = heads // cp
        groups = groups * group_copies(groups, cp) // cp
    elif cp > 1:
        queries = model.seq_length // (2 * cp)
        if cp_comm_type == P2P:
            keys = queries
    share = heads // groups
    sums = min(round_up(keys, ATTENTION_BLOCK) // ATTENTION_BLOCK, QUERY_SUMS)
    wanted = max(2, min(16, threads))
    if max(queries, keys) > LONG_SEQUENCE:
        wanted = min(wanted, -(-threads // sums))
    groups_at_once = min(-(-wanted // share), groups * run.batch.micro_batch_size)
    heads_at_once = wanted if share > wanted else groups_at_once * share
    query_elements = round_up(queries, ATTENTION_BLOCK) * model.kv_channels
    key_elements = round_up(keys, ATTENTION_BLOCK) * model.kv_channels
    per_head = (4 + sums) * query_elements + 2 * queries
    per_group = key_elements
    if share > 1:
        per_head += 2 * key_elements
        per_group = 3 * key_elements
    return FP32_BYTES * (heads_at_once * per_head + groups_at_once * per_group)


def inner_bytes(run: RunConfig, width: int) -> int:
    """Return the bytes of this rank's shard of one (s, b, width) tensor."""
    return run.tokens_per_microbatch * width * run.element_bytes // run.tp


def live_bytes(run: RunConfig, layout: Layout, stage: int, in_flight: Sequence[InFlight]) -> int:
    """Return a stage's largest saved activations in its schedule."""
    placement = layout.placement
    virtual_stages = placement.virtual_stages_of(stage)
    return chunks_live_bytes(
        run,
        [virtual_stage_layers(run, placement, n) for n in virtual_stages],
        [virtual_stage_recompute_groups(run, placement, n) for n in virtual_stages],
        in_flight,
    )


def chunks_live_bytes(
    run: RunConfig,
    layers: Sequence[range],
    groups: Sequence[Sequence[range]],
    in_flight: Sequence[InFlight],
) -> int:
    """Return `live_bytes` for these model chunks.

    A split backward turns recomputed activations, layer by layer, into its larger weight-gradient operands.
    """
    kept, recomputed = zip(
        *(layers_kept_bytes(run, *chunk) for chunk in zip(layers, groups, strict=True)),
        strict=True,
    )
    each = weight_input_bytes(run)
    waiting = [sum(each[chunk.start : chunk.stop]) for chunk in layers]
    largest = 0
    for moment in in_flight:
        counts = (*moment.activations, *moment.weight_inputs)
        live = sum(n * bytes for n, bytes in zip(counts, (*kept, *waiting), strict=True))
        if not any(moment.weight_inputs):
            live += max(recomputed)
        largest = max(largest, live)
    return largest


def working_bytes(run: RunConfig) -> int:
    """Return the temporary bytes of a layer: one MLP tensor and two of width h.

    Overlapped reductions need two more: received shares of the own block, and own shares of the others' blocks.
    """
    hidden_tensors = 4 if run.parallel.tp_comm_overlap and run.tp > 1 else 2
    inner_tensors = 1
    if run.lora.of_mlps(run.model) or ACTIVATIONS[run.model.activation].kernel is None:
        inner_tensors = 3  # adapters compute their own, and torch all columns at once
    mlp = hidden_tensors * activation_bytes(run) + inner_tensors * inner_bytes(
        run, mlp_width(run.model)
    )
    if run.model.num_experts:
        mlp += pair_working_bytes(run)
    return max(mlp, key_working_bytes(run))


def posted_bytes(run: RunConfig, layout: Layout, stage: int) -> int:
    placement = layout.placement
    ahead = row(run.parallel.schedule).receives_ahead
    neighbours = [
        placement.neighbour(stage, chunk, step)
        for chunk in range(placement.model_chunks)
        for step in (-1, 1)
    ]
    senders = sum(n is not None and n[0] != stage for n in neighbours)
    return ahead * senders * residual_bytes(run)


def logits_rows(run: RunConfig) -> int:
    """Return the rows per logits block: equal blocks, as few as their memory allows, up to
    LOGITS_MAX_ROWS.

    The limit is a quarter of the memory that the layers keep, or with --recompute-part-layers would
    keep, so that recompute does not change the order of sums.
    """
    where = placement(run)
    vocabulary = vocabulary_rows(run)
    rows = run.tokens_per_microbatch
    free = run.training.recompute_part_layers is not None
    kept = sum(
        layers_kept_bytes(
            run,
            virtual_stage_layers(run, where, virtual_stage),
            () if free else virtual_stage_recompute_groups(run, where, virtual_stage),
        )[0]
        for virtual_stage in where.virtual_stages_of(where.last_stage)
    )
    budget = max(LOGITS_MIN_BYTES, kept // LOGITS_SHARE)
    chunks = max(-(-rows * vocabulary * FP32_BYTES // budget), -(-rows // LOGITS_MAX_ROWS))
    return -(-rows // chunks)


def reused_bytes(run: RunConfig, layout: Layout, stage: int, live: int) -> int:
    """Return the `live` activation bytes that gradients reuse in an iteration of one micro-batch.

    A bucket is allocated when backward reaches its first unit, the tied embedding's with the logits.
    """
    if layout.microbatches(run, layout.global_batch_size(run)) > 1:
        return 0
    sizes = bucket_elements(run, layout, stage)
    layers = sum(map(len, stage_layers(run, layout.placement, stage)))
    tied_first = run.model.tied and layout.pp == 1
    peak = 0
    allocated = sizes[-1] if tied_first else 0
    left = layers
    for index, bucket in enumerate(bucket_units(run, layout, stage)):
        if not tied_first or index < len(sizes) - 1:
            allocated += sizes[index]
        peak = max(peak, FP32_BYTES * allocated + live * left // layers)
        left -= sum(isinstance(unit, int) for unit in bucket)
    return FP32_BYTES * sum(sizes) + live - peak


def stage_memory(
    run: RunConfig, layout: Layout, stage: int, in_flight: Sequence[InFlight]
) -> Memory:
    elements = sum(bucket_elements(run, layout, stage))
    is_fp32 = run.precision.name == "fp32"
    weight_bytes = FP32_BYTES if is_fp32 else BF16_BYTES
    copies = 1.0
    if run.system.cache_packed_weights:
        copies += 2 * (1.5 if run.system.splits_fp32 else 1.0)  # bf16x3: three BF16 per FP32
    sent = 0  # copies for communication, at worst of all buckets
    if run.parallel.grad_reduce_in_bf16 and layout.replicas > 1:
        sent = BF16_BYTES
    masters = sum(updated_elements(run, layout, stage)) * FP32_BYTES
    moments, saved_moments = moment_bytes(run, layout, stage)
    logits = 0  # with gradients
    placement = layout.placement
    if stage == placement.last_stage:
        element = FP32_BYTES if is_fp32 else FP32_BYTES + BF16_BYTES
        logits = logits_rows(run) * vocabulary_rows(run) * element
    outside = sum(
        record.saved_bytes
        for virtual_stage in placement.virtual_stages_of(stage)
        for record in end_records(run, layout, virtual_stage)
    )
    # the head runs while no layer does
    working = max(working_bytes(run), outside + logits) - logits
    saving = 0
    if run.output.save:
        saving = saved_moments - moments
        if not is_fp32 and not run.masters:
            saving += masters
        if run.output.async_save:
            saving += masters + (0 if run.output.no_save_optim else saved_moments)
    live = live_bytes(run, layout, stage, in_flight)
    packed = 0
    if run.system.int8:
        packed = INT8_COPIES * quantized_weights(run, layout, stage)
    return Memory(
        weights=int(copies * (elements + frozen_elements(run, layout, stage))) * weight_bytes
        + packed
        - q8_savings(run, layout, stage),
        gradients=elements * (FP32_BYTES + sent),
        optimizer=moments + (masters if run.masters else 0),
        activations=live + posted_bytes(run, layout, stage) + working,
        logits=logits,
        saving=saving,
        reused=reused_bytes(run, layout, stage, live),
    )
