"""--check-layout on real MPI processes, and its mistakes."""

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.start.exit_codes import ExitCode
from tests.system.mpi.launch import words

pytestmark = pytest.mark.mpi
CHECK = (
    "-m fugaku_megatron train --recipe 124m --data-path no-such-data --tensor-model-parallel-size 2 --sequence-parallel "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 9 --check-layout"
)


def test_a_layout_is_checked_without_the_run_s_data(mpi):
    job = mpi.run(2, *words(CHECK))
    assert "check of the layout DP 1 x TP 2 x PP 1 of 2 of 2 ranks" in job.stdout
    assert "the layout trains as one rank" in job.stdout


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
