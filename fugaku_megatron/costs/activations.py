"""Activations of a micro-batch, what an operation on them is, and collectives around matmuls, in bytes. No torch.

Between the matmuls every rank works on whole activations (s, b, h), or with --sequence-parallel on its 1/t of the sequence
(Korthikanti et al. 2022, arXiv:2205.05198). Left out: what an operation keeps (`accounting`).
Legend: s sequence, b micro-batch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..config.layout import context_ways, group_copies, sequence_parts
from ..config.lora import FC1, FC2, MATRICES, PROJ, QKV
from ..config.parallel import A2A, ALLGATHER, P2P
from ..config.run_config import ModelConfig, RunConfig

FP32_BYTES = 4


@dataclass(frozen=True)
class Collective:
    """`bytes` handed over by this rank in one call of `verb` on communicator `group`, a name in `comm.grid.Groups`."""

    verb: str
    group: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One operation on one rank for one micro-batch.

    name: layer operation. parameters: held by this rank. replicated: those of them that every tensor-parallel rank holds. of_heads:
    those of these whose gradient comes from a rank's own heads, or its own parts of experts. divided: parameters of experts that
    ranks share in another way than other matrices. gemm: (M, N, K) of the forward matmul and how many of them; grouped: they are
    those of experts. flops_*: multiply and add counted apart, matmuls only, attention's over the full square. seen: the share of
    that square that a kernel needs. dropout: whether some of its probabilities are dropped.
    saved_bytes: kept from forward to backward. forward, backward: collectives in order. frozen: a matmul whose weight has no
    gradient. adapts: the parameters are an adapter's, which alone are trained.
    """

    name: str
    parameters: int = 0
    replicated: int = 0
    of_heads: int = 0
    divided: int = 0
    gemm: tuple[int, int, int] | None = None
    gemm_count: int = 1
    grouped: bool = False
    seen: float = 1.0
    dropout: bool = False
    flops_forward: int = 0
    flops_backward: int = 0
    saved_bytes: int = 0
    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    frozen: bool = False
    adapts: bool = False


def linear(
    name: str,
    rows: int,
    outputs: int,
    inputs: int,
    bias: int,
    saved: int,
    forward: tuple[Collective, ...],
    backward: tuple[Collective, ...],
    replicated: int = 0,
) -> Record:
    """A matmul of the forward, of rows (rows, inputs), and the two of its gradients."""
    flops = 2 * rows * outputs * inputs
    return Record(
        name=name,
        parameters=outputs * inputs + bias,
        gemm=(rows, outputs, inputs),
        flops_forward=flops,
        flops_backward=2 * flops,
        saved_bytes=saved,
        replicated=replicated,
        forward=forward,
        backward=backward,
    )


def tokens_per_microbatch(run: RunConfig) -> int:
    """s b / c: the rows of a whole activation of one micro-batch, of which c context-parallel ranks have a part each."""
    return run.model.seq_length * run.batch.micro_batch_size // run.parallel.context_parallel_size


def element_bytes(run: RunConfig) -> int:
    """Bytes of an activation element."""
    return 4 if run.precision.name == "fp32" else 2


def typical_cp_comm_type(run: RunConfig) -> str:
    """What ranks of a sequence send each other for attention in most layers, of which one stands for all."""
    ways = context_ways(run)
    return max(ways, key=ways.count)


def qkv_bytes(run: RunConfig, tp: int, way: str | None = None) -> int:
    """Bytes of queries, keys and values of this rank's heads for attention, (s, b, g (n/g + 2) d) with every copy of a group.

    way: of --cp-comm-type; None: the typical one.
    """
    model = run.model
    groups = run.model.query_groups // tp
    copies = (
        group_copies(groups, run.parallel.context_parallel_size)
        if (way or typical_cp_comm_type(run)) == A2A
        else 1
    )
    width = (model.num_attention_heads // tp + 2 * groups * copies) * model.kv_channels
    return tokens_per_microbatch(run) * width * element_bytes(run)


def key_elements(run: RunConfig, tp: int) -> int:
    """Elements of the keys and values of this rank's rows and heads, (s, b, 2 g d)."""
    return tokens_per_microbatch(run) * 2 * run.model.query_groups // tp * run.model.kv_channels


def segment_numbers(rank: int, ranks: int) -> tuple[int, int]:
    """Which two of the 2 c parts of a sequence a rank has."""
    return rank, 2 * ranks - 1 - rank


def rank_segments(rank: int, ranks: int, s: int) -> list[range]:
    """The positions of a rank's rows in a sequence of s, in runs that follow one another: all, or those of its two parts."""
    if ranks == 1:
        return [range(s)]
    length = s // (2 * ranks)
    return [range(part * length, (part + 1) * length) for part in segment_numbers(rank, ranks)]


def visible_keys(queries: range, keys: range, window: int | None) -> range:
    """Those of `keys` that one of the queries sees in one document; none where the range ends before it begins."""
    return range(
        max(keys.start, queries.start + 1 - window) if window else keys.start,
        min(keys.stop, queries.stop),
    )


def span(runs: Iterable[range]) -> range:
    """From the first to the last of all runs that are not empty."""
    full = [run for run in runs if run]
    return (
        range(min(run.start for run in full), max(run.stop for run in full)) if full else range(0)
    )


@lru_cache(maxsize=64)
def p2p_keys(s: int, ranks: int, window: int | None) -> tuple[tuple[int, int], ...]:
    """With --cp-comm-type p2p, of each rank: the keys that it sends, once to each rank that needs them, and those that it gets.

    A rank needs of every part of another one what its own queries see.
    """
    runs = [rank_segments(rank, ranks, s) for rank in range(ranks)]
    table = [
        [
            sum(
                len(span(visible_keys(own, keys, window) for own in runs[rank]))
                for keys in runs[source]
            )
            * (rank != source)
            for source in range(ranks)
        ]
        for rank in range(ranks)
    ]
    return tuple((sum(row[rank] for row in table), sum(table[rank])) for rank in range(ranks))


def attention_messages(
    run: RunConfig, tp: int, way: str
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """What ranks of a sequence send each other for attention, forward and backward; of p2p the most that a rank sends.

    a2a: rows for heads before it, heads for rows after it. allgather: keys and values of all ranks, also in backward, where their
    gradients are reduce-scattered. p2p: each step sends keys to another rank, and in backward their gradients back, in FP32.
    """
    cp = run.parallel.context_parallel_size
    elements = key_elements(run, tp)
    if cp == 1:
        return (), ()
    if way == A2A:
        exchanges = tuple(
            Collective("all_to_all", "cp", size)
            for size in (qkv_bytes(run, tp, way), context_bytes(run, tp))
        )
        return exchanges, exchanges[::-1]
    if way == ALLGATHER:
        gather = Collective("all_gather", "cp", elements * element_bytes(run))
        return (gather,), (gather, Collective("reduce_scatter", "cp", cp * elements * FP32_BYTES))
    each = elements * cp // run.model.seq_length  # of a key of all samples
    sent, got = (
        max(row) * each // (cp - 1)
        for row in zip(*p2p_keys(run.model.seq_length, cp, run.model.window))
    )
    keys = (Collective("send", "cp", sent * element_bytes(run)),) * (cp - 1)
    return keys, (*keys, *(Collective("send", "cp", got * FP32_BYTES),) * (cp - 1))


def context_bytes(run: RunConfig, tp: int) -> int:
    """Bytes of what attention makes of them, (s, b, n d)."""
    return tokens_per_microbatch(run) * run.model.context_width * element_bytes(run) // tp


def activation_bytes(run: RunConfig) -> int:
    """Bytes of one whole (s, b, h) activation: what tensor-parallel ranks reduce."""
    return tokens_per_microbatch(run) * run.model.hidden_size * element_bytes(run)


def key_working_bytes(run: RunConfig, tp: int) -> int:
    """What attention's backward needs where ranks exchange keys: its gradients in FP32, and others' keys with theirs.

    Around it are the context's gradient and two tensors of the residual stream's width. allgather: a rank's keys and the sum of
    their gradients, and of all ranks keys, gradients and the same in the order of ranks. p2p, in the last step: its own keys and
    another rank's, the sum of gradients, and of each other rank those of three parts that are sent or come, until all have arrived.
    """
    cp = run.parallel.context_parallel_size
    ways = {*context_ways(run)} - {A2A}
    if cp == 1 or not ways:
        return 0
    own = key_elements(run, tp)
    low = element_bytes(run)
    gathered = low + FP32_BYTES + cp * (low + 2 * FP32_BYTES)
    passed = 2 * low + FP32_BYTES + (cp - 1) * 3 * FP32_BYTES // 2
    around = (
        2 * activation_bytes(run)
        + context_bytes(run, tp)
        + qkv_bytes(run, tp, P2P) // low * FP32_BYTES
    )
    return around + own * (gathered if ALLGATHER in ways else passed)


def residual_bytes(run: RunConfig, tp: int) -> int:
    """Bytes of an activation between the matmuls, (s, b, h) or a part of it: what a rank keeps, and pipeline stages send."""
    return activation_bytes(run) // sequence_parts(run, tp)


EXCHANGED_BLOCKS = 4  # of a whole activation, at least: the first of them hides nothing, and matmuls of fewer rows are slower


def overlap_blocks(tp: int) -> int:
    """Blocks in which --tp-comm-overlap exchanges each rank's part of the rows."""
    return -(-EXCHANGED_BLOCKS // tp)


def all_reduce(bytes: int, tp: int) -> tuple[Collective, ...]:
    """An all-reduce over tensor-parallel ranks; nothing for one rank."""
    return (Collective("all_reduce", "tp", bytes),) if tp > 1 else ()


@dataclass(frozen=True)
class MatmulCollectives:
    """Collectives around the matmuls of tensor-parallel ranks: into a column-parallel one and out of a row-parallel one."""

    into: tuple[Collective, ...]
    into_backward: tuple[Collective, ...]
    out: tuple[Collective, ...]
    out_backward: tuple[Collective, ...]

    @staticmethod
    def from_run(run: RunConfig, tp: int, whole: int | None = None) -> MatmulCollectives:
        """Sums of whole activations; with sequence parallelism the parts are gathered, in backward once more for the weights.

        whole: bytes of an activation; None: of one of the model's width.
        """
        whole = activation_bytes(run) if whole is None else whole
        if sequence_parts(run, tp) == 1:
            return MatmulCollectives((), all_reduce(whole, tp), all_reduce(whole, tp), ())
        gather = Collective("all_gather", "tp", whole // tp)
        scatter = Collective("reduce_scatter", "tp", whole)
        return MatmulCollectives((gather,), (gather, scatter), (scatter,), (gather,))


def recompute_groups(layers: int, method: str, number: int) -> list[range]:
    """Groups of `layers` layers that are recomputed together: all layers (uniform) or single layers from the first (block)."""
    if method == "block":
        return [range(i, i + 1) for i in range(min(number, layers))]
    return [range(i, min(i + number, layers)) for i in range(0, layers, number)]


# Adapters (`nn.adapters`) ---------------------------------------------------------------------------------------------------------


def adapted(run: RunConfig, tp: int, records: tuple[Record, ...]) -> tuple[Record, ...]:
    """The records where adapters alone are trained: without the weight gradients of others, and with the adapters' own matmuls."""
    if not run.lora.on:
        return records
    return tuple(
        each for record in records for each in (_frozen(run, record), *_adapters(run, tp, record))
    )


def _frozen(run: RunConfig, record: Record) -> Record:
    """A record without gradients of its parameters. A linear layer without an adapter does not keep its input."""
    matmul = record.gemm is not None and record.parameters > 0 or record.name == "logits"
    kept = record.saved_bytes
    if record.name == QKV and not run.lora.parts(QKV, run.model):
        kept = 0
    if record.name == FC1 and run.lora.parts(FC2, run.model) and not run.lora.parts(FC1, run.model):
        kept = 0
    again = _linear_name(record) in (QKV, FC1)
    backward = record.backward[-1:] if again else record.backward  # the input is not gathered again
    return replace(
        record,
        replicated=0,
        of_heads=0,
        divided=0,
        saved_bytes=kept,
        backward=backward,
        frozen=matmul,
        flops_backward=record.flops_forward if matmul else record.flops_backward,
    )


def _linear_name(record: Record) -> str:
    """The linear layer that a matmul is, also of a shared expert."""
    return record.name.replace("shared_", "linear_")


def _adapters(run: RunConfig, tp: int, record: Record) -> tuple[Record, ...]:
    """The two matmuls of a linear layer's adapters; none where it has none. Their input is kept with the layer's."""
    name = _linear_name(record)
    rank = run.lora.rank
    parts = run.lora.parts(name, run.model) if name in MATRICES else ()
    if not parts or record.gemm is None:
        return ()
    (rows, outputs, inputs) = record.gemm
    part = sequence_parts(run, tp)
    split = name in (PROJ, FC2)
    width = len(parts) * rank
    kept = rows * width * element_bytes(run)
    around = MatmulCollectives.from_run(run, tp, kept)
    if record.grouped:
        down, up = (
            linear(f"{name}_lora_{kind}", rows, *sizes, 0, 0, (), ())
            for kind, sizes in (("A", (width, inputs)), ("B", (outputs, width)))
        )
        return (
            _of_experts(run, tp, record, down, width * inputs, not split),
            _of_experts(run, tp, record, up, outputs * rank, split),
        )
    if split:
        down = linear(f"{name}_lora_A", rows, width, inputs, 0, 0, around.out, around.out_backward)
        up = linear(f"{name}_lora_B", rows // part, outputs, width, 0, kept // part, (), ())
        return replace(down, adapts=True), replace(
            up, parameters=outputs * rank, replicated=outputs * rank, adapts=True
        )
    down = linear(
        f"{name}_lora_A",
        rows // part,
        width,
        inputs,
        0,
        0,
        around.into,
        around.into_backward[-1:],
        width * inputs,
    )
    up = linear(f"{name}_lora_B", rows, outputs, width, 0, kept, (), ())
    return replace(down, adapts=True), replace(up, parameters=outputs * rank, adapts=True)


def _of_experts(
    run: RunConfig, tp: int, experts: Record, matmul: Record, elements: int, whole: bool
) -> Record:
    """That of an expert's adapters as the matmul of all. elements: of the matrix; whole: ranks that share an expert all have it."""
    count = experts.gemm_count
    divided = bool(experts.divided)
    shares = not divided or (run.parallel.expert_tensor_parallel_size or tp) > 1
    size = elements * count
    common = elements * count * (whole and shares)
    return replace(
        matmul,
        gemm_count=count,
        grouped=True,
        parameters=size,
        divided=size * divided,
        replicated=common,
        of_heads=common,
        flops_forward=matmul.flops_forward * count,
        flops_backward=matmul.flops_backward * count,
        adapts=True,
    )


def cache_slots(model: ModelConfig, positions: int) -> int:
    """Positions of a sample whose keys and values are kept while it grows to `positions`: no more than a window has."""
    return min(positions, model.window or positions)


def cache_bytes(run: RunConfig, samples: int, positions: int, layers: int, tp: int) -> int:
    """Bytes of the keys and values of that many samples on a rank with `layers` layers."""
    model = run.model
    elements = (
        samples * cache_slots(model, positions) * model.query_groups // tp * model.kv_channels
    )
    return 2 * layers * elements * element_bytes(run)
