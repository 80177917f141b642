"""One rank's seconds of computation and communication, and the communication that computation
hides.

Computation is a roofline model. GEMM on a CPU runs at peak x fraction x maximum / (1 + (half /
n)^exponent); n is the cube root of m n k for published curves, and the harmonic mean of the sides
for calibrate's curves. A matmul in INT8 reaches the same fraction of INT8's peak, and operands are
quantized at the memory's rate, unless calibrate measured both. GEMM on a GPU runs in waves of
tiles. Collectives are rings, or recursive halving and doubling if faster. MPI's rings cross nodes
at the slowest link; software with two-level sums reduces inside a node first. Left out: routes
through the torus; groups are assumed to be compact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..config import features
from ..config.fields import check
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs.attention import ATTENTION_BACKWARD_SHARE
from ..costs.records import Collective
from ..costs.sizes import FP32_BYTES
from .machine import GB, INT8, GemmCurve, Machine
from .software import Parameters, Software
from .system import System
from .work import ExpertExchange, Matmul, OverlappedCollectives, Work

LARGE_REDUCTIONS = ("dp", "edp", "embedding")  # communicators with gradient all-reduces


@dataclass(frozen=True, kw_only=True)
class Network:
    """Communicators for a layout on a machine.

    slow: large all-reduces at the machine's pessimistic rate
    """

    machine: Machine
    parameters: Parameters
    layout: Layout
    ranks_per_node: int
    active: frozenset[str] = frozenset()
    slow: bool = False

    def seconds(self, verb: str, group: str, bytes: int) -> float:
        """Return the seconds of a collective or message. bytes: of a rank's input"""
        members, together = self._group(group)
        if members == 1:
            return 0.0
        machine = self.machine
        if verb == "send" and members <= together:
            return machine.intra_alpha_us * 1e-6 + bytes / (machine.intra_gbs * GB)
        if verb == "send":
            rate = min(machine.link_gbs, machine.injection_gbs / self.ranks_per_node)
            rate *= self.parameters.transfer_fraction
            return machine.link_alpha_us * 1e-6 + bytes / (rate * GB)
        if verb == "all_to_all":
            return self._exchange(group, bytes)
        size = bytes * members if verb == "all_gather" else bytes
        passes = 2 if verb == "all_reduce" else 1
        inside = min(members, together)
        levels = (
            members == inside or features.TWO_LEVEL_SUMS in self.active and members % inside == 0
        )
        within = self.parameters.intra_reduce_gbs or machine.intra_gbs
        if not (levels and features.NODE_SUMS in self.active):  # not in memory that the ranks share
            within = self.parameters.intra_reduce_gbs or machine.intra_reduce_gbs or within
        if not levels:
            between = self._between_rate(group, self.ranks_per_node // inside)
            rate = min(between, within) if inside > 1 else between
            ring = self._ring(size, members, passes, rate, machine.link_alpha_us)
            return self._wait(group, members) + ring
        between = self._between_rate(group, self.ranks_per_node)
        return self._ring(size, inside, passes, within, machine.intra_alpha_us) + self._ring(
            size / inside, members // inside, passes, between, machine.link_alpha_us
        )

    def messages(self, verb: str, group: str, bytes: int) -> float:
        """Return the seconds for a collective as pairwise messages.

        Remote data crosses a node's ports once for each rank.
        """
        members, together = self._group(group)
        part = bytes if verb == "all_gather" else bytes / members
        inside = min(members, together)
        near = (inside - 1) * part
        far = (members - inside) * part
        between = self._between_rate(group, self.ranks_per_node)
        machine = self.machine
        return (
            near / (machine.intra_gbs * GB)
            + far / (between * GB)
            + ((inside - 1) * machine.intra_alpha_us + (members - inside) * machine.link_alpha_us)
            * 1e-6
        )

    def _exchange(self, group: str, bytes: int) -> float:
        """Return the seconds for an all_to_all, with one message per node pair."""
        members, together = self._group(group)
        inside = min(members, together)
        nodes = members // inside
        machine = self.machine
        if (
            inside == 1
            or nodes == 1
            or members % inside
            or features.TWO_LEVEL_SUMS not in self.active
        ):
            return self.messages("all_to_all", group, bytes)
        near = (inside - 1) / inside * bytes
        far = (nodes - 1) / nodes * bytes
        senders = min(inside, nodes - 1)
        between = self._between_rate(group, self.ranks_per_node * senders // inside)
        return (
            near * (1 + (nodes - 1) / nodes) / (machine.intra_gbs * GB)
            + far * inside / senders / (between * GB)
            + 3 * (inside - 1) * machine.intra_alpha_us * 1e-6
            + (nodes - 1) / senders * machine.link_alpha_us * 1e-6
        )

    def between_nodes(self, group: str) -> bool:
        members, together = self._group(group)
        return members > together

    def _wait(self, group: str, members: int) -> float:
        """Return the seconds until the last rank begins, if starts are uniform in `wait_ms`.

        Large reductions, which take seconds, have it in their rate.
        """
        if group in LARGE_REDUCTIONS:
            return 0.0
        return self.parameters.wait_ms * 1e-3 * members / (members + 1)

    def inside_node(self, group: str) -> bool:
        members, together = self._group(group)
        return members <= together and features.NODE_SUMS in self.active

    def _group(self, group: str) -> tuple[int, int]:
        layout = self.layout
        ranks = self.ranks_per_node
        etp = layout.etp or layout.tp
        if group == "ep" and etp < layout.tp:  # tensor-parallel ranks, then other replicas
            near = min(layout.tp // etp, layout.ep)
            if ranks < near * etp:
                return layout.ep, max(1, ranks // etp)
            return layout.ep, near * max(1, ranks // (layout.tp * layout.pp))
        sharing = layout.tp * layout.cp
        if group == "dp":  # ranks that share a sequence, then other replicas
            if ranks < sharing:
                return layout.replicas, max(1, ranks // layout.tp)
            return layout.replicas, layout.cp * max(1, ranks // (sharing * layout.pp))
        members, distance = {  # ranks, and between two of them in the world
            "tp": (layout.tp, 1),
            "etp": (etp, 1),
            "cp": (layout.cp, layout.tp),
            "pp": (layout.pp, sharing),
            "embedding": (min(2, layout.pp), sharing * (layout.pp - 1)),
            "ep": (layout.ep, layout.tp * layout.pp),
            "edp": (layout.edp, layout.pp * layout.ep * etp),
        }[group]
        return members, max(1, ranks // max(1, distance))

    def _between_rate(self, group: str, rings: int) -> float:
        """Return a ring link's GB/s between nodes if `rings` rings leave a node.

        Software whose waits are known reaches the link's rate between neighbours.
        """
        if self.parameters.wait_ms and group not in LARGE_REDUCTIONS:
            return min(self.machine.link_gbs, self.machine.injection_gbs / rings)
        # each link of a ring carries the vector twice
        own = self.parameters.reduce_gbs or 2 * self.machine.large_allreduce_gbs
        if self.slow and group in LARGE_REDUCTIONS and self.machine.slow_reduce_gbs:
            own = min(own, self.machine.slow_reduce_gbs)
        if (
            features.GRAD_REDUCE_IN_BF16 in self.active
            and group in LARGE_REDUCTIONS
            and self.machine.all_to_all_gbs
        ):
            own = min(own, self.machine.all_to_all_gbs / self.ranks_per_node)
        return min(own, self.machine.injection_gbs / rings)

    @staticmethod
    def _ring(size: float, members: int, passes: int, rate: float, alpha_us: float) -> float:
        steps = passes * min(members - 1, 2 * math.ceil(math.log2(members)))
        return steps * alpha_us * 1e-6 + passes * (members - 1) / members * size / (rate * GB)


def exposed(
    collectives: Sequence[Collective],
    seconds: Callable[[Collective], float],
    forward: float,
    backward: float,
    active: frozenset[str],
) -> float:
    """Return the seconds per iteration that a stage waits for `collectives`.

    forward, backward: seconds per micro-batch
    """
    reductions = [c for c in collectives if c.group in ("dp", "edp") and c.verb != "all_gather"]
    gathers = [c for c in collectives if c.verb == "all_gather"]
    others = [c for c in collectives if c not in reductions and c not in gathers]
    waiting = sum(map(seconds, others))
    if features.OVERLAP_GRAD_REDUCE in active:
        computed = _shares(reductions, backward)
        waiting += max(0.0, _second_end(computed, map(seconds, reductions)) - backward)
    else:
        waiting += sum(map(seconds, reductions))
    if features.OVERLAP_PARAM_GATHER in active:
        gathers.reverse()
        end = _second_end(map(seconds, gathers), _shares(gathers, forward))
        return waiting + max(0.0, end - forward)
    return waiting + sum(map(seconds, gathers))


def _shares(buckets: Sequence[Collective], seconds: float) -> list[float]:
    """Return each bucket's share of the seconds of a computation, by bytes."""
    whole = sum(c.bytes for c in buckets)
    return [seconds * c.bytes / whole for c in buckets]


def _second_end(firsts: Iterable[float], seconds: Iterable[float]) -> float:
    """Return the end of second steps, each after the bucket's first step and the second step before."""
    ready = 0.0
    clock = 0.0
    for first, second in zip(firsts, seconds):
        ready += first
        clock = max(clock, ready) + second
    return clock


# glibc maps larger blocks anew each time (DEFAULT_MMAP_THRESHOLD_MAX); freed smaller ones stay in the heap.
MMAP_BYTES = 32 << 20


TILES = ((256, 128), (128, 256))  # rows x columns of a GPU's GEMM tile


PARTIAL_MATMULS = 6  # in BF16, of --fp32-matmul bf16x3


GPU_HALF_K = 600.0  # K at which a tile reaches half its rate, before the fitted factor gemm_half


def quantized_bytes(elements: int, element_bytes: int) -> int:
    """Return the bytes moved to quantize operands: read for the scales, read again, and written."""
    return elements * (2 * element_bytes + 1)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """A rank's seconds by cause: computation, then exposed communication inside layers."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    page_faults: float = 0.0
    calls: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, times: float) -> Seconds:
        return Seconds(**{name: value * times for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Model of one rank, which converts work in FLOPs, bytes and calls into seconds."""

    machine: Machine
    software: Software
    parameters: Parameters
    network: Network
    precision: str
    nodes: int
    ranks_per_node: int
    element_bytes: int = FP32_BYTES
    splits_fp32: bool = False  # --fp32-matmul bf16x3

    @staticmethod
    def of(
        run: RunConfig,
        layout: Layout,
        system: System,
        parameters: Parameters | None = None,
        slow: bool = False,
    ) -> Rank:
        """Return the model of a run's rank. parameters: None: the system's. slow: as of `Network`"""
        parameters = parameters or system.parameters
        network = Network(
            machine=system.machine,
            parameters=parameters,
            layout=layout,
            ranks_per_node=system.ranks_per_node,
            active=system.software.active(run),
            slow=slow,
        )
        return Rank(
            machine=system.machine,
            software=system.software,
            parameters=parameters,
            network=network,
            nodes=system.nodes,
            precision=run.precision.name,
            element_bytes=run.element_bytes,
            ranks_per_node=system.ranks_per_node,
            splits_fp32=run.system.splits_fp32,
        )

    @cached_property
    def _peak(self) -> float:
        return self._peak_in(self.software.counts["computes_in"][self.precision])

    def _peak_in(self, precision: str) -> float:
        return self.machine.peak_tflops[precision] * 1e12 * self.machine.clock / self.ranks_per_node

    @cached_property
    def _int8_peak(self) -> float:
        check(
            INT8 in self.machine.peak_tflops,
            f"--int8 needs the rate of INT8 matmuls, which the description of machine {self.machine.name} "
            "lacks: calibrate again, or leave it out",
        )
        return self._peak_in(INT8)

    @cached_property
    def _matmul_share(self) -> float:
        """Matmul rate outside attention relative to the run's precision."""
        if not self.splits_fp32 or self.software.style != "native":
            return 1.0
        ratio = self.machine.peak_tflops["bf16"] / self.machine.peak_tflops["fp32"]
        measured = self.parameters.bf16x3
        check(
            bool(measured) or ratio > 1,
            f"--fp32-matmul bf16x3 needs BF16 arithmetic, which machine {self.machine.name} lacks "
            "by its description: leave it out, or calibrate again",
        )
        return measured or ratio / PARTIAL_MATMULS

    @cached_property
    def _slowness(self) -> float:
        return (self.parameters.old_torch if self.software.old_torch else 1.0) / self.machine.clock

    def seconds(self, work: Work) -> Seconds:
        """Return the seconds by cause, collectives inside a layer included."""
        gemm = sum(self._matmul(p) for p in work.matmuls if not p.attention)
        attention = sum(self._matmul(p) for p in work.matmuls if p.attention)
        sent = [
            (
                c.group,
                times * (self.network.seconds(c.verb, c.group, c.bytes) + self._registration(c)),
            )
            for c, times in work.collectives
        ]
        sent += [
            (exchange.group, times * self._waiting(exchange)) for exchange, times in work.exchanges
        ]
        shared = sum(waiting for group, waiting in sent if group == "cp")
        seconds = Seconds(
            gemm=gemm,
            attention=attention,
            elementwise=self.traffic(work.moved),
            page_faults=self._faults(work.allocations),
            calls=self.calls(work.calls),
            context_parallel=shared,
            tensor_parallel=sum(waiting for _, waiting in sent) - shared,
        )
        return seconds * self.machine.host_factor

    def _registration(self, collective: Collective) -> float:
        """Return the seconds to register a collective's block, which is newly mapped, with the network."""
        rate = self.parameters.register_gbs
        is_new = self.software.page_faults != "none" and collective.bytes > MMAP_BYTES
        if not rate or not is_new or not self.network.between_nodes(collective.group):
            return 0.0
        return collective.bytes / (rate * GB) / self.machine.clock

    def _waiting(self, exchange: OverlappedCollectives | ExpertExchange) -> float:
        if isinstance(exchange, ExpertExchange):
            return self._waiting_for_experts(exchange)
        sending = sum(
            (self.network.seconds if c.verb == "send" else self.network.messages)(
                c.verb, c.group, c.bytes
            )
            for c in exchange.collectives
        )
        first = self._matmul(exchange.first) if exchange.first else 0.0
        return max(0.0, sending + first - sum(map(self._matmul, exchange.overlapped)))

    def _waiting_for_experts(self, exchange: ExpertExchange) -> float:
        """Return `_waiting` for expert rows. Inside a node, ranks exchange rows without computing."""
        far = not self.network.inside_node(exchange.group)
        groups = exchange.groups if far else 1
        there, back = (
            groups * sum(self.network.seconds(c.verb, c.group, c.bytes // groups) for c in way)
            for way in (exchange.there, exchange.back)
        )
        if not far:
            return there + back
        computed = sum(map(self._matmul, exchange.overlapped))
        half = sum(map(self._matmul, exchange.around)) / 2
        ends = max(half, there / groups) + computed + max(half, back / groups)
        return max(ends, there + back) - computed - 2 * half

    def traffic(self, bytes: float) -> float:
        """Return the seconds of memory traffic.

        Without page placement a tensor is on one unit even if a rank spans several: STREAM then
        falls from 804 to 93 GB/s on an A64FX, by more than its four units.
        """
        sharers = self.ranks_per_node
        if self.software.counts["pages_on_one_unit"]:
            sharers = max(sharers, self.machine.units)
        rate = self.machine.stream_gbs * GB * self.parameters.elementwise_fraction / sharers
        return bytes / rate * self._slowness

    def calls(self, count: float) -> float:
        return count * self.parameters.call_us * 1e-6 * self._slowness

    def _faults(self, allocations: Iterable[tuple[int, float]]) -> float:
        """Return the seconds to zero every large block's pages, and to deregister freed blocks from
        the network.

        allocations: (block bytes, number)
        """
        kind = self.software.page_faults
        parameters = self.parameters
        large = [(size, times) for size, times in allocations if size > MMAP_BYTES]
        if kind == "none" or not large:
            return 0.0
        seconds = (
            sum(size * times for size, times in large)
            * self.ranks_per_node
            / (parameters.fault_gbs * GB)
        )
        if kind == "registered" or self.nodes > 1:
            seconds += sum(times for _, times in large) * parameters.unmap_ms * 1e-3
        return seconds / self.machine.clock

    def _matmul(self, p: Matmul) -> float:
        flops = 2.0 * p.m * p.n * p.k * p.count * p.times
        if p.fp32_share is not None:
            return flops / (self._peak_in("fp32") * p.fp32_share)
        if p.attention and self.parameters.attention_forward:
            return self._attention(p, flops)
        if p.quantized:
            return flops / (self._int8_peak * self._cpu(p, self._curves[True])) + self._quantizing(
                p
            )
        share = 1.0 if p.attention else self._matmul_share
        return flops / (
            self._peak
            * share
            * (self._gpu(p) if self.machine.kind == "gpu" else self._cpu(p, self._curves[False]))
        )

    def _quantizing(self, p: Matmul) -> float:
        """Return the seconds to quantize operands, without the first one if the measured rate includes it."""
        first = 0 if self.machine.int8_curves else p.m * p.k
        second = p.k * p.n if p.quantized > 1 else 0
        return self.traffic(quantized_bytes((first + second) * p.times, self.element_bytes))

    def _attention(self, p: Matmul, flops: float) -> float:
        """Return the seconds in a fused kernel, which recomputes the scores in backward.

        Dropout decides once per probability in each pass.
        """
        name, again = (
            ("attention_backward", ATTENTION_BACKWARD_SHARE)
            if p.backward
            else ("attention_forward", 1.0)
        )
        length = sorted((p.m, p.n, p.k))[1]  # two sides are the sequence length, one the head size
        half: float = getattr(self.parameters, f"{name}_half")
        maximum: float = getattr(self.parameters, name)
        share = maximum / (1 + half / length)
        of_a_probability = again * 4 * (p.m * p.n * p.k // length**2)
        dropped = self.parameters.dropout_flops / of_a_probability if p.dropout else 0.0
        if self.software.counts["causal"]:
            flops *= p.visible * (again / 2 if p.backward else 1.0)
        return flops / self._peak * (1 / share + dropped)

    @cached_property
    def _curves(self) -> dict[bool, GemmCurve]:
        """Curves of matmuls in the run's precision and, for True, in INT8."""
        threads = self.machine.threads // self.ranks_per_node
        return {int8: self.machine.gemm_curve(threads, int8) for int8 in (False, True)}

    def _cpu(self, p: Matmul, curve: GemmCurve) -> float:
        if self.software.measured_on(self.machine):  # by elements moved per multiplication
            n = 3 / (1 / p.m + 1 / p.n + 1 / p.k)
        else:
            n = (p.m * p.n * p.k) ** (1 / 3)
        shape = curve.maximum / (1 + (curve.half * self.parameters.gemm_half / n) ** curve.exponent)
        return float(self.parameters.gemm_fraction * shape)

    def _gpu(self, p: Matmul) -> float:
        filled = max(self._waves(p, *tile) for tile in TILES)
        parameters = self.parameters
        fraction = parameters.gemm_fraction * filled * p.k
        fraction /= p.k + GPU_HALF_K * parameters.gemm_half
        return fraction * (parameters.unaligned if any(n % 8 for n in (p.m, p.n, p.k)) else 1.0)

    def _waves(self, p: Matmul, rows: int, columns: int) -> float:
        """Return the useful share: edge tiles and the last wave over the SMs are partly empty."""
        sms = self.machine.threads
        tiles = math.ceil(p.m / rows) * math.ceil(p.n / columns) * p.count
        return p.m * p.n * p.count / (math.ceil(tiles / sms) * sms * rows * columns)
