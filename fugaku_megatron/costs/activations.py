"""Activations, operations and matmul collectives for one micro-batch, in bytes, without torch.

Between matmuls every rank has whole activations (s, b, h), or with --sequence-parallel 1/t of the sequence (Korthikanti et al.
2022, arXiv:2205.05198). Legend: as in `accounting`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..config.layer_kinds import FC1, FC2, column_parallel, input_projections, row_parallel
from ..config.layout import cp_comm_types, group_copies
from ..config.parallel import A2A, ALLGATHER, P2P
from ..config.run_config import RunConfig

FP32_BYTES = 4


@dataclass(frozen=True)
class Collective:
    """A `verb` call on communicator `group` (a name in `comm.grid.Groups`) with `bytes` from this rank."""

    verb: str
    group: str
    bytes: int


Collectives = tuple[Collective, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One operation on one rank for one micro-batch.

    replicated: parameters on every tensor-parallel rank.
    of_heads: replicated parameters with partial gradients from a rank's own heads or expert shards.
    divided: expert parameters that ranks shard unlike other matrices.
    gemm: (M, N, K) for each of `gemm_count` forward matmuls; grouped: expert matmuls; quantizes: in INT8 with --int8.
    mixes: combines the tokens of a sequence, without a weight matrix; selective recompute repeats it.
    visible: share of attention's squares Q K^T and P V that a kernel computes; None: no attention.
    fp32_share: share of the FP32 peak that a kernel of its own reaches; None: by shape and precision.
    flops_forward, flops_backward: multiply and add counted separately, matmuls only, attention over
        the full square.
    """

    name: str
    parameters: int = 0
    replicated: int = 0
    of_heads: int = 0
    divided: int = 0
    gemm: tuple[int, int, int] | None = None
    gemm_count: int = 1
    grouped: bool = False
    quantizes: bool = True
    is_head: bool = False
    mixes: bool = False
    visible: float | None = None
    fp32_share: float | None = None
    dropout: bool = False
    flops_forward: int = 0
    flops_backward: int = 0
    saved_bytes: int = 0
    forward: Collectives = ()
    backward: Collectives = ()
    frozen: bool = False
    adapts: bool = False


Records = tuple[Record, ...]


def linear(
    name: str,
    gemm: tuple[int, int, int],
    *,
    bias: int = 0,
    saved_bytes: int = 0,
    forward: Collectives = (),
    backward: Collectives = (),
    replicated: int = 0,
) -> Record:
    """Return a matmul and its two gradient matmuls. gemm: (rows, outputs, inputs)."""
    rows, outputs, inputs = gemm
    flops = 2 * rows * outputs * inputs
    return Record(
        name=name,
        parameters=outputs * inputs + bias,
        gemm=gemm,
        flops_forward=flops,
        flops_backward=2 * flops,
        saved_bytes=saved_bytes,
        replicated=replicated,
        forward=forward,
        backward=backward,
    )


def typical_cp_comm_type(run: RunConfig) -> str:
    ways = cp_comm_types(run)
    return max(ways, key=ways.count)


def qkv_bytes(run: RunConfig, cp_comm_type: str | None = None) -> int:
    """Return the bytes for this rank's queries, keys and values, copied groups included."""
    model = run.model
    groups = run.model.query_groups // run.tp
    copies = 1
    if (cp_comm_type or typical_cp_comm_type(run)) == A2A:
        copies = group_copies(groups, run.parallel.context_parallel_size)
    width = (model.num_attention_heads // run.tp + 2 * groups * copies) * model.kv_channels
    return run.tokens_per_microbatch * width * run.element_bytes


def key_elements(run: RunConfig) -> int:
    return run.tokens_per_microbatch * 2 * run.model.query_groups // run.tp * run.model.kv_channels


def segment_numbers(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def rank_segments(rank: int, ranks: int, s: int) -> list[range]:
    if ranks == 1:
        return [range(s)]
    length = s // (2 * ranks)
    return [range(n * length, (n + 1) * length) for n in segment_numbers(rank, ranks)]


def visible_keys(queries: range, keys: range, window: int | None) -> range:
    """Return the range in `keys` that any query sees; inverted if there is none."""
    first = max(keys.start, queries.start + 1 - window) if window else keys.start
    return range(first, min(keys.stop, queries.stop))


def span(ranges: Iterable[range]) -> range:
    full = [each for each in ranges if each]
    if not full:
        return range(0)
    return range(min(each.start for each in full), max(each.stop for each in full))


@lru_cache(maxsize=64)
def p2p_keys(s: int, ranks: int, window: int | None) -> tuple[tuple[int, int], ...]:
    """Return the number of keys that each rank (sends, receives) with --cp-comm-type p2p.

    A rank receives only the keys that its own queries see.
    """
    segments = [rank_segments(rank, ranks, s) for rank in range(ranks)]
    sent = [0 for _ in segments]
    received = [0 for _ in segments]
    for rank in range(ranks):
        for source in range(ranks):
            if source == rank:
                continue
            for keys in segments[source]:
                needed = len(span(visible_keys(own, keys, window) for own in segments[rank]))
                sent[source] += needed
                received[rank] += needed
    return tuple(zip(sent, received))


def attention_messages(
    run: RunConfig, cp_comm_type: str, window: int | None
) -> tuple[Collectives, Collectives]:
    """Return attention's context-parallel collectives, forward and backward; p2p: on the rank that sends most.

    a2a: sequence to heads before attention, back after it. allgather: keys and values, again in backward, which reduce-scatters their
    gradients. p2p: keys per step, and in backward their FP32 gradients.
    """
    cp = run.parallel.context_parallel_size
    elements = key_elements(run)
    if cp == 1:
        return (), ()
    if cp_comm_type == A2A:
        exchanges = tuple(
            Collective("all_to_all", "cp", size)
            for size in (qkv_bytes(run, cp_comm_type), context_bytes(run))
        )
        return exchanges, exchanges[::-1]
    if cp_comm_type == ALLGATHER:
        gather = Collective("all_gather", "cp", elements * run.element_bytes)
        return (gather,), (gather, Collective("reduce_scatter", "cp", cp * elements * FP32_BYTES))
    each = elements * cp // run.model.seq_length  # of one position, all samples
    sent, received = (
        max(row) * each // (cp - 1) for row in zip(*p2p_keys(run.model.seq_length, cp, window))
    )
    keys = (Collective("send", "cp", sent * run.element_bytes),) * (cp - 1)
    return keys, (*keys, *(Collective("send", "cp", received * FP32_BYTES),) * (cp - 1))


def context_bytes(run: RunConfig) -> int:
    return run.tokens_per_microbatch * run.model.context_width * run.element_bytes // run.tp


def activation_bytes(run: RunConfig) -> int:
    return run.tokens_per_microbatch * run.model.hidden_size * run.element_bytes


def key_working_bytes(run: RunConfig) -> int:
    """Return the temporary bytes in attention's backward if ranks exchange keys.

    The context's gradient, two tensors with width h and FP32 gradients exist around it. allgather: a rank's keys and summed gradients,
    and all ranks' keys and twice their gradients. p2p: own and received keys, summed gradients, and for each other rank three
    segments' gradients in flight.
    """
    cp = run.parallel.context_parallel_size
    ways = {*cp_comm_types(run)} - {A2A}
    if cp == 1 or not ways:
        return 0
    own = key_elements(run)
    low = run.element_bytes
    gathered = low + FP32_BYTES + cp * (low + 2 * FP32_BYTES)
    passed = 2 * low + FP32_BYTES + (cp - 1) * 3 * FP32_BYTES // 2
    around = (
        2 * activation_bytes(run) + context_bytes(run) + qkv_bytes(run, P2P) // low * FP32_BYTES
    )
    return around + own * (gathered if ALLGATHER in ways else passed)


def sequence_shards(run: RunConfig) -> int:
    return run.tp if run.parallel.sequence_parallel else 1


def residual_bytes(run: RunConfig) -> int:
    """Return the bytes of (s, b, h) or its sequence shard."""
    return activation_bytes(run) // sequence_shards(run)


# Blocks of a whole activation, at least: the first is not overlapped, and matmuls with fewer rows are slower.
EXCHANGED_BLOCKS = 4


def overlap_blocks(tp: int) -> int:
    return -(-EXCHANGED_BLOCKS // tp)


def all_reduce(bytes: int, tp: int) -> Collectives:
    return (Collective("all_reduce", "tp", bytes),) if tp > 1 else ()


@dataclass(frozen=True)
class MatmulCollectives:
    """Collectives into a column-parallel matmul and out of a row-parallel one."""

    into: Collectives
    into_backward: Collectives
    out: Collectives
    out_backward: Collectives

    def column(self, name: str, gemm: tuple[int, int, int], **more: int) -> Record:
        return linear(name, gemm, forward=self.into, backward=self.into_backward, **more)

    def row(self, name: str, gemm: tuple[int, int, int], **more: int) -> Record:
        return linear(name, gemm, forward=self.out, backward=self.out_backward, **more)

    @staticmethod
    def from_run(run: RunConfig, whole: int | None = None) -> MatmulCollectives:
        """Return all-reduces, or with sequence parallelism gathers and scatters; backward gathers once more for weight gradients.

        whole: bytes of an activation; None: width h.
        """
        whole = activation_bytes(run) if whole is None else whole
        if sequence_shards(run) == 1:
            summed = all_reduce(whole, run.tp)
            return MatmulCollectives((), summed, summed, ())
        gather = Collective("all_gather", "tp", whole // run.tp)
        scatter = Collective("reduce_scatter", "tp", whole)
        return MatmulCollectives((gather,), (gather, scatter), (scatter,), (gather,))


def recompute_groups(layers: int, method: str, number: int) -> list[range]:
    """Return the layers recomputed together: all (uniform) or each from the first (block)."""
    if method == "block":
        return [range(i, i + 1) for i in range(min(number, layers))]
    return [range(i, min(i + number, layers)) for i in range(0, layers, number)]


# Adapters (`nn.adapters`) ---------------------------------------------------------------------------------------------------------


def adapted(run: RunConfig, records: Records) -> Records:
    if not run.lora.on:
        return records
    return tuple(
        each for record in records for each in (_frozen(run, record), *_adapters(run, record))
    )


def _frozen(run: RunConfig, record: Record) -> Record:
    """Return a record without weight gradients; without an adapter no input is saved."""
    matmul = record.gemm is not None and record.parameters > 0 or record.is_head
    saved = record.saved_bytes
    if record.name in input_projections() and not run.lora.parts(record.name, run.model):
        saved = 0
    if record.name == FC1 and run.lora.parts(FC2, run.model) and not run.lora.parts(FC1, run.model):
        saved = 0
    gathers = _linear_name(record) in column_parallel()  # only for the weight gradient
    backward = record.backward[-1:] if gathers else record.backward
    return replace(
        record,
        replicated=0,
        of_heads=0,
        divided=0,
        saved_bytes=saved,
        backward=backward,
        frozen=matmul,
        flops_backward=record.flops_forward if matmul else record.flops_backward,
    )


def _linear_name(record: Record) -> str:
    return record.name.replace("shared_", "linear_")


def _adapters(run: RunConfig, record: Record) -> Records:
    name = _linear_name(record)
    rank = run.lora.rank
    matrices = run.lora.parts(name, run.model)
    if not matrices or record.gemm is None:
        return ()
    rows, outputs, inputs = record.gemm
    width = len(matrices) * rank
    is_row_parallel = name in row_parallel()
    if record.grouped:
        down = linear(f"{name}_lora_A", (rows, width, inputs))
        up = linear(f"{name}_lora_B", (rows, outputs, width))
        return (
            _of_experts(run, record, down, width * inputs, not is_row_parallel),
            _of_experts(run, record, up, outputs * rank, is_row_parallel),
        )
    saved = rows * width * run.element_bytes
    around = MatmulCollectives.from_run(run, saved)
    shards = sequence_shards(run)
    if is_row_parallel:
        down = around.row(f"{name}_lora_A", (rows, width, inputs))
        up = linear(
            f"{name}_lora_B",
            (rows // shards, outputs, width),
            saved_bytes=saved // shards,
            replicated=outputs * rank,
        )
    else:
        down = linear(
            f"{name}_lora_A",
            (rows // shards, width, inputs),
            forward=around.into,
            backward=around.into_backward[-1:],
            replicated=width * inputs,
        )
        up = linear(f"{name}_lora_B", (rows, outputs, width), saved_bytes=saved)
    return replace(down, adapts=True), replace(up, parameters=outputs * rank, adapts=True)


def _of_experts(
    run: RunConfig, experts: Record, matmul: Record, elements: int, whole: bool
) -> Record:
    """Return an expert adapter's matmul for all experts.

    whole: ranks that share an expert all have the matrix.
    """
    count = experts.gemm_count
    divided = bool(experts.divided)
    size = elements * count
    is_shared = not divided or (run.parallel.expert_tensor_parallel_size or run.tp) > 1
    replicated = size if whole and is_shared else 0
    return replace(
        matmul,
        gemm_count=count,
        grouped=True,
        parameters=size,
        divided=size if divided else 0,
        replicated=replicated,
        of_heads=replicated,
        flops_forward=matmul.flops_forward * count,
        flops_backward=matmul.flops_backward * count,
        adapts=True,
    )
