"""Work that fails on all ranks or on none: if a rank fails, every rank raises the message of the first failing rank.

If one rank alone raised an exception, the others would wait in their next collective for ever. This is for set-up, files and
checks, not for the training step.
"""

from __future__ import annotations

import errno
import pickle
import platform
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .base import Comm

T = TypeVar("T")
EVERYWHERE = "everywhere"  # the attribute of an exception that every rank raises
# Errors of a disk or a file server that may be gone at the next try. Others (no space, no permission, no such file) stay.
PASSING = (
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
    """A file could not be read or written for one of the reasons in PASSING: the user made no mistake."""


def storage_failed(error: BaseException | None) -> bool:
    """Whether the error, or one that it came from, is a StorageFailure or an OSError of PASSING."""
    while error is not None:
        if isinstance(error, StorageFailure) or (
            isinstance(error, OSError) and error.errno in PASSING
        ):
            return True
        error = error.__cause__
    return False


@contextmanager
def everywhere() -> Iterator[None]:
    """Mark mistakes that every rank finds by itself (flags, sizes), so that only rank 0 reports them.

    The ValueErrors and SystemExits that leave this block carry the mark. It needs no communication, so it works before
    MPI is initialised: see `comm.job.run_or_abort`.
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

    If it raises on any rank, every rank raises ValueError, or StorageFailure where that was the reason. The message is `prefix`,
    the first failing rank (unless `name_rank` is False), that rank's message, and what `hint` returns on rank 0. Success costs one
    reduction of a number, so no rank holds anything of the others.
    """
    results: list[T] = []
    cause: Exception | None = None
    try:
        results.append(work())
    except Exception as error:  # of any kind: no rank may raise alone
        cause = error
    failing = _first(comm, cause is not None)
    if failing == comm.size:
        return results[0]
    own = None if cause is None else (describe(cause), storage_failed(cause))
    text, passing = comm.broadcast_object(own, root=failing)
    advice = "" if hint is None else comm.broadcast_object(hint() if comm.rank == 0 else "")
    with everywhere():
        raise (StorageFailure if passing else ValueError)(
            prefix + f"rank {failing}: " * name_rank + text + advice
        ) from cause


def _first(comm: Comm, flag: bool) -> int:
    """The first rank whose flag is set, `comm.size` if there is none. Collective."""
    return int(comm.all_reduce(torch.tensor(comm.rank if flag else comm.size), "min"))


def first_rank(comm: Comm, key: tuple[int, ...] | None, length: int) -> int | None:
    """The rank with the least key of `length` numbers below 2^62, the first one of several; None where no rank has a key.

    Collective; one reduction of a number for each number of the key, so no rank holds anything of the others.
    """
    for place in range(length):
        own = 2**62 if key is None else key[place]
        if int(comm.all_reduce(torch.tensor(own), "min")) != own:
            key = None
    rank = _first(comm, key is not None)
    return None if rank == comm.size else rank


def on_root(
    comm: Comm | None,
    work: Callable[[], T],
    prefix: str = "",
    hint: Callable[[], str] | None = None,
) -> T:
    """Run `work` on rank 0 alone and return its (picklable) result on all ranks; errors as in `agree`. Collective.

    Without a communicator this process is alone.
    """
    if comm is None:
        return work()
    return comm.broadcast_object(
        agree(comm, lambda: work() if comm.rank == 0 else None, prefix, hint, name_rank=False)
    )


def describe(error: Exception) -> str:
    """The error as one line, which is never empty."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error)
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class Nodes:
    """ranks: those of this rank's node, in the order of the world. count: nodes of the world. number: this one's, from 0."""

    ranks: Comm
    count: int
    number: int

    @property
    def leads(self) -> bool:
        """Whether this rank does what one rank of a node does for all."""
        return self.ranks.rank == 0


def find_nodes(world: Comm, name: str | None = None) -> Nodes:
    """The nodes of `world`. name: this rank's node, by default the host's name. Collective.

    The nodes are numbered in the order of their first ranks.
    """
    name = name or platform.node()
    alike = world.split(
        zlib.crc32(name.encode()) & 0x7FFFFFFF, world.rank
    )  # names of one checksum: nearly always one name
    names = alike.all_gather_object(name)
    ranks = (
        alike if len(set(names)) == 1 else alike.split(sorted(set(names)).index(name), alike.rank)
    )
    leaders = world.split(0 if ranks.rank == 0 else 1, world.rank)
    place = torch.tensor([leaders.rank, leaders.size] if ranks.rank == 0 else [0, 0])
    number, count = ranks.broadcast(place).tolist()
    return Nodes(ranks, count, number)


def scatter_object(comm: Comm, objects: Sequence[Any] | None) -> Any:
    """objects[rank] of rank 0 on every rank; the other ranks pass None. Collective. A rank sends as often as there are others."""
    if comm.rank > 0:
        return _receive(comm)
    assert objects is not None and len(objects) == comm.size, (objects, comm.size)
    for rank in range(1, comm.size):
        data = torch.frombuffer(
            bytearray(pickle.dumps(objects[rank], pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8
        )
        comm.send(torch.tensor([data.numel()]), rank)
        comm.send(data, rank)
    return objects[0]


def _receive(comm: Comm) -> Any:
    size = int(comm.recv(torch.zeros(1, dtype=torch.int64), 0))
    data = comm.recv(torch.empty(size, dtype=torch.uint8), 0)
    return (
        pickle.loads(data.numpy().tobytes()) if size else None
    )  # nothing comes where nobody sends (a dry run)


def differing(comm: Comm, values: Mapping[str, Any]) -> str | None:
    """The first name whose value is not the same on all ranks, both values and who has them; None where all agree. Collective.

    Agreement costs one reduction of two numbers. values: the same names on every rank, and values that pickle.
    """
    if _equal(comm, values):
        return None
    name = next(name for name, value in values.items() if not _equal(comm, value))
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(comm.all_gather_object(values[name])):
        found.setdefault(str(value), []).append(rank)
    return f"{name} is " + ", ".join(
        f"{value:.60} on {_ranks(ranks)}" for value, ranks in [*found.items()][:3]
    )


def _equal(comm: Comm, value: Any) -> bool:
    """Whether the ranks have values of one representation. Collective."""
    import torch

    crc = zlib.crc32(repr(value).encode("utf-8", "surrogateescape"))
    lowest, negated = comm.all_reduce(torch.tensor([crc, -crc]), "min").tolist()
    return lowest == -negated


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + ", ..." * (len(ranks) > 4)
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
