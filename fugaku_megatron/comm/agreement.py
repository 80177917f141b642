"""Work that fails on all ranks or on none: errors are gathered, and every rank raises the first failing rank's message.

If one rank alone raised an exception, the others would wait in their next collective for ever. For set-up, files and checks, not
for the step.
Test: pytest tests/test_agreement.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .base import Comm


@contextmanager
def everywhere() -> Iterator[None]:
    """Mark mistakes that every rank finds by itself (flags, sizes), so that only rank 0 reports them.

    The ValueErrors and SystemExits that leave this block carry the mark. It needs no communication, so it works before
    MPI is initialised: see `comm.launch.run_or_abort`.
    """
    try:
        yield
    except (ValueError, SystemExit) as error:
        error.everywhere = True
        raise


def agree(comm: Comm, work: Callable[[], Any], prefix: str = "", hint: Callable[[], str] | None = None,
          name_rank: bool = True) -> list[Any] | None:
    """Run `work` on every rank. Returns the results in rank order on rank 0, None elsewhere. Collective.

    If it raises on any rank, every rank raises ValueError. The message is `prefix`, the first failing rank (unless `name_rank`
    is False), that rank's message, and what `hint` returns on rank 0.
    """
    result, cause = None, None
    try:
        result = work()
    except Exception as error:  # of any kind: no rank may raise alone
        cause = error
    gathered = comm.gather_object((result, None if cause is None else describe(cause)))
    failure = None
    if gathered is not None:
        failure = next((prefix + f"rank {rank}: " * name_rank + text for rank, (_, text) in enumerate(gathered) if text), None)
        if failure and hint:
            failure += hint()
    failure = comm.broadcast_object(failure)
    if failure:
        with everywhere():
            raise ValueError(failure) from cause
    return None if gathered is None else [value for value, _ in gathered]


def on_root(comm: Comm | None, work: Callable[[], Any], prefix: str = "", hint: Callable[[], str] | None = None) -> Any:
    """Run `work` on rank 0 alone and return its (picklable) result on all ranks; errors as in `agree`. Collective.

    Without a communicator this process is alone.
    """
    if comm is None:
        return work()
    results = agree(comm, lambda: work() if comm.rank == 0 else None, prefix, hint, name_rank=False)
    return comm.broadcast_object(None if results is None else results[0])


def describe(error: Exception) -> str:
    """The error as one line, which is never empty."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error)
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
