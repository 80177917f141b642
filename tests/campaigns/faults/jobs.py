"""The campaign's runs: small jobs on two to four ranks, started, watched, and compared with an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.two_hosts import on_host, two_hosts
from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.data.indexed import IndexedDatasetWriter
from tests.mpi import launch

ROOT = launch.TESTS.parent
PROGRAM = str(ROOT / "pretrain_gpt.py")
VOCABULARY = 96
ITERATIONS = 20
SAVE_INTERVAL = 3
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --make-vocab-size-divisible-by 8 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --hidden-dropout 0.1 --log-interval 1 --eval-iters 0 "
    f"--split 100,0,0 --kernels native --vocab-size {VOCABULARY} --train-iters {ITERATIONS} "
    f"--save-interval {SAVE_INTERVAL}"
).split()
PATIENCE = 60.0  # s after which a job that does not end is a hang; longer where the machine has more to do than cores
_ITERATION = re.compile(r"^ iteration\s+(\d+)/", re.MULTILINE)


@dataclass(frozen=True)
class Layout:
    """A way to run the model.

    asynchronous: a save may still be under way when the next one falls due.
    plain: the name of the layout that ends with the same bits; default: this layout.
    """

    name: str
    ranks: int
    flags: tuple[str, ...] = ()
    asynchronous: bool = False
    hosts: tuple[str, ...] = ()  # network namespaces, one for each rank
    plain: str = ""


ZERO = tuple(
    "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4000".split()
)
LAYOUTS = (
    Layout("DP 2", 2),
    Layout("DP 2, ZeRO-1", 2, ZERO),
    Layout("TP 2", 2, ("--tensor-model-parallel-size", "2")),
    Layout("PP 2", 2, ("--pipeline-model-parallel-size", "2")),
    Layout("DP 2, async save", 2, ("--async-save",), True, plain="DP 2"),
    Layout(
        "DP 2, ZeRO-1, save local",
        2,
        (*ZERO, "--async-save", "--save-local", "{local}"),
        asynchronous=True,
        plain="DP 2, ZeRO-1",
    ),
    Layout("TP 2 x DP 2", 4, tuple("--tensor-model-parallel-size 2 --zero-stage 1".split())),
)


def on_two_hosts(number: int) -> Layout:
    """Return a layout whose hosts belong to fault `number` alone."""
    return Layout(
        "DP 2 on two hosts",
        2,
        ZERO,
        hosts=(f"fm-faults{number}a", f"fm-faults{number}b"),
        plain="DP 2, ZeRO-1",
    )


def write_data(folder: Path) -> Path:
    """Write a small .bin and .idx; return the prefix."""
    rng = np.random.default_rng(7)
    with IndexedDatasetWriter(folder / "corpus", np.uint16) as writer:
        for length in rng.integers(20, 60, 120):
            writer.add_document(rng.integers(0, VOCABULARY, length))
    return folder / "corpus"


@dataclass
class Job:
    """A started job. lines: its output so far, both streams."""

    process: subprocess.Popen
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for_iteration(self, number: int) -> bool:
        """Wait for this iteration; return whether the job logs it before the job ends."""
        with self._changed:
            self._changed.wait_for(
                lambda: last_iteration(self.text()) >= number or not self._reader.is_alive(),
                patience(),
            )
            return last_iteration(self.text()) >= number and self.process.poll() is None

    def text(self) -> str:
        return "".join(self.lines)

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks' processes by rank."""
        found: dict[int, psutil.Process] = {}
        for process in children(self.process.pid):
            try:
                words = process.environ()
                if PROGRAM in process.cmdline() and "PMI_RANK" in words:
                    found.setdefault(int(words["PMI_RANK"]), process)
            except psutil.Error:
                continue
        return [found[rank] for rank in sorted(found)]

    def end(self) -> int | None:
        """The exit code; None for a job that had to be killed because it hung."""
        try:
            self.process.wait(patience())
        except subprocess.TimeoutExpired:
            launch.kill_tree(self.process.pid)
            self.process.wait()
            return None
        self._reader.join(10)
        return self.process.returncode


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def patience() -> float:
    return PATIENCE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def last_iteration(text: str) -> int:
    found = _ITERATION.findall(text)
    return int(found[-1]) if found else 0


def lost_iterations(text: str) -> int:
    """Return the most iterations that a start had to repeat, from all starts' log lines in order."""
    lost = last = 0
    for number in map(int, _ITERATION.findall(text)):
        if number <= last:
            lost = max(lost, last - number + 1)
        last = number
    return lost


def network(layout: Layout) -> contextlib.AbstractContextManager[None]:
    """A layout's hosts, which are gone afterwards."""
    return two_hosts("1gbit", layout.hosts) if layout.hosts else contextlib.nullcontext()


def command(layout: Layout, folder: Path, data: Path, *flags: str) -> list[str]:
    """Return mpiexec with a layout's ranks that save to `folder`/save."""
    save = str(folder / "save")
    own = [flag.replace("{local}", str(folder / "local")) for flag in layout.flags]
    program = [
        sys.executable,
        PROGRAM,
        *MODEL,
        *own,
        "--data-path",
        str(data),
        "--save",
        save,
        "--load",
        save,
        *flags,
    ]
    if not layout.hosts:
        return [str(launch.mpich().mpiexec), "-n", str(layout.ranks), *program]
    first, second = (on_host(host, program) for host in layout.hosts)
    return [str(launch.mpich().mpiexec), *first, ":", *second]


def start(words: Sequence[str], **variables: str) -> Job:
    """Start a command with both streams in one pipe."""
    process = subprocess.Popen(
        list(words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**launch.mpich().variables(), **variables},
    )
    return Job(process)


def ended(save: Path) -> bool:
    """Return whether a run that saves there has come to its end."""
    return (save / f"iter_{ITERATIONS:07d}").exists()


def final(folder: Path) -> dict[str, Any]:
    """Return the last loss, and each file's CRC-32 in the last checkpoint: a disturbed run must end with the same."""
    manifest = read_manifest(folder / "save", ITERATIONS)
    records = [
        json.loads(line)
        for line in (folder / "save" / "history.jsonl")
        .read_text(errors="replace")
        .splitlines()[-3:]
    ]
    losses = [
        record["lm_loss"]
        for record in records
        if record.get("kind") == "train" and record["iteration"] == ITERATIONS
    ]
    return {
        "loss": losses,
        "files": {name: entry["crc32"] for name, entry in manifest["files"].items()},
    }
