"""Automatic restarts: endings, choice of nodes, last restart, forwarded signals.

The runs are a shell script that replaces the launcher and the trainer. Real ranks: tests/jobs/test_restarts.py.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.jobs import supervise
from fugaku_megatron.jobs.child import ending as ending_of
from fugaku_megatron.jobs.supervise import FRUITLESS, read_hosts
from fugaku_megatron.observe.export.hours import HOURS, append, read_hours
from fugaku_megatron.start.exit_codes import ExitCode
from tests.checks.control_group import make_control_group
from tests.processes import ROOT, run_python, write_program
from tests.time_limit import time_limit

pytestmark = pytest.mark.system

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --mock-data --train-iters 9 --max-position-embeddings 16"
)
SAME = "--save x --load x"
OPENMPI_KILL = (
    "prterun noticed that process rank 1 with PID 22675 on node c12 exited on\nsignal 9 (Killed)."
)
MPICH_KILL = "=   PID 22518 RUNNING AT c12.site\n=   EXIT CODE: 6\nAPPLICATION TERMINATED WITH THE EXIT STRING: Aborted (signal 6)"
SRUN_KILL = "srun: error: c12: task 1: Killed\nsrun: error: c13: task 0: Terminated"
SRUN_EXIT = (
    "srun: error: c12: task 1: Exited with exit code {}\nsrun: error: c13: task 0: Terminated"
)


@pytest.mark.parametrize(
    "returncode, said, code, number, node",
    [
        (0, "", ExitCode.FINISHED, 0, ""),
        (2, "rank 0: --lr is -1", ExitCode.USER_ERROR, 0, ""),
        (3, "", ExitCode.DIVERGED, 0, ""),
        (4, "", ExitCode.HANG, 0, ""),
        (5, "", ExitCode.LOST_RANK, 0, ""),
        (7, "", ExitCode.STORAGE, 0, ""),
        (9, "", ExitCode.FAILED, 0, ""),
        (255, "", ExitCode.FAILED, 0, ""),  # a launcher's own mistake
        (-9, "", ExitCode.LOST_RANK, 9, ""),  # the launcher was killed
        (137, OPENMPI_KILL, ExitCode.LOST_RANK, 9, "c12"),
        (6, MPICH_KILL, ExitCode.LOST_RANK, 6, "c12.site"),
        (143, SRUN_KILL, ExitCode.LOST_RANK, 0, "c12"),
        (143, SRUN_EXIT.format(2), ExitCode.USER_ERROR, 0, "c12"),
        (143, SRUN_EXIT.format(4), ExitCode.HANG, 0, "c12"),
        (
            137,
            "application called MPI_Abort(MPI_COMM_WORLD, 3) - process 1\nsrun: error: c1: tasks 0-1: Killed",
            ExitCode.DIVERGED,
            0,
            "c1",
        ),
        (
            1,
            "MPI_ABORT was invoked on rank 1\n  Proc: [[2737,1],1]\n  Errorcode: 5\n\nNOTE",
            ExitCode.LOST_RANK,
            0,
            "",
        ),
        (130, "", ExitCode.INTERRUPTED, 0, ""),
        (141, "", ExitCode.OUTPUT, 0, ""),
    ],
)
def test_what_a_launcher_says_counts_before_its_code(returncode, said, code, number, node):
    ending = ending_of(returncode, said)
    assert (ending.code, ending.signal, ending.node) == (code, number, node)
    assert ending.restarts == (
        code in (ExitCode.FAILED, ExitCode.HANG, ExitCode.LOST_RANK, ExitCode.STORAGE)
    )


def test_signals_of_several_ranks_are_not_read_as_another_one():
    killed = MPICH_KILL.replace("6", "9").replace(
        "Aborted (signal 9)", "Segmentation fault (signal 11)"
    )
    assert (
        ending_of(9, killed).text()
        == "a rank is lost (signal 9, SIGKILL, and others in other ranks) on node c12.site"
    )
    assert ending_of(6, MPICH_KILL).text() == "a rank is lost (signal 6, SIGABRT) on node c12.site"


@pytest.mark.parametrize(
    ("line", "folder", "file", "text"),
    [
        ("0::/job", "job", "memory.events", "low 0\noom 3\noom_kill {}\noom_group_kill 0\n"),
        ("4:memory:/job", "memory/job", "memory.oom_control", "under_oom 0\noom_kill {}\n"),
    ],
)
def test_an_out_of_memory_kill_is_named(line, folder, file, text, tmp_path, monkeypatch, capfd):
    make_control_group(monkeypatch, tmp_path, line, folder)
    events = tmp_path / folder / file
    events.write_text(text.format(1))
    job = Job(tmp_path, capfd, "137 1 killed", "137 2 killed", "0 3 end")
    waiting = supervise.Launcher.wait

    def wait(launcher):
        ended = waiting(launcher)
        if (tmp_path / "calls").read_text().count("\n") == 1:
            events.write_text(text.format(2))
        return ended

    monkeypatch.setattr(supervise.Launcher, "wait", wait)
    code, lines = job.end()
    assert code == 0
    ends = [line for line in lines if line.startswith("a rank is lost (signal 9, SIGKILL)")]
    named = ": out of memory: the kernel killed a process of this control group (memory.events): "
    assert [named in end for end in ends] == [True, False]


def allocation(
    hosts: int, spares: int, ranks_per_node: int = 1, flags: str = ""
) -> supervise.Nodes:
    run = supervise.run_of(f"fugaku-megatron train {MODEL} {SAME} {flags}".split())
    return supervise.Nodes([f"c{i}" for i in range(hosts)], ranks_per_node, spares, run)


def without(*dead: str):
    return lambda hosts: not set(hosts) & set(dead)


def test_a_named_node_is_replaced_by_a_spare():
    made = allocation(3, 1)
    assert made.choose() == ["c0", "c1"]
    assert made.lose("c1.site", ["c0", "c1"], without()) == ["c1"] and made.choose() == ["c0", "c2"]


def test_without_a_spare_only_a_node_that_does_not_answer_is_left_out():
    made = allocation(4, 0)
    assert made.lose("c1", made.choose(), without()) == [] and len(made.choose()) == 4
    assert made.lose("", made.choose(), without("c2")) == ["c2"]
    assert made.choose() == ["c0", "c1"]  # 3 x 2 samples do not divide the global batch of 8
    assert made.lose("", ["c0", "c1"], without("c0")) == ["c0"] and made.choose() == ["c1", "c3"]


def test_a_launcher_that_starts_nothing_condemns_no_node():
    made = allocation(4, 0)
    assert made.lose("", made.choose(), lambda hosts: False) == [] and len(made.choose()) == 4


def test_silent_nodes_are_found_by_halving():
    asked = []

    def answers(hosts):
        asked.append(len(hosts))
        return without("c700")(hosts)

    assert (
        supervise.silent([f"c{i}" for i in range(1024)], answers) == ["c700"] and len(asked) == 21
    )


def test_the_layout_decides_how_many_nodes_are_used():
    assert len(allocation(6, 2, 2, "--pipeline-model-parallel-size 2").choose()) == 4
    made = allocation(2, 0, 2, "--tensor-model-parallel-size 4")
    assert made.lose("", made.choose(), without("c1")) == ["c1"] and made.choose() == []


STANDS_FOR_A_LAUNCHER = r"""#!/bin/bash
# launch FOLDER MAP-or-- WORDS: the next line of FOLDER/plan is `code iteration words`; calls are written to FOLDER/calls
folder=$1; map=$2; shift 2
[ "$map" = - ] || hosts=$(sort -u "$map" | paste -sd,)
if [ "$1" = true ]; then for down in $(cat "$folder/down"); do [[ ,$hosts, != *,$down,* ]] || exit 1; done; exit 0; fi
echo "${hosts:--} $*" >> "$folder/calls"
read -r code iteration words < "$folder/plan"
sed -i 1d "$folder/plan"
[ "$iteration" = 0 ] || { mkdir -p "$folder/save"; echo "$iteration" > "$folder/save/latest_checkpointed_iteration.txt"; }
trap 'echo asked to stop; exit 0' USR1
echo -e "$words" >&2
[ "$code" != wait ] || while true; do sleep 0.05; done
exit "$code"
"""


class Job:
    """A supervised run with planned endings."""

    def __init__(self, folder: Path, capfd, *plan: str):
        self.folder = folder
        self.capfd = capfd
        self.launch = write_program(folder / "launch", STANDS_FOR_A_LAUNCHER)
        (folder / "plan").write_text("\n".join(plan) + "\n")
        (folder / "down").touch()

    def words(self, flags: str = "", launcher: bool = False, train: str = "") -> list[str]:
        save = f"--save {self.folder}/save --load {self.folder}/save"
        trainer = f"fugaku-megatron train {MODEL} {save} {train}"
        start = f"{self.launch} {self.folder}"
        if launcher:
            return shlex.split(f"supervise --launcher '{start} {{map}}' {flags} -- {trainer}")
        return f"supervise {flags} -- {start} - {trainer}".split()

    def end(self, flags: str = "", **options) -> tuple[int, list[str]]:
        """Return the exit code, and the lines of the supervisor."""
        with time_limit(60):
            code = program.main(self.words(flags, **options))
        said = self.capfd.readouterr().err.splitlines()
        begin = "supervise: "
        return code, [line.removeprefix(begin) for line in said if line.startswith(begin)]

    def asked_to_stop(self, number: int) -> tuple[int, str, str]:
        """Send a signal to a supervisor when the first start is there; return exit code, stdout and stderr."""
        process = subprocess.Popen(
            [sys.executable, "-m", "fugaku_megatron", *self.words()],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stderr.readline() == "up\n"
        process.send_signal(number)
        out, said = process.communicate(timeout=200)
        return process.returncode, out, said

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def planned(tmp_path, capfd):
    """Job with a plan."""
    return lambda *plan: Job(tmp_path, capfd, *plan)


def test_a_fault_is_followed_by_a_start_from_the_last_checkpoint(planned):
    job = planned("9 4 EXIT STRING: Killed (signal 9)", "4 6", "0 9")
    code, said = job.end("--max-restarts 5")
    assert code == 0 and len(job.calls()) == 3 and len(set(job.calls())) == 1
    assert said == [
        "a rank is lost (signal 9, SIGKILL); the last checkpoint is of iteration 4",
        "restart 1 of 5 from iteration 4",
        "a rank hung; the last checkpoint is of iteration 6",
        "restart 2 of 5 from iteration 6",
    ]


def test_the_record_of_hours_has_every_end(planned, tmp_path):
    job = planned("4 6", "0 9")
    (tmp_path / "save").mkdir()
    append(tmp_path / "save" / HOURS, event="start", begun=0, iteration=0)
    job.end()
    lines = read_hours(tmp_path / "save" / HOURS)
    assert [line.get("code") for line in lines] == [None, 4, 0]


@pytest.mark.parametrize(
    "code", [ExitCode.FINISHED, ExitCode.USER_ERROR, ExitCode.DIVERGED, ExitCode.INTERRUPTED]
)
def test_what_would_end_alike_is_not_started_again(planned, code):
    job = planned(f"{code:d} 0")
    assert job.end()[0] == code and len(job.calls()) == 1


@pytest.mark.parametrize("flags", ["", "--save-memory 2"])
def test_restarts_that_gain_nothing_end(planned, flags):
    job = planned("5 4", *["5 0"] * 9)
    code, said = job.end("--max-restarts 9", train=flags)
    assert code == ExitCode.LOST_RANK and len(job.calls()) == 2 + FRUITLESS
    assert said[-1] == f"{FRUITLESS} restarts in a row made no new checkpoint; exit code 5"


@pytest.fixture
def record_start(tmp_path, monkeypatch):
    """Return a function whose argument appends the lines of a start to the record of hours, each time that one ends."""
    hours = tmp_path / "save" / HOURS
    hours.parent.mkdir()
    hours.touch()
    waiting = supervise.Launcher.wait

    def use(append_lines):
        def wait(launcher):
            append_lines(hours, len(read_hours(hours)))
            return waiting(launcher)

        monkeypatch.setattr(supervise.Launcher, "wait", wait)

    return use


@pytest.mark.parametrize(("copies", "calls"), [(1, 1 + FRUITLESS), (2, 6)])
def test_starts_that_make_two_copies_in_memory_gain_something(planned, record_start, copies, calls):
    """Every start begins anew, because its node takes the copies with it; the last copy of a start may be incomplete."""

    def lines(hours, before):
        append(hours, event="start", begun=before, iteration=0)
        append(hours, event="iterations", iteration=7, copies=copies)

    record_start(lines)
    job = planned(*["5 0"] * 5, "0 9")
    code, said = job.end("--max-restarts 9", train="--save-memory 2")
    assert len(job.calls()) == calls
    assert code == (0 if copies == 2 else ExitCode.LOST_RANK)
    fruitless = f"{FRUITLESS} restarts in a row made no new checkpoint; exit code 5"
    assert (said[-1] == fruitless) == (copies < 2)


def test_starts_from_newer_copies_in_memory_gain_something(planned, record_start):
    """Each start continues where the one before had its last copy, and none saves."""
    record_start(lambda hours, before: append(hours, event="start", begun=0, iteration=10 * before))
    job = planned(*["5 0"] * 5, "0 9")
    code, said = job.end("--max-restarts 9", train="--save-memory 2")
    assert code == 0 and len(job.calls()) == 6
    assert said[-1] == "restart 5 of 9 from iteration 0 or newer copies in memory"


def test_restarts_are_counted(planned):
    job = planned("1 1", "1 2", "1 3")
    assert job.end("--max-restarts 1") == (
        1,
        [
            "a rank failed (exit code 1); the last checkpoint is of iteration 1",
            "restart 1 of 1 from iteration 1",
            "a rank failed (exit code 1); the last checkpoint is of iteration 2",
            "all restarts of --max-restarts 1 are used; exit code 1",
        ],
    )


def test_spares_come_first_then_fewer_replicas_with_the_same_batch(planned, tmp_path):
    job = planned(f"9 2 {OPENMPI_KILL.replace('c12', 'b')}".replace("\n", "\\n"), "5 4", "0 9")
    (tmp_path / "down").write_text("c")
    code, said = job.end("--hosts a,b,c --spare-nodes 1", launcher=True)
    assert code == 0 and [call.split()[0] for call in job.calls()] == ["a,b", "a,c", "a"]
    assert said[1:] == [
        "no longer used: b",
        "restart 1 of 3 from iteration 2 on 2 nodes with data-parallel size 2; 0 spare nodes",
        "a rank is lost; the last checkpoint is of iteration 4",
        "no longer used: c",
        "restart 2 of 3 from iteration 4 on 1 nodes with data-parallel size 1; 0 spare nodes",
    ]
    assert job.calls()[2].endswith("--global-batch-size 8")


def test_the_time_that_has_passed_is_taken_off(planned):
    job = planned("5 2", "0 4")
    assert job.end(train="--exit-duration-in-mins 5")[0] == 0
    first, second = (float(call.rpartition(" ")[2]) for call in job.calls())
    assert first == 5 and 4 < second <= 5  # hundredths of a minute
    job = planned("5 5")
    assert job.end(train="--exit-duration-in-mins 0.000001")[1][-1] == (
        "the time of --exit-duration-in-mins is over: the next job continues; exit code 0"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_the_run_to_leave(planned, number):
    assert planned("wait 4 up").asked_to_stop(number) == (0, "asked to stop\n", "")


def test_a_rank_that_dies_of_the_request_ends_the_job_in_order(planned):
    job = planned("wait 4 up")
    job.launch.write_text(STANDS_FOR_A_LAUNCHER.replace("echo asked to stop; exit 0", "exit 10"))
    code, _, said = job.asked_to_stop(signal.SIGUSR1)
    assert code == 0 and said.endswith("supervise: asked to stop; exit code 0\n")


def test_hosts_come_from_a_list_or_a_file(tmp_path):
    (tmp_path / "map").write_text("(0)\n(0)\n(1)\n(1)\n")
    assert read_hosts("a,b") == ["a", "b"] and read_hosts(f"@{tmp_path}/map") == ["(0)", "(1)"]
    for words in (",", f"@{tmp_path}/none", f"@{sys.executable}"):
        with pytest.raises(ValueError, match="--hosts"):
            read_hosts(words)


def test_the_supervisor_needs_neither_torch_nor_mpi():
    code = "import sys, fugaku_megatron.jobs.supervise; print({'torch', 'mpi4py'} & {*sys.modules})"
    assert run_python("-c", code).stdout == "set()\n"
