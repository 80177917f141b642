"""THE formulas: sizes, parameters, FLOPs, saved activations and communicated bytes of a run. Pure integers, no torch.

The trainer, the log, the performance model, the planner and the benchmarks read them here; tests hold them to the trainer.
Left out: what a rank holds at once (`memory`), time (`perf`). Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads
of d elements in g groups, l layers, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ..config.fields import check
from ..config.layout import Layout, context_ways, placement, sequence_parts, stage_sizes
from ..config.model import NORMS
from ..config.parallel import A2A
from ..config.run_config import ModelConfig, ParallelConfig, RunConfig
from ..pipeline.cuts import balanced_cut, cut_of_stages, even_cut
from ..pipeline.placement import Placement
from .activations import (
    FP32_BYTES,
    MatmulCollectives,
    Record,
    activation_bytes,
    adapted,
    all_reduce,
    attention_messages,
    context_bytes,
    element_bytes,
    linear,
    qkv_bytes,
    recompute_groups,
    residual_bytes,
    tokens_per_microbatch,
    typical_cp_comm_type,
)
from .experts import expert_records, typical_mlp

FLAT_ALIGNMENT = 64  # elements; a shard of a flat buffer starts on a 256-byte line


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= value."""
    return -(-value // multiple) * multiple


def padded_vocab_size(model: ModelConfig, tp: int) -> int:
    """--padded-vocab-size, or the vocabulary rounded up to a multiple of --make-vocab-size-divisible-by x tensor-parallel size."""
    if model.padded_vocab_size:
        check(
            model.padded_vocab_size % tp == 0,
            f"--padded-vocab-size {model.padded_vocab_size} is not divisible by "
            f"--tensor-model-parallel-size {tp}: change one of them",
        )
        return model.padded_vocab_size
    if model.vocab_size is None:
        raise ValueError(
            "the vocabulary size is unknown: pass --vocab-size, or the files of a tokenizer"
        )
    return round_up(model.vocab_size, model.make_vocab_size_divisible_by * tp)


def zero_shards(run: RunConfig, layout: Layout) -> int:
    """Parts into which ZeRO cuts the optimizer state of a rank: the data-parallel size, or 1 with --zero-stage 0."""
    return layout.replicas if run.parallel.zero_stage else 1


# Records: what one rank does per micro-batch -----------------------------------------------------------------------------------


def _norm(name: str, run: RunConfig, tp: int) -> Record:
    part = NORMS[run.model.normalization]
    rows = tokens_per_microbatch(run) // sequence_parts(run, tp)
    parameters = part.vectors * run.model.hidden_size
    return Record(
        name=name,
        parameters=parameters,
        replicated=parameters,
        saved_bytes=residual_bytes(run, tp) + part.statistics * rows * FP32_BYTES,
    )


ATTENTION_BACKWARD_SHARE = (
    2.5  # of forward's matmuls: S and dP are computed again, dQ, dK and dV are new
)


def causal_attention_flops(heads: int, s: int, d: int, window: int | None = None) -> float:
    """Q K^T and P V of `heads` query heads (times samples), of the pairs that see each other: what kernels compute."""
    return 4.0 * heads * d * visible_pairs(s, window)


def visible_pairs(s: int, window: int | None) -> float:
    """Pairs of s tokens of which one sees the other, below the diagonal and inside the window: s^2 / 2 - (s - window)^2 / 2."""
    seen = min(window or s, s)
    return seen * (2 * s - seen) / 2


def visible_share(s: int, window: int | None) -> float:
    """Share of `visible_pairs` in all pairs of s tokens."""
    return visible_pairs(s, window) / s**2


def document_length(run: RunConfig) -> int:
    """Tokens that attention takes together: of a document where attention ends with it, or else of a sample."""
    return min(run.data.mean_document_length or run.model.seq_length, run.model.seq_length)


def _attention(run: RunConfig, tp: int, way: str) -> Record:
    model = run.model
    cp = run.parallel.context_parallel_size
    each = document_length(run)
    # rows: of all heads
    rows = tokens_per_microbatch(run) * (model.num_attention_heads // tp)
    d = model.kv_channels
    flops = 4 * rows * each * d  # Q K^T and P V over the full square, as Megatron counts it
    heads_exchanged = cp > 1 and way == A2A
    side = (
        each if cp == 1 or way == A2A else min(each, model.seq_length // (2 * cp))
    )  # of the squares that are computed at once
    # Kept: qkv, the context (also the projection's input, unless ranks exchange heads for rows), the logarithm of each row's sum.
    saved = (
        qkv_bytes(run, tp, way)
        + context_bytes(run, tp) * (1 + heads_exchanged)
        + softmax_bytes(run, tp)
    )
    forward, backward = attention_messages(run, tp, way)
    return Record(
        name="attention",
        gemm=(side, side, d),
        gemm_count=-(-rows * each // side**2),
        flops_forward=flops,
        flops_backward=2 * flops,
        seen=visible_share(each, model.window),
        dropout=model.attention_dropout > 0,
        saved_bytes=saved,
        forward=forward,
        backward=backward,
    )


def _rotary(run: RunConfig, tp: int, way: str) -> tuple[Record, ...]:
    """What happens to queries and keys before attention; their norm needs them as they were, turning them back does not."""
    model = run.model
    saved = qkv_bytes(run, tp, way)
    together = run.model.qk_layernorm_all_heads
    heads = (model.num_attention_heads + model.query_groups) // tp
    if (
        model.normalization == "LayerNorm" or together
    ):  # queries and keys alone, and the mean and deviation of each head, or of all
        numbers = 2 if together else 2 * heads
        saved = tokens_per_microbatch(run) * (
            heads * model.kv_channels * element_bytes(run) + numbers * FP32_BYTES
        )
    weights = (
        (heads if together else 2)
        * NORMS[model.normalization].vectors
        * model.kv_channels
        * model.qk_layernorm
    )
    return (
        (
            Record(
                name="rotary",
                parameters=weights,
                replicated=weights,
                of_heads=weights,
                saved_bytes=saved * model.qk_layernorm,
            ),
        )
        if model.turns_queries
        else ()
    )


def selective_recompute_bytes(run: RunConfig, tp: int) -> int:
    """What selective recompute does without: of softmax, and of queries and keys before their norm."""
    return softmax_bytes(run, tp) + sum(
        record.saved_bytes for record in _rotary(run, tp, typical_cp_comm_type(run))
    )


def softmax_bytes(run: RunConfig, tp: int) -> int:
    """What attention keeps of its softmax: one FP32 number per row and head."""
    return tokens_per_microbatch(run) * run.model.num_attention_heads // tp * FP32_BYTES


@lru_cache(maxsize=64)  # a search asks for the same again and again
def layer_records(
    run: RunConfig, tp: int, mlp: str | None = None, way: str | None = None
) -> tuple[Record, ...]:
    """The operations of one transformer layer. What is saved is what the C++ kernels keep: gelu(x) is computed again from x.

    mlp: the row of MLPS that the layer has; None: experts in a model with any, which then stand for its few dense layers as well.
    way: its --cp-comm-type; None: `typical_cp_comm_type`.
    """
    way = way or typical_cp_comm_type(run)
    model = run.model
    kept = residual_bytes(run, tp)
    around = MatmulCollectives.from_run(run, tp)
    h = model.hidden_size
    rows = tokens_per_microbatch(run)
    qkv = model.qkv_width // tp
    context = model.context_width // tp
    bias = not model.disable_bias_linear
    mlp_norm = _norm("pre_mlp_layernorm", run, tp)
    column = (around.into, around.into_backward)
    row = (around.out, around.out_backward, h * bias)
    return adapted(
        run,
        tp,
        (
            _norm("input_layernorm", run, tp),
            linear("linear_qkv", rows, qkv, h, qkv * model.qkv_bias, kept, *column),
            *_rotary(run, tp, way),
            _attention(run, tp, way),
            linear("linear_proj", rows, h, context, h * bias, 0, *row),
            replace(
                mlp_norm,
                saved_bytes=mlp_norm.saved_bytes
                - residual_bytes(run, tp) * model.parallel_residual,
            ),  # the same input
            *(
                expert_records(run, tp)
                if (mlp or typical_mlp(model)) == "experts"
                else _dense_mlp(run, tp)
            ),
        ),
    )


def _dense_mlp(run: RunConfig, tp: int) -> tuple[Record, ...]:
    model = run.model
    around = MatmulCollectives.from_run(run, tp)
    h = model.hidden_size
    f = model.ffn_hidden_size // tp
    rows = tokens_per_microbatch(run)
    bias = not model.disable_bias_linear
    fc1 = model.fc1_widths * f
    return (
        linear(
            "linear_fc1",
            rows,
            fc1,
            h,
            fc1 * bias,
            residual_bytes(run, tp),
            around.into,
            around.into_backward,
        ),
        Record(name=model.activation, saved_bytes=rows * fc1 * element_bytes(run)),
        linear("linear_fc2", rows, h, f, h * bias, 0, around.out, around.out_backward, h * bias),
    )


def layer_parameters(run: RunConfig, tp: int) -> tuple[int, ...]:
    """Parameters of every layer that one rank holds."""
    sizes = {
        mlp: sum(record.parameters for record in layer_records(run, tp, mlp))
        for mlp in set(run.model.mlps)
    }
    return tuple(sizes[mlp] for mlp in run.model.mlps)


def recomputed_records(run: RunConfig, tp: int, last: bool) -> list[Record]:
    """What full recompute repeats of a layer; of the last of a group not the matmul whose result alone nobody reads again."""
    return [
        r for r in layer_records(run, tp) if not (last and r.name in ("linear_fc2", "experts_sum"))
    ]


def embedding_records(run: RunConfig, tp: int) -> list[Record]:
    """Word embedding, and positions where they are learned (first stage)."""
    model = run.model
    vocabulary = padded_vocab_size(run.model, tp) // tp
    around = MatmulCollectives.from_run(run, tp)
    words = Record(
        name="word_embeddings",
        parameters=vocabulary * model.hidden_size,
        forward=around.out,
        backward=around.out_backward,
    )
    positions = model.max_position_embeddings * model.hidden_size
    learned = (
        Record(name="position_embeddings", parameters=positions, replicated=positions),
    ) * model.learned_positions
    return [*adapted(run, tp, (words, *learned))]


def head_records(run: RunConfig, tp: int, tied: bool) -> list[Record]:
    """Final norm, logits and loss (last stage). tied: a weight that is tied is the embedding's own tensor, and not counted."""
    model = run.model
    vocabulary = padded_vocab_size(run.model, tp) // tp
    around = MatmulCollectives.from_run(run, tp)
    rows = tokens_per_microbatch(run)
    # The head keeps its whole input, which becomes its gradient at once: nothing is gathered again in backward.
    logits = linear(
        "logits",
        rows,
        vocabulary,
        model.hidden_size,
        0,
        activation_bytes(run),
        around.into,
        around.into_backward[-1:],
    )
    logits = replace(logits, parameters=0) if tied and model.tied else logits
    loss = Record(name="cross_entropy", forward=3 * all_reduce(rows * FP32_BYTES, tp))
    return [*adapted(run, tp, (_norm("final_layernorm", run, tp), logits, loss))]


def layer_and_head_flops(run: RunConfig) -> tuple[float, float]:
    """FLOPs of a layer's forward and of the logits on one rank, attention below the diagonal only."""
    tp = run.parallel.tensor_model_parallel_size
    linear, attention = _rank_flops(run, tp)
    return linear + attention / 2, sum(r.flops_forward for r in head_records(run, tp, tied=True))


@lru_cache(maxsize=64)  # every stage asks for it
def virtual_stage_sizes(run: RunConfig, placement: Placement) -> tuple[int, ...]:
    """Layers of each part of the model, as --pipeline-split says; balanced counts multiply-adds. A part has at least one layer."""
    layers = run.model.num_layers
    split = run.parallel.pipeline_split
    if (split == "even" and stage_sizes(run) is None) or placement.virtual_stages == 1:
        return even_cut(layers, placement)
    layer, head = layer_and_head_flops(run)
    sizes = stage_sizes(run)
    return (
        balanced_cut(layers, placement, layer, head)
        if sizes is None
        else cut_of_stages(sizes, placement, layer, head)
    )


def virtual_stage_layers(run: RunConfig, placement: Placement, part: int) -> range:
    """Layers (from 0) of a part of the model."""
    sizes = virtual_stage_sizes(run, placement)
    return range(sum(sizes[:part]), sum(sizes[: part + 1]))


@lru_cache(maxsize=1024)  # a search asks for the same again and again
def pipeline_split(run: RunConfig) -> tuple[int, ...]:
    """Layers of each part of the model, in the model's order."""
    return virtual_stage_sizes(run, placement(run))


def stage_virtual_stages(run: RunConfig, stage: int) -> list[int]:
    """The parts of the model that a pipeline stage has, chunk by chunk."""
    where = placement(run)
    return [where.virtual_stage(stage, chunk) for chunk in range(where.model_chunks)]


def stage_layers(run: RunConfig, stage: int) -> list[range]:
    """Layers (from 0) of each chunk of pipeline stage `stage`."""
    return [
        virtual_stage_layers(run, placement(run), part) for part in stage_virtual_stages(run, stage)
    ]


def virtual_stage_recompute_groups(run: RunConfig, part: int) -> list[range]:
    """Groups of a part's layers, from 0, that full recompute runs together; none without it."""
    training = run.training
    layers = pipeline_split(run)[part]
    if training.recompute_granularity != "full":
        return []
    if training.recompute_part_layers is not None:
        return recompute_groups(layers, "block", training.recompute_part_layers[part])
    return recompute_groups(layers, training.recompute_method, training.recompute_num_layers)


def virtual_stage_records(
    run: RunConfig, layout: Layout, placement: Placement, part: int
) -> Iterator[tuple[str, Record]]:
    """(place, record) of everything that a part of the model does for one micro-batch; place: embedding, layer or head."""
    layers = virtual_stage_layers(run, placement, part)
    for layer in layers:
        yield from (
            ("layer", r)
            for r in layer_records(run, layout.tp, run.model.mlps[layer], context_ways(run)[layer])
        )
    yield from end_records(run, layout, placement, part)


def end_records(
    run: RunConfig, layout: Layout, placement: Placement, part: int
) -> Iterator[tuple[str, Record]]:
    """Those of `virtual_stage_records` that are not in layers."""
    if part == 0:
        yield from (("embedding", r) for r in embedding_records(run, layout.tp))
    if part == placement.virtual_stages - 1:
        tied = placement.owner(part)[0] == placement.owner(0)[0]
        yield from (("head", r) for r in head_records(run, layout.tp, tied=tied))


def stage_records(run: RunConfig, layout: Layout, stage: int) -> Iterator[tuple[str, Record]]:
    """`virtual_stage_records` of all parts that pipeline stage `stage` has."""
    for part in stage_virtual_stages(run, stage):
        yield from virtual_stage_records(run, layout, placement(run), part)


def virtual_stage_parameters(
    run: RunConfig, layout: Layout, placement: Placement, part: int
) -> int:
    """Parameters of a part of the model that one rank holds."""
    ends = sum(record.parameters for _, record in end_records(run, layout, placement, part))
    layers = virtual_stage_layers(run, placement, part)
    return sum(layer_parameters(run, layout.tp)[layers.start : layers.stop]) + ends


def stage_parameters(run: RunConfig, layout: Layout, stage: int) -> int:
    """Parameters that one rank of stage `stage` holds."""
    return sum(
        virtual_stage_parameters(run, layout, placement(run), part)
        for part in stage_virtual_stages(run, stage)
    )


def parameters(run: RunConfig) -> int:
    """Parameters of the whole model, a tied embedding once, the vocabulary padded for one rank."""
    return stage_parameters(replace(run, parallel=ParallelConfig()), Layout(1, 1, 1, 1), 0)


def active_parameters(run: RunConfig) -> int:
    """Those of `parameters` that one token meets: of the experts of a layer, its own ones."""
    model = run.model
    layers = run.model.mlps.count("experts")
    if not layers or model.num_experts is None:
        return parameters(run)
    experts = sum(
        r.parameters
        for r in layer_records(replace(run, parallel=ParallelConfig()), 1, "experts")
        if r.grouped
    )
    return (
        parameters(run)
        - layers * experts * (model.num_experts - model.moe_router_topk) // model.num_experts
    )


# FLOPs of an iteration: three named kinds ----------------------------------------------------------------------------------------


def _recompute_fraction(run: RunConfig) -> float:
    """Share of the layers that full recompute runs twice."""
    parts = range(placement(run).virtual_stages)
    return (
        sum(len(group) for part in parts for group in virtual_stage_recompute_groups(run, part))
        / run.model.num_layers
    )


def _rank_flops(run: RunConfig, tp: int = 1) -> tuple[float, float]:
    """FLOPs of a micro-batch's forward in the mean layer on one rank: (of linear layers, of attention over the full square)."""
    layers = run.model.mlps
    linear = 0.0
    for mlp in dict.fromkeys(layers):  # in one order on all ranks
        flops = {r.name: r.flops_forward for r in layer_records(run, tp, mlp)}
        attention = flops.pop("attention")
        linear += sum(flops.values()) * layers.count(mlp) / len(layers)
    return linear, attention


def layer_flops(run: RunConfig) -> tuple[float, float]:
    """FLOPs of one sample's forward in the mean layer: (of linear layers, of attention over the full square)."""
    # of a rank
    (linear, attention) = _rank_flops(run)
    samples = tokens_per_microbatch(run) / run.model.seq_length
    return linear / samples, attention / samples


def expert_flops(run: RunConfig) -> float:
    """Return the FLOPs of one sample's forward through its experts' matmuls in the mean layer, shared experts left out."""
    layers = run.model.mlps
    samples = tokens_per_microbatch(run) / run.model.seq_length
    flops = 0.0
    for mlp in dict.fromkeys(layers):
        grouped = sum(r.flops_forward for r in layer_records(run, 1, mlp) if r.grouped)
        flops += grouped * layers.count(mlp) / len(layers)
    return flops / samples


def hardware_flops(
    run: RunConfig, global_batch_size: int, squares: int | None = None, padded: int = 0
) -> float:
    """FLOPs of one iteration, whole world, as the benchmark tables count them: recompute included, logits in its factor.

    c B s l h^2 (1 + s/(6h) + v/(16 l h)) for GPT-2's block, c = 96 with full recompute, 72 without; selective recompute adds the
    attention's forward matmuls. Source: Narayanan et al. (2021), equation 3. Of other blocks the matmuls of a layer's forward
    stand for 24 s h^2 (1 + s/(6h)). squares: the batch's sum of (document length)^2; None: as `document_length` says. padded: the
    batch's tokens that go through no expert.
    """
    model = run.model
    tp = run.parallel.tensor_model_parallel_size
    linear, attention = layer_flops(run)
    if padded:
        linear -= expert_flops(run) * padded / (global_batch_size * model.seq_length)
    if squares is not None:
        attention *= squares / (global_batch_size * model.seq_length * document_length(run))
    c = 72 + 24 * _recompute_fraction(run)
    logits = c / 16 * model.seq_length * model.hidden_size * padded_vocab_size(model, tp)
    again = attention if run.training.recompute_granularity == "selective" else 0.0
    return global_batch_size * (
        model.num_layers * (c / 24 * (linear + attention) + again) + logits - frozen_flops(run)
    )


def parameter_flops(run: RunConfig, global_batch_size: int, *, replicas: bool = False) -> float:
    """6 (8 with recompute) FLOPs per parameter of the layers and token, as the A100 tables counted at first; no embeddings.

    replicas: count as the program behind those tables did, what a rank of the last stage holds times TP x PP, so that what
    tensor-parallel ranks hold in common (layer norms, some biases) counts TP times: 0.025 % more at h 13824 and TP 8.
    """
    parallel = replace(run.parallel, expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    tp, pp = (
        (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
        if replicas
        else (1, 0)
    )
    counted = tp * (
        sum(layer_parameters(replace(run, parallel=parallel), tp))
        + pp * _norm("final_layernorm", run, tp).parameters
    )
    return (6 + 2 * _recompute_fraction(run)) * counted * run.model.seq_length * global_batch_size


def model_flops(run: RunConfig, global_batch_size: int) -> float:
    """FLOPs an iteration cannot avoid: no recompute, attention of the pairs that see each other, logits 6 s h v per sample."""
    model = run.model
    (linear, attention) = layer_flops(run)
    layer = 3 * (linear + attention * visible_share(document_length(run), model.window))
    logits = (
        6
        * model.seq_length
        * model.hidden_size
        * padded_vocab_size(model, run.parallel.tensor_model_parallel_size)
    )
    return float(global_batch_size * (model.num_layers * layer + logits - frozen_flops(run)))


def frozen_flops(run: RunConfig) -> float:
    """FLOPs of one sample's weight gradients that a run of adapters does not compute, that of the logits' weight included."""
    records = (*layer_records(run, 1) * run.model.num_layers, *head_records(run, 1, tied=False))
    return sum(r.flops_forward for r in records if r.frozen) / (
        tokens_per_microbatch(run) / run.model.seq_length
    )
