"""Bytes on one rank at a step's peak: weights, gradients, optimizer state, activations, logits.

MPI's buffers and other software: `planner.peak_memory`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from ..config.layer_kinds import LayerKind
from ..config.layout import Layout
from ..config.optimizer import MOMENTS
from ..config.rows import ACTIVATIONS, MLP_OF_EXPERTS
from ..config.run_config import RunConfig
from ..pipeline.instructions import InFlight
from ..pipeline.schedule_names import row
from .buckets import bucket_elements, bucket_sizes, bucket_units, unit_elements, updated_elements
from .context_parallel import key_working_bytes
from .layers import layer_records, per_layer, without_first
from .linear_layers import layer_savings
from .mixers import mixer_costs
from .mlp import mlp_width, pair_working_bytes, waiting_bytes
from .optimizer_states import matrix_elements, scales, unit_segments
from .sizes import (
    BF16_BYTES,
    FP32_BYTES,
    vocabulary_rows,
)
from .stages import (
    end_records,
    quantized_elements,
    stage_layers,
    stage_parameters,
    stage_recompute_groups,
    virtual_stage_layers,
    virtual_stage_recompute_groups,
)

COPY_SLOTS = 2  # of --save-memory: the newest complete copy, and the next
INT8_COPIES = 2  # of a weight, for forward and for data gradients


def frozen_elements(run: RunConfig, stage: int) -> int:
    if not run.has_frozen_weights:
        return 0
    return stage_parameters(run, stage) - sum(unit_elements(run, stage).values())


def q8_savings(run: RunConfig, stage: int) -> int:
    return layer_savings(run, stage) if run.lora.base_in_int8 else 0


def frozen_bytes(run: RunConfig, stage: int) -> int:
    return run.element_bytes * frozen_elements(run, stage) - q8_savings(run, stage)


def _second_moment_of_muon(run: RunConfig, layout: Layout, stage: int) -> int:
    divided, others = matrix_elements(run)
    buckets = bucket_units(run, layout, stage)
    matrices = [
        sum(kind[unit] for unit in bucket if isinstance(unit, int))
        for kind in (others, divided)
        for bucket in buckets
    ]
    sizes = bucket_sizes(run, layout, stage)
    whole = (size for kind in zip(*sizes, strict=True) for size in kind)
    shards = updated_elements(run, layout, stage)
    return sum(
        min(own, size - without) for own, size, without in zip(shards, whole, matrices, strict=True)
    )


def _scales(run: RunConfig, layout: Layout, stage: int) -> int:
    """Return the most scales per 8-bit moment on a rank; with ZeRO-1 an upper limit."""
    segments = unit_segments(run, stage)
    updated = updated_elements(run, layout, stage)
    buckets = bucket_units(run, layout, stage)
    found = 0
    for i, bucket in enumerate(buckets):
        experts, others = zip(*(segments[unit] for unit in bucket), strict=True)
        found += scales(itertools.chain(*others), updated[i])
        found += scales(itertools.chain(*experts), updated[len(buckets) + i])
    return found


def moment_bytes(run: RunConfig, layout: Layout, stage: int) -> tuple[int, int]:
    """Return the bytes of all moments on a rank and in a checkpoint, which saves 8-bit moments as FP32."""
    optimizer = run.optimizer
    first = sum(updated_elements(run, layout, stage))
    if optimizer.exp_avg_dtype == "int8":
        each = first + FP32_BYTES * _scales(run, layout, stage)
        count = len(optimizer.states)
        return count * each, count * FP32_BYTES * first
    second = _second_moment_of_muon(run, layout, stage) if optimizer.muon else first
    numbers = dict(zip(MOMENTS, (first, second), strict=True))
    stored = int(sum(numbers[state] * optimizer.state_bytes(state) for state in MOMENTS))
    return stored, stored


# Limits of a block of FP32 logits: these bytes, or 1 / LOGITS_SHARE of the layers' saved bytes.
LOGITS_MIN_BYTES = 36 << 20
LOGITS_SHARE = 4
LOGITS_MAX_ROWS = 1024  # more rows are not faster
# Bytes of a data reader's index: per sample, with its documents; and at most.
INDEX_SAMPLE_BYTES = 16
INDEX_MAX_BYTES = 128 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes by use.

    saving: the copy that --async-save writes.
    copies: of --save-memory, this rank's state and parity of others', twice.
    reused: activations whose memory gradients reuse later in the step.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    saving: int = 0
    copies: int = 0
    reused: int = 0

    @property
    def total(self) -> int:
        each: tuple[int, ...] = astuple(self)
        return sum(each) - 2 * self.reused


def data_index_bytes(run: RunConfig, samples: int) -> int:
    """Return the index bytes on a data reader: 117 MiB for 146 million samples (measured)."""
    return min(INDEX_SAMPLE_BYTES * samples, INDEX_MAX_BYTES) if run.data.files else 0


@lru_cache(maxsize=64)
def layer_saved_bytes(run: RunConfig) -> tuple[int, ...]:
    def saved(kind: LayerKind) -> int:
        records = layer_records(run, kind)
        total = sum(r.saved_bytes for r in records)
        if kind.mixer is not None:
            total -= mixer_costs(kind.mixer).recomputed_bytes(run, kind)
        return total

    return per_layer(run, saved)


def layers_kept_bytes(run: RunConfig, layers: range, groups: Sequence[range]) -> tuple[int, int]:
    """Return (bytes that layers keep per micro-batch, additional bytes of a recompute in backward or of a forward without backward).

    groups: layers recomputed together, counted from the first of `layers`. Backward has freed other layers by then.
    """
    below = max(0, run.layers_without_backward - layers.start)
    saved = layer_saved_bytes(run)[layers.start : layers.stop]
    passed = max(saved[:below], default=0)
    saved = without_first(saved, below)
    recomputed = [sum(saved[group.start : group.stop]) for group in groups]
    plain = sum(saved) - sum(recomputed)
    kept = sum(group.stop > below for group in groups) * run.residual_bytes + plain
    return kept, max(0, max(recomputed, default=0) - plain, passed - plain)


@lru_cache(maxsize=64)
def weight_input_bytes(run: RunConfig) -> tuple[int, ...]:
    """Return the bytes that each layer keeps between the halves of a split backward.

    Whole (s, b, h): QKV and MLP inputs, projection and MLP output gradients. Sharded: the context, QKV's gradient, and the MLP's
    pre-activation with its gradient.
    """

    def kept(kind: LayerKind) -> int:
        mixer = 0 if kind.mixer is None else mixer_costs(kind.mixer).weight_input_bytes(run)
        if kind.predicts:  # the projection's inputs, and its output's gradient
            mixer += 2 * run.activation_bytes + run.activation_bytes // run.tp
        if kind.mlp is None:
            return mixer
        if kind.mlp == MLP_OF_EXPERTS:
            return mixer + waiting_bytes(run)
        inner = inner_bytes(run, run.model.ffn_hidden_size)
        return mixer + 2 * run.activation_bytes + 2 * run.model.fc1_widths * inner

    return without_first(per_layer(run, kept), run.frozen_layers)


def inner_bytes(run: RunConfig, width: int) -> int:
    """Return the bytes of this rank's shard of one (s, b, width) tensor."""
    return run.tokens_per_microbatch * width * run.element_bytes // run.tp


def live_bytes(run: RunConfig, stage: int, in_flight: Sequence[InFlight]) -> int:
    """Return a stage's largest saved activations in its schedule."""
    return chunks_live_bytes(
        run, stage_layers(run, stage), stage_recompute_groups(run, stage), in_flight
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
    mlp = hidden_tensors * run.activation_bytes + inner_tensors * inner_bytes(
        run, mlp_width(run.model)
    )
    if run.model.num_experts:
        mlp += pair_working_bytes(run)
    return max(mlp, key_working_bytes(run))


def posted_bytes(run: RunConfig, stage: int) -> int:
    placement = run.placement
    ahead = row(run.parallel.schedule).receives_ahead
    neighbours = [
        placement.neighbour(stage, chunk, step)
        for chunk in range(placement.model_chunks)
        for step in (-1, 1)
    ]
    senders = sum(n is not None and n[0] != stage for n in neighbours)
    return ahead * senders * run.residual_bytes


@lru_cache(maxsize=64)
def logits_rows(run: RunConfig) -> int:
    """Return the rows per logits block: equal blocks, as few as their memory allows, up to
    LOGITS_MAX_ROWS.

    The limit is a quarter of the memory that the layers keep, or with --recompute-part-layers would
    keep, so that recompute does not change the order of sums.
    """
    vocabulary = vocabulary_rows(run)
    rows = run.tokens_per_microbatch
    free = run.training.recompute_part_layers is not None
    kept = sum(
        layers_kept_bytes(
            run,
            virtual_stage_layers(run, virtual_stage),
            () if free else virtual_stage_recompute_groups(run, virtual_stage),
        )[0]
        for virtual_stage in run.placement.virtual_stages_of[run.placement.last_stage]
    )
    budget = max(LOGITS_MIN_BYTES, kept // LOGITS_SHARE)
    chunks = max(-(-rows * vocabulary * FP32_BYTES // budget), -(-rows // LOGITS_MAX_ROWS))
    return -(-rows // chunks)


def reused_bytes(run: RunConfig, layout: Layout, stage: int, live: int) -> int:
    """Return the `live` activation bytes that gradients reuse in an iteration of one micro-batch.

    A bucket is allocated when backward reaches its first unit, the tied embedding's with the logits.
    """
    if layout.microbatches(run) > 1:
        return 0
    sizes = bucket_elements(run, layout, stage)
    layers = sum(map(len, stage_layers(run, stage))) or 1
    tied_first = (run.model.tied or run.model.predictions > 0) and layout.pp == 1
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
    """Return the bytes on one rank of a stage. in_flight: peaks of the stage's schedule"""
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
    placement = run.placement
    if stage == placement.last_stage:
        element = FP32_BYTES if is_fp32 else FP32_BYTES + BF16_BYTES
        logits = logits_rows(run) * vocabulary_rows(run) * element
    outside = sum(
        record.saved_bytes
        for virtual_stage in placement.virtual_stages_of[stage]
        for record in end_records(run, virtual_stage)
    )
    # The head runs while no layer does, but the gradients of other heads wait while an MTP module does.
    waiting = 0
    if stage == placement.last_stage:
        waiting = run.model.predictions * run.activation_bytes
    working = max(working_bytes(run) + waiting, outside + logits) - logits
    frozen = 0 if run.lora.on else frozen_bytes(run, stage)  # a checkpoint has it too
    saving = 0
    if run.output.save:
        saving = saved_moments - moments
        if not is_fp32 and not run.masters:
            saving += masters
        if run.output.async_save:
            saving += frozen + masters + (0 if run.output.no_save_optim else saved_moments)
    slots = 0
    if run.output.save_memory:
        state = frozen + masters + saved_moments
        parity = -(-state // (run.output.save_memory_group - 1))
        slots = COPY_SLOTS * (state + parity)
    live = live_bytes(run, stage, in_flight)
    packed = 0
    if run.system.int8:
        packed = INT8_COPIES * quantized_elements(run, stage)
    return Memory(
        weights=int(copies * (elements + frozen_elements(run, stage))) * weight_bytes
        + packed
        - q8_savings(run, stage),
        gradients=elements * (FP32_BYTES + sent),
        optimizer=moments + (masters if run.masters else 0),
        activations=live + posted_bytes(run, stage) + working,
        logits=logits,
        saving=saving,
        copies=slots,
        reused=reused_bytes(run, layout, stage, live),
    )
