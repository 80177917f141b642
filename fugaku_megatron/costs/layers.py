"""Operations of layers, embedding and head on one rank for one micro-batch.

Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads with d elements in g groups, l
layers, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from ..config.freezing import EMBEDDING, EXPERTS, HEAD
from ..config.layer_kinds import EH_PROJ, LayerKind
from ..config.model import ModelConfig
from ..config.rows import MLP_OF_EXPERTS
from ..config.run_config import RunConfig
from .adapters import frozen, with_adapters
from .mixers import mixer_costs
from .mlp import expert_records, mlp_records
from .records import MatmulCollectives, Record, Records, all_reduce, linear
from .sizes import (
    FP32_BYTES,
    vocabulary_rows,
)


def norm_record(name: str, run: RunConfig, width: int | None = None) -> Record:
    """Return a norm of this rank's rows. width: None: the hidden size"""
    norm = run.model.norm
    width = width or run.model.hidden_size
    rows = run.tokens_per_microbatch // run.sequence_shards
    parameters = norm.vectors * width
    return Record(
        name=name,
        parameters=parameters,
        replicated=parameters,
        saved_bytes=rows * (width * run.element_bytes + norm.statistics * FP32_BYTES),
    )


@lru_cache(maxsize=64)  # searches repeat the same runs
def layer_records(
    run: RunConfig, kind: LayerKind | None = None, cp_comm_type: str | None = None
) -> Records:
    """Return one transformer layer's operations. Saved bytes follow the C++ kernels, which recompute gelu(x) from x.

    kind: None: `typical_layer`, with the mean visible share of all layers.
    """
    each = kind or typical_layer(run.model)
    norms = run.model.norms_of(each)

    def norm_if_present(name: str) -> Records:
        return (norm_record(name, run),) if name in norms else ()

    records: Records = ()
    if each.mixer is not None:
        comm_type = cp_comm_type or run.typical_cp_comm_type
        records = (
            *norm_if_present("input_layernorm"),
            *mixer_costs(each.mixer).records(run, comm_type, kind),
            *norm_if_present("post_self_attn_layernorm"),
        )
    if each.mlp is not None:
        before = norm_if_present("pre_mlp_layernorm")
        if run.model.parallel_residual:  # both norms read the same input
            kept = run.residual_bytes
            before = tuple(replace(r, saved_bytes=r.saved_bytes - kept) for r in before)
        records += (*before, *_mlp(run, each.mlp), *norm_if_present("post_mlp_layernorm"))
    if each.predicts:
        records = _prediction(run, records)
    if run.freezing.has(EXPERTS):
        records = tuple(frozen(run, r) if r.grouped else r for r in records)
    return with_adapters(run, records) if run.lora.on else records


def _prediction(run: RunConfig, layer: Records) -> Records:
    """Return the operations of an MTP module with this layer, without its head."""
    around = MatmulCollectives.from_run(run)
    wide = MatmulCollectives.from_run(run, 2 * run.activation_bytes)
    h = run.model.hidden_size
    embedding = Record(name="word_embeddings", forward=around.out, backward=around.out_backward)
    projection = linear(
        EH_PROJ,
        (run.tokens_per_microbatch, h // run.tp, 2 * h),
        saved_bytes=2 * run.residual_bytes,
        forward=(*wide.into, *around.out),
        backward=(*around.out_backward, *wide.into_backward),
    )
    return (
        norm_record("hnorm", run),
        embedding,
        norm_record("enorm", run),
        projection,
        *(replace(record, ends_layer=False) for record in layer),
        norm_record("final_layernorm", run),
    )


def _mlp(run: RunConfig, mlp: str) -> Records:
    if mlp == MLP_OF_EXPERTS:
        return expert_records(run)
    kept = 0 if run.model.parallel_shared_norm else run.residual_bytes  # also of QKV
    *before, fc2 = mlp_records(run, "linear", run.model.ffn_hidden_size, kept)
    return *before, replace(fc2, ends_layer=True)


def typical_layer(model: ModelConfig) -> LayerKind:
    """Return the most frequent kind; a layer with experts in a model with experts.

    A mixer or MLP that it lacks comes from another layer.
    """
    kinds = model.layer_kinds
    sparse = [kind for kind in kinds if kind.mlp == MLP_OF_EXPERTS]
    candidates = sparse or list(kinds)
    typical = max(candidates, key=candidates.count)
    if typical.mixer is None:
        mixing = next((kind for kind in kinds if kind.mixer is not None), typical)
        return mixing._replace(mlp=typical.mlp)
    return typical._replace(mlp=typical.mlp or next(filter(None, model.mlps), None))


def per_layer(run: RunConfig, value: Callable[[LayerKind], int]) -> tuple[int, ...]:
    """Return a value of each layer, and then of each MTP module."""
    values = {kind: value(kind) for kind in set(run.model.all_layer_kinds)}
    return tuple(map(values.__getitem__, run.model.all_layer_kinds))


def without_first(values: Iterable[int], layers: int) -> tuple[int, ...]:
    """Return values of each layer, with zeros for the first `layers`."""
    return tuple(0 if layer < layers else value for layer, value in enumerate(values))


def last_recomputed_records(run: RunConfig, kind: LayerKind | None = None) -> list[Record]:
    """Return the operations that full recompute repeats in a group's last layer, whose result is not read again."""
    records = layer_records(run, kind)
    if run.model.keeps_mlp_tensors:
        return list(records)
    return [r for r in records if not r.ends_layer]


@lru_cache(maxsize=64)
def embedding_records(run: RunConfig) -> Records:
    """Return word embeddings and learned position embeddings."""
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
    if run.freezes_embedding:
        records = [replace(frozen(run, record), backward=()) for record in records]
    return tuple(records)


@lru_cache(maxsize=64)
def head_records(run: RunConfig, tied: bool) -> Records:
    """Return the final norm, and the logits and losses of the model and of its MTP modules.

    tied: the embedding counts the weight
    """
    model = run.model
    around = MatmulCollectives.from_run(run)
    rows = run.tokens_per_microbatch
    # The head keeps its whole input, which becomes its gradient: nothing is gathered again in backward.
    logits = linear(
        "logits",
        (rows, vocabulary_rows(run), model.hidden_size),
        saved_bytes=run.activation_bytes,
        forward=around.into,
        backward=around.into_backward[-1:],
    )
    parameters = 0 if tied and model.tied else logits.parameters
    logits = replace(logits, parameters=parameters, is_head=True)
    loss = Record(name="cross_entropy", forward=3 * all_reduce(rows * FP32_BYTES, run.tp))
    predicted = model.predictions * (replace(logits, parameters=0), loss)
    norm = norm_record("final_layernorm", run)
    if run.freezing.has(HEAD):
        norm = frozen(run, norm)
    if run.freezing.has(EMBEDDING if model.tied else HEAD):
        logits = frozen(run, logits)
    records = (norm, logits, loss, *predicted)
    return with_adapters(run, records) if run.lora.on else records


def is_quantized(run: RunConfig, record: Record) -> bool:
    if record.gemm is None or record.adapts or record.mixes or not record.quantizes:
        return False
    return run.system.int8_head if record.is_head else run.system.int8


def layer_and_head_flops(run: RunConfig) -> tuple[float, float]:
    """Return the forward FLOPs per rank: (mean layer, logits), attention below the diagonal only."""
    linear, attention = linear_and_attention_flops(run)
    return linear + attention / 2, sum(r.flops_forward for r in head_records(run, tied=True))


def mean_layer_flops(run: RunConfig, counted: Callable[[Record], bool]) -> float:
    layers = run.model.all_layer_kinds
    flops = 0.0
    for kind in dict.fromkeys(layers):  # in one order on all ranks
        share = layers.count(kind) / len(layers)
        flops += share * sum([r.flops_forward for r in layer_records(run, kind) if counted(r)])
    return flops


def linear_and_attention_flops(run: RunConfig) -> tuple[float, float]:
    linear = mean_layer_flops(run, lambda record: record.visible is None)
    return linear, mean_layer_flops(run, lambda record: record.visible is not None)
