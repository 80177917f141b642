"""Seconds of counted work on one rank: a roofline whose roofs are shares of the machine's, as the software reaches them.

Time is matrix products + element-wise traffic + page faults + operator calls; nothing overlaps inside one rank.
GEMM, CPU: peak x fraction x maximum / (1 + (half / n)^exponent), curves of square products. On published curves, which lose by the
division among threads, n is the cube root of m n k; on those that calibrate measured, which lose by packing and moving operands
that come from memory, n is the harmonic mean of the sides. GEMM, GPU: tiles of 256 x 128 in waves over the SMs, K / (K + half), and
a slow path for sides that 8 does not divide.
Test: pytest tests/test_perf_cost.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..run import accounting
from .machine import GB, Machine
from .network import Network
from .parameters import Parameters
from .software import Software
from .work import Product, Work

MMAP_BYTES = 32 << 20  # glibc: larger blocks always come from mmap and go back at once (M_MMAP_THRESHOLD's upper limit)
TILES = ((256, 128), (128, 256))
GPU_HALF_K = 600.0


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Time by cause."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    page_faults: float = 0.0
    calls: float = 0.0
    tensor_parallel: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, times: float) -> Seconds:
        return Seconds(**{name: value * times for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's share of a node, and the software on it."""

    machine: Machine
    software: Software
    parameters: Parameters
    network: Network
    precision: str
    nodes: int
    ranks_per_node: int

    @property
    def _peak(self) -> float:
        precision = self.software.counts["computes_in"] or self.precision
        return self.machine.peak_tflops[precision] * 1e12 * self.machine.clock / self.ranks_per_node

    @property
    def _slowness(self) -> float:
        return (self.parameters.old_torch if self.software.old_torch else 1.0) / self.machine.clock

    def seconds(self, work: Work) -> Seconds:
        """Time of `work` by cause, collectives of the tensor-parallel group included."""
        gemm = sum(self._product(p) for p in work.products if not p.attention)
        attention = sum(self._product(p) for p in work.products if p.attention)
        reduce = sum(times * self.network.seconds(c.verb, c.group, c.bytes) for c, times in work.collectives)
        seconds = Seconds(gemm=gemm, attention=attention, elementwise=self.traffic(work.moved),
                          page_faults=self._faults(work.allocations), calls=self.calls(work.calls), tensor_parallel=reduce)
        return seconds * self.machine.host_factor

    def traffic(self, bytes: float) -> float:
        """Element-wise passes over `bytes`."""
        rate = self.machine.stream_gbs * GB * self.parameters.elementwise_fraction / self.ranks_per_node
        return bytes / rate * self._slowness

    def calls(self, count: float) -> float:
        """Operator calls, apart from their data."""
        return count * self.parameters.call_us * 1e-6 * self._slowness

    def _faults(self, allocations: Iterable[tuple[int, float]]) -> float:
        """Zeroing the pages of every large block again, and undoing the network's registration of each block that goes."""
        kind, parameters = self.software.page_faults, self.parameters
        large = [(size, times) for size, times in allocations if size >= MMAP_BYTES]
        if kind == "none" or not large:
            return 0.0
        seconds = sum(size * times for size, times in large) * self.ranks_per_node / (parameters.fault_gbs * GB)
        if kind == "registered" or self.nodes > 1:
            seconds += sum(times for _, times in large) * parameters.unmap_ms * 1e-3
        return seconds / self.machine.clock

    def _product(self, p: Product) -> float:
        flops = 2.0 * p.m * p.n * p.k * p.count * p.times
        if p.attention and self.parameters.attention_forward:
            return self._attention(p, flops)
        return flops / (self._peak * (self._gpu(p) if self.machine.kind == "gpu" else self._cpu(p)))

    def _attention(self, p: Product, flops: float) -> float:
        """A kernel of its own: below the diagonal only, and in the backward the scores' products once more."""
        name = "attention_backward" if p.backward else "attention_forward"
        length = max(p.m, p.n, p.k)  # which of them it is depends on the product; heads are narrower
        share = getattr(self.parameters, name) / (1 + getattr(self.parameters, f"{name}_half") / length)
        if self.software.counts["causal"]:
            flops *= 0.5 * (accounting.ATTENTION_BACKWARD_SHARE / 2 if p.backward else 1.0)
        return flops / (self._peak * share)

    def _cpu(self, p: Product) -> float:
        curve = self.machine.gemm_curve(self.machine.threads // self.ranks_per_node)
        if self.software.measured_on(self.machine):  # what is moved over what is multiplied: 3 / n of a square product
            n = 3 / (1 / p.m + 1 / p.n + 1 / p.k)
        else:
            n = (p.m * p.n * p.k) ** (1 / 3)
        shape = curve.maximum / (1 + (curve.half * self.parameters.gemm_half / n) ** curve.exponent)
        return self.parameters.gemm_fraction * shape

    def _gpu(self, p: Product) -> float:
        filled = max(self._waves(p, *tile) for tile in TILES)
        fraction = self.parameters.gemm_fraction * filled * p.k / (p.k + GPU_HALF_K * self.parameters.gemm_half)
        return fraction * (1.0 if p.n % 8 == 0 and p.k % 8 == 0 and p.m % 8 == 0 else self.parameters.unaligned)

    def _waves(self, p: Product, rows: int, columns: int) -> float:
        """Useful share of the tiles that run: those at the edges are partly empty, and so is the last wave over the SMs."""
        sms = self.machine.threads
        tiles = math.ceil(p.m / rows) * math.ceil(p.n / columns) * p.count
        return p.m * p.n * p.count / (math.ceil(tiles / sms) * sms * rows * columns)
