"""Seconds of counted work on one rank: a roofline model whose roofs are the shares of the machine's rates that software reaches.

Time is the sum of matrix products, element-wise memory traffic, page faults and operator calls; nothing overlaps inside one rank.
GEMM on a CPU runs at peak x fraction x maximum / (1 + (half / n)^exponent), a curve of square n x n x n products. For a product
(m, n, k) the curve's n is the cube root of m n k on published curves, whose losses come from the division among threads; on curves
that calibrate measured, whose losses come from packing and loading operands, it is the harmonic mean of the sides.
GEMM on a GPU runs in tiles of 256 x 128 in waves over the SMs, with efficiency K / (K + half), and more slowly when a side is not a
multiple of 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..costs import accounting
from .machine import GB, Machine
from .network import Network
from .parameters import Parameters
from .software import Software
from .work import Exchange, Product, Work

# glibc: larger blocks come from mmap and go back at once. Blocks of up to this size come from the heap, which keeps them, once one
# of their size has been freed: the threshold grows with what is freed, as far as this limit (DEFAULT_MMAP_THRESHOLD_MAX).
MMAP_BYTES = 32 << 20
TILES = ((256, 128), (128, 256))  # rows x columns of a GPU's GEMM tile
GPU_HALF_K = 600.0  # K at which a tile reaches half its rate, before the fitted factor gemm_half


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds by cause."""

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
    """One rank's share of a node, and the software that runs on it."""

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
        """Seconds of `work` by cause, collectives of the tensor-parallel group included."""
        gemm = sum(self._product(p) for p in work.products if not p.attention)
        attention = sum(self._product(p) for p in work.products if p.attention)
        reduce = sum(times * self.network.seconds(c.verb, c.group, c.bytes) for c, times in work.collectives)
        reduce += sum(times * self._waiting(exchange) for exchange, times in work.exchanges)
        seconds = Seconds(gemm=gemm, attention=attention, elementwise=self.traffic(work.moved),
                          page_faults=self._faults(work.allocations), calls=self.calls(work.calls), tensor_parallel=reduce)
        return seconds * self.machine.host_factor

    def _waiting(self, exchange: Exchange) -> float:
        """Seconds for which an exchange holds up the products that it goes on behind."""
        travelling = sum(self.network.messages(c.verb, c.group, c.bytes) for c in exchange.collectives)
        return max(0.0, travelling + self._product(exchange.first) - sum(map(self._product, exchange.behind)))

    def traffic(self, bytes: float) -> float:
        """Seconds of element-wise operators that read and write `bytes` in total."""
        rate = self.machine.stream_gbs * GB * self.parameters.elementwise_fraction / self._sharers
        return bytes / rate * self._slowness

    @property
    def _sharers(self) -> int:
        """The parts into which a node's memory bandwidth falls, of which a rank has one.

        Software that leaves a tensor's pages where its allocator put them has them on one unit, however many a rank spans: STREAM
        then falls from 804 to 93 GB/s on an A64FX, by more than its four units. Ranks of one unit each use all of them.
        """
        return max(self.ranks_per_node, self.machine.units) if self.software.counts["pages_on_one_unit"] else self.ranks_per_node

    def calls(self, count: float) -> float:
        """Seconds of `count` operator calls: dispatch and team start, without the data they work on."""
        return count * self.parameters.call_us * 1e-6 * self._slowness

    def _faults(self, allocations: Iterable[tuple[int, float]]) -> float:
        """Seconds to zero the pages of every large block again, and to undo the network's registration of each block that is freed.

        allocations: (bytes of a block, how often it is allocated).
        """
        kind, parameters = self.software.page_faults, self.parameters
        large = [(size, times) for size, times in allocations if size > MMAP_BYTES]
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
        """Seconds of a fused kernel, which computes the products of what is seen only and, backward, the scores again.

        Dropout decides on each probability once in forward and once in backward, whatever the head size.
        """
        name, again = ("attention_backward", accounting.ATTENTION_BACKWARD_SHARE) if p.backward else ("attention_forward", 1.0)
        length = sorted((p.m, p.n, p.k))[1]  # two of the sides are the sequence length, the third one the head size
        share = getattr(self.parameters, name) / (1 + getattr(self.parameters, f"{name}_half") / length)
        of_a_probability = again * 4 * (p.m * p.n * p.k // length**2)
        dropped = self.parameters.dropout_flops / of_a_probability if p.dropout else 0.0
        if self.software.counts["causal"]:
            flops *= p.seen * (again / 2 if p.backward else 1.0)
        return flops / self._peak * (1 / share + dropped)

    def _cpu(self, p: Product) -> float:
        curve = self.machine.gemm_curve(self.machine.threads // self.ranks_per_node)
        if self.software.measured_on(self.machine):  # elements moved per multiplication: 3 / n for a square product
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
        """Useful share of the tiles' work: tiles at the edges are partly empty, and so is the last wave over the SMs."""
        sms = self.machine.threads
        tiles = math.ceil(p.m / rows) * math.ceil(p.n / columns) * p.count
        return p.m * p.n * p.count / (math.ceil(tiles / sms) * sms * rows * columns)
