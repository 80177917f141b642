"""One rank's work for one micro-batch: matmuls, bytes moved and allocated, operator calls,
collectives.

Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads, v padded vocabulary, t
tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

from ..config import features
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import accounting, activations, experts, memory
from ..costs.activations import Collective, Record
from ..costs.muon import orthogonalized
from ..pipeline.schedule_names import row
from .software import Software


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Call with `count` matmuls (m, k) x (k, n), made `times` times.

    attention: Q K^T or P V; a kernel computes the share `visible`
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
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Collectives for --tp-comm-overlap, block by block, while matmuls read or produce the blocks.

    first: one block's matmuls, before or after the exchange; None if all are `overlapped`
    """

    collectives: tuple[Collective, ...]
    first: Matmul | None
    overlapped: tuple[Matmul, ...]

    @property
    def group(self) -> str:
        return self.collectives[0].group


@dataclass(frozen=True, kw_only=True)
class ExpertExchange:
    """Expert rows dispatched and combined between nodes, one expert group while others are
    computed.

    there, back: all groups' all-to-alls. overlapped: all groups' matmuls. around: the shared
        expert's, half on each side.
    """

    there: tuple[Collective, ...]
    back: tuple[Collective, ...]
    groups: int
    overlapped: tuple[Matmul, ...]
    around: tuple[Matmul, ...]
    group: str = "ep"


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counts for one phase. moved: bytes read and written. allocations: (bytes per tensor,
    tensors).

    collectives: (collective, calls). exchanges: (exchange, repetitions).
    """

    matmuls: tuple[Matmul, ...] = ()
    moved: float = 0.0
    allocations: tuple[tuple[int, float], ...] = ()
    calls: float = 0.0
    collectives: tuple[tuple[Collective, int], ...] = ()
    exchanges: tuple[tuple[Exchange | ExpertExchange, int], ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def muon(run: RunConfig, layout: Layout, stage: int) -> Work:
    return Work(
        matmuls=tuple(
            Matmul(
                m=sides[0], n=sides[1], k=sides[2], times=count * run.optimizer.muon_num_ns_steps
            )
            for (m, n), count in orthogonalized(run, layout, stage).items()
            for sides in ((m, m, n), (m, m, m), (m, n, m))
        )
    )


def tensors(run: RunConfig, tp: int) -> dict[str, int]:
    """Return the bytes per tensor kind. mlp: mean over an activation's argument and result."""
    model = run.model
    rows = run.tokens_per_microbatch * run.element_bytes
    return {
        "hidden": rows * model.hidden_size,
        "qkv": activations.qkv_bytes(run, tp),
        "context": activations.context_bytes(run, tp),
        "scores": rows * model.seq_length * model.num_attention_heads // tp,
        "mlp": rows * experts.mlp_width(model) * (model.fc1_widths + 1) // 2 // tp,
        "logits": rows * accounting.padded_vocab_size(model, tp) // tp,
    }


def _elementwise_tensors(run: RunConfig, tp: int, software: Software) -> dict[str, int]:
    sizes = tensors(run, tp)
    return (
        {**sizes, "hidden": sizes["hidden"] // tp}
        if features.SEQUENCE_PARALLEL in software.active(run)
        else sizes
    )


def _elementwise(software: Software, phase: str, sizes: dict[str, int]) -> Work:
    counts = {name: value for name, value in software.counts[phase].items() if name != "calls"}
    return Work(
        moved=sum(sizes[name] * moved for name, (moved, _) in counts.items()),
        allocations=tuple(
            (sizes[name], allocated) for name, (_, allocated) in counts.items() if allocated
        ),
        calls=software.counts[phase]["calls"],
    )


def _rotary(run: RunConfig, sizes: Mapping[str, int]) -> Work:
    """Return the rotary work: qkv read and written once.

    --residual-multiplier also reads and writes two results, and norms beyond two a layer a tensor each.
    """
    work = Work()
    if run.model.uses_rotary(accounting.typical_layer(run.model)):
        work = Work(moved=2.0 * sizes["qkv"], calls=1, allocations=((sizes["qkv"], 1),))
    if run.model.attention_output_gate:
        # queries, keys and values without the gates, and the context's product with the gates
        moved = 2.0 * sizes["qkv"] + 5.0 * sizes["context"]
        allocations = ((sizes["qkv"], 1), (sizes["context"], 2))
        work += Work(moved=moved, calls=2, allocations=allocations)
    if run.model.residual_multiplier != 1.0:
        work += Work(moved=4.0 * sizes["hidden"], calls=2, allocations=((sizes["hidden"], 2),))
    more = max(0, run.model.layer_norms - 2)
    if more:
        moved = 2.0 * more * sizes["hidden"]
        work += Work(moved=moved, calls=more, allocations=((sizes["hidden"], more),))
    return work


def _once(collectives: tuple[Collective, ...]) -> tuple[tuple[Collective, int], ...]:
    return tuple((c, 1) for c in collectives)


def _chunks(run: RunConfig, tp: int) -> int:
    pp = run.parallel.pipeline_model_parallel_size
    return -(
        -run.tokens_per_microbatch
        // memory.logits_rows(run, Layout(tp * pp, tp, pp, 1).placed(run))
    )


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
    def of(run: RunConfig, tp: int, software: Software) -> _MatmulOptions:
        chunks = _chunks(run, tp) if software.counts["logits_in_chunks"] else 1
        int8 = run.system.int8 and software.style == "native"
        return _MatmulOptions(run=run, chunks=chunks, int8=int8)

    def quantized(self, record: Record, weight_gradient: bool = False) -> int:
        """Return the operands that a matmul quantizes: both for a weight gradient, else one, as weights are kept."""
        if not self.int8 or not accounting.is_quantized(self.run, record):
            return 0
        if weight_gradient:
            return 2 if self.run.system.int8_wgrad else 0
        return 1


def _forward(record: Record, options: _MatmulOptions) -> Work:
    if record.gemm is None:
        return Work(collectives=_once(record.forward))
    m, n, k = record.gemm
    linear = Matmul(m=m, n=n, k=k, times=record.gemm_count, quantized=options.quantized(record))
    matmuls: tuple[Matmul, ...] = (linear,)
    if record.name == "attention":
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
    elif record.name == "logits":
        matmuls = (replace(linear, m=m // options.chunks, times=options.chunks),)
    return Work(matmuls=matmuls, collectives=_once(record.forward))


def _backward(record: Record, options: _MatmulOptions) -> Work:
    matmuls = []
    quantized = options.quantized(record, weight_gradient=True)
    for p in _forward(record, options).matmuls:
        matmuls.append(replace(p, n=p.k, k=p.n, backward=True))
        if not record.frozen:
            matmuls.append(replace(p, m=p.k, k=p.m, backward=True, quantized=quantized))
    return Work(matmuls=tuple(matmuls), collectives=_once(record.backward))


def _in_layer(run: RunConfig, tp: int, software: Software, work: Work) -> Work:
    """Return a layer record's work, with --tp-comm-overlap as an exchange.

    A weight gradient needs all gathered rows; it hides a reduction, unless deferred.
    """
    collectives = tuple(c for c, _ in work.collectives)
    if any(c.group == "cp" for c in collectives):
        return _passed(run, work, collectives)
    if not collectives or not work.matmuls or features.TP_COMM_OVERLAP not in software.active(run):
        return work
    data, *weight = work.matmuls
    reduced = any(c.verb == "reduce_scatter" for c in collectives)
    overlapped = (
        (data, *weight) if reduced and not row(run.parallel.schedule).splits_backward else (data,)
    )
    first = replace(data, m=-(-data.m // (tp * activations.overlap_blocks(tp))))
    return replace(
        work,
        collectives=(),
        exchanges=((Exchange(collectives=collectives, first=first, overlapped=overlapped), 1),),
    )


def _passed(run: RunConfig, work: Work, collectives: tuple[Collective, ...]) -> Work:
    """Return context-parallel attention with messages overlapped, except in the last step."""
    if any(c.verb != "send" for c in collectives):
        return work
    cp = run.parallel.context_parallel_size
    hiding = tuple(replace(p, count=p.count * (cp - 1) // cp) for p in work.matmuls)
    return replace(
        work,
        collectives=(),
        exchanges=((Exchange(collectives=collectives, first=None, overlapped=hiding), 1),),
    )


def _layer(
    run: RunConfig,
    tp: int,
    software: Software,
    records: Sequence[Record],
    work_of: Callable[[Record], Work],
) -> Work:
    named = [(record.name, _in_layer(run, tp, software, work_of(record))) for record in records]
    whole = sum((work for _, work in named), Work())
    if not run.parallel.divides_experts or features.EXPERT_GROUPS not in software.active(run):
        return whole

    def sent(name: str) -> tuple[Collective, ...]:
        return tuple(
            c
            for each, work in named
            if each == name
            for c, _ in work.collectives
            if _between_experts(c)
        )

    def matmuls(*names: str) -> tuple[Matmul, ...]:
        # deferred weight gradients overlap nothing
        hiding = 1 if row(run.parallel.schedule).splits_backward else None
        return tuple(
            matmul for each, work in named if each in names for matmul in work.matmuls[:hiding]
        )

    groups = experts.exchanged_groups(
        (run.model.num_experts or 0) // run.parallel.expert_model_parallel_size
    )
    exchange = ExpertExchange(
        there=sent("order"),
        back=sent("experts_sum"),
        groups=groups,
        overlapped=matmuls("linear_fc1", "linear_fc2"),
        around=matmuls("shared_fc1", "shared_fc2"),
    )
    return replace(
        whole,
        collectives=tuple(each for each in whole.collectives if not _between_experts(each[0])),
        exchanges=(*whole.exchanges, (exchange, 1)),
    )


def _between_experts(collective: Collective) -> bool:
    return (collective.verb, collective.group) == ("all_to_all", "ep")


def _weights(record: Record, options: _MatmulOptions) -> Work:
    return Work(
        matmuls=()
        if record.frozen
        else tuple(p for p in _backward(record, options).matmuls[1::2] if not p.attention)
    )


@cache
def phases(run: RunConfig, tp: int, software: Software) -> Mapping[str, Work]:
    """Return the work by phase, without recompute and weight gradients. Shared by callers.

    Keys: "layer_forward", "layer_backward", "embedding_forward" and so on; "layer_weights": the
    deferrable backward.
    """
    sizes = _elementwise_tensors(run, tp, software)
    options = _MatmulOptions.of(run, tp, software)
    places = {
        "layer": accounting.layer_records(run, tp),
        "embedding": accounting.embedding_records(run, tp),
        "head": accounting.head_records(run, tp, tied=False),
    }
    work = {}
    for place, records in places.items():
        for phase, record_work in (("forward", _forward), ("backward", _backward)):
            name = f"{place}_{phase}"
            elementwise = _elementwise(software, name, sizes)
            if place == "layer":
                work[name] = sum(
                    (
                        _layer(run, tp, software, records, partial(record_work, options=options)),
                        _rotary(run, sizes),
                    ),
                    elementwise,
                )
            else:
                work[name] = sum((record_work(record, options) for record in records), elementwise)
    work["layer_weights"] = sum((_weights(record, options) for record in places["layer"]), Work())
    return MappingProxyType(work)


def recomputed_layers(run: RunConfig, tp: int, groups: list[range], software: Software) -> Work:
    whole = phases(run, tp, software)["layer_forward"]
    if not software.counts["recompute_ends_early"]:
        return repeat(whole, sum(map(len, groups)))
    records = accounting.last_recomputed_records(run, tp)
    sizes = _elementwise_tensors(run, tp, software)
    forward = partial(_forward, options=_MatmulOptions.of(run, tp, software))
    pieces = (_layer(run, tp, software, records, forward), _rotary(run, sizes))
    last = sum(pieces, _elementwise(software, "layer_forward", sizes))
    return repeat(whole, sum(map(len, groups)) - len(groups)) + repeat(last, len(groups))


def recomputed_attention(run: RunConfig, tp: int, software: Software) -> Work:
    sizes = tensors(run, tp)
    mixers = ("attention", "delta_rule")
    record = next(r for r in accounting.layer_records(run, tp) if r.name in mixers)
    moved, allocated = software.counts["layer_forward"].get("scores", (0, 0))
    return Work(
        matmuls=_forward(record, _MatmulOptions(run=run)).matmuls,
        moved=moved * sizes["scores"],
        calls=5,
        allocations=((sizes["scores"], allocated),) if allocated else (),
    )


def weight_gradients(
    run: RunConfig, tp: int, parameters: int, tensors: int, software: Software
) -> Work:
    counts = software.counts["weights"]
    bytes = parameters * run.element_bytes
    allocations = (
        ((bytes // tensors, tensors * counts["allocated"]),) if counts["allocated"] else ()
    )
    return Work(moved=counts["moved"] * bytes, allocations=allocations, calls=tensors)


def repeat(work: Work, times: int) -> Work:
    return Work(
        matmuls=tuple(replace(p, times=p.times * times) for p in work.matmuls),
        moved=work.moved * times,
        calls=work.calls * times,
        allocations=tuple((size, count * times) for size, count in work.allocations),
        collectives=tuple((c, count * times) for c, count in work.collectives),
        exchanges=tuple((e, count * times) for e, count in work.exchanges),
    )
