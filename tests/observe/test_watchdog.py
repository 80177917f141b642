"""Watchdogs: hanging processes are named with their stacks; many ranks are counted and named correctly.

Nodes are made up on one host: the first one names a rank that is stuck on another, and others name it if it does not answer.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fugaku_megatron.observe.hang import heartbeat
from fugaku_megatron.observe.hang.hang_verdict import (
    FAN,
    NAMED,
    SILENT,
    Link,
    Standing,
    count,
    judge,
    merge,
    open_socket,
    own_address,
    parent,
)
from fugaku_megatron.observe.hang.heartbeat import Heartbeat
from fugaku_megatron.observe.hang.watchdog import OUTSIDE, HangSettings, Watchdog
from fugaku_megatron.start.exit_codes import ExitCode
from tests.processes import run_python, write_program

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("hanging_rank.py")
SECONDS = 2.0  # that are too long
MICRO_BATCH = "forward of micro-batch 3, iteration 12"


@dataclass(frozen=True)
class Group:
    """Each rank's behaviour (see hanging_rank.py), and the expected outcome.

    codes: the first ranks', which end by themselves; said: by the speaker; stacks: words in each rank's; nodes: the ranks'
    """

    words: tuple[str, ...]
    codes: tuple[int, ...]
    said: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    speaker: int = 0
    nodes: tuple[int, ...] = ()


HANG = ExitCode.HANG
LOST = ExitCode.LOST_RANK
GROUPS = {
    "stopped": Group(
        ("wait", "stop"),
        (HANG,),
        (
            "rank 1 (node ",
            f") stopped in {MICRO_BATCH}, ",
            "; 1 rank waits for it; stacks of all ranks: ",
        ),
        ("in forever", "state T (stopped)"),
    ),
    "stopped while waiting": Group(
        ("wait", "stop_while_waiting"), (HANG,), ("rank 1 (node ", "; 1 rank waits for it")
    ),
    "goes on once it is judged": Group(
        ("leave_once_judged", "stop"), (HANG,), ("rank 1 (node ", "; 1 rank waits for it")
    ),
    "killed": Group(("wait", "die"), (LOST,), (f"is gone, last seen in {MICRO_BATCH}",)),
    "stands still": Group(("forward", "wait"), (HANG, HANG), ("rank 0 (node ",)),
    "holds Python's lock": Group(
        ("wait", "hold_the_lock"),
        (HANG,),
        ("rank 1 (node ", "stopped in a kernel, iteration 12"),
        ("", "in hold_the_lock"),
    ),
    "deadlock": Group(
        ("wait", "wait"),
        (HANG, HANG),
        ("no rank computes, all 2 wait: ", "rank 0 (node ", "rank 1 (node "),
    ),
    # before the first iteration longer than the limit without a sign of life, with Python's lock held most of the time
    "works": Group(("compute",), (0,)),
    # a rank whose experts receive all tokens
    "computes for long": Group(("long_iteration", "wait_for_a_long_iteration"), (0, 0)),
    "a rank of another node": Group(
        ("wait", "stop", "wait"),
        (HANG,),
        (f"rank 1 (node made-up 1) stopped in {MICRO_BATCH}, ", "; 2 ranks wait for it"),
        ("most recent call first",) * 3,
        nodes=(0, 1, 1),
    ),
    "a whole node": Group(
        ("wait", "wait", "stop"),
        (LOST,),
        (
            f"rank 2 (node made-up 2) and its node do not answer, last seen in {MICRO_BATCH}, ",
            "; 2 ranks wait for it",
        ),
        nodes=(0, 1, 2),
    ),
    "the first node": Group(
        ("stop", "wait"),
        (-signal.SIGKILL, LOST),
        ("rank 0 (node made-up 0) and its node do not answer, ",),
        speaker=1,
        nodes=(0, 1),
    ),
}


def start(directory: Path, group: Group, path: str = "") -> list[subprocess.Popen]:
    """Start a group's ranks. path: to a debugger, which takes seconds; default: none"""
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[2]), "PATH": path}
    sockets = [open_socket("127.0.0.1") for _ in group.nodes]
    started = []
    for rank, word in enumerate(group.words):
        opened = sockets[rank].fileno() if sockets else 0
        more = (
            (group.nodes[rank], max(group.nodes) + 1, opened, sockets[0].getsockname()[1])
            if sockets
            else ()
        )
        words = (rank, len(group.words), SECONDS, word, *more)
        started.append(
            subprocess.Popen(
                [sys.executable, PROGRAM, directory, *map(str, words)],
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[opened],
            )
        )
    for inherited in sockets:
        inherited.close()
    return started


def let_hang(processes: Iterable[subprocess.Popen]) -> None:
    """Begin to watch all ranks, then let them hang."""
    for line in "there", "watched":
        for process in processes:
            assert process.stdout.readline() == f"{line}\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()


def end(
    directory: Path, group: Group, processes: list[subprocess.Popen]
) -> tuple[list[int | None], str, list[str]]:
    """Wait for the ranks that end by themselves; return (codes, the speaker's output, each rank's stacks)."""
    try:
        _, said = processes[group.speaker].communicate(timeout=120)
        for process, code in zip(processes, group.codes):
            if code != -signal.SIGKILL:
                process.wait(timeout=200)
        files = [
            next(iter(directory.glob(f"hang_*/rank{rank}.txt")), None)
            for rank in range(len(processes))
        ]
        return (
            [process.poll() for process in processes],
            said,
            [file.read_text() if file else "" for file in files],
        )
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Start all groups at the same time."""
    directories = {name: tmp_path_factory.mktemp("group") for name in GROUPS}
    started = {name: start(directories[name], group) for name, group in GROUPS.items()}
    let_hang([process for processes in started.values() for process in processes])
    return {name: end(directories[name], group, started[name]) for name, group in GROUPS.items()}


@pytest.mark.parametrize("name", GROUPS)
def test_what_hangs_is_named_with_its_stack_and_the_job_ends(ended, name):
    group = GROUPS[name]
    codes, said, found = ended[name]
    assert [code for code, expected in zip(codes, group.codes) if expected != -signal.SIGKILL] == [
        code for code in group.codes if code != -signal.SIGKILL
    ], said
    assert all(words in said for words in group.said) and said.count("\n") == bool(group.said), said
    assert all(words in text for words, text in zip(group.stacks, found)), found


def test_native_frames_are_read_where_a_debugger_is(monkeypatch):
    monkeypatch.setattr(heartbeat, "DEBUGGERS", (("false-debugger",), ("echo", "frames of")))
    assert heartbeat.native_stacks(7, time.monotonic() + 10) == "frames of 7\n"
    monkeypatch.setattr(heartbeat, "DEBUGGERS", ())
    assert heartbeat.native_stacks(7, time.monotonic() + 10) == ""


def test_a_debugger_may_write_much_while_it_stops_the_process(tmp_path):
    """More than a pipe holds, which the stopped process cannot read."""
    write_program(tmp_path / "eu-stack", "#!/bin/sh\nkill -STOP $2\nseq 100000\nkill -CONT $2\n")
    program = (
        "import os, time; from fugaku_megatron.observe.hang import heartbeat; "
        "print(heartbeat.native_stacks(os.getpid(), time.monotonic() + 20).split()[-1])"
    )
    done = run_python("-c", program, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.stdout == "100000\n", done.stderr


def test_a_debugger_that_takes_long_does_not_keep_the_job(tmp_path):
    """Stop a rank: the debugger's output until then is kept, and the job ends within 15 s."""
    write_program(tmp_path / "eu-stack", "#!/bin/sh\necho the first frame\nexec sleep 60\n")
    group = GROUPS["stopped"]
    processes = start(tmp_path, group, path=f"{tmp_path}:/usr/bin:/bin")
    let_hang(processes)
    said = processes[0].stderr.readline()
    begin = time.monotonic()
    codes, _, found = end(tmp_path, group, processes)
    assert time.monotonic() - begin < 15 and "rank 1 (node " in said and codes[0] == ExitCode.HANG
    assert "in forward" in found[1], found[1]
    assert re.search("the first frame\neu-stack was not ready within [1-6] s", found[1]), found[1]


# What is said of many ------------------------------------------------------------------------------------------------------------


def standing(rank: int, seconds: float, what: str = "all_reduce") -> Standing:
    return Standing(rank, f"c{rank // 4}", what, seconds, 60.0)


def test_one_of_many_is_named_with_the_number_that_waits():
    census = count(
        [standing(37, 61, "forward of micro-batch 3")],
        [standing(r, 60) for r in range(512) if r != 37],
    )
    found = judge(census)
    assert (
        found.text
        == "rank 37 (node c9) stopped in forward of micro-batch 3, 61 s ago; 511 ranks wait for it"
    )
    assert (found.code, found.stuck) == (ExitCode.HANG, (37,))


def test_many_stuck_ranks_are_counted_and_four_are_named():
    found = judge(count([standing(r, 70 - r) for r in range(8)], []))
    assert found.text.startswith("rank 0 (node c0) stopped in all_reduce, 70 s ago; rank 1 ")
    assert found.text.endswith("67 s ago; and 4 more") and found.stuck == (0, 1, 2, 3)


@pytest.mark.parametrize("stuck, waiting", [([], []), ([59], [59, 59]), ([], [59, 80, 80])])
def test_nothing_is_said_too_early(stuck, waiting):
    assert (
        judge(
            count(
                map(standing, range(9), stuck), [standing(r, s) for r, s in enumerate(waiting, 9)]
            )
        )
        is None
    )


def test_a_node_that_hears_of_no_other_waits_longer_for_their_word():
    census = count([], [standing(0, 100), standing(1, 100)])
    assert judge(census, alone=True) is None
    found = judge(count([], [standing(0, 121), standing(1, 121)]), alone=True)
    assert found.text.startswith(
        "all 2 ranks of this node wait, and no other node has reported a stuck rank: rank 0 (node c0)"
    )


def test_silence_of_a_node_counts_when_nobody_else_moves():
    """Lose datagrams: they must not end a job that continues."""
    silent = Standing(7, "c7", "forward of micro-batch 3", 90.0, 60.0, SILENT)
    for others in (
        count([], [standing(0, 0.1)]),
        count([], [standing(0, 29)]),
        count([], [], [standing(0, 0)]),
    ):
        assert judge(merge([others, count([silent], [])])) is None
    found = judge(merge([count([], [standing(0, 61)]), count([silent], [])]))
    assert found.code == ExitCode.LOST_RANK and found.text.startswith(
        "rank 7 (node c7) and its node do not answer"
    )


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
    divided = Watchdog(Heartbeat(), HangSettings(None, Path(), None, 64))
    divided.measured(30.0)
    assert divided.heart.limit == 64 * 30.0, "one of 64 ranks may get all tokens"
    fixed = Watchdog(Heartbeat(), HangSettings(20.0, Path(), None))
    fixed.measured(30.0)
    assert fixed.heart.limit == 20.0


# Between nodes ------------------------------------------------------------------------------------------------------------------


def test_a_report_of_thousands_of_nodes_stays_short():
    waiting = [
        count([], [Standing(rank, f"c{rank:05}", "all_reduce", 61.0, 60.0)])
        for rank in range(12287)
    ]
    stuck = count([Standing(12287, "c12287", "forward of micro-batch 3", 61.0, 60.0)], [])
    whole = merge([*waiting, stuck])
    assert (
        judge(whole).text.endswith("; 12287 ranks wait for it")
        and whole.nodes == 12288
        and len(whole.waiters) == NAMED
    )
    assert parent(0) is None and max(parent(node) for node in range(1, 12288)) * FAN < 12288


def pair() -> tuple[Link, Link]:
    first = open_socket("127.0.0.1")
    second = open_socket("127.0.0.1")
    return Link(0, 2, 5, first, []), Link(1, 2, 5, second, [first.getsockname()])


def receive(link: Link, now: float) -> None:
    """Receive a datagram once it is there: the kernel may deliver it later."""
    assert select.select([link._socket], [], [], 60)[0]
    link.receive(now)


MOVES = count([], [], [Standing(1, "b", "forward", 0.0, 60.0)])


def test_reports_go_up_and_answers_down():
    first, second = pair()
    second.report(MOVES, MOVES, 60.0, 100.0)
    assert not second.alone(60.0, 160.0) and second.alone(60.0, 161.0)
    receive(first, 100.1)
    own = count([], [Standing(0, "a", "all_reduce", 1.0, 60.0)])
    whole = first.whole(own, 60.0, 100.2)
    assert (whole.ranks, whole.waiting, whole.nodes) == (2, 1, 2)
    first.report(own, whole, 60.0, 100.2)
    receive(second, 100.3)
    assert (
        not second.alone(60.0, 200.0)
        and not second.deserted(60.0, 166.0)
        and second.deserted(60.0, 167.0)
    )
    assert second.whole(MOVES, 60.0, 167.0).stuck[0].rank == 0
    second.leave()
    receive(first, 200.0)
    assert first.whole(own, 60.0, 200.0) == merge([own])  # not silent: it has ended


STRANGE = (
    b"",
    b"[]",
    b"7",
    b'{"token": 6, "end": {}}',
    b'{"token": 5}',
    b'{"token": 5, "node": 1, "own": 3, "whole": []}',
)


@pytest.mark.parametrize("data", STRANGE)
def test_what_others_send_is_ignored(data):
    first, second = pair()
    second._socket.sendto(data, second.parents[0])
    receive(first, 1.0)
    assert first.end is None and first.whole(MOVES, 60.0, 1000.0) == merge([MOVES])


def test_the_own_address_is_one_that_others_reach():
    assert own_address("127.0.0.1") == "127.0.0.1"
    socket.inet_aton(own_address())
