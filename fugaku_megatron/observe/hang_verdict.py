"""Who is stuck and who merely waits: heartbeats become a census, nodes report theirs to each other, and a census becomes a line.

A rank that waits for others is innocent as long as its watchdog is awake. A rank that does something else, or is not awake, and has
not moved for too long, is stuck.

The watchdogs of nodes form a tree of UDP datagrams, so that one of them knows which ranks are stuck. Node n reports to node (n - 1)
// FAN what its ranks do and what its own children have reported, and gets an answer. So a node hears at most FAN others, and a
report about any number of nodes is one short datagram, which names few ranks and counts the rest. Two ranks of each node listen,
because one of them may have stopped. The end of a job is sent down the same tree. Left out: where heartbeats come from
(heartbeat.py), finding addresses over MPI (`observe.observers`).
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import psutil

from ..start.exit_codes import ExitCode

STOPPED, GONE, SILENT = (
    "stopped in",
    "is gone, last seen in",
    "and its node do not answer, last seen in",
)


NAMED = 4  # ranks that a line names


ASLEEP = 3.0  # s: a watchdog that has not looked around for so long, or for half of the limit, is not awake


FAN = 64  # nodes that report to one


LISTENERS = 2  # ranks of a node that hear reports


INTERVAL, INTERVALS = 5.0, 8  # s between two reports, and at least so many of them within the limit


LARGEST = 2**16


Address = tuple[str, int]


@dataclass(frozen=True)
class Standing:
    """A rank that does not move. seconds: for how long. limit: how long is too long. how: STOPPED, GONE or SILENT."""

    rank: int
    host: str
    what: str
    seconds: float
    limit: float
    how: str = STOPPED


@dataclass(frozen=True)
class Census:
    """Ranks of a node, or of several. waiting: how many wait.

    stuck: those that neither wait nor move, longest first, at most NAMED. more: stuck ranks beyond those. waiters: some that wait,
    longest last, at most NAMED. others: one that moves. missing: ranks that never gave a sign of life. nodes: how many.
    """

    ranks: int
    waiting: int
    stuck: tuple[Standing, ...] = ()
    more: int = 0
    waiters: tuple[Standing, ...] = ()
    others: tuple[Standing, ...] = ()
    missing: tuple[int, ...] = ()
    nodes: int = 1

    @classmethod
    def parsed(cls, record: dict) -> Census:
        """The inverse of `dataclasses.asdict`. KeyError or TypeError where it is something else."""
        standings = {
            name: tuple(Standing(**s) for s in record[name])
            for name in ("stuck", "waiters", "others")
        }
        return cls(**{**record, **standings, "missing": tuple(record["missing"])})


@dataclass(frozen=True)
class Verdict:
    """Why a job ends. text: one line. code: the job's exit code. stuck: ranks that cannot speak for themselves."""

    text: str
    code: int
    stuck: tuple[int, ...]


def count(
    stuck: Iterable[Standing],
    waiting: Iterable[Standing],
    moving: Iterable[Standing] = (),
    missing: tuple[int, ...] = (),
) -> Census:
    """A census of the ranks of a node."""
    stuck, waiting, moving = _longest(stuck), _shortest(waiting), tuple(moving)
    ranks = len(stuck) + len(waiting) + len(moving)
    return Census(
        ranks, len(waiting), stuck[:NAMED], len(stuck[NAMED:]), waiting[:NAMED], moving[:1], missing
    )


def merge(reports: Sequence[Census]) -> Census:
    """One census of several nodes."""
    stuck = _longest(s for report in reports for s in report.stuck)
    waiters = _shortest(s for report in reports for s in report.waiters)
    return Census(
        sum(report.ranks for report in reports),
        sum(report.waiting for report in reports),
        stuck[:NAMED],
        sum(report.more for report in reports) + len(stuck[NAMED:]),
        waiters[:NAMED],
        missing=tuple(rank for report in reports for rank in report.missing)[:NAMED],
        nodes=sum(report.nodes for report in reports),
    )


def _longest(standings: Iterable[Standing]) -> tuple[Standing, ...]:
    return tuple(sorted(standings, key=lambda s: (-s.seconds, s.rank)))


def _shortest(standings: Iterable[Standing]) -> tuple[Standing, ...]:
    return tuple(sorted(standings, key=lambda s: (s.seconds, s.rank)))


def judge(census: Census, alone: bool = False, late: float = 0.0) -> Verdict | None:
    """What is wrong, if it has lasted long enough.

    alone: there are other nodes, and this node does not hear from all of them. They get the same time again to report a stuck rank
    before this node ends a job in which all of its own ranks wait. late: s in which another node may report it first.
    A node that sends nothing has stopped only if no rank elsewhere moves: datagrams may be lost while the job continues.
    """
    silence_counts = _stands(census)
    overdue = tuple(
        s
        for s in census.stuck
        if s.seconds >= s.limit + late and (s.how != SILENT or silence_counts)
    )
    if overdue:
        code = ExitCode.HANG if any(s.how == STOPPED for s in overdue) else ExitCode.LOST_RANK
        return Verdict(_stuck(overdue, census), code, tuple(s.rank for s in overdue))
    if census.waiting == census.ranks > 0 and _patient(census.waiters[0], alone, late):
        return Verdict(_deadlock(census, alone), ExitCode.HANG, ())
    return None


def _stands(census: Census) -> bool:
    """Whether every rank is stuck, or has waited as long as it takes to be listed as stuck."""
    waits = all(waiter.seconds >= waiter.limit / 2 for waiter in census.waiters[:1])
    return waits and census.ranks == census.waiting + len(census.stuck) + census.more


def _patient(waiter: Standing, alone: bool, late: float) -> bool:
    """Whether a stuck rank would have been found by now among those that wait."""
    return waiter.seconds >= max(2 * ASLEEP, 2 * waiter.limit if alone else waiter.limit) + late


def _stuck(overdue: tuple[Standing, ...], census: Census) -> str:
    ranks = "; ".join(
        f"rank {s.rank} (node {s.host}) {s.how} {s.what}, {s.seconds:.0f} s ago" for s in overdue
    )
    more = f"; and {census.more} more" * bool(census.more)
    return (
        ranks + more + _waiting(census.waiting, "it" if len(overdue) + census.more == 1 else "them")
    )


def _waiting(ranks: int, whom: str) -> str:
    return f"; {ranks} rank{'s wait' if ranks > 1 else ' waits'} for {whom}" if ranks else ""


def _deadlock(census: Census, alone: bool) -> str:
    shown = "; ".join(
        f"rank {s.rank} (node {s.host}) in {s.what}, {s.seconds:.0f} s" for s in census.waiters
    )
    if census.missing:
        shown = f"no sign of life yet from rank{'s' * (len(census.missing) > 1)} {', '.join(map(str, census.missing))}; {shown}"
    if alone:
        return f"all {census.ranks} ranks of this node wait, and no other node has reported a stuck rank: {shown}"
    return f"no rank computes, all {census.ranks} wait: {shown}"


def parent(node: int) -> int | None:
    """The node that a node reports to; None for the first."""
    return (node - 1) // FAN if node else None


def own_address(towards: str | None = None) -> str:
    """The IPv4 address by which others reach this node. towards: that of another node; by default any that is not the loop's."""
    with contextlib.suppress(OSError):
        if towards:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((towards, 9))  # sends nothing: asks which way it would go
                return probe.getsockname()[0]
        named = socket.gethostbyname(socket.gethostname())
        if not named.startswith("127."):
            return named
    found = [
        a.address
        for addresses in psutil.net_if_addrs().values()
        for a in addresses
        if a.family == socket.AF_INET
    ]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


def open_socket(address: str, port: int = 0) -> socket.socket:
    """A socket that hears datagrams at an address. port: 0: any that is free."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind((address, port))
    opened.setblocking(False)
    return opened


@dataclass(frozen=True)
class Heard:
    """The last datagram of another node: when it came, from where, what it said of its own ranks and of all below it."""

    time: float
    address: Address
    own: Census
    whole: Census

    def silent(self, limit: float, now: float) -> bool:
        """Whether nothing has come for longer than the limit, and than it takes until another rank there speaks for its node."""
        return now - self.time > limit + 2 * ASLEEP


class Link:
    """One rank's place in the tree. number, count: of nodes. token: of the job. parents: where the node above listens."""

    def __init__(
        self, number: int, count: int, token: int, opened: socket.socket, parents: Sequence[Address]
    ) -> None:
        self.number, self.count, self.token, self.parents = number, count, token, list(parents)
        self.end: dict | None = None  # what another node has reported about the end of the job
        self._socket = opened
        self._children: dict[int, Heard] = {}
        self._parent: Heard | None = None
        self._reported = 0.0  # time of the last report
        self._began: float | None = None  # time of the first

    def alone(self, limit: float, now: float) -> bool:
        """Whether the node above has left reports unanswered since the first one, for too long."""
        return self._parent is None and self._began is not None and now - self._began > limit

    def deserted(self, limit: float, now: float) -> bool:
        """Whether the node above was heard, and is silent for too long."""
        return self._parent is not None and self._parent.silent(limit, now)

    def receive(self, now: float) -> None:
        """Take in what has come."""
        with contextlib.suppress(OSError):
            while True:
                data, address = self._socket.recvfrom(LARGEST)
                with contextlib.suppress(ValueError, KeyError, TypeError):  # not from this job
                    self._take(json.loads(data), address, now)

    def _take(self, message: dict, address: Address, now: float) -> None:
        if message["token"] != self.token:
            return
        if "end" in message:
            self.end = message["end"]
        elif message.get("left"):
            self._children.pop(message["node"], None)
        else:
            heard = Heard(
                now, address, Census.parsed(message["own"]), Census.parsed(message["whole"])
            )
            if message["node"] == parent(self.number):
                self._parent = heard
            else:
                self._children[message["node"]] = heard

    def whole(self, own: Census, limit: float, now: float) -> Census:
        """What is known of this node, of all below it, and of the one above if that is silent."""
        reports = [own]
        for heard in [*self._children.values(), *filter(None, [self._parent])]:
            if heard.silent(limit, now):
                reports.append(_silent(heard, limit, now))
            elif heard is not self._parent:
                reports.append(heard.whole)
        return merge(reports)

    def report(self, own: Census, whole: Census, limit: float, now: float) -> None:
        """Report to the node above, and answer those below, if it is time."""
        if now - self._reported < min(INTERVAL, limit / INTERVALS):
            return
        self._reported, self._began = now, (self._began or now) if self.parents else None
        message = {"node": self.number, "own": asdict(own), "whole": asdict(whole)}
        self._send(message, [*self.parents, *(heard.address for heard in self._children.values())])

    def announce(self, end: dict) -> None:
        """Send the reason of the end to the neighbouring nodes in the tree; each sends it on to its own."""
        for _ in range(3):  # a datagram may be lost
            self._send(
                {"end": end}, [*self.parents, *(heard.address for heard in self._children.values())]
            )

    def leave(self) -> None:
        """This node has ended as it should."""
        self._send({"node": self.number, "left": True}, self.parents)
        self._socket.close()

    def _send(self, message: dict, addresses: Sequence[Address]) -> None:
        data = json.dumps({**message, "token": self.token}).encode()
        for address in addresses:
            with contextlib.suppress(OSError):
                self._socket.sendto(data, address)


def _silent(heard: Heard, limit: float, now: float) -> Census:
    """A node from which nothing has come for longer than the limit."""
    first = min(
        (*heard.own.stuck, *heard.own.waiters, *heard.own.others),
        key=lambda standing: standing.rank,
    )
    last = Standing(first.rank, first.host, first.what, now - heard.time, limit, SILENT)
    return Census(heard.own.ranks, 0, (last,), heard.own.ranks - 1)
