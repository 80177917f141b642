"""--check-layout on real MPI processes, and its mistakes."""

import re

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.start.exit_codes import ExitCode
from tests.mpi import launch
from tests.mpi.launch import words

pytestmark = [pytest.mark.system, pytest.mark.mpi]
CHECK = (
    "-m fugaku_megatron train --recipe 124m --data-path no-such-data --tensor-model-parallel-size 2 --sequence-parallel "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 9 --check-layout"
)


def test_a_layout_is_checked_without_the_run_s_data(mpi):
    job = mpi.run(2, *words(CHECK))
    assert "check of the layout DP 1 x TP 2 x PP 1 of 2 of 2 ranks" in job.stdout
    assert "the layout trains as one rank" in job.stdout


def of_one_faulty_rank(mpi, fault):
    """Return the standard output and the error of a check on two ranks of which rank 1 has a wrong library."""
    program = launch.TESTS / "mpi" / "faulty_library.py"
    job = mpi.run(2, str(program), fault, *words(CHECK)[2:], code=ExitCode.LAYOUT_DIFFERS)
    return job.stdout, job.stderr


def test_a_wrong_kernel_is_named(mpich):
    """One constant of the activation is altered in rank 1's copy of the library."""
    out, error = of_one_faulty_rank(mpich, "kernel")
    assert re.search(
        r"the ranks have different libraries: kernels \w+ \w+ on rank 0; \w+ \w+ on rank 1\n", out
    )
    assert "first difference: output of decoder.layers.0.mlp" in error


def test_a_wrong_reduction_is_named(mpich):
    """One element of every sum is altered on rank 1."""
    out, error = of_one_faulty_rank(mpich, "sum")
    assert "the ranks have different libraries" not in out
    assert "first difference: loss, iteration 1" in error
    assert "all-reduce of the softmax over the tensor-parallel ranks 0 1" in error


def test_a_layout_that_does_not_fit_is_refused(mpich):
    mpich.run(1, *words(CHECK), code=2).mistake("--tensor-model-parallel-size 2", "start 2 ranks")


def test_check_layout_and_dry_run_exclude_each_other(capsys):
    code = program.main([*words(CHECK)[2:], "--dry-run"])
    assert code == ExitCode.USER_ERROR
    assert "--check-layout runs the layout" in capsys.readouterr().err


def test_a_record_needs_check_layout(capsys):
    code = program.main([*words(CHECK)[2:-1], "--record", "somewhere"])
    assert code == ExitCode.USER_ERROR
    assert "--record somewhere needs --check-layout: pass both" in capsys.readouterr().err
