"""Ranks that are slow, found from where the time of every rank went."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
from torch import Tensor

from ..comm.base import Comm
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import accounting
from ..data.marks import TokenCounts
from ..host.observed import PHASES, Phases
from .rank_table import NAMED, Interval, Straggler, find
from .screen import append

Slow = set[tuple[int, str]]  # rank, phase


JUDGED_ITERATIONS, JUDGED_SECONDS = (
    10,
    5.0,
)  # a judgement needs as many of both; less is the noise of a start


ATTENTION_COST = 2.0  # seconds of attention's FLOPs, over those of as many FLOPs of a linear layer: about what is measured


class RankTimes:
    """The phases of a rank's iterations, and what all ranks' say at the end of an interval. say: prints a line on rank 0.

    Where attention ends with a document, a rank's share of the work goes with its phases.
    """

    def __init__(
        self,
        run: RunConfig,
        layout: Layout,
        world: Comm,
        phases: Phases,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.layout, self.world, self.phases, self.say = run, layout, world, phases, say
        self.file = run.output.log_ranks if world.rank == 0 else None
        self.work = [
            sum(
                r.flops_forward + r.flops_backward
                for _, r in accounting.stage_records(run, layout, stage)
            )
            for stage in range(layout.pp)
        ]
        self._rows: list[
            list[float]
        ] = []  # of the interval's iterations: seconds of each phase, and the share
        self._judged: tuple[int, Tensor | float] = (
            0,
            0.0,
        )  # iterations since the last judgement, and their seconds (ranks, phases)
        self._before: Slow = set()  # slow in the judgement before
        self._named: Slow = set()

    def begin(self) -> None:
        """Before an iteration."""
        self.phases.begin()

    def end(self, seconds: float, work: TokenCounts | None = None) -> None:
        """After an iteration of so many seconds. work: of its marked samples."""
        self._rows.append([*self.phases.of_iteration(seconds), *self._share(work)])

    def _share(self, work: TokenCounts | None) -> list[float]:
        """This rank's computation over the mean of the data-parallel ranks, where their documents differ."""
        if work is None or not self.run.data.masks_attention:
            return []
        linear, attention = accounting.layer_flops(self.run)
        attention *= (
            ATTENTION_COST
            * work.squares
            / work.samples
            / self.run.model.seq_length
            / accounting.document_length(self.run)
        )
        return [(linear + attention * work.share) / (linear + attention)]

    def finish_interval(self, iteration: int) -> None:
        """After the interval's last iteration. Collective."""
        own = torch.tensor(self._rows).mean(0)
        everyone = torch.empty(self.world.size, len(own))
        self.world.all_gather(everyone, own)
        self._keep(self._interval(iteration, everyone))
        count, seconds = (
            self._judged[0] + len(self._rows),
            self._judged[1] + everyone * len(self._rows),
        )
        self._rows, self._judged = [], (count, seconds)
        if count >= JUDGED_ITERATIONS and float(seconds[0, : len(PHASES)].sum()) >= JUDGED_SECONDS:
            self._judged = 0, 0.0
            if self.world.size > 1:
                mean = seconds / count
                self._name(
                    find(
                        self._interval(iteration, mean),
                        self.work,
                        mean[:, len(PHASES) :].flatten().tolist(),
                    )
                )

    def _interval(self, iteration: int, seconds: Tensor) -> Interval:
        """seconds: of every rank in each phase (ranks, phases), and its share where documents differ."""
        phases = seconds[:, : len(PHASES)].t().tolist()
        return Interval(
            iteration,
            self.layout.tp,
            self.layout.pp,
            dict(zip(PHASES, phases, strict=True)),
            self.layout.cp,
        )

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
            self.say(
                "slow: "
                + "; ".join(s.text(host) for s, host in zip(shown, hosts, strict=True))
                + more
            )
        for rank, phase in sorted(self._named - slow):
            self.say(f"no longer slow: rank {rank}, {phase}")
        self._before, self._named = slow, (self._named | lasting) & slow
