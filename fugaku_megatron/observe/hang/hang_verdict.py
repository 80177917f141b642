"""Hang detection across nodes: they exchange rank censuses until a census yields a verdict.

A rank is stuck if it has not moved for its limit, and neither waits for others nor has an awake
watchdog. Nodes form a tree of UDP datagrams. Two ranks per node listen, because one may have
stopped.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import psutil

from ...start.exit_codes import ExitCode

STOPPED = "stopped in"
GONE = "is gone, last seen in"
SILENT = "and its node do not answer, last seen in"
NAMED = 4  # ranks named in a line
ASLEEP = 3.0  # s without a look, or half of the limit, after which a watchdog is not awake
FAN = 64  # children of a node
LISTENERS = 2  # listening ranks of a node
INTERVAL = 5.0  # s between reports
INTERVALS = 8  # reports within the limit, at least
LARGEST = 2**16  # bytes of a datagram

Address = tuple[str, int]
Message = dict[str, Any]  # JSON


@dataclass(frozen=True)
class Standing:
    """A rank without a move for `seconds`. limit: in seconds. how: STOPPED, GONE or SILENT."""

    rank: int
    host: str
    what: str
    seconds: float
    limit: float
    how: str = STOPPED


Standings = tuple[Standing, ...]


@dataclass(frozen=True)
class Census:
    """Counts of ranks on one or more nodes.

    stuck: at most NAMED, longest first
    more: further stuck ranks
    waiters: at most NAMED, longest last
    others: at most one moving rank
    missing: ranks without any heartbeat
    """

    ranks: int
    waiting: int
    stuck: Standings = ()
    more: int = 0
    waiters: Standings = ()
    others: Standings = ()
    missing: tuple[int, ...] = ()
    nodes: int = 1

    @classmethod
    def parsed(cls, record: Message) -> Census:
        standings = {
            name: tuple(Standing(**s) for s in record[name])
            for name in ("stuck", "waiters", "others")
        }
        return cls(**{**record, **standings, "missing": tuple(record["missing"])})


class Verdict(NamedTuple):
    """Reason for a job's end. text: one line. stuck: ranks that cannot write their own stacks."""

    text: str
    code: int
    stuck: tuple[int, ...]


def count(
    stuck: Iterable[Standing],
    waiting: Iterable[Standing],
    moving: Iterable[Standing] = (),
    missing: tuple[int, ...] = (),
) -> Census:
    """Build one node's census, with the longest stuck and the shortest waiting ranks by name."""
    stuck = _longest(stuck)
    waiting = _shortest(waiting)
    moving = tuple(moving)
    return Census(
        len(stuck) + len(waiting) + len(moving),
        len(waiting),
        stuck=stuck[:NAMED],
        more=len(stuck[NAMED:]),
        waiters=waiting[:NAMED],
        others=moving[:1],
        missing=missing,
    )


def merge(reports: Sequence[Census]) -> Census:
    """Merge the censuses of several nodes into one."""
    stuck = _longest(s for report in reports for s in report.stuck)
    waiters = _shortest(s for report in reports for s in report.waiters)
    return Census(
        sum(report.ranks for report in reports),
        sum(report.waiting for report in reports),
        stuck=stuck[:NAMED],
        more=sum(report.more for report in reports) + len(stuck[NAMED:]),
        waiters=waiters[:NAMED],
        missing=tuple(rank for report in reports for rank in report.missing)[:NAMED],
        nodes=sum(report.nodes for report in reports),
    )


def _longest(standings: Iterable[Standing]) -> Standings:
    return tuple(sorted(standings, key=lambda s: (-s.seconds, s.rank)))


def _shortest(standings: Iterable[Standing]) -> Standings:
    return tuple(sorted(standings, key=lambda s: (s.seconds, s.rank)))


def judge(census: Census, alone: bool = False, late: float = 0.0) -> Verdict | None:
    """Return the verdict on a hang that has lasted long enough.

    late: s in which another node may report first

    A silent node counts as stuck only if no rank elsewhere moves, because datagrams may be lost.
    """
    waits = all(waiter.seconds >= waiter.limit / 2 for waiter in census.waiters[:1])
    silence_counts = waits and census.ranks == census.waiting + len(census.stuck) + census.more
    overdue = tuple(
        s
        for s in census.stuck
        if s.seconds >= s.limit + late and (s.how != SILENT or silence_counts)
    )
    if overdue:
        code = ExitCode.HANG if any(s.how == STOPPED for s in overdue) else ExitCode.LOST_RANK
        return Verdict(_stuck(overdue, census), code, tuple(s.rank for s in overdue))
    if census.waiting == census.ranks > 0:
        waiter = census.waiters[0]
        limit = 2 * waiter.limit if alone else waiter.limit
        if waiter.seconds >= max(2 * ASLEEP, limit) + late:
            return Verdict(_deadlock(census, alone), ExitCode.HANG, ())
    return None


def _stuck(overdue: Standings, census: Census) -> str:
    ranks = "; ".join(
        f"rank {s.rank} (node {s.host}) {s.how} {s.what}, {s.seconds:.0f} s ago" for s in overdue
    )
    if census.more:
        ranks += f"; and {census.more} more"
    if census.waiting:
        waits = "ranks wait" if census.waiting > 1 else "rank waits"
        whom = "it" if len(overdue) + census.more == 1 else "them"
        ranks += f"; {census.waiting} {waits} for {whom}"
    return ranks


def _deadlock(census: Census, alone: bool) -> str:
    shown = "; ".join(
        f"rank {s.rank} (node {s.host}) in {s.what}, {s.seconds:.0f} s" for s in census.waiters
    )
    if census.missing:
        plural = "ranks" if len(census.missing) > 1 else "rank"
        missing = ", ".join(map(str, census.missing))
        shown = f"no sign of life yet from {plural} {missing}; {shown}"
    if alone:
        return f"all {census.ranks} ranks of this node wait, and no other node has reported a stuck rank: {shown}"
    return f"no rank computes, all {census.ranks} wait: {shown}"


def parent(node: int) -> int | None:
    return (node - 1) // FAN if node else None


def own_address(towards: str | None = None) -> str:
    """Return this node's IPv4 address on the route to `towards`, or any that is not loopback."""
    with contextlib.suppress(OSError):
        if towards:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((towards, 9))  # selects the route, sends nothing
                address: str = probe.getsockname()[0]
                return address
        named = socket.gethostbyname(socket.gethostname())
        if not named.startswith("127."):
            return named
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                found: str = each.address
                return found
    return "127.0.0.1"


def open_socket(address: str) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind((address, 0))
    opened.setblocking(False)
    return opened


class Heard(NamedTuple):
    """Last datagram from another node."""

    time: float
    address: Address
    own: Census
    whole: Census

    def silent(self, limit: float, now: float) -> bool:
        """Return True after the limit and the time that the node's other listener needs to take over."""
        return now - self.time > limit + 2 * ASLEEP


class Link:
    """A node in the tree. token: identifies the job. parents: addresses of the node above."""

    def __init__(
        self, number: int, count: int, token: int, opened: socket.socket, parents: Sequence[Address]
    ) -> None:
        self.number = number
        self.count = count
        self.token = token
        self.parents = list(parents)
        self.end: Message | None = None  # announced by another node
        self._socket = opened
        self._children: dict[int, Heard] = {}
        self._parent: Heard | None = None
        self._reported = 0.0  # time of the last report
        self._began: float | None = None  # time of the first

    def alone(self, limit: float, now: float) -> bool:
        """Return True if the node above never answered within the limit."""
        return self._parent is None and self._began is not None and now - self._began > limit

    def deserted(self, limit: float, now: float) -> bool:
        return self._parent is not None and self._parent.silent(limit, now)

    def receive(self, now: float) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, address = self._socket.recvfrom(LARGEST)
                with contextlib.suppress(ValueError, KeyError, TypeError):  # not from this job
                    self._accept(json.loads(data), address, now)

    def _accept(self, message: Message, address: Address, now: float) -> None:
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
        reports = [own]
        for heard in [*self._children.values(), *filter(None, [self._parent])]:
            if heard.silent(limit, now):
                reports.append(_silent(heard, limit, now))
            elif heard is not self._parent:
                reports.append(heard.whole)
        return merge(reports)

    def report(self, own: Census, whole: Census, limit: float, now: float) -> None:
        if now - self._reported < min(INTERVAL, limit / INTERVALS):
            return
        self._reported = now
        self._began = (self._began or now) if self.parents else None
        message = {"node": self.number, "own": asdict(own), "whole": asdict(whole)}
        self._send_neighbours(message)

    def announce(self, end: Message) -> None:
        """Send the reason for the end to the neighbours, which forward it."""
        for _ in range(3):  # a datagram may be lost
            self._send_neighbours({"end": end})

    def leave(self) -> None:
        self._send({"node": self.number, "left": True}, self.parents)
        self._socket.close()

    def _send_neighbours(self, message: Message) -> None:
        children = [heard.address for heard in self._children.values()]
        self._send(message, [*self.parents, *children])

    def _send(self, message: Message, addresses: Sequence[Address]) -> None:
        data = json.dumps({**message, "token": self.token}).encode()
        for address in addresses:
            with contextlib.suppress(OSError):
                self._socket.sendto(data, address)


def _silent(heard: Heard, limit: float, now: float) -> Census:
    first = min(
        (*heard.own.stuck, *heard.own.waiters, *heard.own.others),
        key=lambda standing: standing.rank,
    )
    last = Standing(first.rank, first.host, first.what, now - heard.time, limit, SILENT)
    return Census(heard.own.ranks, 0, (last,), heard.own.ranks - 1)
