"""The Slurm scripts: committed as rendered, accepted by bash and shellcheck, and run on one node if Slurm is installed.

The cluster needs root and `apt-get install -y slurm-wlm munge`; no test installs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.jobs import render
from fugaku_megatron.observe.log.iteration_metrics import parse_log
from tests.helpers import check_scripts
from tests.mpi import launch
from tests.mpi.kills import holding, kill_held
from tests.mpi.launch import words
from tests.mpi.pretraining import MODEL, losses, pretrain
from tests.processes import write_program

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts" / "slurm"
SCRIPTS = render.slurm_scripts()
FLAGS = MODEL.replace("--make-vocab-size-divisible-by 8 ", "")
DAEMONS = ("munged", "slurmctld", "slurmd")


def test_the_committed_scripts_are_those_that_are_rendered():
    committed = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.glob("*/*")}
    assert committed == render.slurm_scripts("124m") and committed.items() < SCRIPTS.items(), (
        "make rendered writes them again"
    )


def test_bash_and_shellcheck_accept_the_scripts(tmp_path):
    (tmp_path / "fugaku_megatron").symlink_to(ROOT / "fugaku_megatron")
    folder = tmp_path / "scripts" / "slurm"
    folder.mkdir(parents=True)
    assert program.main(["job", "slurm", str(folder)]) == 0
    assert {
        str(path.relative_to(folder)): path.read_text() for path in folder.glob("*/*")
    } == SCRIPTS
    check_scripts(
        [
            FOLDER / "one_node.sh",
            ROOT / "fugaku_megatron" / "jobs" / "slurm.sh",
            *(folder / name for name in SCRIPTS),
        ]
    )


@pytest.mark.parametrize(
    "variables, answer",
    [
        ({}, "submit from the checkout, or set FUGAKU_MEGATRON to its path"),
        (
            {"FUGAKU_MEGATRON": str(ROOT), "PYTHON": "/nowhere/python"},
            "/nowhere/python was not found: run make setup",
        ),
    ],
)
def test_a_job_without_the_program_says_so_in_one_line(variables, answer, tmp_path):
    job = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NAME": "a",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": "1",
        "LAUNCHER": "false",
    }
    done = subprocess.run(
        ["bash", FOLDER / "x86" / "run_124m.sbatch"],
        env={**os.environ, **job, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and answer in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["nowhere", "README.md"])
def test_only_a_folder_that_is_there_is_written(command, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").touch()
    command("job slurm", name, code=2).mistake("pass an existing folder")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_recipe_that_cannot_run_is_refused():
    cluster = render.CLUSTERS["a64fx"]
    job = cluster.recipes[3]
    with pytest.raises(ValueError, match="a64fx, 30b: .* MiB per rank .*raise nodes, TP or PP"):
        render.render_slurm(cluster, job._replace(pp=4))
    with pytest.raises(ValueError, match="is not divisible by --tensor-model-parallel-size"):
        render.render_slurm(cluster, job._replace(tp=5))


@pytest.mark.parametrize("code, restarts", [(0, 0), (8, 0), (0, 1)])
def test_a_job_first_checks_its_layout_if_asked(code, restarts, tmp_path):
    """Four of the eight nodes hold two replicas; a job that was requeued is not checked again."""
    job = tmp_path / "job.sbatch"
    recipe = render.Recipe("124m", nodes=8, tp=2, pp=4)
    job.write_text(render.render_slurm(render.CLUSTERS["a64fx"], recipe, checks_layout=True))
    log = tmp_path / "log"
    nodes = [f"c{n}" for n in range(8)]
    commands = {
        "mpiexec": f'echo "started $*" >> {log}\n[[ $* != *--check-layout ]] || exit {code}',
        "scontrol": f"printf '%s\\n' {' '.join(nodes)}",
        "python": f'echo "started $*" >> {log}',
    }
    for name, text in commands.items():
        write_program(tmp_path / name, f"#!/bin/bash\n{text}\n")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FUGAKU_MEGATRON": str(ROOT),
        "PYTHON": str(tmp_path / "python"),
        "LAUNCHER": "mpiexec",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "c[0-7]",
        "SLURM_JOB_NUM_NODES": "8",
        "SLURM_NTASKS": "32",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    ended = subprocess.run(["bash", str(job), "--lr", "1e-3"], env=environment)
    assert ended.returncode == code
    lines = log.read_text().splitlines()
    checked = [line for line in lines if line.endswith("--check-layout")]
    assert len(checked) == (restarts == 0)
    for line in checked:
        assert line.startswith("started -n 16 --host c0:4,c1:4,c2:4,c3:4 ") and "--lr 1e-3" in line
    started = [line for line in lines if "supervise" in line]
    assert len(started) == (code == 0)
    for line in started:
        assert f"--hosts {','.join(nodes)} --ranks-per-node 4" in line


def two_ports() -> int:
    """Return a free port with a free next port: slurmctld's and slurmd's."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("", port + 1))
                return port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Slurm on this machine, as a function that runs a command there."""
    path = os.environ["PATH"] + ":/usr/sbin"
    missing = [name for name in DAEMONS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(
            f"Slurm is not installed ({', '.join(missing)}): apt-get install -y slurm-wlm munge"
        )
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    folder = tmp_path_factory.mktemp("slurm")
    port = two_ports()
    environment = {
        **os.environ,
        "PATH": path,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "SLURM_TEST_PORT": str(port),
    }

    def run(*command: str) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    try:
        run(str(FOLDER / "one_node.sh"), "start", str(folder))
        yield run
    finally:
        run(str(FOLDER / "one_node.sh"), "stop", str(folder))


@pytest.fixture(params=["srun", "mpiexec"])
def launcher(request):
    """The script's LAUNCHER. The wheel's MPICH knows both."""
    mpich = launch.mpich()
    if mpich is None:
        pytest.skip(launch.MISSING["mpich"])
    return str(mpich.mpiexec) if request.param == "mpiexec" else "srun"


def submit(cluster, folder: Path, launcher: str, flags: str, **variables: str) -> tuple[str, Path]:
    """Submit the x86 recipe on two ranks with a tiny model; return the job and its log."""
    log = folder / "job.log"
    exported = {
        "LAUNCHER": launcher,
        "PMI": "pmi2",
        "FUGAKU_MEGATRON": ROOT,
        "PYTHON": sys.executable,
        "SAVE": folder / "save",
        **variables,
    }
    export = ",".join(["ALL", *(f"{name}={value}" for name, value in exported.items())])
    options = f"--nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --output={log} --chdir={folder}"
    script = FOLDER / "x86" / "run_124m.sbatch"
    printed = cluster(*words("sbatch", options, f"--export={export}", script, FLAGS, flags))
    return re.search(r"Submitted batch job (\d+)", printed)[1], log


def wait(condition, log: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text() if log.exists() else "the job wrote no log"
        time.sleep(0.3)


def state(cluster, job: str) -> str:
    return re.search(r"JobState=(\w+)", cluster("scontrol", "show", "job", job))[1]


def wait_for_end(cluster, job: str, log: Path) -> str:
    """Wait for a job that completes, and return its log."""
    running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    wait(lambda: state(cluster, job) not in running, log)
    text = log.read_text()
    assert state(cluster, job) == "COMPLETED", text
    return text


@pytest.mark.slow  # a real cluster of one node
def test_a_job_trains_on_two_ranks_and_ends(cluster, launcher, tmp_path):
    text = wait_for_end(cluster, *submit(cluster, tmp_path, launcher, "--train-iters 5"))
    assert [line.iteration for line in parse_log(text.splitlines())] == [1, 2, 3, 4, 5]
    assert '"world_size": 2' in text
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "5"


@pytest.mark.slow
def test_a_job_whose_rank_is_killed_goes_on_and_ends_with_the_same_bits(
    cluster, launcher, tmp_path
):
    flags = "--train-iters 12 --save-interval 2"
    held = tmp_path / "held"
    killing = kill_held(held, 5)
    variables = {"PYTHONPATH": str(launch.FIRST), **holding(held, 5)}
    text = wait_for_end(cluster, *submit(cluster, tmp_path, launcher, flags, **variables))
    killing.join()
    assert "supervise: a rank is lost" in text
    assert "supervise: restart 1 of 5 from iteration " in text
    whole = tmp_path / "whole"
    pretrain(launch.mpich(), 2, f"--recipe 124m {FLAGS} {flags} --mock-data --save {whole}")
    assert losses(tmp_path / "save") == losses(whole)


@pytest.mark.slow
def test_a_job_near_its_limit_saves_is_queued_again_and_resumes(cluster, launcher, tmp_path):
    flags = "--train-iters 100000 --save-interval 1000000"
    job, log = submit(cluster, tmp_path, launcher, flags)
    wait(lambda: log.exists() and parse_log(log.read_text().splitlines()), log)
    cluster("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@300 sends
    wait(lambda: "Restarts=1" in cluster("scontrol", "show", "job", job), log)
    text = log.read_text()
    left = int(re.search(r"leaving after iteration (\d+): a signal asked to stop", text)[1])
    assert f"saved checkpoint of iteration {left}" in text

    def resumed() -> bool:
        # a job that is queued again waits two minutes for the node to be cleaned
        if state(cluster, job) == "PENDING":
            cluster("scontrol", "update", f"JobId={job}", "StartTime=now")
        return f"resumed from {tmp_path}/save at iteration {left}" in log.read_text()

    # started in the second in which the first run's credential was revoked, the job would be killed as forged
    time.sleep(5)
    wait(resumed, log)
    cluster("scancel", job)
