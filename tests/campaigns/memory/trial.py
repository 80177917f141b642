"""A supervised run on emulated nodes, of which ranks and nodes are killed at random moments.

A node is a name, and a folder in place of its memory. A lost node loses its ranks and this folder.
"""

from __future__ import annotations

import contextlib
import random
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from fugaku_megatron.checkpoint.memory_copy import node_groups
from tests.campaigns.faults import jobs
from tests.mpi import launch
from tests.mpi.launch import words

INTERVAL = 3  # iterations between copies in memory
SAVES = 14  # iterations between checkpoints in --save
STEPS = 12  # iterations of a run for each kill, at least
KILLS = 5  # in a run
MOST_STEPS = 9  # of them before a kill
RANK = "one rank"
NODE = "one node, which comes back empty"
SPARE = "one node, replaced by a spare"
PARTNERS = "all nodes of a group"
KINDS = (RANK, NODE, SPARE, PARTNERS)
MEMORY = "memory"
SAVE = "--save"
NOTHING = "the beginning"
PAUSE = 0.3  # s after an iteration before a kill, at most
RESTART = "supervise: restart "
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
_ITERATION = re.compile(r"^ iteration +(\d+)/", re.MULTILINE)
_RESUMED = re.compile(r"^resumed from (.*) at iteration (\d+)", re.MULTILINE)
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --make-vocab-size-divisible-by 8 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --hidden-dropout 0.1 --log-interval 1 --eval-iters 0 --vocab-size 96 "
    "--split 100,0,0 --kernels native --keep-last 2"
)
LAUNCHER = """#!/bin/sh
# launcher FOLDER RANKS MAP PROGRAM...: mpiexec on emulated nodes, of which none may be down
folder=$1 ranks=$2 map=$3
shift 3
if grep -qxFf "$folder/down" "$map"; then exit 1; fi
cp "$map" "$folder/map"
FAULT_NODES="$folder/map:$folder/nodes" exec {mpiexec} -n "$ranks" "$@"
"""


@dataclass(frozen=True)
class Layout:
    """Nodes with ranks. group: nodes that protect each other"""

    nodes: int
    ranks_per_node: int
    group: int
    flags: str = ""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


LAYOUTS = {
    "DP 4": Layout(4, 1, 2),
    "DP 2 x TP 2": Layout(2, 2, 2, "--tensor-model-parallel-size 2"),
    "DP 4, ZeRO-1, groups of 4": Layout(4, 1, 4, "--zero-stage 1 --overlap-grad-reduce"),
}


class Kill(NamedTuple):
    """A kill and the start after it.

    source: of that start: MEMORY, SAVE or NOTHING
    repeated: iterations
    """

    kind: str
    source: str
    repeated: int

    @property
    def is_right(self) -> bool:
        return self.repeated <= (SAVES if self.kind == PARTNERS else INTERVAL)


def starts(text: str) -> Iterator[tuple[str, int]]:
    """Yield the source of each restart in a log, and the iterations that it repeats."""
    last = 0
    for number, segment in enumerate(text.split(RESTART)):
        source = NOTHING
        begin = 0
        if found := _RESUMED.search(segment):
            source = MEMORY if "in memory" in found[1] else SAVE
            begin = int(found[2])
        if number:
            yield source, last - begin
        iterations = _ITERATION.findall(segment)
        last = int(iterations[-1]) if iterations else begin


@dataclass
class Trial:
    """A run in `folder` with kills."""

    folder: Path
    data: Path
    layout: Layout
    mpi: launch.MPI
    rng: random.Random
    kinds: Sequence[str]

    @property
    def iterations(self) -> int:
        return STEPS * (len(self.kinds) + 1)

    def program(self, *flags: str) -> list[str]:
        save = self.folder / "save"
        return words(
            sys.executable,
            jobs.PROGRAM,
            MODEL,
            self.layout.flags,
            f"--train-iters {self.iterations} --save {save} --load {save} --data-path {self.data}",
            *flags,
        )

    def undisturbed(self) -> list[str]:
        """Return the command of the run without kills and copies, which saves at its end."""
        return [*self.mpi.command(self.layout.ranks)[:-1], *self.program()]

    def supervised(self) -> list[str]:
        """Return the supervisor's command, with one spare node."""
        mpiexec = shlex.join([str(self.mpi.mpiexec), *self.mpi.options])
        launcher = self.folder / "launcher"
        launcher.write_text(LAUNCHER.format(mpiexec=mpiexec))
        launcher.chmod(0o755)
        (self.folder / "down").touch()
        (self.folder / "nodes").mkdir()
        hosts = ",".join(f"n{number}" for number in range(self.layout.nodes + 1))
        return [
            *words(sys.executable, "-m fugaku_megatron supervise --max-restarts 50 --hosts", hosts),
            *words("--spare-nodes 1 --ranks-per-node", self.layout.ranks_per_node),
            "--launcher",
            f"{launcher} {self.folder} {{ranks}} {{map}}",
            "--",
            *self.program(
                f"--save-interval {SAVES} --save-memory {INTERVAL}",
                f"--save-memory-group {self.layout.group}",
            ),
        ]

    def run(self) -> tuple[int | None, str]:
        """Run to the end with all kills; return the exit code and the output."""
        job = jobs.start(self.supervised(), **self.mpi.variables())
        try:
            for number, kind in enumerate(self.kinds):
                if self._await_moment(job, number):
                    self._kill(job, kind)
            return job.end(), job.text()
        finally:
            if job.process.poll() is None:
                launch.kill_tree(job.process.pid)

    def _await_moment(self, job: jobs.Job, restarts: int) -> bool:
        """Wait for a random moment after so many restarts. Return False if the run ends before.

        Every second start makes two copies, because `supervise` ends a run that makes none in three starts.
        """
        least = 2 * INTERVAL + 1 if restarts % 2 else 1
        steps = self.rng.randint(least, MOST_STEPS)
        pause = self.rng.random() * PAUSE
        end = time.monotonic() + 4 * jobs.patience()
        while time.monotonic() < end and job.process.poll() is None:
            segments = job.text().split(RESTART)
            if len(segments) == restarts + 1 and len(_ITERATION.findall(segments[-1])) >= steps:
                time.sleep(pause)
                return True
            time.sleep(0.02)
        return False

    def _kill(self, job: jobs.Job, kind: str) -> None:
        ranks = _ranks(job)
        places = (self.folder / "map").read_text().split()
        nodes = list(dict.fromkeys(places))
        lost = [self.rng.choice(nodes)]
        if kind == RANK:
            ranks = [self.rng.choice(ranks)]
            lost = []
        elif kind == PARTNERS:
            group = self.rng.choice(node_groups(len(nodes), self.layout.group))
            lost = [nodes[number] for number in group]
        elif kind == SPARE:
            (self.folder / "down").write_text(f"{lost[0]}\n")
        for rank, process in ranks:
            if kind == RANK or places[rank] in lost:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for name in lost:
            shutil.rmtree(self.folder / "nodes" / name, ignore_errors=True)


def _ranks(job: jobs.Job) -> list[tuple[int, psutil.Process]]:
    found: dict[int, psutil.Process] = {}
    for process in jobs.children(job.process.pid):
        with contextlib.suppress(psutil.Error):
            values = process.environ()
            rank = next((values[name] for name in RANK_VARIABLES if name in values), None)
            if rank is not None and jobs.PROGRAM in process.cmdline():
                found.setdefault(int(rank), process)
    return sorted(found.items())
