"""local_pjsub: runs our scripts as pjsub would, keeps limits, chains steps to the same losses, knows bulk jobs and pjdel."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmark
from fugaku_megatron.cli import program as program_module
from tests.system.mpi import launch
from tests.system.mpi.kills import PATIENCE, holding, kill_held
from tests.system.mpi.test_pretrain import losses
from tests.time_limit import wait_until

pytestmark = pytest.mark.mpi
ROOT = launch.TESTS.parent
SCRIPTS = ROOT / "scripts" / "pjsub"
# 1,600 micro-batches: longer than the 0.6 s that a job trains at least, also at 0.5 ms per micro-batch
FLAGS = "--train-iters 100 --global-batch-size 32 --save-interval 100000"
TRIAL = ["--elapse", "240", "--wait"]
ALONE = ["--scale", "1", *TRIAL]
PAIR = ["--scale", "2", *TRIAL]


@pytest.fixture
def local(tmp_path, monkeypatch, capsys):
    """Runs a command of the emulator in this process, which saves its start. Jobs are processes of their own."""
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

    def run(program: str, *words: str) -> subprocess.CompletedProcess:
        code = scheduler.main(program, list(words))
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run


def script(folder: Path, body: str) -> str:
    path = folder / "job.sh"
    path.write_text('#!/bin/bash\n#PJM -L "node=1,elapse=00:04:00"\n#PJM -N job\n#PJM -S\n' + body)
    return str(path)


def archive(folder: Path) -> Path:
    """The emulator's archive, with what lets ranks wait to be killed and draws no losses."""
    path = importlib.import_module("local_commands").archive(folder)
    link = tarfile.TarInfo("site")
    link.type, link.linkname = tarfile.SYMTYPE, str(launch.FIRST)
    with tarfile.open(path, "a") as tar:
        tar.addfile(link)
    return path


def test_a_chain_through_the_elapse_limit_and_a_killed_rank_has_the_losses_of_one_run(
    local, tmp_path, monkeypatch
):
    every = f"{FLAGS} --log-interval 1"
    packed = f"ARCHIVE={archive(tmp_path)}"
    resume = str(SCRIPTS / "resume.sh")
    first = local(
        "local_pjsub",
        *ALONE,
        "--margin",
        "240",
        "--flags",
        every,
        "--step",
        "--sparam",
        "jnam=c,sn=1",
        "-x",
        packed,
        resume,
    )
    message = (tmp_path / "gpt_124m_chain.1_1.err").read_text()
    assert first.returncode == 0, message + first.stderr
    log = next((tmp_path / "output" / "gpt_124m_chain.1_1" / "train").rglob("stdout*")).read_text()
    assert "--exit-duration-in-mins is over" in log
    save = tmp_path / "checkpoints" / "gpt_124m_chain"
    killed, held = len(losses(save)) + 1, tmp_path / "held"
    for name, value in holding(held, killed).items():
        monkeypatch.setenv(name, value)
    killing = kill_held(held, killed)
    second = local(
        "local_pjsub",
        *ALONE,
        "--flags",
        every,
        "--step",
        "--sparam",
        "jid=1,sn=2,sd=ec!=0:all:1",
        "-x",
        packed,
        resume,
    )
    assert second.returncode == 0 and "1_2" in local("local_pjstat").stdout
    killing.join()
    assert (
        next((tmp_path / "output" / "gpt_124m_chain.1_2" / "train").rglob("stdout*"))
        .read_text()
        .count("resumed from")
        == 2
    )
    assert (
        "supervise: restart 1 of 5 from iteration "
        in (tmp_path / "gpt_124m_chain.1_2.err").read_text()
    )
    whole = local(
        "local_pjsub",
        *ALONE,
        "--flags",
        every,
        "-x",
        f"SAVE={tmp_path / 'whole'},{packed}",
        resume,
    )
    assert whole.returncode == 0, whole.stderr
    assert losses(save) == losses(tmp_path / "whole")
    assert "EXIT CODE               : 0" in (tmp_path / "gpt_124m_chain.1_2.stats").read_text()


def rows(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith("|")]


def trained(local, tmp_path: Path, *words: str) -> str:
    """Rank 0's training log of a short job."""
    *options, file = words
    done = local("local_pjsub", *options, "-x", f"ARCHIVE={archive(tmp_path)}", file)
    assert done.returncode == 0, done.stderr
    (log,) = (
        path
        for path in (tmp_path / "output").glob("*/*/0/0/stdout.1.0")
        if path.parts[-4] != "stage"
    )
    return str(log)


SHORT = ["--flags", "--train-iters 6 --log-interval 1"]


@pytest.mark.full
def test_a_job_on_a_torus_trains_to_a_checkpoint_and_a_row(local, tmp_path, capsys):
    log = trained(local, tmp_path, *PAIR, *SHORT, str(SCRIPTS / "run_30b.sh"))
    assert (
        tmp_path / "checkpoints" / "gpt_30b" / "latest_checkpointed_iteration.txt"
    ).read_text().strip() == "6"
    assert program_module.main(["log", log]) == 0
    header, _, row = rows(capsys.readouterr().out)
    assert "Sec/it" in header and row.split("|")[4].strip() == "2" and "loss" in row  # DP 2


def test_clocks_end_in_the_published_table(local, tmp_path, capsys):
    script = SCRIPTS / "compare_frequency.sh"
    other = next(line for line in script.read_text().splitlines() if "boost-eco-2.2: pjsub" in line)
    options = shlex.split(other.partition("-g GROUP ")[2])[:-1]
    log = trained(local, tmp_path, *ALONE, *SHORT, *options, str(script))
    benchmark(["alloc", "--from-logs", log, log])
    _, _, *clocks = rows(capsys.readouterr().out)
    assert len(clocks) == 2 and all("GHz" in row for row in clocks)


def test_a_script_is_checked_and_ends_at_its_elapse_limit(local, tmp_path):
    refused = local(*f"local_pjsub --scale 2 -L freq=2200 {SCRIPTS / 'run_124m.sh'}".split())
    assert refused.returncode == 2 and "since April 2025" in refused.stderr
    ended = local(
        *"local_pjsub --no-check --wait -L elapse=1".split(), script(tmp_path, "sleep 60\n")
    )
    stats = (tmp_path / "job.1.stats").read_text()
    assert (
        ended.returncode != 0
        and "ELAPSE LIMIT EXCEEDED" in stats
        and "PJM CODE                : 11" in stats
    )


def test_bulk_jobs_and_variables(local, tmp_path):
    body = 'echo "$PJM_BULKNUM of $PJM_JOBID in $PJM_SUBJOBID, $COLOUR $SHAPE"\necho oops >&2\n'
    bulk = "--bulk --sparam 0-1 -x COLOUR=red,SHAPE=9,3".split()
    done = local("local_pjsub", "--no-check", "--wait", *bulk, script(tmp_path, body))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "job.1[1].out").read_text() == "1 of 1 in 1[1], red 9,3\n"
    assert (tmp_path / "job.1[0].err").read_text() == "oops\n"


def test_a_failed_step_drops_the_next(local, tmp_path):
    path = script(tmp_path, "exit 3\n")
    assert (
        local(*"local_pjsub --no-check --wait --step --sparam jnam=c,sn=1".split(), path).returncode
        == 3
    )
    local(
        *"local_pjsub --no-check --wait --step --sparam jid=1,sn=2,sd=ec!=0:all:1".split(),
        path,
    )
    assert " RJT " in local("local_pjstat").stdout.splitlines()[-1]
    assert not (tmp_path / "job.1_2.out").exists()


def test_pjdel(local, tmp_path):
    assert local("local_pjsub", "--no-check", script(tmp_path, "sleep 60\n")).returncode == 0
    assert wait_until(lambda: " RUN " in local("local_pjstat").stdout, PATIENCE)
    assert local("local_pjdel", "1").returncode == 0
    assert " CCL " in local("local_pjstat").stdout
    assert local("local_pjdel", "7").returncode == 2


def test_interactive(local):
    where = ["--interact", "-L", "node=1,rscgrp=int,elapse=1:00:00"]
    assert local("local_pjsub", *where, "/bin/true").returncode == 0
    assert local("local_pjsub", *where, "bash", "-c", "exit 3").returncode == 3


def test_mistakes_are_one_line(local, tmp_path):
    file = script(tmp_path, "exit 0\n")
    assert local("local_pjsub", "--no-check", "--wait", file).returncode == 0
    for words, answer in (
        ("nowhere.sh", "nowhere.sh is not a file"),
        ("-Q x", "local_pjsub: pjsub option -Q is unknown"),
        ("--scale many x", "--scale is many: pass a number from 1"),
        ("--elapse 0 x", "--elapse is 0"),
        (f"--no-check --step --sparam jid=9 {file}", "jid=9: there is no such job"),
        (
            f"--no-check --step --sparam jid=../jobs,sn=1 {file}",
            "jid=../jobs: there is no such job",
        ),
        (
            f"--no-check --step --sparam jid=1,sn=x {file}",
            "--sparam sn=x: pass the number of a step",
        ),
        (f"--no-check --bulk --sparam 3-0 {file}", '--sparam "FIRST-LAST"'),
        (f"--no-check --bulk {file}", '--sparam "FIRST-LAST"'),
        (f"--no-check {file} -S", f"'-S' after {file}: pass options before the script"),
        ("-N job --wait x", "option --wait of this emulator must come before pjsub's"),
        ("--interact nosuchcommand", "nosuchcommand: No such file or directory"),
    ):
        message = local("local_pjsub", *shlex.split(words))
        assert (
            message.returncode == 2 and message.stderr.count("\n") == 1 and answer in message.stderr
        ), (words, message.stderr)
    ended = local("local_pjdel", "1")
    assert ended.returncode == 2 and "job 1 has ended already" in ended.stderr
    assert len(local("local_pjstat").stdout.splitlines()) == 2


def test_the_emulated_mpiexec(monkeypatch):
    monkeypatch.setenv("LOCAL_PJSUB_FLAGS", "--seed 7")
    monkeypatch.syspath_prepend(SCRIPTS)
    commands = importlib.import_module("local_commands")
    options, command = commands.split("-n 8 -mca a 1 --vcoordfile m bash -c x".split())
    assert options["-mca"] == ["a", "1"] and command == ["bash", "-c", "x"]
    words = commands.scaled("python pretrain_gpt.py --cpu-frequency 2.0 --lr 1".split())
    assert (
        "--cpu-frequency" not in words
        and "2.0" not in words
        and words[-2:] == ["--seed", "7"]
        and "--lr" in words
    )
    with pytest.raises(ValueError, match="-ppn is unknown"):
        commands.split(["-ppn", "1", "bash"])


def test_a_job_reports_its_nodes(local, tmp_path):
    assert (
        program_module.main(f"job render --report --nodes 2 -o {tmp_path / 'report.sh'}".split())
        == 0
    )
    done = local(
        "local_pjsub",
        *ALONE,
        "-x",
        "MORE=--shrunk --minutes 4 --only host kernels",
        str(tmp_path / "report.sh"),
    )
    assert done.returncode == 0, (tmp_path / "report.1.err").read_text()
    report = json.loads(next((tmp_path / "output").rglob("report.json")).read_text())
    assert report["complete"] and len(report["sections"]["kernels"]["ranks"]) == 1
