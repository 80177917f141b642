"""A real rank stopped by SIGSTOP is named with its heartbeat's phase, and the job ends as a hang.

make test-full stops one in every phase. A phase may be over when the signal arrives. Then the rank continues, and is stopped again
when it comes there once more.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fugaku_megatron.observe.hang.heartbeat import Beat, Node, prefix
from fugaku_megatron.start.exit_codes import ExitCode
from tests.mpi import launch
from tests.mpi.launch import words
from tests.mpi.pretraining import PROGRAM, TINY, resuming

pytestmark = [pytest.mark.campaigns, pytest.mark.mpi]
RANKS = 4
FEW = 2  # a replica
TIMEOUT = 4.0
PATIENCE = 120.0  # s for a rank to come to a phase, and for the end
FLAGS = (
    "--log-interval 1000 --pipeline-model-parallel-size 2 --train-iters 1000000 "
    f"--save-interval 5 --keep-last 2 --hang-timeout-in-secs {TIMEOUT}"
)
REPLICATED = "(all_reduce|reduce_scatter|all_gather) over"  # two replicas of two stages
# A phase, in the words of its heartbeat, and the rank that is stopped in it.
PHASES = {
    "the start": 3,
    "forward of": 0,
    "reading data": 1,
    "send_(forward|backward) of": 2,
    "save of": 3,
    REPLICATED: 0,
}
USUAL = {"mpich": "the start", "openmpi": "forward of"}


def start(mpi: launch.MPI, ranks: int, directory: Path) -> subprocess.Popen:
    """A job that trains and saves for ever, with its output in directory/output."""
    with (directory / "output").open("w") as output:
        return subprocess.Popen(
            [*mpi.command(ranks), PROGRAM, *words(TINY, FLAGS, resuming(directory / "save"))],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=mpi.variables(),
        )


def heartbeats(job: subprocess.Popen, ranks: int) -> Iterator[list[Beat]]:
    """Yield the heartbeats of a job's processes until it ends. Raise TimeoutError after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    nodes = []
    processes = set()
    while job.poll() is None:
        if time.monotonic() > end:
            raise TimeoutError(f"the phase did not come within {PATIENCE} s")
        if len(processes) < ranks:
            children = {child.pid for child in psutil.Process(job.pid).children(recursive=True)}
            folders = [
                path
                for path in Path(prefix()).parent.glob(f"{Path(prefix()).name}*")
                if any((path / str(pid)).exists() for pid in children)
            ]
            nodes = [Node(folder) for folder in folders]
            processes = {beat.process for node in nodes for beat in node.read()} & children
        yield [beat for node in nodes for beat in node.read() if beat.process in processes]


def stop(job: subprocess.Popen, ranks: int, rank: int, phase: str) -> Beat:
    """Stop a rank in a phase and return its heartbeat. Raise RuntimeError if the job ends before."""
    beats_of_job = heartbeats(job, ranks)
    for beats in beats_of_job:
        beat = next((beat for beat in beats if beat.rank == rank), None)
        if beat is None or not re.match(phase, beat.what):
            continue
        process = psutil.Process(beat.process)
        process.send_signal(signal.SIGSTOP)
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        last = next((b for b in next(beats_of_job, []) if b.rank == rank), None)
        if last is None or re.match(phase, last.what):
            return last or beat
        process.send_signal(signal.SIGCONT)
    raise RuntimeError(
        f"the job ended with code {job.returncode} before rank {rank} came to {phase}"
    )


@pytest.mark.parametrize(
    "phase", [None, *(pytest.param(phase, marks=pytest.mark.full) for phase in PHASES)]
)
def test_a_stopped_rank_is_named_and_the_job_ends(mpi, tmp_path, phase):
    phase = phase or USUAL[mpi.name]
    ranks = RANKS if phase == REPLICATED else FEW
    rank = PHASES[phase] % ranks
    job = start(mpi, ranks, tmp_path)
    try:
        beat = stop(job, ranks, rank, phase)
        code = job.wait(TIMEOUT + PATIENCE)
    finally:
        if job.poll() is None:
            launch.kill_tree(job.pid)
        job.wait()
    output = (tmp_path / "output").read_text(errors="replace")
    line = next((line for line in output.splitlines() if "; stacks of all ranks: " in line), "")
    assert code == ExitCode.HANG, output
    assert f"rank {rank} (node " in line and f"stopped in {beat.what}, " in line, (beat, line)
    assert re.search(f"; {ranks - 1} ranks? waits? for it", line)
    assert len(list(tmp_path.rglob("hang_*/*"))) == ranks
    stopped = next(tmp_path.rglob(f"rank{rank}.txt")).read_text()
    assert "state T (stopped)" in stopped and "most recent call first" in stopped
