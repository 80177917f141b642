"""What every section of a report gets: the ranks, the time, and the sizes of what it measures."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..comm.agreement import Nodes
from ..comm.base import Comm
from ..host.energy import Counters
from .kernel_checks import Sizes

SHRUNK_GFLOPS = 4.0  # of one thread, below which a CPU is emulated, or so slow that whole sizes would take hours
TRAINING_SHARE, UNKNOWN_GFLOPS = 0.6, 100.0  # of the matmuls' rate; of a rank whose matmuls were not measured


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of what is measured.

    sizes: of square matmuls, whose operands together have cold_bytes. lengths: of sequences in attention. triad, elements: of the
    vectors of STREAM and of the optimizer. elementwise: of the kernels that memory bounds. messages: bytes of collectives. reduced:
    bytes of the large all-reduce. model: what replaces values of recipe 124m. layers: shape -> what replaces values of its recipe.
    sequences: lengths of which the first that fits into the time is taken.
    """

    sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    cold_bytes: int = 256 << 20
    lengths: tuple[int, ...] = (512, 1024, 2048)
    triad: int = 1 << 25
    elements: int = 1 << 24
    elementwise: Sizes = Sizes(rows=4096, cols=2048, heads=12, d=64, words=64)
    rounds: int = 3
    messages: tuple[int, ...] = (1 << 14, 1 << 18, 1 << 22, 1 << 26)
    reduced: int = 128 << 20
    model: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    sequences: tuple[int, ...] = (2048, 1024, 512, 256)


SHRUNK = Scale(sizes=(32, 64, 96), cold_bytes=1 << 18, lengths=(32, 64, 96), triad=1 << 16, elements=1 << 14,
               elementwise=Sizes(rows=64, cols=256, heads=2, d=32, words=64), rounds=1, messages=(1 << 12, 1 << 16),
               reduced=1 << 18, model={"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
                                       "vocab_size": 128},
               layers={"hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 128, "kv_channels": 8}, sequences=(32,))


@dataclass(kw_only=True)
class Context:
    """seconds: of the section that runs. free: bytes of the node's memory at the start. save: folder of checkpoints; None: the
    system's folder for temporary files. compute: what the section of kernels measured of this rank, for the machine's description.
    energy: the counters of this node on its first rank. mapping: the log's lines about the ranks of this node and their cores.
    """

    world: Comm
    nodes: Nodes
    scale: Scale
    energy: Counters
    pinned: bool = False
    mapping: list[str] = field(default_factory=list)
    save: Path | None = None
    free: float = 0.0
    seconds: float = 0.0
    begin: float = field(default_factory=time.monotonic)
    compute: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] | None = None

    @property
    def left(self) -> float:
        """Seconds until the section should end, on this rank's clock."""
        return self.seconds - (time.monotonic() - self.begin)

    @property
    def training_flops(self) -> float:
        """FLOP/s that a rank may reach in training: a little below its matmuls, which the section of kernels measured."""
        gflops = max((rate for _, rate in self.compute.get("gemm", ())), default=UNKNOWN_GFLOPS)
        return TRAINING_SHARE * gflops * 1e9

    def agreed(self, value: Any) -> Any:
        """Rank 0's value on every rank, so that all decide alike. Collective."""
        return self.world.broadcast_object(value)
