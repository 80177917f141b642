"""Activations of a micro-batch and the collectives of tensor-parallel ranks around their matmuls, in bytes. No torch.

Between the matmuls every rank works on whole activations (s, b, h), or with --sequence-parallel on its 1/t of the sequence
(Korthikanti et al. 2022, arXiv:2205.05198). Left out: what an operation keeps (`accounting`).
Legend: s sequence, b micro-batch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.layout import sequence_parts
from ..config.run_config import ModelConfig, RunConfig


@dataclass(frozen=True)
class Collective:
    """`bytes` handed over by this rank in one call of `verb` on communicator `group` ("tp", "pp", "dp", "embedding")."""

    verb: str
    group: str
    bytes: int


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
