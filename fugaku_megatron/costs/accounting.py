"""Parameters, FLOPs, saved activations and communicated bytes for a run, as integers, without
torch.

Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads with d elements in g groups, l
layers, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from ..config.fields import check
from ..config.layer_kinds import ATTENTION, LayerKind
from ..config.layout import Layout, cp_comm_types, placement, stage_sizes
from ..config.model import MLP_OF_EXPERTS, NORMS, ModelConfig
from ..config.parallel import ParallelConfig
from ..config.run_config import RunConfig
from ..pipeline.cuts import balanced_cut, cut_of_stages, even_cut
from ..pipeline.placement import Placement
from .activations import (
    FP32_BYTES,
    MatmulCollectives,
    Record,
    Records,
    activation_bytes,
    adapted,
    all_reduce,
    linear,
    recompute_groups,
    residual_bytes,
    sequence_shards,
    typical_cp_comm_type,
)
from .experts import expert_records, mlp_records
from .mixers import mixer_costs

FLAT_ALIGNMENT = 64  # elements; a shard of a flat buffer starts on a 256-byte line


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_vocab_size(model: ModelConfig, tp: int) -> int:
    """Return --padded-vocab-size, or the vocabulary padded to --make-vocab-size-divisible-by x tensor-parallel size."""
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


def vocabulary_rows(run: RunConfig) -> int:
    """Return this rank's rows of the padded vocabulary."""
    return padded_vocab_size(run.model, run.tp) // run.tp


def zero_shards(run: RunConfig, layout: Layout) -> int:
    return layout.replicas if run.parallel.zero_stage else 1


# Records: what one rank does per micro-batch -----------------------------------------------------------------------------------


def _norm(name: str, run: RunConfig) -> Record:
    norm = NORMS[run.model.normalization]
    rows = run.tokens_per_microbatch // sequence_shards(run)
    parameters = norm.vectors * run.model.hidden_size
    return Record(
        name=name,
        parameters=parameters,
        replicated=parameters,
        saved_bytes=residual_bytes(run) + norm.statistics * rows * FP32_BYTES,
    )


# Backward FLOPs of attention relative to forward: S is recomputed; dP, dQ, dK and dV are new.
ATTENTION_BACKWARD_SHARE = 2.5


def causal_attention_flops(heads: int, s: int, d: int, window: int | None = None) -> float:
    """Return Q K^T and P V FLOPs over visible pairs. heads: query heads times samples."""
    return 4.0 * heads * d * visible_pairs(s, window)


def visible_pairs(s: int, window: int | None) -> float:
    """Count the visible (query, key) pairs: s^2 / 2 - (s - window)^2 / 2."""
    window = min(window or s, s)
    return window * (2 * s - window) / 2


def visible_share(s: int, window: int | None) -> float:
    return visible_pairs(s, window) / s**2


def document_length(run: RunConfig) -> int:
    """Return the mean document length if documents are masked, or else the sample length."""
    return min(run.data.mean_document_length or run.model.seq_length, run.model.seq_length)


def mean_visible_share(model: ModelConfig, s: int) -> float:
    """Return the mean over the layers with an attention."""
    windows = [kind.window for kind in model.layer_kinds if kind.mixer == ATTENTION]
    return sum(visible_share(s, window) for window in windows) / max(1, len(windows))


Norms = tuple[list[Record], list[Record]]  # before and after attention or the MLP


def _layer_norms(run: RunConfig) -> tuple[Norms, Norms]:
    before, after = run.model.norms_around

    def norm_if(present: bool, name: str) -> list[Record]:
        return [_norm(name, run)] if present else []

    shared = run.model.parallel_shared_norm
    around_attention = (
        norm_if(before, "input_layernorm"),
        norm_if(after, "post_self_attn_layernorm"),
    )
    mlp_input = norm_if(before and not shared, "pre_mlp_layernorm")
    if run.model.parallel_residual:  # both norms read the same input
        kept = residual_bytes(run)
        mlp_input = [replace(each, saved_bytes=each.saved_bytes - kept) for each in mlp_input]
    return around_attention, (mlp_input, norm_if(after, "post_mlp_layernorm"))


@lru_cache(maxsize=64)  # searches repeat the same runs
def layer_records(
    run: RunConfig, kind: LayerKind | None = None, cp_comm_type: str | None = None
) -> Records:
    """Return one transformer layer's operations. Saved bytes follow the C++ kernels, which recompute gelu(x) from x.

    kind: None: `typical_layer`, with the mean visible share of all layers.
    """
    each = kind or typical_layer(run.model)
    around_mixer, around_mlp = _layer_norms(run)
    records: Records = ()
    if each.mixer is not None:
        comm_type = cp_comm_type or typical_cp_comm_type(run)
        mixer = mixer_costs(each.mixer).records(run, comm_type, kind)
        records = (*around_mixer[0], *mixer, *around_mixer[1])
    if each.mlp is not None:
        records += (*around_mlp[0], *_mlp(run, each.mlp), *around_mlp[1])
    return adapted(run, records)


def _mlp(run: RunConfig, mlp: str) -> Records:
    if mlp == MLP_OF_EXPERTS:
        return expert_records(run)
    kept = 0 if run.model.parallel_shared_norm else residual_bytes(run)  # also of QKV
    return mlp_records(run, "linear", run.model.ffn_hidden_size, kept)


def typical_layer(model: ModelConfig) -> LayerKind:
    """Return the most frequent kind; a layer with experts in a model with experts.

    A mixer or MLP that it lacks is that of another layer.
    """
    kinds = model.layer_kinds
    sparse = [kind for kind in kinds if kind.mlp == MLP_OF_EXPERTS]
    candidates = sparse or list(kinds)
    typical = max(candidates, key=candidates.count)
    if typical.mixer is None:
        mixing = next((kind for kind in kinds if kind.mixer is not None), typical)
        return mixing._replace(mlp=typical.mlp)
    return typical._replace(mlp=typical.mlp or next(filter(None, model.mlps), None))


def of_layers(run: RunConfig, value: Callable[[LayerKind], int]) -> tuple[int, ...]:
    values = {kind: value(kind) for kind in set(run.model.layer_kinds)}
    return tuple(values[kind] for kind in run.model.layer_kinds)


def layer_parameters(run: RunConfig) -> tuple[int, ...]:
    return of_layers(run, lambda kind: sum(r.parameters for r in layer_records(run, kind)))


def last_recomputed_records(run: RunConfig, kind: LayerKind | None = None) -> list[Record]:
    """Return the operations that full recompute repeats in a group's last layer, whose result is not read again."""
    records = layer_records(run, kind)
    if run.model.keeps_mlp_tensors:
        return list(records)
    return [r for r in records if r.name not in ("linear_fc2", "experts_sum")]


@lru_cache(maxsize=64)
def embedding_records(run: RunConfig) -> Records:
    model = run.model
    around = MatmulCollectives.from_run(run)
    records = [
        Record(
            name="word_embeddings",
            parameters=vocabulary_rows(run) * model.hidden_size,
            forward=around.out,
            backward=around.out_backward,
        )
    ]
    if model.learned_positions:
        positions = model.max_position_embeddings * model.hidden_size
        records.append(
            Record(name="position_embeddings", parameters=positions, replicated=positions)
        )
    return adapted(run, tuple(records))


@lru_cache(maxsize=64)
def head_records(run: RunConfig, tied: bool) -> Records:
    """Return the final norm, the logits and the loss. tied: the embedding counts the weight."""
    model = run.model
    around = MatmulCollectives.from_run(run)
    rows = run.tokens_per_microbatch
    # The head keeps its whole input, which becomes its gradient: nothing is gathered again in backward.
    logits = linear(
        "logits",
        (rows, vocabulary_rows(run), model.hidden_size),
        saved_bytes=activation_bytes(run),
        forward=around.into,
        backward=around.into_backward[-1:],
    )
    parameters = 0 if tied and model.tied else logits.parameters
    logits = replace(logits, parameters=parameters, is_head=True)
    loss = Record(name="cross_entropy", forward=3 * all_reduce(rows * FP32_BYTES, run.tp))
    return adapted(run, (_norm("final_layernorm", run), logits, loss))


def is_quantized(run: RunConfig, record: Record) -> bool:
    if record.gemm is None or record.adapts or record.mixes or not record.quantizes:
        return False
    return run.system.int8_head if record.is_head else run.system.int8


@lru_cache(maxsize=4096)  # searches repeat the same runs
def quantized_weights(run: RunConfig, layout: Layout, stage: int) -> int:
    elements = 0
    for record in stage_records(run, layout, stage):
        if record.gemm and is_quantized(run, record):
            _, outputs, inputs = record.gemm
            elements += record.gemm_count * outputs * inputs
    return elements


def layer_and_head_flops(run: RunConfig) -> tuple[float, float]:
    """Return the forward FLOPs per rank: (layer, logits), attention below the diagonal only."""
    linear, attention = _rank_flops(run)
    return linear + attention / 2, sum(r.flops_forward for r in head_records(run, tied=True))


@lru_cache(maxsize=1024)  # searches repeat the same runs
def virtual_stage_sizes(run: RunConfig, placement: Placement) -> tuple[int, ...]:
    layers = run.model.num_layers
    sizes = stage_sizes(run)
    if placement.virtual_stages == 1 or run.parallel.pipeline_split == "even" and sizes is None:
        return even_cut(layers, placement)
    layer, head = layer_and_head_flops(run)
    if sizes is None:
        return balanced_cut(layers, placement, layer, head)
    if len(sizes) == placement.virtual_stages:
        return sizes
    return cut_of_stages(sizes, placement, layer, head)


def virtual_stage_layers(run: RunConfig, placement: Placement, virtual_stage: int) -> range:
    sizes = virtual_stage_sizes(run, placement)
    return range(sum(sizes[:virtual_stage]), sum(sizes[: virtual_stage + 1]))


def stage_layers(run: RunConfig, placement: Placement, stage: int) -> list[range]:
    return [
        virtual_stage_layers(run, placement, virtual_stage)
        for virtual_stage in placement.virtual_stages_of(stage)
    ]


def whole_layers(model: ModelConfig, layers: Iterable[int]) -> int:
    """Return the number of layers with a mixer and an MLP that have as many parts as these layers, rounded up."""
    return -(-sum(model.layer_kinds[layer].parts for layer in layers) // 2)


def virtual_stage_recompute_groups(
    run: RunConfig, placement: Placement, virtual_stage: int
) -> list[range]:
    """Return the groups of layers (from 0) that full recompute runs together."""
    training = run.training
    if training.recompute_granularity != "full":
        return []
    layers = virtual_stage_sizes(run, placement)[virtual_stage]
    if training.recompute_part_layers is not None:
        return recompute_groups(layers, "block", training.recompute_part_layers[virtual_stage])
    return recompute_groups(layers, training.recompute_method, training.recompute_num_layers)


def end_records(run: RunConfig, layout: Layout, virtual_stage: int) -> list[Record]:
    """Return the operations outside layers: the embedding's and the head's."""
    placement = layout.placement
    records = list[Record]()
    if virtual_stage == 0:
        records += embedding_records(run)
    if virtual_stage == placement.virtual_stages - 1:
        tied = placement.owner(virtual_stage)[0] == placement.owner(0)[0]
        records += head_records(run, tied=tied)
    return records


def stage_records(run: RunConfig, layout: Layout, stage: int) -> list[Record]:
    comm_types = cp_comm_types(run)
    records = list[Record]()
    for virtual_stage in layout.placement.virtual_stages_of(stage):
        for layer in virtual_stage_layers(run, layout.placement, virtual_stage):
            kind = run.model.layer_kinds[layer]
            records += layer_records(run, kind, comm_types[layer])
        records += end_records(run, layout, virtual_stage)
    return records


def virtual_stage_parameters(run: RunConfig, layout: Layout, virtual_stage: int) -> int:
    ends = sum(record.parameters for record in end_records(run, layout, virtual_stage))
    layers = virtual_stage_layers(run, layout.placement, virtual_stage)
    return sum(layer_parameters(run)[layers.start : layers.stop]) + ends


def stage_parameters(run: RunConfig, layout: Layout, stage: int) -> int:
    return sum(
        virtual_stage_parameters(run, layout, virtual_stage)
        for virtual_stage in layout.placement.virtual_stages_of(stage)
    )


def on_one_rank(run: RunConfig) -> RunConfig:
    return replace(run, parallel=ParallelConfig())


def parameters(run: RunConfig) -> int:
    """Count the model's parameters: a tied embedding once, the vocabulary padded for one rank."""
    return stage_parameters(on_one_rank(run), Layout(1, 1, 1, 1), 0)


def active_parameters(run: RunConfig) -> int:
    """Count the `parameters` that process one token: only the experts to which it is routed."""
    model = run.model
    layers = run.model.mlps.count("experts")
    if not layers or model.num_experts is None:
        return parameters(run)
    experts = sum(r.parameters for r in layer_records(on_one_rank(run)) if r.grouped)
    return (
        parameters(run)
        - layers * experts * (model.num_experts - model.moe_router_topk) // model.num_experts
    )


# FLOPs of an iteration: three named kinds ----------------------------------------------------------------------------------------


def _recompute_fraction(run: RunConfig) -> float:
    if run.training.recompute_granularity != "full":
        return 0.0
    where = placement(run)
    groups = [
        group
        for virtual_stage in range(where.virtual_stages)
        for group in virtual_stage_recompute_groups(run, where, virtual_stage)
    ]
    return sum(map(len, groups)) / run.model.num_layers


def _rank_flops(run: RunConfig) -> tuple[float, float]:
    layers = run.model.layer_kinds
    linear = attention = 0.0
    for kind in dict.fromkeys(layers):  # in one order on all ranks
        share = layers.count(kind) / len(layers)
        records = layer_records(run, kind)
        squares = sum(r.flops_forward for r in records if r.visible is not None)
        attention += squares * share
        linear += (sum(r.flops_forward for r in records) - squares) * share
    return linear, attention


def layer_flops(run: RunConfig) -> tuple[float, float]:
    """Return the mean layer's forward FLOPs per sample: (linear layers, attention over the full square)."""
    linear, attention = _rank_flops(on_one_rank(run))  # of a micro-batch
    samples = run.batch.micro_batch_size
    return linear / samples, attention / samples


def expert_flops(run: RunConfig) -> float:
    """Return the mean layer's forward FLOPs per sample in routed experts' matmuls."""
    layers = run.model.layer_kinds
    whole = on_one_rank(run)
    flops = 0.0
    for kind in dict.fromkeys(layers):
        grouped = sum(r.flops_forward for r in layer_records(whole, kind) if r.grouped)
        flops += grouped * layers.count(kind) / len(layers)
    return flops / run.batch.micro_batch_size


def hardware_flops(
    run: RunConfig, global_batch_size: int, squares: int | None = None, padded: int = 0
) -> float:
    """Return the FLOPs per iteration over all ranks as the benchmark tables count them, recompute included.

    c B s l h^2 (1 + s/(6h) + v/(16 l h)) for GPT-2's block, c = 96 with full recompute, 72 without; selective recompute adds the
    attention's forward matmuls. Source: Narayanan et al. (2021), equation 3. For other blocks the forward matmuls replace
    24 s h^2 (1 + s/(6h)).

    squares: the batch's sum of (document length)^2; None: from `document_length`.
    padded: tokens that no expert computes.
    """
    model = run.model
    linear, attention = layer_flops(run)
    if padded:
        linear -= expert_flops(run) * padded / (global_batch_size * model.seq_length)
    if squares is not None:
        attention *= squares / (global_batch_size * model.seq_length * document_length(run))
    c = 72 + 24 * _recompute_fraction(run)
    logits = c / 16 * model.seq_length * model.hidden_size * padded_vocab_size(model, run.tp)
    recomputed = attention if run.training.recompute_granularity == "selective" else 0.0
    return global_batch_size * (
        model.num_layers * (c / 24 * (linear + attention) + recomputed) + logits - frozen_flops(run)
    )


def parameter_flops(run: RunConfig, global_batch_size: int, *, replicas: bool = False) -> float:
    """Return 6 (8 with recompute) FLOPs per layer parameter and token, as the A100 tables first counted; no embeddings.

    replicas: count replicated parameters TP times, as those tables did: 0.025 % more at h 13824 and TP 8.
    """
    counted = sum(layer_parameters(on_one_rank(run)))
    if replicas:
        pp = run.parallel.pipeline_model_parallel_size
        parallel = ParallelConfig(tensor_model_parallel_size=run.tp)
        rank = sum(layer_parameters(replace(run, parallel=parallel)))
        counted = run.tp * (rank + pp * _norm("final_layernorm", run).parameters)
    return (6 + 2 * _recompute_fraction(run)) * counted * run.model.seq_length * global_batch_size


def model_flops(run: RunConfig, global_batch_size: int) -> float:
    """Return the FLOPs that an iteration cannot avoid: no recompute, visible pairs only, logits 6 s h v per sample."""
    model = run.model
    linear, attention = layer_flops(run)
    layer = 3 * (linear + attention * mean_visible_share(model, document_length(run)))
    logits = 6 * model.seq_length * model.hidden_size * padded_vocab_size(model, run.tp)
    return float(global_batch_size * (model.num_layers * layer + logits - frozen_flops(run)))


def frozen_flops(run: RunConfig) -> float:
    """Return the weight-gradient FLOPs per sample, logits included, that adapter training skips."""
    whole = on_one_rank(run)
    layers = (layer_records(whole, kind) for kind in run.model.layer_kinds)
    records = (*chain.from_iterable(layers), *head_records(whole, tied=False))
    return sum(r.flops_forward for r in records if r.frozen) / run.batch.micro_batch_size
