"""What one rank holds at the peak of a step: weights, gradients, optimizer state, activations and logits, in bytes. No torch.

A gradient bucket is a part of a stage's parameters whose gradients are reduced, and whose weights are gathered, at once. A stage's
parameters come in units, in the order in which backward finishes them: the final norm (with the head's weight, where that is its
own), the layers from the last to the first, the embeddings. A bucket is a run of whole units.
Left out: when a bucket is reduced (`optim.buckets`), what an operation keeps (`accounting`), other software and the
MPI's buffers (`planner.memory`). `stage_memory` leaves out what depends on a rank's threads (`attention_bytes`).
Legend: s sequence, b micro-batch, v vocabulary of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..config.layout import Layout, context_ways, group_copies, placement, sequence_parts
from ..config.optimizer import MOMENT_BYTES
from ..config.parallel import A2A, P2P
from ..config.run_config import RunConfig
from ..pipeline.instructions import InFlight
from ..pipeline.schedule_names import receives_ahead
from .accounting import (
    FLAT_ALIGNMENT,
    embedding_records,
    end_records,
    head_records,
    layer_parameters,
    layer_records,
    padded_vocab_size,
    pipeline_split,
    residual_bytes,
    round_up,
    selective_recompute_bytes,
    stage_layers,
    stage_parameters,
    stage_records,
    stage_virtual_stages,
    tokens_per_microbatch,
    virtual_stage_recompute_groups,
    zero_shards,
)
from .activations import (
    FP32_BYTES,
    Collective,
    activation_bytes,
    context_bytes,
    element_bytes,
    key_working_bytes,
    qkv_bytes,
)
from .experts import mlp_width, pair_working_bytes, waiting_bytes
from .int8_moments import scales, unit_segments
from .muon import matrix_elements

# Megatron's default of --ddp-bucket-size: large enough for the chunks of a ring over many ranks
BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_RANK = 1_000_000
BF16_BYTES = 2


def bucket_minimum(run: RunConfig, dp: int) -> int:
    """Elements that a bucket has at least: where nothing is reduced, each unit is a bucket."""
    return run.parallel.ddp_bucket_size or (
        max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * dp) if dp > 1 else 1
    )


def cut(units: Sequence[int], minimum: int, tied: bool) -> list[range]:
    """Which units form each bucket: as few as have `minimum` elements together; the last bucket takes what remains.

    units: elements of each. tied: the last unit is the word embedding that another stage holds as well; it is a bucket of its own,
    because its reduction waits for that stage.
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
    if len(buckets) > 1 and not sum(
        units[buckets[-1].start : end]
    ):  # the last units have nothing that is trained
        last = buckets.pop()
        buckets[-1] = range(buckets[-1].start, last.stop)
    return [*buckets, range(end, len(units))] if tied else buckets


def holds_tied_copy(run: RunConfig, stage: int) -> bool:
    """Whether this stage's word embedding is one of two trained copies, whose gradients are reduced together."""
    first = placement(run).owner(0)[0]
    last = placement(run).last_stage
    return run.model.tied and not run.lora.on and first != last and stage in (first, last)


def adapter_parameters(run: RunConfig, tp: int) -> tuple[int, ...]:
    """Parameters of every layer's adapters on one rank."""
    sizes = {
        mlp: sum(record.parameters for record in layer_records(run, tp, mlp) if record.adapts)
        for mlp in set(run.model.mlps)
    }
    return tuple(sizes[mlp] for mlp in run.model.mlps)


def frozen_elements(run: RunConfig, layout: Layout, stage: int) -> int:
    """Parameters of one rank that are not trained."""
    return (
        stage_parameters(run, layout, stage) - sum(stage_units(run, layout, stage))
        if run.lora.on
        else 0
    )


def stage_units(run: RunConfig, layout: Layout, stage: int) -> list[int]:
    """Elements of each unit of a stage, in the order in which backward finishes them; a tied copy is the last. Trained ones."""
    tp = layout.tp
    tied = holds_tied_copy(run, stage)
    numbers = [n for c in reversed(stage_layers(run, stage)) for n in reversed(c)]
    first = placement(run).owner(0)[0]
    last = placement(run).last_stage
    if run.lora.on:
        of_layer = adapter_parameters(run, tp)
        return [
            *[0] * (stage == last),
            *(of_layer[layer] for layer in numbers),
            *[0] * (stage == first),
        ]
    head = sum(r.parameters for r in head_records(run, tp, tied=True))
    table = padded_vocab_size(run.model, tp) // tp * run.model.hidden_size
    embedding = sum(r.parameters for r in embedding_records(run, tp)) - table * tied
    of_layer = layer_parameters(run, tp)
    return [
        *[head] * (stage == last),
        *(of_layer[layer] for layer in numbers),
        *[embedding] * (stage == first),
        *[table] * tied,
    ]


def bucket_units(
    run: RunConfig, layout: Layout, stage: int, units: list[int] | None = None
) -> list[range]:
    """The units of each bucket. units: those of `stage_units`, where they are known."""
    units = stage_units(run, layout, stage) if units is None else units
    return cut(units, bucket_minimum(run, layout.replicas), holds_tied_copy(run, stage))


@lru_cache(maxsize=64)  # each kind of a stage's memory asks for the same
def bucket_sizes(run: RunConfig, layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
    """(elements that are held like other matrices, those of divided experts) of each bucket in a rank's flat buffers.

    Both are padded so that every part is aligned that one of the ranks with the same elements updates. Divided experts of the same
    units are a bucket of their own.
    """
    where = placement(run)
    of_mlp = {
        mlp: sum(r.divided for r in layer_records(run, layout.tp, mlp))
        for mlp in set(run.model.mlps)
    }
    layers = [
        of_mlp[run.model.mlps[layer]]
        for chunk in reversed(stage_layers(run, stage))
        for layer in reversed(chunk)
    ]
    units = stage_units(run, layout, stage)
    experts = [*[0] * (stage == where.last_stage), *layers, 0, 0]
    sizes = []
    for bucket in bucket_units(run, layout, stage, units):
        divided = sum(experts[i] for i in bucket)
        sizes.append(
            (
                round_up(sum(units[i] for i in bucket) - divided, layout.replicas * FLAT_ALIGNMENT),
                round_up(divided, layout.edp * FLAT_ALIGNMENT),
            )
        )
    return tuple(sizes)


def bucket_elements(run: RunConfig, layout: Layout, stage: int) -> list[int]:
    """Elements of each bucket in a rank's flat buffers, divided experts of the same units counted with it."""
    return [others + divided for others, divided in bucket_sizes(run, layout, stage)]


def updated_elements(run: RunConfig, layout: Layout, stage: int) -> list[int]:
    """Elements of what a rank updates: of each bucket, or with ZeRO-1 its part of each. Divided experts follow the others."""
    sizes = bucket_sizes(run, layout, stage)
    of_experts = layout.edp if run.parallel.zero_stage else 1
    return [others // zero_shards(run, layout) for others, _ in sizes] + [
        divided // of_experts for _, divided in sizes
    ]


def _second_moment_of_muon(run: RunConfig, layout: Layout, stage: int) -> int:
    """Elements of the second moment on the rank of a stage that holds most: Muon's matrices, which lie first, have none."""
    shards = zero_shards(run, layout)
    layers = [layer for chunk in reversed(stage_layers(run, stage)) for layer in reversed(chunk)]
    matrices = matrix_elements(run, layout.tp)
    head = int(stage == placement(run).last_stage)
    elements = 0
    for size, units in zip(
        bucket_elements(run, layout, stage), bucket_units(run, layout, stage), strict=True
    ):
        without = sum(
            matrices[layers[unit - head]] for unit in units if head <= unit < head + len(layers)
        )
        elements += min(size // shards, size - without)
    return elements


def _scales(run: RunConfig, layout: Layout, stage: int) -> int:
    """Return the scales of a moment in 8 bits, with ZeRO-1 an upper limit: on the rank of a stage that holds most."""
    units = unit_segments(run, layout, stage, holds_tied_copy(run, stage))
    sharded = bool(run.parallel.zero_stage)
    found = 0
    for bucket, (others, divided) in zip(
        bucket_units(run, layout, stage), bucket_sizes(run, layout, stage), strict=True
    ):
        found += scales(
            (each for unit in bucket for each in units[unit][1]),
            others // zero_shards(run, layout),
        )
        found += scales(
            (each for unit in bucket for each in units[unit][0]),
            divided // (layout.edp if sharded else 1),
        )
    return found


def moment_bytes(run: RunConfig, layout: Layout, stage: int) -> tuple[int, int]:
    """Bytes of both moments on a rank, and of what a checkpoint holds of them: those of 8 bits are saved in FP32."""
    optimizer = run.optimizer
    parts = updated_elements(run, layout, stage)
    if optimizer.exp_avg_dtype == "int8":
        each = sum(parts) + FP32_BYTES * _scales(run, layout, stage)
        return 2 * each, 2 * FP32_BYTES * sum(parts)
    second = _second_moment_of_muon(run, layout, stage) if optimizer.muon else sum(parts)
    held = (
        sum(parts) * MOMENT_BYTES[optimizer.exp_avg_dtype]
        + second * MOMENT_BYTES[optimizer.exp_avg_sq_dtype]
    )
    return int(held), int(held)


def flat_elements(run: RunConfig, layout: Layout, stage: int) -> int:
    """Elements of a rank's flat buffers: its parameters with the padding of their buckets."""
    return sum(bucket_elements(run, layout, stage))


def gradient_bytes(run: RunConfig) -> int:
    """Bytes of a gradient element on the wire."""
    return BF16_BYTES if run.parallel.grad_reduce_in_bf16 else FP32_BYTES


def gradient_collectives(run: RunConfig, layout: Layout, stage: int) -> list[Collective]:
    """Once per iteration: all-reduces of tied embeddings and of partial gradients, gradient reduction, ZeRO-1's all-gather."""
    collectives = []
    size = gradient_bytes(run)
    if holds_tied_copy(run, stage):
        vocabulary = padded_vocab_size(run.model, layout.tp) // layout.tp
        collectives.append(
            Collective("all_reduce", "embedding", vocabulary * run.model.hidden_size * size)
        )
    parts = sequence_parts(run, layout.tp) > 1
    if partial := sum(
        r.replicated if parts else r.of_heads for _, r in stage_records(run, layout, stage)
    ) * (layout.tp > 1):
        collectives.append(
            Collective("all_reduce", "tp", partial * FP32_BYTES)
        )  # every rank's, of its part of sequence or heads
    for others, divided in bucket_sizes(run, layout, stage):
        collectives += _bucket_collectives(run, "dp", layout.replicas, others)
        collectives += _bucket_collectives(run, "edp", layout.edp, divided)
    return collectives


def _bucket_collectives(
    run: RunConfig, group: str, replicas: int, elements: int
) -> list[Collective]:
    """Of a bucket of so many elements that `replicas` ranks hold alike."""
    size = gradient_bytes(run)
    if replicas == 1 or not elements:
        return []
    if not run.parallel.zero_stage:
        return [Collective("all_reduce", group, elements * size)]
    return [
        Collective("reduce_scatter", group, elements * size),
        Collective("all_gather", group, elements // replicas * element_bytes(run)),
    ]


# Memory at the peak --------------------------------------------------------------------------------------------------------------

# FP32 logits held at once: this, or this share of what the layers keep
LOGITS_MIN_BYTES = 36 << 20
LOGITS_SHARE = 4
LOGITS_MAX_ROWS = 1024  # more rows are not faster
# of the data's index on a reader: of a sample, with its documents; and at most
INDEX_SAMPLE_BYTES = 16
INDEX_MAX_BYTES = 128 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds at the peak of a step, by use. saving: the copy that --async-save writes. reused: what counts as
    activations and, later in the step, as gradients.
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
    """What the rank that reads the data for its node holds of an index of so many samples: 117 MiB of 146 million (measured)."""
    return min(INDEX_SAMPLE_BYTES * samples, INDEX_MAX_BYTES) if run.data.files else 0


def layer_saved_bytes(run: RunConfig, tp: int) -> int:
    """Bytes that one layer keeps from forward to backward, whole layers not being recomputed."""
    spared = (
        selective_recompute_bytes(run, tp)
        if run.training.recompute_granularity == "selective"
        else 0
    )
    return sum(r.saved_bytes for r in layer_records(run, tp)) - spared


def layers_kept_bytes(
    run: RunConfig, tp: int, layers: int, groups: Sequence[range]
) -> tuple[int, int]:
    """What `layers` layers keep of one micro-batch from forward to backward, and what backward holds in addition for recompute.

    groups: of layers that are recomputed together. The layers that are not come last, so backward has freed them by then.
    """
    per_layer = layer_saved_bytes(run, tp)
    plain = layers - sum(map(len, groups))
    again = max(map(len, groups), default=0)
    return len(groups) * residual_bytes(run, tp) + plain * per_layer, max(
        0, again - plain
    ) * per_layer


def weight_input_bytes(run: RunConfig, tp: int) -> int:
    """What one layer keeps between the two halves of a split backward: both operands of its weight gradients.

    Four matmuls with whole operands (s, b, h): the inputs of QKV and of the MLP, the gradients of the projection and of the MLP;
    cut over tensor-parallel ranks: the context, QKV's gradient, and of the MLP the activation's argument and its gradient.
    """
    attention = 2 * activation_bytes(run) + context_bytes(run, tp) + qkv_bytes(run, tp)
    if run.model.num_experts:
        return attention + waiting_bytes(run, tp)
    return attention + 2 * activation_bytes(run) + 2 * run.model.fc1_widths * inner_bytes(run, tp)


# Of the kernels' attention (kernels_sve/attention_shape.h): rows of a block, sums of dQ for a head, and from where heads are few.
ATTENTION_BLOCK = 96
QUERY_SUMS = 6
LONG_SEQUENCE = 32768


def attention_bytes(run: RunConfig, tp: int, threads: int) -> int:
    """What the kernels of attention hold in FP32 beyond its tensors, from the first backward on: packed operands and sums.

    threads: of a rank. About 12 matrices (s, d) for each head at hand; of a part of the sequence, where ranks exchange keys.
    """
    return max(_attention_bytes(run, tp, threads, way) for way in set(context_ways(run)))


def _attention_bytes(run: RunConfig, tp: int, threads: int, way: str) -> int:
    """`attention_bytes` of layers with this --cp-comm-type."""
    model = run.model
    cp = run.parallel.context_parallel_size
    queries = keys = model.seq_length
    heads = model.num_attention_heads // tp
    groups = model.query_groups // tp
    if cp > 1 and way == A2A:
        heads = heads // cp
        groups = groups * group_copies(groups, cp) // cp
    elif cp > 1:
        queries = model.seq_length // (2 * cp)
        keys = queries if way == P2P else keys
    share = heads // groups
    sums = min(round_up(keys, ATTENTION_BLOCK) // ATTENTION_BLOCK, QUERY_SUMS)
    wanted = max(2, min(16, threads))
    if max(queries, keys) > LONG_SEQUENCE:
        wanted = min(wanted, -(-threads // sums))
    groups_at_once = min(-(-wanted // share), groups * run.batch.micro_batch_size)
    heads_at_once = wanted if share > wanted else groups_at_once * share
    of_query, of_key = (
        round_up(rows, ATTENTION_BLOCK) * model.kv_channels for rows in (queries, keys)
    )
    of_head = (4 + sums) * of_query + 2 * queries + 2 * of_key * (share > 1)
    of_group = of_key * (3 if share > 1 else 1)
    return FP32_BYTES * (heads_at_once * of_head + groups_at_once * of_group)


def inner_bytes(run: RunConfig, tp: int) -> int:
    """Bytes of this rank's part of one tensor of the MLP's width, (s, b, f)."""
    return tokens_per_microbatch(run) * mlp_width(run.model) * element_bytes(run) // tp


def live_bytes(run: RunConfig, layout: Layout, stage: int, held: Sequence[InFlight]) -> int:
    """What a stage's layers hold at the fullest of the moments of its schedule."""
    parts = stage_virtual_stages(run, stage)
    return chunks_live_bytes(
        run,
        layout.tp,
        [pipeline_split(run)[part] for part in parts],
        [virtual_stage_recompute_groups(run, part) for part in parts],
        held,
    )


def chunks_live_bytes(
    run: RunConfig,
    tp: int,
    layers: Sequence[int],
    groups: Sequence[Sequence[range]],
    held: Sequence[InFlight],
) -> int:
    """`live_bytes` of chunks of so many layers, of which `groups` are recomputed together.

    What is recomputed becomes, layer by layer, what a split backward leaves for its second half, which is more.
    """
    kept, again = zip(
        *(layers_kept_bytes(run, tp, *chunk) for chunk in zip(layers, groups, strict=True)),
        strict=True,
    )
    waiting = [count * weight_input_bytes(run, tp) for count in layers]
    return max(
        (
            sum(
                n * bytes
                for n, bytes in zip(
                    (*moment.activations, *moment.weight_inputs), (*kept, *waiting), strict=True
                )
            )
            + (0 if any(moment.weight_inputs) else max(again))
            for moment in held
        ),
        default=0,
    )


def working_bytes(run: RunConfig, tp: int) -> int:
    """Tensors that a layer's forward or backward needs for itself: the MLP's inner one and two of the residual stream's width.

    Where blocks of a reduction are sent, those of two more: all ranks' shares of the own part, and own shares of the others' parts.
    """
    whole = activation_bytes(run)
    widths = 4 if run.parallel.tp_comm_overlap and tp > 1 else 2
    inner = 3 if run.lora.of_mlps(run.model) else 1  # what adapters add is made apart
    of_mlp = (
        widths * whole
        + inner * inner_bytes(run, tp)
        + (pair_working_bytes(run, tp) if run.model.num_experts else 0)
    )
    return max(of_mlp, key_working_bytes(run, tp))


def posted_bytes(run: RunConfig, tp: int, stage: int) -> int:
    """Memory of the receives that a stage has posted ahead, from each neighbour of each of its chunks."""
    where = placement(run)
    ahead = receives_ahead(run.parallel.schedule)
    neighbours = [
        where.neighbour(stage, chunk, step)
        for chunk in range(where.model_chunks)
        for step in (-1, 1)
    ]
    return (
        ahead * sum(n is not None and n[0] != stage for n in neighbours) * residual_bytes(run, tp)
    )


def logits_rows(run: RunConfig, layout: Layout) -> int:
    """Rows of logits that the head computes at once: equal chunks, as few as the memory for them allows.

    A chunk pays once for packing the whole weight, so more memory is more speed, up to LOGITS_MAX_ROWS; it may have a quarter of
    what the layers keep, or with --recompute-part-layers would keep: the order of sums is then the same whatever is recomputed.
    """
    vocabulary = padded_vocab_size(run.model, layout.tp) // layout.tp
    rows = tokens_per_microbatch(run)
    free = run.training.recompute_part_layers is not None
    kept = sum(
        layers_kept_bytes(
            run,
            layout.tp,
            pipeline_split(run)[part],
            () if free else virtual_stage_recompute_groups(run, part),
        )[0]
        for part in stage_virtual_stages(run, placement(run).last_stage)
    )
    budget = max(LOGITS_MIN_BYTES, kept // LOGITS_SHARE)
    chunks = max(-(-rows * vocabulary * FP32_BYTES // budget), -(-rows // LOGITS_MAX_ROWS))
    return -(-rows // chunks)


def reused_bytes(run: RunConfig, layout: Layout, stage: int, live: int) -> int:
    """What the gradients of an iteration of one micro-batch take of the `live` bytes that layers keep, which backward frees.

    A bucket gets memory when backward reaches its first unit (`optim.flat`), the tied embedding's with the logits.
    """
    if layout.microbatches(run, layout.global_batch_size(run)) > 1:
        return 0
    sizes = bucket_elements(run, layout, stage)
    layers = sum(map(len, stage_layers(run, stage)))
    head = int(stage == placement(run).last_stage)
    tied_first = run.model.tied and layout.pp == 1
    peak = 0
    taken = sizes[-1] * tied_first
    for index, (size, units) in enumerate(
        zip(sizes, bucket_units(run, layout, stage), strict=True)
    ):
        taken += size * (not tied_first or index < len(sizes) - 1)
        left = layers - min(max(units.start - head, 0), layers)
        peak = max(peak, FP32_BYTES * taken + live * left // layers)
    return FP32_BYTES * sum(sizes) + live - peak


def stage_memory(run: RunConfig, layout: Layout, stage: int, held: Sequence[InFlight]) -> Memory:
    """Memory of one rank of `stage`. held: what its schedule holds at the moments that may need most (`schedule.in_flight`)."""
    elements = flat_elements(run, layout, stage)
    sharded = sum(updated_elements(run, layout, stage))
    low = 0 if run.precision.name == "fp32" else 2
    outside = sum(
        r.saved_bytes
        for part in stage_virtual_stages(run, stage)
        for _, r in end_records(run, layout, placement(run), part)
    )
    logits = (
        logits_rows(run, layout)
        * padded_vocab_size(run.model, layout.tp)
        // layout.tp
        * (FP32_BYTES + low)
    )  # with gradients
    logits = logits if stage == placement(run).last_stage else 0
    working = (
        max(working_bytes(run, layout.tp), outside + logits) - logits
    )  # the head works when no layer does
    sent = (
        BF16_BYTES if run.parallel.grad_reduce_in_bf16 and layout.replicas > 1 else 0
    )  # copies, of all buckets at worst
    moments, in_file = moment_bytes(run, layout, stage)
    saved = sharded * FP32_BYTES + (0 if run.output.no_save_optim else in_file)
    widened = (
        in_file - moments + (sharded * FP32_BYTES if low and not run.masters else 0)
    )  # what a checkpoint holds in FP32
    saving = (saved if run.output.save and run.output.async_save else 0) + (
        widened if run.output.save else 0
    )
    packed = 1.5 if run.system.splits_fp32 else 1.0  # three BF16 numbers for one of FP32
    copies = 1 + 2 * packed * run.system.cache_packed_weights
    live = live_bytes(run, layout, stage, held)
    held_weights = elements + frozen_elements(run, layout, stage)
    return Memory(
        weights=int(copies * held_weights) * (low or FP32_BYTES),
        gradients=elements * (FP32_BYTES + sent),
        optimizer=moments + (sharded * FP32_BYTES if run.masters else 0),
        activations=live + posted_bytes(run, layout.tp, stage) + working,
        logits=logits,
        saving=saving,
        reused=reused_bytes(run, layout, stage, live),
    )
