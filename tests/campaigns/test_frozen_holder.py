"""A job that stands still loses the lock of its --save to the next job; awake again, it ends and changes nothing.

Each job of a chain is stopped at a random moment, the next job takes its lock over and saves, and the stopped job wakes up.
`make test-full` does so 50 times.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fugaku_megatron.checkpoint.manifest import list_iterations
from fugaku_megatron.start.exit_codes import ExitCode
from tests.campaigns.faults import jobs
from tests.mpi import launch

pytestmark = [pytest.mark.campaigns, pytest.mark.mpi]
BEAT = 0.3  # seconds
PATIENCE = 1.5
FREEZES = 10
FLAGS = "--train-iters 1000000 --save-interval 2 --keep-last 2 --hang-timeout-in-secs 0".split()
MODES = {
    "one rank": jobs.Layout("one rank", 1),
    "one rank, async save": jobs.Layout("one rank, async save", 1, ("--async-save",)),
    "SIGTERM while frozen": jobs.Layout("one rank", 1),
    "DP 2, ZeRO-1": jobs.LAYOUTS[1],
    "DP 2, ZeRO-1, save local": jobs.LAYOUTS[5],
}


@dataclass
class Holder:
    """A job that has saved. changes: file with a line for each of its changes of files"""

    job: jobs.Job
    changes: Path

    @classmethod
    def start(cls, layout: jobs.Layout, folder: Path, data: Path, number: int) -> Holder:
        own = folder / str(number)  # of the local copies: a node of its own
        words = jobs.command(layout, own, data, *FLAGS)
        words = [word.replace(str(own / "save"), str(folder / "save")) for word in words]
        changes = folder / f"changes{number}"
        job = jobs.start(words, FAULT_LOCK=f"{changes}:{BEAT}:{PATIENCE}")
        return cls(job, changes)

    def saves(self) -> int:
        return self.job.text().count("saved checkpoint of")

    def wait_for_save(self) -> None:
        end = time.monotonic() + jobs.patience()
        while not self.saves():
            assert self.job.process.poll() is None and time.monotonic() < end, self.job.text()
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Send a signal to the launcher and every rank, as a suspended node does."""
        for process in (psutil.Process(self.job.process.pid), *jobs.children(self.job.process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def changed(self, since: float, save: Path) -> list[str]:
        """Return the changes below `save` since a time, without the job's own unfinished saves.

        A job may stop between the check of its lock and the change that follows: that one change is left out, too.
        """
        lines = [line.split(maxsplit=3) for line in self.changes.read_text().splitlines()]
        here = [
            (float(when), thread, event, path)
            for when, thread, event, path in lines
            if f"{save}/" in path
        ]
        own = [path for _, _, event, path in here if event == "os.mkdir" and path.endswith(".tmp")]
        before: dict[str, tuple[float, str]] = {}  # of each thread: its last line's time and event
        changes = []
        for when, thread, event, path in here:
            checked, last = before.get(thread, (0.0, ""))
            before[thread] = (when, event)
            under_way = last == "check" and checked < since
            unfinished = any(path.startswith(folder) for folder in own)
            if event != "check" and when >= since and not (under_way or unfinished):
                changes.append(f"{event} {path}")
        return changes


def freeze_and_wake(holder: Holder, following: Holder, save: Path, asks: bool) -> None:
    """Check that the woken holder ends with its line and leaves `save` to the following job."""
    following.wait_for_save()
    woken = time.time()
    if asks:
        for rank in holder.job.ranks():
            rank.terminate()
    holder.signal(signal.SIGCONT)
    assert holder.job.end() == ExitCode.USER_ERROR, holder.job.text()
    said = holder.job.text()
    reports = re.findall(
        r"^rank 0: .*its lock was taken over by another job.*$", said, re.MULTILINE
    )
    assert len(reports) == 1 and "Traceback" not in said, said
    assert holder.changed(woken, save) == []


@pytest.mark.parametrize(
    ("mode", "freezes"),
    [("one rank", 2), *(pytest.param(mode, FREEZES, marks=pytest.mark.full) for mode in MODES)],
)
def test_a_woken_holder_leaves_the_directory_to_the_job_that_took_it_over(mode, freezes, tmp_path):
    layout = MODES[mode]
    rng = random.Random(mode)
    data = jobs.write_data(tmp_path)
    save = tmp_path / "save"
    started = [Holder.start(layout, tmp_path, data, 0)]
    try:
        for number in range(1, freezes + 1):
            holder = started[-1]
            holder.wait_for_save()
            time.sleep(0.5 * rng.random())
            holder.signal(signal.SIGSTOP)
            started.append(Holder.start(layout, tmp_path, data, number))
            freeze_and_wake(holder, started[-1], save, asks=mode.startswith("SIGTERM"))
        started[-1].job.process.send_signal(signal.SIGUSR1)
        assert started[-1].job.end() == 0, started[-1].job.text()
    finally:
        for holder in started:
            if holder.job.process.poll() is None:
                launch.kill_tree(holder.job.process.pid)
    assert not list(save.glob("*iter_*.tmp")) and len(list_iterations(save)) == 2
    verify = jobs.start([sys.executable, "-m", "fugaku_megatron", "verify", str(save)])
    assert verify.end() == 0, verify.text()
