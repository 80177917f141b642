"""Slow ranks, by every rank's phase times."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
from torch import Tensor

from ...comm.base import Comm
from ...config.layout import Layout
from ...config.run_config import RunConfig
from ...costs.attention import document_length
from ...costs.flops import layer_flops
from ...costs.stages import stage_records
from ...data.marks import TokenCounts
from ...host.observed import PHASES, Phases
from ...training.trainer import IterationResult
from ..log.rank_table import NAMED, Interval, Straggler, find
from ..log.screen import append
from ..observer import MetricValues, Observer

Slow = set[tuple[int, str]]  # rank, phase


JUDGED_ITERATIONS = 10  # in a judgement, at least
JUDGED_SECONDS = 5.0  # in a judgement, at least
ATTENTION_COST = 2.0  # seconds per FLOP of attention, relative to a linear layer (measured)


class RankTimes(Observer):
    """Phase times per iteration, compared over all ranks."""

    def __init__(
        self,
        run: RunConfig,
        layout: Layout,
        world: Comm,
        phases: Phases,
        say: Callable[[str], None],
    ) -> None:
        self.run = run
        self.layout = layout
        self.world = world
        self.phases = phases
        self.say = say
        self.file = run.output.log_ranks if world.rank == 0 else None
        self.work = [
            sum(r.flops_forward + r.flops_backward for r in stage_records(run, stage))
            for stage in range(layout.pp)
        ]
        # Per iteration of the interval: seconds of each phase, and the rank's share of the computation.
        self._rows: list[list[float]] = []
        # Iterations since the last judgement, and their seconds (ranks, phases).
        self._judged: tuple[int, Tensor | float] = (0, 0.0)
        self._before: Slow = set()  # of the previous judgement
        self._named: Slow = set()

    def begin(self) -> None:
        self.phases.begin()

    def end(self, result: IterationResult) -> MetricValues:
        seconds = self.phases.of_iteration(result.seconds)
        self._rows.append([*seconds, *self._share(result.work)])
        return {}

    def _share(self, work: TokenCounts | None) -> list[float]:
        """Return computation relative to the data-parallel mean; empty if documents do not affect attention."""
        if work is None or not self.run.data.masks_attention:
            return []
        linear, attention = layer_flops(self.run)
        attention *= (
            ATTENTION_COST
            * work.squares
            / work.samples
            / self.run.model.seq_length
            / document_length(self.run)
        )
        return [(linear + attention * work.share) / (linear + attention)]

    def report(self, iteration: int) -> None:
        """Log all ranks' phase times, and name slow ranks after enough seconds. Collective."""
        own = torch.tensor(self._rows).mean(0)
        everyone = torch.empty(self.world.size, len(own))
        self.world.all_gather(everyone, own)
        try:
            append(self.file, self._interval(iteration, everyone).line())
        except OSError as error:  # not worth ending a run
            self.say(f"--log-ranks {self.file}: no longer written: {error.strerror}")
            self.file = None
        count = self._judged[0] + len(self._rows)
        seconds = self._judged[1] + everyone * len(self._rows)
        self._rows = []
        self._judged = (count, seconds)
        if count >= JUDGED_ITERATIONS and float(seconds[0, : len(PHASES)].sum()) >= JUDGED_SECONDS:
            self._judged = (0, 0.0)
            if self.world.size > 1:
                mean = seconds / count
                shares = mean[:, len(PHASES) :].flatten().tolist()
                self._name(find(self._interval(iteration, mean), self.work, shares))

    def _interval(self, iteration: int, seconds: Tensor) -> Interval:
        """Return the interval's row. seconds: (ranks, phases), or (ranks, phases + 1) with the share"""
        phases = seconds[:, : len(PHASES)].t().tolist()
        return Interval(
            iteration,
            self.layout.tp,
            self.layout.pp,
            dict(zip(PHASES, phases, strict=True)),
            self.layout.cp,
        )

    def _name(self, found: list[Straggler]) -> None:
        slow = {(s.rank, s.phase) for s in found}
        lasting = slow & self._before
        if lasting - self._named:
            shown = [s for s in found if (s.rank, s.phase) in lasting][:NAMED]
            hosts = [self.world.broadcast_object(socket.gethostname(), s.rank) for s in shown]
            more = f"; and {len(lasting) - NAMED} more" if len(lasting) > NAMED else ""
            self.say(
                "slow: "
                + "; ".join(s.text(host) for s, host in zip(shown, hosts, strict=True))
                + more
            )
        for rank, phase in sorted(self._named - slow):
            self.say(f"no longer slow: rank {rank}, {phase}")
        self._before = slow
        self._named = (self._named | lasting) & slow
