"""Seconds of a forward pass over one micro-batch, with the experts of each layer divided over nodes.

Every node computes all of a layer except the experts, which are on one node each. The nodes add
their experts' results by an all-reduce. Left out: the head, which a prompt needs for one token, and
unequal numbers of rows of the experts.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from ..config.fields import check
from ..config.layer_kinds import GATED_DELTA_NET, MIXERS, LayerKind
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs.layers import layer_records
from ..costs.records import EXPERTS, Record
from ..costs.sizes import FP32_BYTES
from . import work
from .cost import Rank
from .machine import GB
from .model import BAND
from .software import MODEL_ERROR
from .system import System

PROJECTIONS = "delta_net_projections"
SCAN = "delta_net_scan"
ATTENTION = "attention"
DENSE = "dense_mlp"
ROUTED = "experts"
EXCHANGE = "exchange"
ELEMENTWISE = "elementwise"
PARTS = (PROJECTIONS, SCAN, ATTENTION, ROUTED, DENSE, EXCHANGE, ELEMENTWISE)


class Forward(NamedTuple):
    """Seconds by part, and each part's share of their sum with bounds that hold nine of ten runs."""

    seconds: dict[str, float]
    fast_exchange: float
    slow_exchange: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        return self.seconds[part] / self.total

    @property
    def total_bounds(self) -> tuple[float, float]:
        computed = self.total - self.seconds[EXCHANGE]
        factor = math.exp(BAND * MODEL_ERROR)
        return computed / factor + self.fast_exchange, computed * factor + self.slow_exchange

    def bounds(self, part: str) -> tuple[float, float]:
        """Return a share's bounds: two times that nobody measured, and the network's two rates."""
        factor = math.exp(BAND * MODEL_ERROR * math.sqrt(2))
        if part == EXCHANGE:
            others = self.total - self.seconds[part]
            return (
                self.fast_exchange / (self.fast_exchange + others * factor),
                self.slow_exchange / (self.slow_exchange + others / factor),
            )
        own = self.seconds[part]
        computed = self.total - own - self.seconds[EXCHANGE]
        return (
            own / (own + computed * factor + self.slow_exchange),
            own / (own + computed / factor + self.fast_exchange),
        )


def _part(kind: LayerKind, record: Record) -> str:
    if record.expert_step == EXPERTS:
        return ROUTED
    if record.name == "delta_rule":
        return SCAN
    linears: tuple[str, ...] = ()
    if kind.mixer is not None:
        linears = (*MIXERS[kind.mixer].linears, *MIXERS[kind.mixer].replicated)
    if record.name in linears and kind.mixer == GATED_DELTA_NET:
        return PROJECTIONS
    if record.mixes or record.name in linears:
        return ATTENTION
    return DENSE


def forward(run: RunConfig, system: System) -> Forward:
    """Model a forward pass. ValueError for more than one rank on a node or for parallel layouts."""
    check(
        max(run.tp, run.pp, run.cp, run.ep, system.ranks_per_node) == 1,
        "--forward models one rank on a node and experts divided over --nodes: leave out the parallel sizes, "
        "and pass --ranks-per-node 1",
    )
    rank = Rank.of(run, Layout(system.nodes, 1, 1, system.nodes), system)
    seconds = dict.fromkeys(PARTS, 0.0)
    for kind, layers in Counter(run.model.layer_kinds).items():
        for part, each in _layer(run, kind, rank).items():
            seconds[part] += layers * each
    exchanges = run.model.num_layers if run.model.num_experts and system.nodes > 1 else 0
    bytes = run.tokens_per_microbatch * run.model.hidden_size * FP32_BYTES
    all_reduce = rank.network.seconds("all_reduce", "dp", bytes)
    slow = replace(rank.network, slow=True).seconds("all_reduce", "dp", bytes)
    wire = 2 * (system.nodes - 1) / system.nodes * bytes / (system.machine.link_gbs * GB)
    seconds[EXCHANGE] = exchanges * all_reduce
    return Forward(seconds=seconds, fast_exchange=exchanges * wire, slow_exchange=exchanges * slow)


def _layer(run: RunConfig, kind: LayerKind, rank: Rank) -> dict[str, float]:
    """Return a layer's seconds by part. The grouped matmul of experts gives each thread its own."""
    machine = rank.machine
    code = rank.software
    nodes = rank.nodes
    thread = replace(rank, ranks_per_node=machine.threads)
    seconds = dict.fromkeys(PARTS, 0.0)
    for record in layer_records(run, kind):
        done = work.forward_matmuls(run, code, record)
        part = _part(kind, record)
        if part == ROUTED:
            held = -(-record.gemm_count // nodes)
            done = replace(done, matmuls=tuple(replace(p, times=held) for p in done.matmuls))
            seconds[part] += thread.seconds(done).total / machine.threads
        else:
            seconds[part] += rank.seconds(done).total
    whole = work.phases(run, code, kind)["layer_forward"]
    pairs = work.tensors(run, kind)["mlp"] * code.counts["layer_forward"]["mlp"][0]
    elsewhere = pairs * (1 - 1 / nodes) if run.model.num_experts else 0.0
    seconds[ELEMENTWISE] += rank.traffic(whole.moved - elsewhere) + rank.calls(whole.calls)
    return seconds
