"""The command under a launcher: help and mistakes come out once, whatever the number of processes."""

from __future__ import annotations

import pytest

from tests.system.mpi import launch

pytestmark = pytest.mark.mpi
PROGRAMS = {"fugaku-megatron train": ["-m", "fugaku_megatron", "train"],
            "pretrain_gpt.py": [str(launch.TESTS.parent / "pretrain_gpt.py")]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_is_printed_once(mpi, name):
    job = mpi.run(2, *PROGRAMS[name], "--help")
    assert job.returncode == 0, job.stderr
    assert job.stdout.startswith(f"usage: {name} ") and job.stdout.count("usage: ") == 1 and "--num-layers" in job.stdout


def test_the_page_of_commands_is_printed_once(mpi):
    job = mpi.run(2, "-m", "fugaku_megatron", "--help")
    assert job.returncode == 0 and job.stdout.count("usage: fugaku-megatron COMMAND") == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_is_told_once(mpi, name):
    job = mpi.run(2, *PROGRAMS[name], "--num-layer", "2")
    assert job.returncode == 2 and job.stdout == ""
    assert job.stderr.startswith(f"{name}: unknown flag --num-layer: did you mean --num-layers?\n")
    assert job.stderr.count("--num-layer:") == 1


@pytest.mark.smoke
def test_ranks_train_by_the_command(mpi):
    flags = ["--recipe", "demo", "--mock-data", "--train-iters", "2", "--micro-batch-size", "1", "--global-batch-size", "2"]
    job = mpi.run(2, "-m", "fugaku_megatron", "train", *flags, "--kernels", "native")
    assert job.returncode == 0 and " iteration        2/" in job.stdout, job.stderr
