"""A --save directory's lock file: one job writes there at a time.

The lock is created by link(2), atomic on shared file systems too (O_EXCL without hard links), and
its time stamp is renewed every BEAT seconds. The next job takes over a lock if the process is gone
(same kernel), if the time stamp is PATIENCE seconds old (other nodes), or if the lock is damaged
and not renewed for a beat and a half. A job that stood still may lose its lock: `Lock.check`.
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

import psutil

from ..comm.agreement import describe, on_root
from ..comm.base import Comm
from ..text.written_files import make_folder, write_text
from .manifest import Directory

LOCK = ".lock"
# seconds
BEAT = 10.0
PATIENCE = 120.0
UNKNOWN_BEATS = 1.5  # of waiting for a sign of life if the lock does not name its owner
MAX_PROCESS = 2**31 - 1
GUARD_PATIENCE = 60.0  # seconds; a takeover takes milliseconds
GUARD_QUIET = 1.0  # seconds of them without a note
REPORT = 5.0  # seconds left to another thread that reports a lost lock and ends the job


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


class StopRequested(Exception):
    """A signal asked to stop while a job waited for a lock."""


@contextlib.contextmanager
def hold(
    directory: Directory | None, comm: Comm, alive: Callable[[], object] = bool
) -> Iterator[Callable[[], object]]:
    """Hold the lock of --save `directory`, if any, inside the block. Collective.

    Yields a function that raises ValueError if another job has taken the lock over; without effect on ranks other than 0.

    alive: called repeatedly while waiting for another job's sign of life; true: every rank leaves by SystemExit

    Raises ValueError if another job holds the lock or the directory is not writable.
    """
    if directory is None:
        yield bool
        return
    locks: list[Lock] = []  # one on rank 0, none elsewhere

    def acquire() -> bool:
        try:
            locks.append(Lock(Path(directory), beat=BEAT, patience=PATIENCE, alive=alive))
        except StopRequested:
            print("leaving before the first iteration: a signal asked to stop", flush=True)
        return bool(locks)

    if not on_root(comm, acquire):
        raise SystemExit(0)
    try:
        yield locks[0].check if locks else bool
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
    """Lock on one directory until `release`. Raises ValueError if another job holds it.

    alive: called repeatedly while waiting; true: StopRequested is raised
    """

    def __init__(
        self,
        directory: Path,
        beat: float = BEAT,
        patience: float = PATIENCE,
        alive: Callable[[], object] = bool,
    ) -> None:
        self.path = directory / LOCK
        self.beat = beat
        self.patience = patience
        self.alive = alive
        self.owner = Owner.from_this_process()
        self._released = threading.Event()
        self._checking = threading.Lock()
        self._reporting = 0  # thread that raises the first error of a lost lock
        try:
            make_folder(directory)
            while not self._create():
                # its job ended, or another removed it: try again
                with contextlib.suppress(FileNotFoundError):
                    self._remove_if_dead()
        except OSError as error:
            raise ValueError(
                f"--save {directory} is not writable: {describe(error)}. Pass another --save or change the "
                "permissions"
            ) from error
        self._seen = time.monotonic()
        threading.Thread(target=self._renew, name="lock of --save", daemon=True).start()

    def release(self) -> None:
        """Remove the lock, unless another job has taken it over."""
        self._released.set()
        with self._checking, contextlib.suppress(OSError):
            if _read(self.path) == self.owner:
                self.path.unlink()

    def check(self) -> None:
        """Raise ValueError if another job has taken the lock over.

        A damaged file is still this job's lock. A missing one is created again if this job has checked it within the time
        that a takeover needs.
        """
        with self._checking:
            if self._released.is_set():
                return
            now = time.monotonic()
            try:
                owner = _read(self.path)
                held = owner is None or owner == self.owner
            except FileNotFoundError:
                owner = None
                held = now - self._seen < self.patience and self._create()
            if held:
                self._seen = now
                return
            self._reporting = self._reporting or threading.get_ident()
        if self._reporting != threading.get_ident():
            time.sleep(REPORT)
        which = _job(owner) if owner else "a job that has ended"
        raise ValueError(
            f"--save {self.path.parent}: this job stood still, and its lock was taken over by another job ({which}): "
            "this job ends, and saves nothing more"
        )

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
        # on the disk before it is linked: no crash leaves an empty lock
        write_text(aside, json.dumps(asdict(self.owner)))
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
        """Return True if the time stamp changes in time."""
        patience = self.patience if owner else min(self.patience, UNKNOWN_BEATS * self.beat)
        which = (
            f"has the lock of another job ({_job(owner)})"
            if owner
            else f"has a {LOCK} that is empty or damaged"
        )
        print(
            f"note: --save {self.path.parent} {which}: waiting up to {patience:g} s for a sign of life, then it is replaced",
            flush=True,
        )
        return not self._stays(self._stamp, patience, self.beat / 10)

    def _stays(self, stamp: Callable[[], object], seconds: float, interval: float) -> bool:
        """Return True if a file's stamp stays the same for `seconds`, False once it changes or the file is gone.

        Node clocks may differ, or be set back, so only changes count.
        """
        first = stamp()
        end = time.monotonic() + seconds
        while first is not None:
            # before the look: a process that was suspended looks once more
            last = time.monotonic() >= end
            if stamp() != first:
                return False
            if last:
                return True
            time.sleep(interval)
            if self.alive():
                raise StopRequested
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
            self._await_takeover(guard)
            return
        try:
            if _read(self.path) == dead:
                self.path.unlink()
        finally:
            guard.unlink(missing_ok=True)

    def _await_takeover(self, guard: Path) -> None:
        """Wait until another job has removed its guard; remove the guard of a job that died before."""

        def stamp() -> tuple[int, int] | None:
            try:
                status = guard.lstat()
            except FileNotFoundError:
                return None
            return status.st_ino, status.st_mtime_ns

        if not self._stays(stamp, GUARD_QUIET, 0.02):
            return
        print(
            f"note: --save {guard.parent} has {guard.name} of a job that takes its lock over: waiting up to "
            f"{GUARD_PATIENCE:g} s, then it is removed",
            flush=True,
        )
        if self._stays(stamp, GUARD_PATIENCE, self.beat / 10):
            guard.unlink(missing_ok=True)

    def _renew(self) -> None:
        """Renew the time stamp. A ValueError of `check` on this thread ends the job: see `comm.job`."""
        while not self._released.wait(self.beat):
            with contextlib.suppress(OSError):
                self.check()
                os.utime(self.path, follow_symlinks=False)
