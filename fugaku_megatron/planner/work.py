"""One rank's work for one micro-batch: matmuls, bytes moved and allocated, operator calls,
collectives.

Legend: as in `costs.layers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pkgutil import resolve_name
from types import MappingProxyType
from typing import NamedTuple

from ..config import features
from ..config.layer_kinds import UP_PROJECTIONS, LayerKind
from ..config.optimizer import OPTIMIZERS
from ..config.rows import MLP_OF_EXPERTS
from ..config.run_config import RunConfig
from ..config.training import CORE_ATTN, MLA_UP_PROJ
from ..costs import memory
from ..costs import mlp as experts
from ..costs.layers import (
    embedding_records,
    head_records,
    is_quantized,
    last_recomputed_records,
    layer_records,
    typical_layer,
)
from ..costs.mixers import mixer_costs
from ..costs.mlp import mlp_width
from ..costs.records import (
    COMBINE,
    DISPATCH,
    EXPERTS,
    SHARED,
    Collective,
    Collectives,
    Record,
    overlap_blocks,
)
from ..costs.sizes import vocabulary_rows
from ..costs.stages import virtual_stage_layers, virtual_stage_parameters, whole_layers
from ..pipeline.schedule_names import row
from .software import Software


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Call with `count` matmuls (m, k) x (k, n), made `times` times.

    attention: Q K^T or P V; a kernel computes the share `visible`
    fp32_share: share of the FP32 peak that a kernel of its own reaches; None: by shape and precision
    quantized: operands that the call quantizes to INT8: the first, or both; 0: not in INT8
    """

    m: int
    n: int
    k: int
    count: int = 1
    attention: bool = False
    visible: float = 0.5
    dropout: bool = False
    backward: bool = False
    quantized: int = 0
    fp32_share: float | None = None
    times: int = 1


Matmuls = tuple[Matmul, ...]


class OverlappedCollectives(NamedTuple):
    """Collectives for --tp-comm-overlap, block by block, while matmuls read or produce the blocks.

    first: one block's matmuls, before or after the exchange; None if all are `overlapped`
    """

    collectives: Collectives
    first: Matmul | None
    overlapped: Matmuls

    @property
    def group(self) -> str:
        return self.collectives[0].group


class ExpertExchange(NamedTuple):
    """Expert rows dispatched and combined between nodes, one expert group while others are
    computed.

    there, back: all groups' all-to-alls. overlapped: all groups' matmuls. around: the shared
        expert's, half on each side.
    """

    there: Collectives
    back: Collectives
    groups: int
    overlapped: Matmuls
    around: Matmuls
    group: str = "ep"


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counts for one phase. moved: bytes read and written. allocations: (bytes per tensor,
    tensors).

    collectives: (collective, calls). exchanges: (exchange, repetitions).
    """

    matmuls: Matmuls = ()
    moved: float = 0.0
    allocations: tuple[tuple[int, float], ...] = ()
    calls: float = 0.0
    collectives: tuple[tuple[Collective, int], ...] = ()
    exchanges: tuple[tuple[OverlappedCollectives | ExpertExchange, int], ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(**{name: value + getattr(other, name) for name, value in vars(self).items()})


TENSORS_OF_LAYER = 12  # parameters of a layer, a call each

Pieces = list[tuple[Work, int]]  # work, and how often it is done


def optimizer_matmuls(run: RunConfig, stage: int) -> Work:
    """Return the matmuls of an optimizer step on a stage's data-parallel ranks."""
    name = OPTIMIZERS[run.optimizer.optimizer].matmuls
    matmuls = resolve_name(name)(run, stage) if name else []
    return Work(matmuls=tuple(Matmul(m=m, n=n, k=k, times=count) for count, m, n, k in matmuls))


_NO_MIXER = {"qkv": 0, "context": 0, "scores": 0}


def tensors(run: RunConfig, kind: LayerKind | None = None) -> dict[str, int]:
    """Return the bytes per tensor kind. mlp: mean over an activation's argument and result.

    kind: None: `typical_layer`
    """
    model = run.model
    each = kind or typical_layer(model)
    rows = run.tokens_per_microbatch * run.element_bytes
    mixer = _NO_MIXER if each.mixer is None else mixer_costs(each.mixer).tensors(run)
    width = 0
    if each.mlp is not None:
        width = mlp_width(model) if each.mlp == MLP_OF_EXPERTS else model.ffn_hidden_size
    return {
        "hidden": rows * model.hidden_size,
        **mixer,
        "mlp": rows * width * (model.fc1_widths + 1) // 2 // run.tp,
        "logits": rows * vocabulary_rows(run),
    }


def _elementwise_tensors(
    run: RunConfig, software: Software, kind: LayerKind | None
) -> dict[str, int]:
    sizes = tensors(run, kind)
    if features.SEQUENCE_PARALLEL in software.active(run):
        sizes["hidden"] //= run.tp
    return sizes


def _elementwise(software: Software, phase: str, sizes: dict[str, int]) -> Work:
    counts = {name: value for name, value in software.counts[phase].items() if name != "calls"}
    return Work(
        moved=sum(sizes[name] * moved for name, (moved, _) in counts.items()),
        allocations=tuple(
            (sizes[name], allocated) for name, (_, allocated) in counts.items() if allocated
        ),
        calls=software.counts[phase]["calls"],
    )


def _around_parts(
    run: RunConfig, software: Software, phase: str, sizes: dict[str, int], kind: LayerKind
) -> Work:
    """Return a layer's element-wise work. The counts of a phase are a layer's with a mixer and an MLP.

    --residual-multiplier also reads and writes two results, and norms beyond two a layer a tensor each.
    """
    work = _elementwise(software, phase, sizes)
    if kind.mixer is not None:
        work += Work(**mixer_costs(kind.mixer).elementwise(run, sizes, kind)._asdict())
    if run.model.residual_multiplier != 1.0:
        work += Work(moved=4.0 * sizes["hidden"], calls=2, allocations=((sizes["hidden"], 2),))
    more = max(0, 2 * sum(run.model.norms_around) - 2)
    if more:
        moved = 2.0 * more * sizes["hidden"]
        work += Work(moved=moved, calls=more, allocations=((sizes["hidden"], more),))
    if None in (kind.mixer, kind.mlp):
        halves = tuple((size, count / 2) for size, count in work.allocations)
        return replace(work, moved=work.moved / 2, calls=work.calls / 2, allocations=halves)
    return work


def _once(collectives: Collectives) -> tuple[tuple[Collective, int], ...]:
    return tuple((c, 1) for c in collectives)


@dataclass(frozen=True, kw_only=True)
class _MatmulOptions:
    """Choices of a run and its software that every record's matmuls depend on.

    chunks: blocks of logits
    int8: the software has --int8, and the run uses it
    """

    run: RunConfig
    chunks: int = 1
    int8: bool = False

    @staticmethod
    def of(run: RunConfig, software: Software) -> _MatmulOptions:
        chunks = 1
        if software.counts["logits_in_chunks"]:
            chunks = -(-run.tokens_per_microbatch // memory.logits_rows(run))
        int8 = run.system.int8 and software.style == "native"
        return _MatmulOptions(run=run, chunks=chunks, int8=int8)

    def quantized(self, record: Record, weight_gradient: bool = False) -> int:
        """Return the operands that a matmul quantizes: both for a weight gradient, else one, as weights are kept."""
        if not self.int8 or not is_quantized(self.run, record):
            return 0
        if weight_gradient:
            return 2 if self.run.system.int8_wgrad else 0
        return 1


def _forward(record: Record, options: _MatmulOptions) -> Work:
    if record.gemm is None:
        return Work(collectives=_once(record.forward))
    m, n, k = record.gemm
    linear = Matmul(
        m=m,
        n=n,
        k=k,
        times=record.gemm_count,
        quantized=options.quantized(record),
        fp32_share=record.fp32_share,
    )
    matmuls: Matmuls = (linear,)
    if record.visible is not None:
        matmul = Matmul(
            m=m,
            n=n,
            k=k,
            count=record.gemm_count,
            attention=True,
            visible=record.visible,
            dropout=record.dropout,
        )
        matmuls = (matmul, replace(matmul, n=k, k=n))
    elif record.is_head:
        matmuls = (replace(linear, m=m // options.chunks, times=options.chunks),)
    return Work(matmuls=matmuls, collectives=_once(record.forward))


def forward_matmuls(run: RunConfig, software: Software, record: Record) -> Work:
    """Return a record's matmuls in forward, without collectives and element-wise work."""
    return Work(matmuls=_forward(record, _MatmulOptions.of(run, software)).matmuls)


def _backward(record: Record, options: _MatmulOptions) -> Work:
    matmuls = []
    quantized = options.quantized(record, weight_gradient=True)
    for p in _forward(record, options).matmuls:
        matmuls.append(replace(p, n=p.k, k=p.n, backward=True))
        if not record.frozen:
            matmuls.append(replace(p, m=p.k, k=p.m, backward=True, quantized=quantized))
    return Work(matmuls=tuple(matmuls), collectives=_once(record.backward))


def _in_layer(run: RunConfig, software: Software, work: Work) -> Work:
    """Return a layer record's work, with --tp-comm-overlap as an exchange.

    A weight gradient needs all gathered rows; it hides a reduction, unless deferred. Messages of context-parallel attention
    are overlapped, except in the last step.
    """
    collectives = tuple(c for c, _ in work.collectives)
    first = None
    overlapped = work.matmuls
    if any(c.group == "cp" for c in collectives):
        if any(c.verb != "send" for c in collectives):
            return work
        overlapped = tuple(replace(p, count=p.count * (run.cp - 1) // run.cp) for p in overlapped)
    elif collectives and overlapped and features.TP_COMM_OVERLAP in software.active(run):
        data = overlapped[0]
        reduced = any(c.verb == "reduce_scatter" for c in collectives)
        if not reduced or row(run.parallel.schedule).splits_backward:
            overlapped = (data,)
        first = replace(data, m=-(-data.m // (run.tp * overlap_blocks(run.tp))))
    else:
        return work
    exchange = OverlappedCollectives(collectives=collectives, first=first, overlapped=overlapped)
    return replace(work, collectives=(), exchanges=((exchange, 1),))


def _layer(
    run: RunConfig,
    software: Software,
    records: Sequence[Record],
    work_of: Callable[[Record], Work],
) -> Work:
    steps = [(record.expert_step, _in_layer(run, software, work_of(record))) for record in records]
    whole = sum((work for _, work in steps), Work())
    if not run.parallel.divides_experts or features.EXPERT_GROUPS not in software.active(run):
        return whole

    def works(step: str) -> list[Work]:
        return [work for each, work in steps if each == step]

    def sent(step: str) -> Collectives:
        return tuple(c for work in works(step) for c, _ in work.collectives if _between_experts(c))

    def matmuls(step: str) -> Matmuls:
        # deferred weight gradients overlap nothing
        hiding = 1 if row(run.parallel.schedule).splits_backward else None
        return tuple(matmul for work in works(step) for matmul in work.matmuls[:hiding])

    groups = experts.exchanged_groups((run.model.num_experts or 0) // run.ep)
    exchange = ExpertExchange(
        there=sent(DISPATCH),
        back=sent(COMBINE),
        groups=groups,
        overlapped=matmuls(EXPERTS),
        around=matmuls(SHARED),
    )
    return replace(
        whole,
        collectives=tuple(each for each in whole.collectives if not _between_experts(each[0])),
        exchanges=(*whole.exchanges, (exchange, 1)),
    )


def _between_experts(collective: Collective) -> bool:
    return (collective.verb, collective.group) == ("all_to_all", "ep")


def _weights(record: Record, options: _MatmulOptions) -> Work:
    if record.frozen or record.mixes:
        return Work()
    return Work(matmuls=_backward(record, options).matmuls[1::2])


@cache
def phases(run: RunConfig, software: Software, kind: LayerKind | None = None) -> Mapping[str, Work]:
    """Return the work by phase, without recompute and weight gradients. Shared by callers.

    Keys: "layer_forward", "layer_backward", "embedding_forward" and so on; "layer_weights": the
    deferrable backward.
    kind: of the layer; None: `typical_layer`
    """
    sizes = _elementwise_tensors(run, software, kind)
    options = _MatmulOptions.of(run, software)
    each = kind or typical_layer(run.model)
    layer = layer_records(run, kind)
    ends = {
        "embedding": embedding_records(run),
        "head": head_records(run, tied=False),
    }
    work = {}
    for phase, record_work in (("forward", _forward), ("backward", _backward)):
        of_layer = _layer(run, software, layer, partial(record_work, options=options))
        name = f"layer_{phase}"
        work[name] = of_layer + _around_parts(run, software, name, sizes, each)
        for place, records in ends.items():
            name = f"{place}_{phase}"
            elementwise = _elementwise(software, name, sizes)
            work[name] = sum((record_work(record, options) for record in records), elementwise)
    work["layer_weights"] = sum((_weights(record, options) for record in layer), Work())
    return MappingProxyType(work)


def recomputed_layers(
    run: RunConfig, kinds: Sequence[LayerKind], groups: list[range], software: Software
) -> Pieces:
    """Return the forward of groups of layers. kinds: of a virtual stage's layers"""
    early = software.counts["recompute_ends_early"]
    lasts = Counter(kinds[group[-1]] for group in groups if early)
    others = Counter(kinds[layer] for group in groups for layer in group) - lasts
    return [
        *((phases(run, software, kind)["layer_forward"], count) for kind, count in others.items()),
        *((_last_recomputed(run, kind, software), count) for kind, count in lasts.items()),
    ]


def _last_recomputed(run: RunConfig, kind: LayerKind, software: Software) -> Work:
    records = last_recomputed_records(run, kind)
    sizes = _elementwise_tensors(run, software, kind)
    forward = partial(_forward, options=_MatmulOptions.of(run, software))
    layer = _layer(run, software, records, forward)
    return layer + _around_parts(run, software, "layer_forward", sizes, kind)


def recomputed_mixer(run: RunConfig, kind: LayerKind, software: Software) -> Work:
    """Return the forward that selective recompute runs again: scores and matmuls, and projections to heads."""
    repeated = Work()
    options = _MatmulOptions(run=run)
    records = layer_records(run, kind)
    if run.training.recomputes(MLA_UP_PROJ):
        for record in records:
            if record.name in UP_PROJECTIONS:
                repeated += _forward(record, options)
    mixing = [r for r in records if r.mixes]
    if not mixing or not run.training.recomputes(CORE_ATTN):
        return repeated
    sizes = tensors(run, kind)
    moved, allocated = software.counts["layer_forward"].get("scores", (0, 0))
    return repeated + Work(
        matmuls=_forward(mixing[0], options).matmuls,
        moved=moved * sizes["scores"],
        calls=5,
        allocations=((sizes["scores"], allocated),) if allocated else (),
    )


def weight_gradients(
    run: RunConfig, virtual_stage: int, kinds: Mapping[LayerKind, int], software: Software
) -> Work:
    """Return the writing and adding of a virtual stage's weight gradients in one micro-batch.

    The embedding and the head each make a gradient of the vocabulary's table.
    kinds: layers of each kind
    """
    counts = software.counts["weights"]
    width = run.element_bytes
    parameters = virtual_stage_parameters(run, virtual_stage)
    layers = whole_layers(run.model, virtual_stage_layers(run, virtual_stage))
    times: float = counts["allocated"]
    tables = (0, run.placement.virtual_stages - 1).count(virtual_stage)
    table_bytes = vocabulary_rows(run) * run.model.hidden_size * width
    blocks = [(table_bytes, times * tables)]
    for kind, count in kinds.items():
        for record in layer_records(run, kind):
            if record.gemm and not record.mixes and not record.frozen:
                _, n, k = record.gemm
                blocks.append((n * k * width, times * count * record.gemm_count))
    return Work(
        moved=counts["moved"] * parameters * width,
        allocations=tuple(blocks) if times else (),
        calls=TENSORS_OF_LAYER * layers,
    )
