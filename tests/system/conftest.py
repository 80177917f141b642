"""Fixtures for tests that start runs."""

import shlex
import subprocess
from pathlib import Path

import pytest

from fugaku_megatron.cli import program
from tests.system.mpi import launch


@pytest.fixture
def alone(capsys, monkeypatch):
    """Train on one rank in this process and check the exit code. Memory, cores and threads stay."""
    import torch

    from fugaku_megatron.cli.arguments import parse
    from fugaku_megatron.comm.base import SoloComm
    from fugaku_megatron.comm.job import run_or_abort
    from fugaku_megatron.host import runtime
    from fugaku_megatron.observe.hang.heartbeat import Heartbeat
    from fugaku_megatron.observe.hang.watchdog import HangSettings, Watchdog
    from fugaku_megatron.observe.log import loss_plot
    from fugaku_megatron.run.start import pretrain

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(loss_plot, "start_loss_curve", lambda *words: subprocess.Popen(["true"]))
    before = runtime.CpuBinding(torch.get_num_threads(), ())

    torch.set_num_threads(1)

    def run(*flags: object, code: int = 0) -> launch.Result:
        own = launch.words(*flags, "--allocator stock --thread-affinity none")
        watchdog = Watchdog(Heartbeat(), HangSettings(None, Path(), None))
        ended = 0
        try:
            run_or_abort(lambda world: pretrain(parse(own), world, watchdog), SoloComm())
        except SystemExit as end:
            ended = end.code
        return launch.Result(ended, *capsys.readouterr(), seconds=0.0).check(code)

    yield run
    runtime.apply_binding(before, False)


@pytest.fixture
def command(capsys):
    """Run fugaku-megatron in this process on a command line, given in pieces, and check the exit code."""

    def run(*parts: object, code: int | None = 0, start=program.main) -> launch.Result:
        ended = start(shlex.split(" ".join(map(str, parts))))
        return launch.Result(ended, *capsys.readouterr(), seconds=0.0).check(code)

    return run
