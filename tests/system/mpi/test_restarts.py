"""A job whose rank is killed goes on by itself and ends with the bits of an undisturbed one: plain mpiexec, and pjsub's emulator.

A rendered script with a killed rank: tests/system/mpi/test_jobs_local.py. Slurm: tests/system/test_slurm.py.
Decisions: tests/system/test_supervise.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.system.mpi import launch
from tests.system.mpi.kills import kill_after, ranks_of
from tests.system.mpi.test_pretrain import PROGRAM, TINY, losses

pytestmark = pytest.mark.mpi
ROOT = launch.TESTS.parent
FLAGS = [*TINY, "--train-iters", "12", "--save-interval", "2", "--hidden-dropout", "0.1", "--zero-stage", "1"]
PATIENCE = 120  # s


@pytest.fixture(scope="module")
def undisturbed(mpich, tmp_path_factory):
    """The losses of two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    job = mpich.run(2, PROGRAM, *FLAGS, "--save", str(folder))
    assert job.returncode == 0, job.stderr
    return losses(folder)


def supervise(mpi: launch.MPI, save: Path, *words: str) -> subprocess.Popen:
    environment = {**{n: v for n, v in os.environ.items() if n not in mpi.removed}, **mpi.environment, "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fugaku_megatron", "supervise", *words, "--", str(mpi.mpiexec), *mpi.options, "-n", "2",
               sys.executable, PROGRAM, *FLAGS, "--save", str(save), "--load", str(save)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def test_a_killed_rank_costs_a_restart_and_no_bit(mpi, undisturbed, tmp_path):
    killing = kill_after(tmp_path / "save", 5)
    job = supervise(mpi, tmp_path / "save", "--max-restarts", "2")
    out, said = job.communicate(timeout=PATIENCE)
    killing.join()
    assert job.returncode == 0, out + said
    assert "supervise: a rank is lost (signal 9, SIGKILL) on node " in said
    assert "supervise: restart 1 of 2 from iteration " in said and "resumed from" in out
    assert losses(tmp_path / "save") == undisturbed


def handles(process: psutil.Process, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_ranks_start_is_not_lost(mpi, number, tmp_path):
    """Ranks that are still importing keep it and leave before their first iteration; the job's exit code is 0."""
    job = supervise(mpi, tmp_path)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and sum(handles(rank, signal.SIGUSR1) for rank in ranks_of(tmp_path)) < 2:
        time.sleep(0.01)
    job.send_signal(number)
    out, said = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, out + said
    assert "leaving before the first iteration: a signal asked to stop" in out and list(tmp_path.glob("iter_*")) == []


JOB = """#!/bin/bash
#PJM -L "node=3,elapse=00:02:00"
#PJM -N job
#PJM -S
printf '(0)\\n(1)\\n(2)\\n' > hosts
exec {python} -m fugaku_megatron supervise --hosts @hosts --spare-nodes 1 \\
    --launcher 'mpiexec -n {{ranks}} --vcoordfile {{map}}' -- {python} {program} {flags} --save {save} --load {save}
"""


def test_an_emulated_job_takes_its_spare_node_and_then_fewer(undisturbed, tmp_path):
    """Node 1 fails and node 2 takes its place; node 0 fails and no spare is left, so one rank goes on with the whole batch."""
    save, down, script = tmp_path / "save", tmp_path / "jobs" / "1" / "down", tmp_path / "job.sh"
    script.write_text(JOB.format(python=sys.executable, program=PROGRAM, flags=" ".join(FLAGS), save=save))
    killing = kill_after(save, 5, 9, then=lambda turn: down.write_text("(1)\n(0)\n"[: 4 + 4 * turn]))
    job = subprocess.run([sys.executable, str(ROOT / "scripts" / "pjsub" / "local_pjsub"), "--no-check", "--wait", "-x",
                          f"PYTHONPATH={ROOT},OMP_NUM_THREADS=1", str(script)], cwd=tmp_path, timeout=PATIENCE, check=False,
                         env={**os.environ, "LOCAL_PJSUB": str(tmp_path / "jobs")})
    killing.join()
    said = (tmp_path / "job.1.err").read_text()
    assert job.returncode == 0, said
    told = [line.rpartition(" on ")[2] for line in said.splitlines() if line.startswith("supervise: restart ")]
    assert told == ["2 nodes with data-parallel size 2; 0 spare nodes", "1 nodes with data-parallel size 1; 0 spare nodes"], said
    assert losses(save)[:8] == undisturbed[:8] and losses(save) == pytest.approx(undisturbed, rel=1e-6)
