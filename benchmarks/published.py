"""A measured row in the published tables' columns, so that both can be laid side by side.

Test: pytest tests/test_benchmark_tables.py
"""

from __future__ import annotations

from fugaku_megatron.perf.rows import load

DOCUMENT = "002"  # whose columns they are


def header() -> tuple[str, ...]:
    """Nodes, Freq, Size, DP, TP, PP, MBS, GBS, Mem, Sec/it, TFLOPs, Est. Aggr. PetaFLOPs, Notes."""
    return next(row.table.header for row in load([DOCUMENT]))


def cells(*, ranks: int, ghz: float, size: str, tp: int, pp: int, micro_batch_size: int, global_batch_size: int, mib: float,
          seconds: float, tflops: float, notes: str) -> tuple[str, ...]:
    """The cells under `header`; a rank stands where the tables have a node. tflops: of one rank."""
    return (str(ranks), f"{ghz:.1f}GHz", size.upper(), str(ranks // (tp * pp)), str(tp), str(pp), str(micro_batch_size),
            str(global_batch_size), f"{mib:.1f} MiB", f"{seconds:.2f}", f"{tflops:.2f}", f"{tflops * ranks / 1024:.4f}", notes)


def title(size: str, seq_length: int, recompute: bool, software: str) -> str:
    """A table's title as the published ones say it."""
    return (f"{size.upper()} model, Sequence Length={seq_length} \\w{'' if recompute else chr(92) + 'o'} Activation Checkpointing, "
            f"{software}")
