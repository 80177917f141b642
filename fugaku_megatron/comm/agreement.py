"""Collective error handling: work that fails on all ranks or on none.

An exception on one rank alone would leave the others waiting in their next collective: `agree` raises the first failing
rank's message on all, as functions marked Collective do. For set-up, files and checks, not for the training step.
"""

from __future__ import annotations

import errno
import pickle
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .base import Comm

T = TypeVar("T")
EVERYWHERE = "everywhere"  # the attribute of an exception that every rank raises
# Errors that a disk or file server may not repeat. Others (no space, no permission, no such file) persist.
TRANSIENT_ERRNOS = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENXIO,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ESHUTDOWN,
)


class StorageFailure(ValueError):
    """A file error in TRANSIENT_ERRNOS: not the user's mistake."""


def storage_failed(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, StorageFailure):
            return True
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            return True
        error = error.__cause__
    return False


@contextmanager
def everywhere() -> Iterator[None]:
    """Mark ValueErrors and SystemExits that every rank raises by itself (flags, sizes), so that only rank 0 reports.

    Works before MPI is initialised: see `comm.job.run_or_abort`.
    """
    try:
        yield
    except (ValueError, SystemExit) as error:
        setattr(error, EVERYWHERE, True)
        raise


def agree(
    comm: Comm,
    work: Callable[[], T],
    prefix: str = "",
    hint: Callable[[], str] | None = None,
    name_rank: bool = True,
) -> T:
    """Run `work` on every rank and return this rank's result. Collective.

    If any rank fails, every rank raises ValueError (StorageFailure if storage failed) with `prefix`, the first failing rank
    (if `name_rank`), its message, and `hint` of rank 0. Success costs one reduction.
    """
    results: list[T] = []
    cause: Exception | None = None
    try:
        results.append(work())
    except Exception as error:  # no rank may raise alone
        cause = error
    failing = _first(comm, cause is not None)
    if failing == comm.size:
        return results[0]
    own = None if cause is None else (describe(cause), storage_failed(cause))
    text, is_storage = comm.broadcast_object(own, root=failing)
    if name_rank:
        text = f"rank {failing}: {text}"
    if hint is not None:
        text += comm.broadcast_object(hint() if comm.rank == 0 else "")
    with everywhere():
        raise (StorageFailure if is_storage else ValueError)(prefix + text) from cause


def _first(comm: Comm, flag: bool) -> int:
    return int(comm.all_reduce(torch.tensor(comm.rank if flag else comm.size), "min"))


def first_rank(comm: Comm, key: tuple[int, ...] | None, length: int) -> int | None:
    """Return the first rank with the smallest key, or None without keys. Collective.

    Costs one reduction per number.

    key: `length` numbers below 2^62
    """
    for i in range(length):
        own = 2**62 if key is None else key[i]
        if int(comm.all_reduce(torch.tensor(own), "min")) != own:
            key = None
    rank = _first(comm, key is not None)
    return None if rank == comm.size else rank


def first_text(
    comm: Comm, key: tuple[int, ...] | None, length: int, text: Callable[[], str]
) -> str | None:
    """Return the text of the first rank with the smallest key, or None without keys. Collective."""
    rank = first_rank(comm, key, length)
    if rank is None:
        return None
    found: str = comm.broadcast_object(text() if rank == comm.rank else "", root=rank)
    return found


def on_root(
    comm: Comm | None,
    work: Callable[[], T],
    prefix: str = "",
    hint: Callable[[], str] | None = None,
) -> T:
    """Run `work` on rank 0; return its picklable result on all ranks. Errors as in `agree`.
    Collective.
    """
    if comm is None:
        return work()
    own = agree(comm, lambda: work() if comm.rank == 0 else None, prefix, hint, name_rank=False)
    result: T = comm.broadcast_object(own)
    return result


def describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error)
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class Nodes:
    """A world's nodes.

    number: this node's index
    """

    ranks: Comm
    count: int
    number: int

    @property
    def leads(self) -> bool:
        return self.ranks.rank == 0


def find_nodes(world: Comm, name: str | None = None) -> Nodes:
    """Group ranks by node; nodes are numbered by their first ranks. Collective."""
    name = name or platform.node()
    ranks = world.split(zlib.crc32(name.encode()) & 0x7FFFFFFF, world.rank)
    names = sorted(set(ranks.all_gather_object(name)))
    if len(names) > 1:  # names with one checksum
        ranks = ranks.split(names.index(name), ranks.rank)
    leaders = world.split(0 if ranks.rank == 0 else 1, world.rank)
    number_and_count = torch.tensor([leaders.rank, leaders.size] if ranks.rank == 0 else [0, 0])
    number, count = ranks.broadcast(number_and_count).tolist()
    return Nodes(ranks, count, number)


def scatter_object(comm: Comm, objects: Sequence[Any] | None) -> Any:
    """Return rank 0's objects[rank] on every rank; others pass None. Collective."""
    if comm.rank > 0:
        size = int(comm.recv(torch.zeros(1, dtype=torch.int64), 0))
        received = comm.recv(torch.empty(size, dtype=torch.uint8), 0)
        if size == 0:  # a dry run has no sender
            return None
        return pickle.loads(received.numpy().tobytes())
    assert objects is not None and len(objects) == comm.size, (objects, comm.size)
    for rank in range(1, comm.size):
        pickled = bytearray(pickle.dumps(objects[rank], pickle.HIGHEST_PROTOCOL))
        data = torch.frombuffer(pickled, dtype=torch.uint8)
        comm.send(torch.tensor([data.numel()]), rank)
        comm.send(data, rank)
    return objects[0]


def differing(comm: Comm, values: Mapping[str, Any]) -> str | None:
    """Describe the first value that differs between ranks. Collective.

    Equal values cost one reduction of two numbers.
    """
    if _equal(comm, values):
        return None
    name = next(name for name, value in values.items() if not _equal(comm, value))
    found = ranks_by_value(comm.all_gather_object(values[name]))
    shown = [f"{value:.60} on {_format_ranks(ranks)}" for value, ranks in [*found.items()][:3]]
    return f"{name} is {', '.join(shown)}"


def ranks_by_value(values: Iterable[Any]) -> dict[str, list[int]]:
    """Return value as text -> ranks with it. values: of each rank, in order"""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(str(value), []).append(rank)
    return found


def _equal(comm: Comm, value: Any) -> bool:
    crc = zlib.crc32(repr(value).encode("utf-8", "surrogateescape"))
    lowest, negated = comm.all_reduce(torch.tensor([crc, -crc]), "min").tolist()
    return bool(lowest == -negated)


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    if len(ranks) > 4:
        shown += ", ..."
    return f"{len(ranks)} ranks ({shown})"
