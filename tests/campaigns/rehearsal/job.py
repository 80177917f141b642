"""A small job under `supervise`, disturbed at random moments until it has been restarted often enough."""

from __future__ import annotations

import math
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fugaku_megatron.observe.export.hours import HOURS, read_hours
from fugaku_megatron.start.exit_codes import ExitCode
from tests.campaigns.faults import jobs
from tests.campaigns.faults.jobs import Job, Layout

LAYOUT = Layout("DP 2", 2)
HANG_SECONDS = 10
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --micro-batch-size 2 "
    f"--global-batch-size 4 --keep-last 2 --train-iters 100000 --hang-timeout-in-secs {HANG_SECONDS}"
).split()  # in place of the flags of jobs.MODEL
POLL = 0.02  # s
PATIENCE = 120.0  # s for a rank to exist


@dataclass
class Disturbed:
    """A job in `folder`, with its faults.

    mtbf: mean seconds between two faults
    stops: share of faults that stop a rank instead of killing it
    """

    folder: Path
    data: Path
    draw: random.Random
    mtbf: float
    stops: float
    save_interval: int
    flags: tuple[str, ...] = ()
    faults: int = 0
    text: list[str] = field(default_factory=list)

    @property
    def save(self) -> Path:
        return self.folder / "save"

    def run(self, count: int, minutes: float = math.inf) -> None:
        """Train until `count` faults, each followed by a restart, or so many minutes are over, and stop in order."""
        end = time.monotonic() + 60 * minutes
        next_fault = time.monotonic() + self.draw.expovariate(1 / self.mtbf)
        job = self._start()
        while self.faults < count and time.monotonic() < end:
            time.sleep(max(0.0, next_fault - time.monotonic()))
            job = self._disturb(job)
            self.faults += 1
            next_fault = time.monotonic() + self.draw.expovariate(1 / self.mtbf)
        job = self._until_trained(job)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == ExitCode.FINISHED, job.text()[-3000:]
        self.text.append(job.text())

    def _start(self) -> Job:
        interval = ["--save-interval", str(self.save_interval)]
        words = jobs.command(LAYOUT, self.folder, self.data, *MODEL, *interval, *self.flags)
        supervise = [sys.executable, "-m", "fugaku_megatron", "supervise", "--max-restarts"]
        return jobs.start([*supervise, "1000000", "--", *words])

    def _alive(self, job: Job) -> Job:
        """Return the job, or the next one if its supervisor has ended: after restarts without a checkpoint."""
        if job.process.poll() is None:
            return job
        job.end()
        self.text.append(job.text())
        return self._start()

    def _disturb(self, job: Job) -> Job:
        """Kill or stop a random rank, as soon as there is one."""
        number = signal.SIGSTOP if self.draw.random() < self.stops else signal.SIGKILL
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            job = self._alive(job)
            ranks = job.ranks()
            if ranks:
                try:
                    self.draw.choice(ranks).send_signal(number)
                    return job
                except psutil.Error:
                    continue
            time.sleep(POLL)
        raise TimeoutError(f"no rank for {PATIENCE:g} s: {job.text()[-3000:]}")

    def _until_trained(self, job: Job) -> Job:
        """Wait for an iteration of the last start."""
        starts = self._starts()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            job = self._alive(job)
            lines = read_hours(self.save / HOURS) if (self.save / HOURS).exists() else []
            if lines and lines[-1]["event"] == "iterations" and self._starts() > starts:
                return job
            time.sleep(POLL)
        raise TimeoutError(f"no iteration for {PATIENCE:g} s: {job.text()[-3000:]}")

    def _starts(self) -> int:
        path = self.save / HOURS
        lines = read_hours(path) if path.exists() else []
        return sum(line["event"] == "start" for line in lines)
