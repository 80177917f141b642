"""Each log interval gathers where the time of every rank went, names slow ranks in the log, and writes --log-ranks.

Ranks are judged over log intervals that are enough together (JUDGED_ITERATIONS, JUDGED_SECONDS). A rank is named when it was slow
in two judgements in a row; a single one is often the system's. One small all-gather per interval.
Left out: the clock of a rank (`host.observed`), what is slow (`logs.rank_table`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
from torch import Tensor

from ..comm.base import Comm
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import accounting
from ..host.observed import PHASES, Phases
from ..logs.rank_table import NAMED, Interval, Straggler, find
from ..logs.screen import append

Slow = set[tuple[int, str]]  # rank, phase
JUDGED_ITERATIONS, JUDGED_SECONDS = 10, 5.0  # a judgement needs as many of both; less is the noise of a start


class RankTimes:
    """The phases of a rank's iterations, and what all ranks' say at the end of an interval. say: prints a line on rank 0."""

    def __init__(self, run: RunConfig, layout: Layout, world: Comm, phases: Phases, say: Callable[[str], None]) -> None:
        self.layout, self.world, self.phases, self.say = layout, world, phases, say
        self.file = run.output.log_ranks if world.rank == 0 else None
        self.work = [sum(r.flops_forward + r.flops_backward for _, r in accounting.stage_records(run, layout, stage))
                     for stage in range(layout.pp)]
        self._rows: list[list[float]] = []  # of the interval's iterations: seconds of each phase
        self._judged: tuple[int, Tensor | float] = 0, 0.0  # iterations since the last judgement, and their seconds (ranks, phases)
        self._before: Slow = set()  # slow in the judgement before
        self._named: Slow = set()

    def begin(self) -> None:
        """Before an iteration."""
        self.phases.begin()

    def end(self, seconds: float) -> None:
        """After an iteration of so many seconds."""
        self._rows.append(self.phases.of_iteration(seconds))

    def finish_interval(self, iteration: int) -> None:
        """After the interval's last iteration. Collective."""
        own, everyone = torch.tensor(self._rows).mean(0), torch.empty(self.world.size, len(PHASES))
        self.world.all_gather(everyone, own)
        self._keep(self._interval(iteration, everyone))
        count, seconds = self._judged[0] + len(self._rows), self._judged[1] + everyone * len(self._rows)
        self._rows, self._judged = [], (count, seconds)
        if count >= JUDGED_ITERATIONS and float(seconds[0].sum()) >= JUDGED_SECONDS:
            self._judged = 0, 0.0
            if self.world.size > 1:
                self._name(find(self._interval(iteration, seconds / count), self.work))

    def _interval(self, iteration: int, seconds: Tensor) -> Interval:
        """seconds: of every rank in each phase (ranks, phases)."""
        return Interval(iteration, self.layout.tp, self.layout.pp, dict(zip(PHASES, seconds.t().tolist(), strict=True)))

    def _keep(self, interval: Interval) -> None:
        try:
            append(self.file, interval.line())
        except OSError as error:  # not worth ending a run
            self.say(f"--log-ranks {self.file}: no longer written: {error.strerror}")
            self.file = None

    def _name(self, found: list[Straggler]) -> None:
        slow = {(s.rank, s.phase) for s in found}
        lasting = slow & self._before
        if lasting - self._named:
            shown = [s for s in found if (s.rank, s.phase) in lasting][:NAMED]
            hosts = [self.world.broadcast_object(socket.gethostname(), s.rank) for s in shown]
            more = f"; and {len(lasting) - NAMED} more" if len(lasting) > NAMED else ""
            self.say("slow: " + "; ".join(s.text(host) for s, host in zip(shown, hosts, strict=True)) + more)
        for rank, phase in sorted(self._named - slow):
            self.say(f"no longer slow: rank {rank}, {phase}")
        self._before, self._named = slow, (self._named | lasting) & slow
