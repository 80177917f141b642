"""Stops one rank of a real job with SIGSTOP in a given phase, which its heartbeat tells, and reads what the job says of it.

    python -m tests.campaigns.hangs --count 20 --timeout 10 --json hangs.json     every phase in turn, on a job of four ranks

A phase may be over when the signal arrives. Then the rank goes on, and is stopped again when it comes there once more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from fugaku_megatron.watchdog.heartbeat import Beat, Node, prefix
from tests.system.mpi import launch

# What a heartbeat says in each phase.
PHASES = {"start": r"the start", "reading": r"reading data", "forward": r"forward of", "send": r"send_(forward|backward) of",
          "reduction": r"(all_reduce|reduce_scatter|all_gather) over", "save": r"save of"}
RANKS = 4
FLAGS = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--vocab-size", "96",
         "--make-vocab-size-divisible-by", "8", "--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-3",
         "--mock-data", "--log-interval", "1000", "--eval-iters", "0", "--kernels", "native", "--pipeline-model-parallel-size", "2",
         "--train-iters", "1000000", "--save-interval", "5", "--keep-last", "2"]
PATIENCE = 120.0  # s for a rank to come to a phase, and for a job to end
ENDS_WITHIN = 45.0  # s beside the timeout, for stacks on a crowded machine


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job. said: what its heartbeat said when it was stopped. seconds: until the line came.

    ending: seconds from the line to the end.
    """

    phase: str
    rank: int
    said: str
    line: str
    code: int
    seconds: float
    ending: float
    stacks: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether the line names the rank that was stopped and what it did."""
        return f"rank {self.rank} (node " in self.line and f"stopped in {self.said}, " in self.line


def start(mpi: launch.MPI, directory: Path, timeout: float, *flags: str) -> subprocess.Popen:
    """A job of RANKS ranks that trains and saves for ever, with its output in directory/output."""
    program = str(launch.TESTS.parent / "pretrain_gpt.py")
    command = [str(mpi.mpiexec), *mpi.options, "-n", str(RANKS), sys.executable, program, *FLAGS, "--save", str(directory / "save"),
               "--load", str(directory / "save"), "--hang-timeout-in-secs", str(timeout), *flags]
    environment = {name: value for name, value in os.environ.items() if name not in mpi.removed}
    environment |= {**mpi.environment, "OMP_NUM_THREADS": "1"}
    with (directory / "output").open("w") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment)


def heartbeats(job: subprocess.Popen) -> Iterator[list[Beat]]:
    """The heartbeats of a job's processes, again and again until it ends. TimeoutError after PATIENCE seconds."""
    end, nodes, processes = time.monotonic() + PATIENCE, [], set()
    while job.poll() is None:
        if time.monotonic() > end:
            raise TimeoutError(f"the phase did not come within {PATIENCE} s")
        if len(processes) < RANKS:
            children = {child.pid for child in psutil.Process(job.pid).children(recursive=True)}
            folders = [path for path in Path(prefix()).parent.glob(f"{Path(prefix()).name}*")
                       if any((path / str(pid)).exists() for pid in children)]
            nodes = [Node(folder) for folder in folders]
            processes = {beat.process for node in nodes for beat in node.read()} & children
        yield [beat for node in nodes for beat in node.read() if beat.process in processes]


def stop(job: subprocess.Popen, rank: int, phase: str) -> Beat:
    """Stop a rank in a phase; its heartbeat. RuntimeError where the job ends before."""
    for beats in heartbeats(job):
        beat = next((beat for beat in beats if beat.rank == rank), None)
        if beat is None or not re.match(PHASES[phase], beat.what):
            continue
        process = psutil.Process(beat.process)
        process.send_signal(signal.SIGSTOP)
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        last = next(b for b in next(heartbeats(job)) if b.rank == rank)
        if re.match(PHASES[phase], last.what):
            return last
        process.send_signal(signal.SIGCONT)
    raise RuntimeError(f"the job ended with code {job.returncode} before rank {rank} came to {phase}")


def hang(mpi: launch.MPI, directory: Path, rank: int, phase: str, timeout: float, *flags: str) -> Outcome:
    """Start a job, stop a rank in a phase, and wait for the end. flags: more of the job's."""
    job = start(mpi, directory, timeout, *flags)
    try:
        beat = stop(job, rank, phase)
        begin, line, seconds = time.monotonic(), "", 0.0
        while job.poll() is None and time.monotonic() < begin + timeout + ENDS_WITHIN:
            time.sleep(0.05)
            if not line and (line := _line(directory)):
                seconds = time.monotonic() - begin
        ended, ending = job.poll(), time.monotonic() - begin - seconds
    finally:
        launch.kill_tree(job.pid)
        job.wait()
    stacks = sorted(str(path.relative_to(directory)) for path in directory.rglob("hang_*/*"))
    return Outcome(phase, rank, beat.what, line or _line(directory), -1 if ended is None else ended, seconds, ending, tuple(stacks))


def _line(directory: Path) -> str:
    lines = (directory / "output").read_text(errors="replace").splitlines()
    return next((line for line in lines if "; stacks of all ranks: " in line), "")


def main() -> int:
    """Every phase in turn, a rank by chance; prints a table, and --json what it is made of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=10)
    parser.add_argument("--mpi", choices=sorted(launch.FIND), default="mpich")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mpi, chance = launch.FIND[options.mpi](), random.Random(options.seed)
    outcomes = []
    for i in range(options.count):
        with tempfile.TemporaryDirectory() as directory:
            outcomes.append(hang(mpi, Path(directory), chance.randrange(RANKS), list(PHASES)[i % len(PHASES)], options.timeout))
            last = outcomes[-1]
            took = f"code {last.code}, named after {last.seconds:.1f} s, ended {last.ending:.1f} s later:"
            print("right" if last.right else "WRONG", took, last.line or last, flush=True)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1))
    print(f"{sum(outcome.right for outcome in outcomes)} of {len(outcomes)} named rightly")
    return 0 if all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
