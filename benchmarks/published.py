"""A measured row in the published tables' columns, so that both can be compared side by side."""

from __future__ import annotations

from fugaku_megatron.logs.iteration import PublishedRow
from fugaku_megatron.logs.iteration import published_header as header

__all__ = ("cells", "header", "title")


def cells(*, ranks: int, ghz: float, size: str, tp: int, pp: int, micro_batch_size: int, global_batch_size: int, mib: float,
          seconds: float, tflops: float, notes: str) -> tuple[str, ...]:
    """The cells under `header`; a rank takes the place of the tables' node. mib: of the largest rank; tflops: of one rank."""
    return PublishedRow(nodes=ranks, ranks=ranks, ghz=ghz, size=size.upper(), dp=ranks // (tp * pp), tp=tp, pp=pp,
                        mbs=micro_batch_size, gbs=global_batch_size, memory_mib=mib, seconds=seconds, tflops=tflops,
                        notes=notes).cells()


def title(size: str, seq_length: int, recompute: bool, software: str) -> str:
    """A table's title in the wording of the published ones."""
    return (f"{size.upper()} model, Sequence Length={seq_length} \\w{'' if recompute else chr(92) + 'o'} Activation Checkpointing, "
            f"{software}")
