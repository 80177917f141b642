"""Processes that hang are named by one that lives, with their stacks; what is said of many is counted and named rightly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fugaku_megatron.comm.launcher import ExitCode
from fugaku_megatron.watchdog import heartbeat
from fugaku_megatron.watchdog.heartbeat import Heartbeat
from fugaku_megatron.watchdog.verdict import SILENT, Standing, count, judge, merge
from fugaku_megatron.watchdog.watch import OUTSIDE, HangSettings, Watchdog

PROGRAM = Path(__file__).with_name("hanging_rank.py")
SECONDS = 1.0


# name -> what each rank does (see hanging_rank.py), and the signal that the last one gets
GROUPS = {
    "stopped": (("wait", "forward"), signal.SIGSTOP), "stopped while waiting": (("wait", "wait"), signal.SIGSTOP),
    "killed": (("wait", "forward"), signal.SIGKILL), "stands still": (("forward", "wait"), None),
    "holds the lock": (("wait", "hold_the_lock"), None), "deadlock": (("wait", "wait"), None), "works": (("compute",), None),
}


@dataclass(frozen=True)
class Ended:
    """What became of a group. codes: of its ranks, None: still there. said: by the speaker. stacks: of each rank."""

    codes: list[int | None]
    said: str
    stacks: list[str]


def start(directory: Path, words: tuple[str, ...], seconds: float = SECONDS,
          more: Callable[[int], tuple[int, ...]] = lambda rank: (), path: str = "") -> list[subprocess.Popen]:
    """The ranks of a group, which do what the words say. more: arguments of each, about its node. path: where a debugger may be."""
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[1]), "PATH": path}  # without one: it takes seconds
    return [subprocess.Popen([sys.executable, PROGRAM, directory, *map(str, (rank, len(words), seconds, word, *more(rank)))],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
            for rank, word in enumerate(words)]


def let_hang(processes: list[subprocess.Popen], after: float = 0.0) -> None:
    """When all are there, begin to watch them, and so many seconds later let them come to where they hang."""
    for line, seconds in ("there", 0.0), ("watched", after):
        assert [process.stdout.readline() for process in processes] == [f"{line}\n"] * len(processes)
        time.sleep(seconds)
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
    time.sleep(0.5)


def end(directory: Path, processes: list[subprocess.Popen], speaker: int = 0, ends: bool = False) -> Ended:
    """Wait until the speaker has ended, and the last rank if that `ends` by itself."""
    try:
        _, said = processes[speaker].communicate(timeout=40)
        if ends:
            processes[-1].wait(timeout=20)
        files = [next(iter(directory.glob(f"hang_*/rank{rank}.txt")), None) for rank in range(len(processes))]
        return Ended([process.poll() for process in processes], said, [file.read_text() if file else "" for file in files])
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """All groups, which hang at the same time."""
    directories = {name: tmp_path_factory.mktemp("group") for name in GROUPS}
    groups = {name: start(directories[name], words) for name, (words, _) in GROUPS.items()}
    let_hang([process for group in groups.values() for process in group])
    for name, (_, number) in GROUPS.items():
        if number:
            groups[name][-1].send_signal(number)
    return {name: end(directories[name], processes, ends=GROUPS[name][1] is None and name != "holds the lock")
            for name, processes in groups.items()}


def test_a_stopped_rank_is_named_by_one_that_waits(ended):
    job = ended["stopped"]
    assert job.codes[0] == ExitCode.HANG
    assert job.said.startswith("rank 1 (node ") and ") stopped in forward of micro-batch 3, iteration 12, " in job.said
    assert "; 1 rank waits for it; stacks of all ranks: " in job.said and job.said.count("\n") == 1
    assert "in forever" in job.stacks[0] and "state T (stopped)" in job.stacks[1] and "in forward" in job.stacks[1]


def test_a_rank_that_stops_while_it_waits_is_not_one_that_waits(ended):
    job = ended["stopped while waiting"]
    assert job.codes[0] == ExitCode.HANG and "rank 1 (node " in job.said and "; 1 rank waits for it" in job.said, job.said


def test_a_rank_that_stands_still_names_itself_and_all_end(ended):
    job = ended["stands still"]
    assert job.said.startswith("rank 0 (node ") and job.codes == [ExitCode.HANG, ExitCode.HANG], job


def test_who_holds_pythons_lock_is_named_with_its_stack(ended):
    job = ended["holds the lock"]
    assert job.codes[0] == ExitCode.HANG and job.said.startswith("rank 1 (node "), job.said
    assert "stopped in a kernel, iteration 12" in job.said
    assert "in hold_the_lock" in job.stacks[1]


def test_a_rank_whose_process_is_gone_is_lost(ended):
    job = ended["killed"]
    assert job.codes[0] == ExitCode.LOST_RANK, job.said
    assert "is gone, last seen in forward of micro-batch 3, iteration 12" in job.said


def test_ranks_that_wait_for_each_other_are_all_named(ended):
    job = ended["deadlock"]
    assert "no rank computes, all 2 wait: " in job.said and "rank 0 (node " in job.said and "rank 1 (node " in job.said, job.said
    assert job.codes == [ExitCode.HANG, ExitCode.HANG]


def test_work_before_the_first_iteration_is_no_hang(ended):
    """Longer than the limit without a sign of life, with Python's lock held most of the time."""
    assert (ended["works"].codes, ended["works"].said) == ([0], "")


def test_native_frames_are_read_where_a_debugger_is(monkeypatch):
    monkeypatch.setattr(heartbeat, "DEBUGGERS", (("false-debugger",), ("echo", "frames of")))
    assert heartbeat.native_stacks(7, time.monotonic() + 10) == "frames of 7\n"
    monkeypatch.setattr(heartbeat, "DEBUGGERS", ())
    assert heartbeat.native_stacks(7, time.monotonic() + 10) == ""


def test_a_debugger_that_takes_long_does_not_keep_the_job(tmp_path):
    """Of a stopped rank: what the debugger has said until then is kept, and the job ends within 15 s."""
    debugger = tmp_path / "eu-stack"
    debugger.write_text("#!/bin/sh\necho the first frame\nexec sleep 60\n")
    debugger.chmod(0o755)
    processes = start(tmp_path, ("wait", "forward"), path=f"{tmp_path}:/usr/bin:/bin")
    let_hang(processes)
    processes[1].send_signal(signal.SIGSTOP)
    said = processes[0].stderr.readline()
    begin = time.monotonic()
    job = end(tmp_path, processes)
    assert time.monotonic() - begin < 15 and "rank 1 (node " in said and job.codes[0] == ExitCode.HANG
    assert "in forward" in job.stacks[1] and "the first frame\neu-stack was not ready within 6 s" in job.stacks[1], job.stacks[1]


# What is said of many ------------------------------------------------------------------------------------------------------------


def standing(rank: int, seconds: float, what: str = "all_reduce") -> Standing:
    return Standing(rank, f"c{rank // 4}", what, seconds, 60.0)


def test_one_of_many_is_named_with_the_number_that_waits():
    census = count([standing(37, 61, "forward of micro-batch 3")], [standing(r, 60) for r in range(512) if r != 37])
    found = judge(census)
    assert found.text == "rank 37 (node c9) stopped in forward of micro-batch 3, 61 s ago; 511 ranks wait for it"
    assert (found.code, found.stuck) == (ExitCode.HANG, (37,))


def test_many_stuck_ranks_are_counted_and_four_are_named():
    found = judge(count([standing(r, 70 - r) for r in range(8)], []))
    assert found.text.startswith("rank 0 (node c0) stopped in all_reduce, 70 s ago; rank 1 ")
    assert found.text.endswith("67 s ago; and 4 more") and found.stuck == (0, 1, 2, 3)


@pytest.mark.parametrize("stuck, waiting", [([], []), ([59], [59, 59]), ([], [59, 80, 80])])
def test_nothing_is_said_too_early(stuck, waiting):
    assert judge(count(map(standing, range(9), stuck), [standing(r, s) for r, s in enumerate(waiting, 9)])) is None


def test_a_node_that_hears_of_no_other_waits_longer_for_their_word():
    census = count([], [standing(0, 100), standing(1, 100)])
    assert judge(census, alone=True) is None
    found = judge(count([], [standing(0, 121), standing(1, 121)]), alone=True)
    assert found.text.startswith("all 2 ranks of this node wait, and no other node has reported a stuck rank: rank 0 (node c0)")


def test_silence_of_a_node_counts_when_nobody_else_moves():
    """Lost datagrams do not end a job that goes on."""
    silent = Standing(7, "c7", "forward of micro-batch 3", 90.0, 60.0, SILENT)
    for others in (count([], [standing(0, 0.1)]), count([], [standing(0, 29)]), count([], [], [standing(0, 0)])):
        assert judge(merge([others, count([silent], [])])) is None
    found = judge(merge([count([], [standing(0, 61)]), count([silent], [])]))
    assert found.code == ExitCode.LOST_RANK and found.text.startswith("rank 7 (node c7) and its node do not answer")


def test_ranks_that_never_spoke_are_named():
    found = judge(count([], [standing(0, 61, "start"), standing(1, 61, "start")], missing=(2, 3)))
    assert "no sign of life yet from ranks 2, 3; rank 0 (node c0) in start" in found.text


def test_the_limit_follows_the_slowest_iteration():
    watchdog = Watchdog(Heartbeat(), HangSettings(None, Path(), None))
    assert watchdog.heart.limit == OUTSIDE
    limits = []
    for seconds in (1.0, 30.0, 2.0):
        watchdog.measured(seconds)
        limits.append(watchdog.heart.limit)
    assert limits == [60.0, 300.0, 300.0]
    fixed = Watchdog(Heartbeat(), HangSettings(20.0, Path(), None))
    fixed.measured(30.0)
    assert fixed.heart.limit == 20.0
