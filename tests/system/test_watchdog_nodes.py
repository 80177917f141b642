"""Made-up nodes on one host: the first one names a rank that is stuck on another, and others name it if it is silent."""

from __future__ import annotations

import signal
import socket

import pytest

from fugaku_megatron.comm.launcher import ExitCode
from fugaku_megatron.watchdog.verdict import (
    FAN,
    NAMED,
    Census,
    Link,
    Standing,
    count,
    judge,
    merge,
    open_socket,
    own_address,
    parent,
)
from tests.system.test_watchdog import Ended, end, let_hang, start

SECONDS = 2.0
# name -> (node, what it does) of each rank, the rank that is stopped, the rank that speaks
JOBS = {
    "one of a node": (((0, "wait"), (1, "forward"), (1, "wait")), 1, 0),
    "a whole node": (((0, "wait"), (1, "wait"), (2, "forward")), 2, 0),
    "the first node": (((0, "forward"), (1, "wait")), 0, 1),
}


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(number)]
    for opened in sockets:
        opened.bind(("127.0.0.1", 0))
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """All jobs, which hang at the same time; reports have gone both ways by then."""
    jobs = {}
    for name, (ranks, _, _) in JOBS.items():
        nodes, ports = [node for node, _ in ranks], free_ports(len(ranks))
        jobs[name] = directory, started = tmp_path_factory.mktemp("job"), []
        started.extend(start(directory, tuple(word for _, word in ranks), SECONDS,
                             lambda rank, nodes=nodes, ports=ports: (nodes[rank], max(nodes) + 1, ports[rank], ports[0])))
    let_hang([process for _, started in jobs.values() for process in started], after=2.0)
    for name, (_, stopped, _) in JOBS.items():
        jobs[name][1][stopped].send_signal(signal.SIGSTOP)
    return {name: end(*jobs[name], speaker) for name, (_, _, speaker) in JOBS.items()}


def test_the_first_node_names_a_rank_of_another_with_all_that_wait(ended: dict[str, Ended]):
    job = ended["one of a node"]
    assert "rank 1 (node made-up 1) stopped in forward of micro-batch 3, iteration 12, " in job.said, job.said
    assert "; 2 ranks wait for it" in job.said and job.codes[0] == ExitCode.HANG
    assert all("most recent call first" in text for text in job.stacks)


def test_a_node_that_is_silent_is_lost(ended):
    job = ended["a whole node"]
    assert "rank 2 (node made-up 2) and its node do not answer, last seen in forward of micro-batch 3, iteration 12, " in job.said
    assert "; 2 ranks wait for it" in job.said and job.codes[0] == ExitCode.LOST_RANK


def test_another_node_speaks_for_the_first_one(ended):
    job = ended["the first node"]
    assert "rank 0 (node made-up 0) and its node do not answer, " in job.said and job.codes[1] == ExitCode.LOST_RANK, job.said


def test_a_report_of_thousands_of_nodes_stays_short():
    waiting = [count([], [Standing(rank, f"c{rank:05}", "all_reduce", 61.0, 60.0)]) for rank in range(12287)]
    stuck = count([Standing(12287, "c12287", "forward of micro-batch 3", 61.0, 60.0)], [])
    whole = merge([*waiting, stuck])
    assert judge(whole).text.endswith("; 12287 ranks wait for it") and whole.nodes == 12288 and len(whole.waiters) == NAMED
    assert parent(0) is None and max(parent(node) for node in range(1, 12288)) * FAN < 12288


def pair() -> tuple[Link, Link]:
    first, second = open_socket("127.0.0.1"), open_socket("127.0.0.1")
    return Link(0, 2, 5, first, []), Link(1, 2, 5, second, [first.getsockname()])


MOVES = count([], [], [Standing(1, "b", "forward", 0.0, 60.0)])


def test_reports_go_up_and_answers_down():
    first, second = pair()
    second.report(MOVES, MOVES, 60.0, 100.0)
    assert not second.alone(60.0, 160.0) and second.alone(60.0, 161.0)
    first.receive(100.1)
    own = count([], [Standing(0, "a", "all_reduce", 1.0, 60.0)])
    whole = first.whole(own, 60.0, 100.2)
    assert (whole.ranks, whole.waiting, whole.nodes) == (2, 1, 2)
    first.report(own, whole, 60.0, 100.2)
    second.receive(100.3)
    assert not second.alone(60.0, 200.0) and not second.deserted(60.0, 166.0) and second.deserted(60.0, 167.0)
    assert second.whole(MOVES, 60.0, 167.0).stuck[0].rank == 0
    second.leave()
    first.receive(200.0)
    assert first.whole(own, 60.0, 200.0) == merge([own])  # not silent: it has ended


STRANGE = (b"", b"[]", b"7", b'{"token": 6, "end": {}}', b'{"token": 5}', b'{"token": 5, "node": 1, "own": 3, "whole": []}')


@pytest.mark.parametrize("data", STRANGE)
def test_what_others_send_is_ignored(data):
    first, second = pair()
    second._socket.sendto(data, second.parents[0])
    first.receive(1.0)
    assert first.end is None and first.whole(MOVES, 60.0, 1000.0) == merge([MOVES])


def test_a_census_survives_the_wire():
    census = Census(2, 1, (Standing(1, "b", "x", 2.0, 3.0),), 0, (Standing(2, "c", "y", 2.0, 3.0),), (), (7,), 2)
    first, second = pair()
    second.report(census, census, 60.0, 100.0)
    first.receive(100.0)
    assert first.whole(Census(0, 0, nodes=0), 60.0, 100.0) == census


def test_the_own_address_is_one_that_others_reach():
    assert own_address("127.0.0.1") == "127.0.0.1"
    socket.inet_aton(own_address())
