"""Activations of a micro-batch, what an operation on them is, and collectives around matmuls, in bytes. No torch.

Between the matmuls every rank works on whole activations (s, b, h), or with --sequence-parallel on its 1/t of the sequence
(Korthikanti et al. 2022, arXiv:2205.05198). Left out: what an operation keeps (`accounting`).
Legend: s sequence, b micro-batch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.layout import sequence_parts
from ..config.run_config import ModelConfig, RunConfig

FP32_BYTES = 4


@dataclass(frozen=True)
class Collective:
    """`bytes` handed over by this rank in one call of `verb` on communicator `group` ("tp", "pp", "dp", "embedding")."""

    verb: str
    group: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One operation on one rank for one micro-batch.

    name: layer operation. parameters: held by this rank. replicated: those of them that every tensor-parallel rank holds. of_heads:
    those of these whose gradient comes from a rank's own heads. gemm: (M, N, K) of the forward matmul and how many of them.
    flops_*: multiply and add counted apart, matmuls only, attention's over the full square. seen: the share of that square
    that a kernel needs. dropout: whether some of its probabilities are dropped.
    saved_bytes: kept from forward to backward. forward, backward: collectives in order.
    """

    name: str
    parameters: int = 0
    replicated: int = 0
    of_heads: int = 0
    gemm: tuple[int, int, int] | None = None
    gemm_count: int = 1
    seen: float = 1.0
    dropout: bool = False
    flops_forward: int = 0
    flops_backward: int = 0
    saved_bytes: int = 0
    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()


def linear(name: str, rows: int, outputs: int, inputs: int, bias: int, saved: int, forward: tuple[Collective, ...],
            backward: tuple[Collective, ...], replicated: int = 0) -> Record:
    """A matmul of the forward, of rows (rows, inputs), and the two of its gradients."""
    flops = 2 * rows * outputs * inputs
    return Record(name=name, parameters=outputs * inputs + bias, gemm=(rows, outputs, inputs), flops_forward=flops,
                  flops_backward=2 * flops, saved_bytes=saved, replicated=replicated, forward=forward, backward=backward)


def tokens_per_microbatch(run: RunConfig) -> int:
    """s b: the rows of a whole activation of one micro-batch."""
    return run.model.seq_length * run.batch.micro_batch_size


def element_bytes(run: RunConfig) -> int:
    """Bytes of an activation element."""
    return 4 if run.precision.name == "fp32" else 2


def activation_bytes(run: RunConfig) -> int:
    """Bytes of one whole (s, b, h) activation: what tensor-parallel ranks reduce."""
    return tokens_per_microbatch(run) * run.model.hidden_size * element_bytes(run)


def residual_bytes(run: RunConfig, tp: int) -> int:
    """Bytes of an activation between the matmuls, (s, b, h) or a part of it: what a rank keeps, and pipeline stages send."""
    return activation_bytes(run) // sequence_parts(run, tp)


EXCHANGED_BLOCKS = 4  # of a whole activation, at least: the first of them hides nothing, and matmuls of fewer rows are slower


def blocks_of_a_part(tp: int) -> int:
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
    def from_run(run: RunConfig, tp: int) -> MatmulCollectives:
        """Sums of whole activations; with sequence parallelism the parts are gathered, in backward once more for the weights."""
        whole = activation_bytes(run)
        if sequence_parts(run, tp) == 1:
            return MatmulCollectives((), all_reduce(whole, tp), all_reduce(whole, tp), ())
        gather, scatter = Collective("all_gather", "tp", whole // tp), Collective("reduce_scatter", "tp", whole)
        return MatmulCollectives((gather,), (gather, scatter), (scatter,), (gather,))


def cache_slots(model: ModelConfig, positions: int) -> int:
    """Positions of a sample whose keys and values are kept while it grows to `positions`: no more than a window has."""
    return min(positions, model.window or positions)


def cache_bytes(run: RunConfig, samples: int, positions: int, layers: int, tp: int) -> int:
    """Bytes of the keys and values of that many samples on a rank with `layers` layers."""
    model = run.model
    elements = samples * cache_slots(model, positions) * model.query_groups // tp * model.kv_channels
    return 2 * layers * elements * element_bytes(run)
