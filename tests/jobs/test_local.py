"""local_pjsub: runs our scripts as pjsub would, keeps limits, chains steps to the same losses, knows bulk jobs and pjdel."""

from __future__ import annotations

import importlib
import json
import shlex
import tarfile
from pathlib import Path

import pytest

from fugaku_megatron.cli import program as program_module
from tests.mpi import launch
from tests.mpi.kills import PATIENCE, holding, kill_held
from tests.mpi.pretraining import losses
from tests.time_limit import wait_until

pytestmark = [pytest.mark.system, pytest.mark.mpi]
ROOT = launch.TESTS.parent
SCRIPTS = ROOT / "scripts" / "pjsub"
# 1,280 micro-batches: longer than the 0.6 s that a job trains at least, also at 0.5 ms per micro-batch
FLAGS = "--train-iters 40 --global-batch-size 32 --save-interval 100000"
TRIAL = "--elapse 240 --wait"
ALONE = f"--scale 1 {TRIAL}"
PAIR = f"--scale 2 {TRIAL}"
SHORT = "--flags '--train-iters 6 --log-interval 1'"
UNCHECKED = "--no-check --wait"
FIRST_STEP = "--step --sparam jnam=c,sn=1"
SECOND_STEP = "--step --sparam jid=1,sn=2,sd=ec!=0:all:1"


@pytest.fixture
def local(tmp_path, monkeypatch, capsys):
    """Run the emulator in this process, without a start. Jobs are separate processes."""
    if launch.mpich() is None:
        pytest.skip(launch.MISSING["mpich"])
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("PWD", tmp_path),
        ("LOCAL_PJSUB", tmp_path / "jobs"),
        ("FUGAKU_MEGATRON", ROOT),
    ):
        monkeypatch.setenv(name, str(value))
    scheduler = importlib.import_module("local_scheduler")

    def run(command: str, *more: str, code: int = 0) -> launch.Result:
        """Run a command: name and options as in a shell, then more words."""
        program, *options = shlex.split(command)
        ended = scheduler.main(program, [*options, *more])
        return launch.Result(ended, *capsys.readouterr(), seconds=0.0).check(code)

    return run


def script(folder: Path, body: str) -> str:
    path = folder / "job.sh"
    path.write_text('#!/bin/bash\n#PJM -L "node=1,elapse=00:04:00"\n#PJM -N job\n#PJM -S\n' + body)
    return str(path)


def archive(folder: Path) -> Path:
    """Return the emulator's archive, with the code that lets ranks wait for a kill and draws no losses."""
    path = importlib.import_module("local_commands").archive(folder)
    link = tarfile.TarInfo("site")
    link.type = tarfile.SYMTYPE
    link.linkname = str(launch.FIRST)
    with tarfile.open(path, "a") as tar:
        tar.addfile(link)
    return path


def test_a_chain_through_the_elapse_limit_and_a_killed_rank_has_the_losses_of_one_run(
    local, tmp_path, monkeypatch
):
    chain = f"local_pjsub {ALONE} --flags '{FLAGS} --log-interval 1'"
    packed = f"ARCHIVE={archive(tmp_path)}"
    resume = SCRIPTS / "resume.sh"
    local(f"{chain} --margin 240 {FIRST_STEP} -x {packed} {resume}")
    name = "gpt_124m_chain.1_{}"

    def log(step: int) -> str:
        folder = tmp_path / "output" / name.format(step) / "train"
        return next(folder.rglob("stdout*")).read_text()

    assert "--exit-duration-in-mins is over" in log(1)
    save = tmp_path / "checkpoints" / "gpt_124m_chain"
    killed = len(losses(save)) + 1
    held = tmp_path / "held"
    for variable, value in holding(held, killed).items():
        monkeypatch.setenv(variable, value)
    killing = kill_held(held, killed)
    local(f"{chain} {SECOND_STEP} -x {packed} {resume}")
    assert "1_2" in local("local_pjstat").stdout
    killing.join()
    assert log(2).count("resumed from") == 2
    second = tmp_path / name.format(2)
    assert "supervise: restart 1 of 5 from iteration " in Path(f"{second}.err").read_text()
    local(f"{chain} -x SAVE={tmp_path}/whole,{packed} {resume}")
    assert losses(save) == losses(tmp_path / "whole")
    assert "EXIT CODE               : 0" in Path(f"{second}.stats").read_text()


def rows(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith("|")]


def trained(local, tmp_path: Path, options: str, file: Path) -> str:
    """Return rank 0's training log from a short job."""
    local(f"local_pjsub {options} -x ARCHIVE={archive(tmp_path)} {file}")
    logs = (tmp_path / "output").glob("*/*/0/0/stdout.1.0")
    (log,) = (path for path in logs if path.parts[-4] != "stage")
    return str(log)


@pytest.mark.full
def test_a_job_on_a_torus_trains_to_a_checkpoint_and_a_row(local, tmp_path, capsys):
    log = trained(local, tmp_path, f"{PAIR} {SHORT}", SCRIPTS / "run_30b.sh")
    latest = tmp_path / "checkpoints" / "gpt_30b" / "latest_checkpointed_iteration.txt"
    assert latest.read_text().strip() == "6"
    assert program_module.main(["log", log]) == 0
    header, _, row = rows(capsys.readouterr().out)
    assert "Sec/it" in header and row.split("|")[4].strip() == "2" and "loss" in row  # DP 2


def test_clocks_end_in_the_published_table(local, tmp_path, capsys):
    script = SCRIPTS / "compare_frequency.sh"
    other = next(line for line in script.read_text().splitlines() if "boost-eco-2.2: pjsub" in line)
    options = other.partition("-g GROUP ")[2].rpartition(" ")[0]
    log = trained(local, tmp_path, f"{ALONE} {SHORT} {options}", script)
    assert program_module.main(["log", log, log]) == 0
    _, _, *clocks = rows(capsys.readouterr().out)
    assert sum("GHz" in row for row in clocks) == 2


def test_a_script_is_checked_and_ends_at_its_elapse_limit(local, tmp_path):
    refused = local(f"local_pjsub --scale 2 -L freq=2200 {SCRIPTS}/run_124m.sh", code=2)
    assert "since April 2025" in refused.stderr
    sleeping = script(tmp_path, "sleep 60\n")
    ended = local(f"local_pjsub {UNCHECKED} -L elapse=1 {sleeping}", code=None)
    stats = (tmp_path / "job.1.stats").read_text()
    assert ended.returncode != 0 and "ELAPSE LIMIT EXCEEDED" in stats
    assert "PJM CODE                : 11" in stats


def test_bulk_jobs_and_variables(local, tmp_path):
    body = 'echo "$PJM_BULKNUM of $PJM_JOBID in $PJM_SUBJOBID, $COLOUR $SHAPE"\necho oops >&2\n'
    bulk = "--bulk --sparam 0-1 -x COLOUR=red,SHAPE=9,3"
    local(f"local_pjsub {UNCHECKED} {bulk} {script(tmp_path, body)}")
    assert (tmp_path / "job.1[1].out").read_text() == "1 of 1 in 1[1], red 9,3\n"
    assert (tmp_path / "job.1[0].err").read_text() == "oops\n"


def test_a_failed_step_drops_the_next(local, tmp_path):
    path = script(tmp_path, "exit 3\n")
    local(f"local_pjsub {UNCHECKED} {FIRST_STEP} {path}", code=3)
    local(f"local_pjsub {UNCHECKED} {SECOND_STEP} {path}", code=None)
    assert " RJT " in local("local_pjstat").stdout.splitlines()[-1]
    assert not (tmp_path / "job.1_2.out").exists()


def test_pjdel(local, tmp_path):
    sleeping = script(tmp_path, "sleep 60\n")
    local(f"local_pjsub --no-check {sleeping}")
    assert wait_until(lambda: " RUN " in local("local_pjstat").stdout, PATIENCE)
    local("local_pjdel 1")
    assert " CCL " in local("local_pjstat").stdout
    local("local_pjdel 7", code=2)


def test_interactive(local):
    where = "local_pjsub --interact -L node=1,rscgrp=int,elapse=1:00:00"
    local(f"{where} /bin/true")
    local(f"{where} bash -c 'exit 3'", code=3)


def test_mistakes_are_one_line(local, tmp_path):
    file = script(tmp_path, "exit 0\n")
    local(f"local_pjsub {UNCHECKED} {file}")
    step = "--no-check --step --sparam"
    for words, answer in {
        "nowhere.sh": "nowhere.sh is not a file",
        "-Q x": "local_pjsub: pjsub option -Q is unknown",
        "--scale many x": "--scale is many: pass a number from 1",
        "--elapse 0 x": "--elapse is 0",
        f"{step} jid=9 {file}": "jid=9: there is no such job",
        f"{step} jid=../jobs,sn=1 {file}": "jid=../jobs: there is no such job",
        f"{step} jid=1,sn=x {file}": "--sparam sn=x: pass the number of a step",
        f"--no-check --bulk --sparam 3-0 {file}": '--sparam "FIRST-LAST"',
        f"--no-check --bulk {file}": '--sparam "FIRST-LAST"',
        f"--no-check {file} -S": f"'-S' after {file}: pass options before the script",
        "-N job --wait x": "option --wait of this emulator must come before pjsub's",
        "--interact nosuchcommand": "nosuchcommand: No such file or directory",
    }.items():
        local(f"local_pjsub {words}", code=2).mistake(answer)
    local("local_pjdel 1", code=2).mistake("job 1 has ended already")
    assert len(local("local_pjstat").stdout.splitlines()) == 2


def test_the_emulated_mpiexec(monkeypatch):
    monkeypatch.setenv("LOCAL_PJSUB_FLAGS", "--seed 7")
    monkeypatch.syspath_prepend(SCRIPTS)
    commands = importlib.import_module("local_commands")
    options, command = commands.split("-n 8 -mca a 1 --vcoordfile m bash -c x".split())
    assert options["-mca"] == ["a", "1"] and command == ["bash", "-c", "x"]
    words = commands.scaled("python pretrain_gpt.py --cpu-frequency 2.0 --lr 1".split())
    assert not {"--cpu-frequency", "2.0"} & set(words) and "--lr" in words
    assert words[-2:] == ["--seed", "7"]
    with pytest.raises(ValueError, match="-ppn is unknown"):
        commands.split(["-ppn", "1", "bash"])


def test_a_job_reports_its_nodes(local, tmp_path):
    file = tmp_path / "report.sh"
    assert program_module.main(f"job render --report --nodes 2 -o {file}".split()) == 0
    more = "MORE=--shrunk --minutes 4 --only host kernels"
    local(f"local_pjsub {ALONE} -x '{more}' {file}")
    report = json.loads(next((tmp_path / "output").rglob("report.json")).read_text())
    assert report["complete"] and len(report["sections"]["kernels"]["ranks"]) == 1
