"""Small runs of pretrain_gpt.py: flags, start, ranks, losses."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

import psutil

from tests.mpi import launch
from tests.mpi.launch import words

PROGRAM = str(launch.TESTS.parent / "pretrain_gpt.py")
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--log-interval 1 --eval-iters 0 --kernels native"
)
TINY = f"{MODEL} --mock-data"


def pretrain(mpi: launch.MPI, ranks: int, *flags: object, code: int = 0) -> launch.Result:
    return mpi.run(ranks, PROGRAM, *words(*flags), code=code)


def resuming(directory: Path) -> str:
    """Return the flags to save into a directory and continue from there."""
    return f"--save {directory} --load {directory}"


def start(mpi: launch.MPI, *flags: object, **environment: str) -> subprocess.Popen:
    """Start two ranks."""
    return subprocess.Popen(
        [*mpi.command(2), PROGRAM, *words(*flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**mpi.variables(), **environment},
    )


def losses(directory: Path) -> list[float]:
    """Return every training loss in the history, to the last bit."""
    records = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return [record["lm_loss"] for record in records if record["kind"] == "train"]


def wait_for_lines(job: subprocess.Popen, count: int) -> bool:
    """Read until `count` iterations were logged; return False if the job ended before."""
    seen = 0
    for line in job.stdout:
        seen += line.startswith(" iteration ")
        if seen == count:
            return True
    return False


def ranks(job: subprocess.Popen) -> list[psutil.Process]:
    """Return a running job's rank processes.

    A rank's child that draws losses has the rank's command line for a moment.
    """
    found = {}
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a picture is drawn
            if PROGRAM in process.cmdline() and process.ppid() not in found:
                found[process.pid] = process
    return list(found.values())
