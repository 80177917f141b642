"""A --save directory's lock file: one job writes there at a time.

The lock is created by link(2), atomic on shared file systems too (O_EXCL without hard links), and
its time stamp is renewed every BEAT seconds. The next job takes over a lock if the process is gone
(same kernel), if the time stamp is PATIENCE seconds old (other nodes), or if the lock is damaged
and not renewed for a beat and a half.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from ..comm.agreement import describe, on_root
from ..comm.base import Comm
from .manifest import Directory, write_text

LOCK = ".lock"
# seconds
BEAT = 10.0
PATIENCE = 120.0
UNKNOWN_BEATS = 1.5  # of waiting for a sign of life if the lock does not name its owner
MAX_PROCESS = 2**31 - 1
GUARD_PATIENCE = 60.0  # seconds; a takeover takes milliseconds


@dataclass(frozen=True)
class Owner:
    """Process that owns a lock.

    kernel: boot id and process namespace, within which `process` is unique
    created: process start, seconds since 1970, to detect reused process numbers
    """

    host: str
    kernel: str
    process: int
    created: float
    since: str
    token: str

    @classmethod
    def from_this_process(cls) -> Owner:
        return cls(
            platform.node(),
            _kernel(),
            os.getpid(),
            psutil.Process().create_time(),
            time.strftime("%Y-%m-%d %H:%M:%S"),
            uuid.uuid4().hex,
        )

    def is_possible(self) -> bool:
        kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
        return (
            all(isinstance(getattr(self, f.name), kinds[str(f.type)]) for f in fields(self))
            and 0 < self.process <= MAX_PROCESS
        )

    def lives(self) -> bool | None:
        """Return True if the process exists; None if only its own node can know."""
        if self.kernel != _kernel():
            return None
        try:
            return bool(abs(psutil.Process(self.process).create_time() - self.created) < 1)
        except psutil.NoSuchProcess:
            return False


def _kernel() -> str:
    try:
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + " "
            + os.readlink("/proc/self/ns/pid")
        )
    except OSError:  # not on this system: only the time stamp counts
        return uuid.uuid4().hex


@contextlib.contextmanager
def hold(
    directory: Directory | None, comm: Comm, alive: Callable[[], Any] = bool
) -> Iterator[None]:
    """Hold the lock of --save `directory`, if any, inside the block. Collective.

    alive: called repeatedly while waiting for another job's sign of life

    Raises ValueError if another job holds the lock or the directory is not writable.
    """
    if directory is None:
        yield
        return
    locks: list[Lock] = []  # one on rank 0, none elsewhere
    on_root(comm, lambda: locks.append(Lock(Path(directory), alive=alive)))
    try:
        yield
    finally:
        for lock in locks:
            lock.release()


def _read(path: Path) -> Owner | None:
    try:
        owner = Owner(**json.loads(path.read_text(encoding="utf-8")))
        return owner if owner.is_possible() else None
    except (TypeError, ValueError, RecursionError):
        return None


def _job(owner: Owner | None) -> str:
    return (
        f"process {owner.process} on {owner.host} since {owner.since}"
        if owner
        else f"{LOCK} does not say which"
    )


class Lock:
    """Lock on one directory until `release`. Raises ValueError if another job holds it."""

    def __init__(
        self,
        directory: Path,
        beat: float = BEAT,
        patience: float = PATIENCE,
        alive: Callable[[], Any] = bool,
    ) -> None:
        self.path = directory / LOCK
        self.beat = beat
        self.patience = patience
        self.alive = alive
        self.owner = Owner.from_this_process()
        self._released = threading.Event()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise ValueError(
                f"--save {directory} is not writable: {describe(error)}. Pass another --save or change the "
                "permissions"
            ) from error
        threading.Thread(target=self._renew, name="lock of --save", daemon=True).start()

    def release(self) -> None:
        """Remove the lock, unless another job has taken it over."""
        self._released.set()
        with contextlib.suppress(OSError):
            if _read(self.path) == self.owner:
                self.path.unlink()

    def _acquire(self) -> None:
        while not self._create():
            with contextlib.suppress(
                FileNotFoundError
            ):  # its job ended, or another removed it: try again
                self._remove_if_dead()

    def _remove_if_dead(self) -> None:
        if not stat.S_ISREG(self.path.lstat().st_mode):
            raise ValueError(
                f"--save {self.path.parent}: {LOCK} in it is not a regular file: remove it, or pass another --save"
            )
        owner = _read(self.path)
        lives = owner.lives() if owner else None
        if self._is_renewed(owner) if lives is None else lives:
            raise ValueError(
                f"--save {self.path.parent} is in use by another job: {_job(_read(self.path) or owner)}: wait for its "
                "end, or pass another --save"
            )
        self._remove(owner)

    def _create(self) -> bool:
        aside = self.path.with_name(f"{LOCK}.{self.owner.token}")
        write_text(
            aside, json.dumps(asdict(self.owner))
        )  # on the disk before it is linked: no crash leaves an empty lock
        try:
            os.link(aside, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            return self._create_exclusively()
        finally:
            aside.unlink()
        return True

    def _create_exclusively(self) -> bool:
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.owner)))
        except FileExistsError:
            return False
        return True

    def _is_renewed(self, owner: Owner | None) -> bool:
        """Return True if the time stamp changes in time. Node clocks may differ, so only changes
        count.
        """
        patience = self.patience if owner else min(self.patience, UNKNOWN_BEATS * self.beat)
        first = self._stamp()
        end = time.monotonic() + patience
        which = (
            f"has the lock of another job ({_job(owner)})"
            if owner
            else f"has a {LOCK} that is empty or damaged"
        )
        print(
            f"note: --save {self.path.parent} {which}: waiting up to {patience:g} s for a sign of life, then it is replaced",
            flush=True,
        )
        while first is not None:
            last = (
                time.monotonic() >= end
            )  # before the look: a process that was suspended looks once more
            if self._stamp() != first:
                return True
            if last:
                return False
            time.sleep(self.beat / 10)
            self.alive()
        return False

    def _stamp(self) -> int | None:
        try:
            with open(self.path, "rb") as file:  # opening makes NFS ask the server
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def _remove(self, dead: Owner | None) -> None:
        """Remove a dead owner's lock, one job at a time, so that no job removes another's new lock."""
        guard = self.path.with_name(f"{LOCK}.takeover")
        try:
            os.close(os.open(guard, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if (
                    time.time() - guard.stat().st_mtime > GUARD_PATIENCE
                ):  # its job died in the few lines below
                    guard.unlink()
            time.sleep(0.02)
            return
        try:
            if _read(self.path) == dead:
                self.path.unlink()
        finally:
            guard.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._released.wait(self.beat):
            with contextlib.suppress(OSError):
                os.utime(self.path)
