"""Heartbeats of a node's ranks in shared memory, and stack dumps.

A heartbeat is a one-page file in /dev/shm, so that readers need neither the rank's interpreter nor
MPI nor a signal. Times are seconds of CLOCK_MONOTONIC, shared by a node's processes. Stacks come
from faulthandler, and from gdb or eu-stack if installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from ...start.environment import SHARED_MEMORY as MEMORY
from ...text.written_files import is_private, make_private, new_file, no_link

PAGE = 4096
MAGIC = b"heart 1\0"
TEXT = 200  # bytes of a phase's description
OWNER = struct.Struct("<8sqqd")  # magic, process, rank, limit in seconds
OWNER_AT = 0
TICK = struct.Struct("<d?")  # time of the watchdog's last look, stacks written
TICK_AT = 64
STATE = struct.Struct(f"<Qdd?{TEXT}s")  # beats, last beat, waiting since, training, phase
STATE_AT = 128
# Environment variables with equal values in all processes of one launch.
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_STEP_ID")
# Signal on which a process dumps its stack, even while its interpreter is busy.
ON_REQUEST = signal.SIGUSR2
# System call that signals one thread, without a wrapper in glibc 2.28.
TGKILL = {"x86_64": 234, "aarch64": 131}
DEBUGGERS = (
    ("eu-stack", "-p"),
    ("gdb", "-batch", "-nx", "-ex", "thread apply all backtrace", "-p"),
)


class Beat(NamedTuple):
    """A rank's last heartbeat. Times in s of CLOCK_MONOTONIC.

    limit: seconds without a move before the rank counts as stuck
    waits: for other ranks
    training: in an iteration
    """

    process: int
    rank: int
    limit: float
    number: int
    moved: float
    waits: bool
    training: bool
    what: str
    looked: float
    written: bool


def prefix() -> str:
    folder = MEMORY if os.access(MEMORY, os.W_OK) else tempfile.gettempdir()
    return f"{folder}/fugaku_megatron_{os.geteuid()}_"


def node_folder() -> Path:
    """Create this launch's heartbeat folder on this node.

    The launcher's variables or the parent process name it. If neither identifies the launch, or another user took the name,
    a process uses its own folder until `Heartbeat.move`.
    """
    job = [os.environ[name] for name in JOBS if name in os.environ]
    job.append(os.environ.get("SLURM_JOB_ID", ""))
    own = f"{os.getppid()} {_birth(os.getppid())}" if len(job) == 1 else " ".join(job)
    folder = Path(f"{prefix()}{zlib.crc32(own.encode()):08x}")
    try:
        make_private(folder)
    except PermissionError:
        beginning = Path(prefix())
        return Path(tempfile.mkdtemp(prefix=beginning.name, dir=beginning.parent))
    return folder


def stat_words(process: int | str) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()


def _birth(process: int) -> str:
    try:
        return stat_words(process)[19]
    except OSError:
        return ""


def lives(process: int) -> bool:
    """Return True if a process of this node exists and is no zombie."""
    try:
        return stat_words(process)[0] not in "ZX"
    except OSError:
        return False


def remove_dead() -> None:
    """Remove heartbeat folders of this user's killed jobs on this node."""
    for folder in Path(prefix()).parent.glob(Path(prefix()).name + "*"):
        with contextlib.suppress(OSError):
            if not is_private(folder):
                continue
            if not any(name.isdecimal() and lives(int(name)) for name in os.listdir(folder)):
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()


class Heartbeat:
    """This rank's heartbeat; without a folder in private memory.

    limit: seconds without a move before the rank counts as stuck
    what: current phase
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self.file: Path | None = None
        self.what = ""
        self._memory: mmap.mmap | bytearray = bytearray(PAGE)
        self._number = 0
        self._since = 0.0
        self._where = ""
        if folder is not None:
            self.file = folder / str(os.getpid())
            self._memory = _page(self.file)
        self.look()
        self.enter("start")
        self.introduce(rank, 0.0)

    def introduce(self, rank: int, limit: float) -> None:
        self.rank = rank
        self.limit = limit
        OWNER.pack_into(self._memory, OWNER_AT, MAGIC, os.getpid(), rank, limit)

    @property
    def folder(self) -> Path | None:
        return self.file.parent if self.file else None

    def move(self, folder: Path) -> None:
        if self.file is not None and folder != self.file.parent and is_private(folder):
            old = self.file.parent
            self.file = folder / self.file.name
            with contextlib.suppress(OSError):
                for file in old.glob(f"{self.file.name}*"):
                    file.rename(folder / file.name)
                old.rmdir()

    def close(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):
                for file in self.file.parent.glob(f"{self.file.name}*"):
                    file.unlink()
                self.file.parent.rmdir()
            self.file = None

    # Beats

    def enter(self, what: str) -> str:
        before = self.what
        self.what = what
        self._beat()
        return before

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        before = self.enter(what)
        try:
            yield
        finally:
            self.enter(before)

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Mark the block as an iteration; the limit applies in it even if the rank uses processor time."""
        self._where = f"iteration {number}"
        try:
            with self.phase(""):
                yield
        finally:
            self._where = ""

    def wait(self, waits: bool) -> None:
        self._since = time.monotonic() if waits else 0.0
        self._beat()

    def _beat(self) -> None:
        self._number += 1
        what = ", ".join(filter(None, (self.what, self._where)))
        training = bool(self._where)
        STATE.pack_into(
            self._memory,
            STATE_AT,
            self._number,
            time.monotonic(),
            self._since,
            training,
            what.encode()[:TEXT],
        )

    def look(self, written: bool = False) -> None:
        TICK.pack_into(self._memory, TICK_AT, time.monotonic(), written)


def decode(memory: mmap.mmap | bytes | bytearray) -> Beat | None:
    """Return the heartbeat in a page; None if the page has none."""
    before = b""
    for _ in range(3):  # until no beat came while the page was copied
        page = bytes(memory[: STATE_AT + STATE.size])
        if page == before:
            break
        before = page
    magic, process, rank, limit = OWNER.unpack_from(page, OWNER_AT)
    number, moved, since, training, what = STATE.unpack_from(page, STATE_AT)
    looked, written = TICK.unpack_from(page, TICK_AT)
    text = what.rstrip(b"\0").decode(errors="replace")
    if magic != MAGIC:
        return None
    return Beat(
        process,
        rank,
        limit=limit,
        number=number,
        moved=moved,
        waits=since > 0,
        training=training,
        what=text,
        looked=looked,
        written=written,
    )


def _page(file: Path) -> mmap.mmap:
    """Create and map a page of zeros, over an ended process's leftover with the same number."""
    while True:
        make_private(file.parent)
        with contextlib.suppress(FileNotFoundError):  # another rank has just removed the folder
            with open(file, "w+b", opener=new_file) as opened:
                opened.write(bytes(PAGE))
                opened.flush()
                return mmap.mmap(opened.fileno(), PAGE)


class Node:
    """Heartbeats in a folder, each mapped once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pages: dict[str, mmap.mmap] = {}

    def read(self) -> list[Beat]:
        try:
            names = [name for name in os.listdir(self.folder) if name.isdecimal()]
        except OSError:
            names = []
        for name in set(names) - set(self._pages):
            with contextlib.suppress(OSError, ValueError), open(self.folder / name, "rb") as file:
                self._pages[name] = mmap.mmap(file.fileno(), PAGE, access=mmap.ACCESS_READ)
        self._pages = {name: self._pages[name] for name in names if name in self._pages}
        beats = [decode(page) for page in self._pages.values()]
        return sorted((beat for beat in beats if beat), key=lambda beat: beat.rank)


def _append(directory: Path, rank: int) -> TextIO:
    return open(directory / f"rank{rank}.txt", "a", opener=no_link)


def write_own(directory: Path, rank: int, native: bool, until: float) -> None:
    with contextlib.suppress(OSError), _append(directory, rank) as file:
        faulthandler.dump_traceback(file, all_threads=True)
        if native:
            file.flush()
            file.write(native_stacks(os.getpid(), until))


def write_of(directory: Path, rank: int, process: int, requested: Path, until: float) -> None:
    """Write the stacks of another process on this node.

    requested: its `on_request` file, written first: a debugger may run out of time
    """
    with contextlib.suppress(OSError), _append(directory, rank) as file:
        file.write(f"process {process}, state {state(process)}\n")
        file.write(_request(process, requested))
        file.flush()
        file.write(native_stacks(process, until))


def on_request(path: Path) -> None:
    """Register ON_REQUEST to write the main thread's frames to `path`.

    Reading running threads' frames crashed one process in four.
    """
    file = open(path, "w", opener=new_file)
    faulthandler.register(ON_REQUEST, file, all_threads=False)


def _request(process: int, requested: Path) -> str:
    """Return the stack that the process writes. A stopped process is continued and stopped again."""
    with contextlib.suppress(OSError):
        stopped = state(process).startswith(("T", "t"))
        _ask(process)
        os.kill(process, signal.SIGCONT)
        size = 0
        end = time.monotonic() + 1
        while (size == 0 or requested.stat().st_size > size) and time.monotonic() < end:
            size = requested.stat().st_size
            time.sleep(0.02)
        if stopped:
            os.kill(process, signal.SIGSTOP)
        return requested.read_text()
    return ""


def _ask(process: int) -> None:
    """Send ON_REQUEST to the main thread: a signal to a stopped process would go to any thread."""
    number = TGKILL.get(platform.machine())
    if number is None or ctypes.CDLL(None).syscall(number, process, process, int(ON_REQUEST)):
        os.kill(process, ON_REQUEST)


def state(process: int) -> str:
    """Return the process state, and the kernel function in which it waits, if shown."""
    words = []
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text()
        words += re.findall(r"^State:\s*(.*)$", status, re.MULTILINE)
        words.append(Path(f"/proc/{process}/wchan").read_text().strip("0"))
    return " ".join(filter(None, words)) or "unknown"


def native_stacks(process: int, until: float) -> str:
    """Return native stacks by an installed debugger, else an empty text. until: in s of CLOCK_MONOTONIC"""
    command = next((words for words in DEBUGGERS if shutil.which(words[0])), None)
    if command is None:
        return ""
    seconds = max(0.0, until - time.monotonic())
    # In a file: a debugger stops this process, which could not read a pipe.
    with tempfile.TemporaryFile("w+", errors="replace") as frames:
        late = ""
        try:
            subprocess.run(
                [*command, str(process)],
                stdin=subprocess.DEVNULL,
                stdout=frames,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
            )
        except OSError as error:
            return f"{command[0]}: {error.strerror}\n"
        except subprocess.TimeoutExpired:
            late = f"{command[0]} was not ready within {seconds:.0f} s\n"
        frames.seek(0)
        return frames.read() + late
