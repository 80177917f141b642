"""Fixtures of tests that start runs."""

import subprocess
from pathlib import Path

import pytest

from tests.system.mpi import launch


@pytest.fixture
def alone(capsys, monkeypatch):
    """Train with flags on one rank in this process, whose memory, cores and threads stay as they are."""
    import torch

    from fugaku_megatron.cli.arguments import parse
    from fugaku_megatron.comm.base import SoloComm
    from fugaku_megatron.comm.job import run_or_abort
    from fugaku_megatron.host import runtime
    from fugaku_megatron.observe import loss_plot
    from fugaku_megatron.observe.heartbeat import Heartbeat
    from fugaku_megatron.observe.watchdog import HangSettings, Watchdog
    from fugaku_megatron.run.start import pretrain

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(loss_plot, "start_loss_curve", lambda *words: subprocess.Popen(["true"]))
    before = runtime.Placement(torch.get_num_threads(), ())

    torch.set_num_threads(1)

    def run(*flags: object) -> launch.Result:
        own = [*map(str, flags), "--allocator", "stock", "--thread-affinity", "none"]
        watchdog = Watchdog(Heartbeat(), HangSettings(None, Path(), None))
        code = 0
        try:
            run_or_abort(lambda world: pretrain(parse(own), world, watchdog), SoloComm())
        except SystemExit as end:
            code = end.code
        return launch.Result(code, *capsys.readouterr(), seconds=0.0)

    yield run
    runtime.apply_placement(before, False)
