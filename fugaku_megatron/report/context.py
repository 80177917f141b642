"""Context of a report's sections."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..calibration import calibrate
from ..comm.agreement import Nodes
from ..comm.base import Comm
from ..host.energy import Counters
from ..planner.machine import FP32
from ..text.named_files import JsonObject

SHRUNK_GFLOPS = 4.0  # of one thread, below which a CPU is emulated, or so slow that whole sizes would take hours
TRAINING_SHARE = 0.6  # of the matmuls' rate
UNKNOWN_GFLOPS = 100.0  # of a rank without measured matmuls


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """rows x cols: element-wise kernels
    m, n, k: matmuls
    s: tokens of attention
    words: vocabulary
    """

    rows: int = 37
    cols: int = 200
    m: int = 37
    n: int = 83
    k: int = 65
    s: int = 45
    heads: int = 3
    d: int = 64
    words: int = 301


@dataclass(frozen=True, kw_only=True)
class Scale(calibrate.Scale):
    """Sizes of all sections.

    elementwise: memory-bound kernels
    messages: bytes of collectives
    model: changes to recipe 124m; layers: shape -> changes to its recipe
    sequences: the first length that fits into the time is used
    """

    rounds: int = 3
    elementwise: Sizes = Sizes(rows=4096, cols=2048, heads=12, d=64, words=64)
    messages: tuple[int, ...] = (1 << 14, 1 << 18, 1 << 22, 1 << 26)
    model: JsonObject = field(default_factory=dict)
    layers: JsonObject = field(default_factory=dict)
    sequences: tuple[int, ...] = (2048, 1024, 512, 256)


SHRUNK = Scale(
    sizes=(32, 64, 96),
    cold_bytes=1 << 18,
    lengths=(32, 64, 96),
    triad=1 << 16,
    elements=1 << 14,
    elementwise=Sizes(rows=64, cols=256, heads=2, d=32, words=64),
    rounds=1,
    messages=(1 << 12, 1 << 16),
    reduced=1 << 18,
    model={
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "vocab_size": 128,
    },
    layers={"hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 128, "kv_channels": 8},
    sequences=(32,),
)


@dataclass(kw_only=True)
class Context:
    """seconds: for the current section
    free: bytes of node memory at the start
    save: directory for checkpoints; None: the system's temporary directory
    compute: this rank's kernel measurements
    energy: this node's counters, on its first rank
    mapping: the log's lines about ranks and cores
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
    compute: calibrate.Compute | None = None
    machine: JsonObject | None = None

    @property
    def left(self) -> float:
        """Return the seconds until the section should end."""
        return self.seconds - (time.monotonic() - self.begin)

    @property
    def training_flops(self) -> float:
        """Return the rank's FLOP/s in training: a little below its matmuls."""
        points = self.compute.gemm[FP32] if self.compute else ()
        gflops = max((rate for _, rate in points), default=UNKNOWN_GFLOPS)
        return TRAINING_SHARE * gflops * 1e9

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value, so that all decide alike. Collective."""
        return self.world.broadcast_object(value)
