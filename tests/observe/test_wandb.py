"""--wandb-project: the figures of a run in Weights & Biases, with a stand-in for the package and with the real one."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.observe.export import writers
from fugaku_megatron.observe.export.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.observe.export.writers import WandbRun, open_writers

pytestmark = pytest.mark.parallel

BASE = ["--recipe", "demo", "--mock-data"]


class Package(SimpleNamespace):
    """A stand-in for the package that keeps its arguments."""

    def init(self, **given):
        self.given = given
        self.logged = []
        self.finished = False
        return SimpleNamespace(
            log=lambda values, step: self.logged.append((step, values)),
            finish=lambda: setattr(self, "finished", True),
        )


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Package(__spec__=SimpleNamespace(name="wandb")))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return sys.modules["wandb"]


def test_wandb_gets_the_figures_and_is_offline_without_a_network(
    package, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    words = "--wandb-project project --wandb-exp-name name --wandb-entity team --wandb-save-dir"
    run = parse([*BASE, *words.split(), str(tmp_path / "new")]).run
    writer = MetricsWriter(10, 5, LogOutputs(writers=open_writers(run, 0, True, print)))
    writer.validation(5, 2.0, 80)
    writer.close()
    assert package.given == {
        "project": "project",
        "name": "name",
        "entity": "team",
        "dir": str(tmp_path / "new"),
        "config": asdict(run),
        "mode": "offline",
    }
    assert (5, {"lm loss validation": 2.0}) in package.logged and package.finished
    assert "--wandb-project: offline" in capsys.readouterr().out
    assert open_writers(run, 0, False, print) == []
    monkeypatch.setattr(writers, "_reachable", lambda: True)
    open_writers(run, 0, True, print)
    assert package.given["mode"] == "online"


def test_an_error_of_wandb_does_not_end_the_run(package, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(package, "init", lambda **given: 1 / 0)
    run = parse([*BASE, *"--wandb-project project --wandb-exp-name name".split()]).run
    wandb = WandbRun(run, print)
    MetricsWriter(10, 5, LogOutputs(writers=[wandb])).validation(5, 2.0, 80)
    assert (
        "--wandb-project project: division by zero; the run continues without it"
        in capsys.readouterr().out
    )


@pytest.mark.system
def test_the_real_package_keeps_a_run_offline(tmp_path):
    words = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --mock-data"
    order = [
        *words.split(),
        *"--vocab-size 64 --train-iters 3 --log-interval 1 --eval-iters 0 --kernels native".split(),
        *"--wandb-project p --wandb-exp-name n".split(),
    ]
    # The limits are for hangs alone: with a load of 12 on two cores, its 11 processor seconds took two minutes.
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "OMP_NUM_THREADS": "1",
        "WANDB__SERVICE_WAIT": "600",
        "WANDB_INIT_TIMEOUT": "600",
    }
    done = subprocess.run(
        [sys.executable, "-m", "fugaku_megatron", "train", *order],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "--wandb-project: offline" in done.stdout
        and len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    )


def test_wandb_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="--wandb-project p: a package is missing: pip install wandb"
    ):
        open_writers(
            parse([*BASE, *"--wandb-project p --wandb-exp-name n".split()]).run, 0, False, print
        )
    assert parse([*BASE, "--wandb-entity", "e"]).notes == (
        "--wandb-entity has no effect without --wandb-project",
    )
