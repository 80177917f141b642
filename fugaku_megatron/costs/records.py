"""Operations and their collectives on one rank for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.run_config import RunConfig

# Values of `Record.expert_step`.
DISPATCH = "dispatch"
EXPERTS = "experts"
COMBINE = "combine"
SHARED = "shared"


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
    expert_step: DISPATCH, EXPERTS, COMBINE, SHARED (expert's matmuls), or None.
    ends_layer: only the next layer reads the result.
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
    expert_step: str | None = None
    ends_layer: bool = False
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
        whole = run.activation_bytes if whole is None else whole
        if run.sequence_shards == 1:
            summed = all_reduce(whole, run.tp)
            return MatmulCollectives((), summed, summed, ())
        gather = Collective("all_gather", "tp", whole // run.tp)
        scatter = Collective("reduce_scatter", "tp", whole)
        return MatmulCollectives((gather,), (gather, scatter), (scatter,), (gather,))
