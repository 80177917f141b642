"""What a rank is doing, in memory that all ranks of its node can read, and where its threads stand.

    heart = Heartbeat(node_folder(), rank=3)
    with heart.phase("save"): ...           a sign of life at both ends, and what this rank was doing should it stop there

A heartbeat is a file of one page below /dev/shm, so that a sign of life is a write to memory and a reader needs nothing from the
rank: not its interpreter, not MPI, not a signal. Times are seconds of CLOCK_MONOTONIC, one clock for all processes of a node.
Stacks are Python's frames by faulthandler, and native ones by gdb or eu-stack if a system has them.
Needs neither torch nor MPI. Left out: who is stuck (hang_verdict.py), the thread that looks (watchdog.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import platform
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..start.private_folder import create, is_private, make_private

PAGE = 4096


MAGIC = b"heart 1\0"


TEXT = 200  # bytes of a phase's description


OWNER, OWNER_AT = struct.Struct("<8sqqd"), 0  # magic, process, rank, limit in seconds


TICK, TICK_AT = (
    struct.Struct("<d?"),
    64,
)  # time of the watchdog's last look, whether this rank has written its stacks


STATE, STATE_AT = (
    struct.Struct(f"<Qdd?{TEXT}s"),
    128,
)  # beats, time of the last, waiting since, in an iteration, what

JOBS = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "SLURM_STEP_ID",
)  # variables that the processes of one start have in common


MEMORY = "/dev/shm"


ON_REQUEST = (
    signal.SIGUSR2
)  # a process that gets it writes where it is: its interpreter need not be free to


TGKILL = {
    "x86_64": 234,
    "aarch64": 131,
}  # Linux's system call that sends a signal to one thread, which glibc 2.28 does not offer


DEBUGGERS = (
    ("eu-stack", "-p"),
    ("gdb", "-batch", "-nx", "-ex", "thread apply all backtrace", "-p"),
)


@dataclass(frozen=True)
class Beat:
    """A rank's last sign of life. Times in s of the node's clock.

    process: its number. limit: s without a move that it finds too long. number: of the beat. moved: when it last began or ended
    something. waits: for other ranks. training: in an iteration. what: it is doing. looked: when its watchdog last looked around.
    written: its stacks.
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
    """Return the path with which every heartbeat folder of this user begins, whatever the job."""
    folder = MEMORY if os.access(MEMORY, os.W_OK) else tempfile.gettempdir()
    return f"{folder}/fugaku_megatron_{os.geteuid()}_"


def node_folder() -> Path:
    """Create the folder in which the processes of this start on this node have their heartbeats.

    The launcher's variables name it, or else the parent process. A process has a folder of its own
    until `Heartbeat.move` if those do not identify the start, or if another user took the name.
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


def stat_words(process: int) -> list[str]:
    """The words of /proc/PROCESS/stat from the third field, the state, on. OSError if the process does not exist."""
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()


def _birth(process: int) -> str:
    try:
        return stat_words(process)[19]
    except OSError:
        return ""


def lives(process: int) -> bool:
    """Whether a process of this node is there, if only stopped; a zombie is not."""
    try:
        return stat_words(process)[0] not in "ZX"
    except OSError:
        return False


def remove_dead() -> None:
    """Remove the files of killed jobs of this user on this node."""
    for folder in Path(prefix()).parent.glob(Path(prefix()).name + "*"):
        with contextlib.suppress(OSError):
            if not is_private(folder):
                continue
            if not any(name.isdecimal() and lives(int(name)) for name in os.listdir(folder)):
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()


class Heartbeat:
    """This rank's heartbeat. folder: of the node; without one nobody else reads it."""

    def __init__(self, folder: Path | None = None, rank: int = 0, limit: float = 0.0) -> None:
        self.rank, self.limit, self.file = rank, limit, None
        self._memory: mmap.mmap | bytearray = bytearray(PAGE)
        self._number, self._since, self.what, self._where = 0, 0.0, "", ""
        if folder is not None:
            self.file = folder / str(os.getpid())
            self._memory = _page(self.file)
        self.look()
        self.enter("start")
        self.introduce(rank, limit)

    def introduce(self, rank: int, limit: float) -> None:
        """Say which rank this is, and how many seconds without a move are too long for it."""
        self.rank, self.limit = rank, limit
        OWNER.pack_into(self._memory, OWNER_AT, MAGIC, os.getpid(), rank, limit)

    @property
    def folder(self) -> Path | None:
        """Of the heartbeats of this node."""
        return self.file.parent if self.file else None

    def move(self, folder: Path) -> None:
        """Continue in another folder of the same node."""
        if self.file is not None and folder != self.file.parent and is_private(folder):
            old, self.file = self.file.parent, folder / self.file.name
            with contextlib.suppress(OSError):
                for file in old.glob(f"{self.file.name}*"):
                    file.rename(folder / file.name)
                old.rmdir()

    def close(self) -> None:
        """This rank has ended as it should."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                for file in self.file.parent.glob(f"{self.file.name}*"):
                    file.unlink()
                self.file.parent.rmdir()
            self.file = None

    # Signs of life ----------------------------------------------------------------------------------------------------------------

    def enter(self, what: str) -> str:
        """From now on this rank does `what`; returns what it did, for `leave`."""
        before, self.what = self.what, what
        self._beat()
        return before

    def leave(self, before: str) -> None:
        """`what` is done, and this rank continues with what it did before."""
        self.what = before
        self._beat()

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """This rank does `what` inside the block."""
        before = self.enter(what)
        try:
            yield
        finally:
            self.leave(before)

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Inside the block this rank is in an iteration, where `limit` counts without regard to processor time."""
        self._where = f"iteration {number}"
        try:
            with self.phase(""):
                yield
        finally:
            self._where = ""

    def wait(self, waits: bool) -> None:
        """This rank waits for others from now on, or no longer."""
        self._since = time.monotonic() if waits else 0.0
        self._beat()

    def _beat(self) -> None:
        self._number += 1
        what = (
            f"{self.what}, {self._where}" if self.what and self._where else self.what or self._where
        )
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
        """The watchdog of this rank is awake; `written`: the stacks of this rank's threads are in their file."""
        TICK.pack_into(self._memory, TICK_AT, time.monotonic(), written)

    def beat(self) -> Beat | None:
        """What others read."""
        return decode(self._memory)


def decode(memory: mmap.mmap | bytes | bytearray) -> Beat | None:
    """The heartbeat in a page; None if it is none yet."""
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
    return (
        Beat(process, rank, limit, number, moved, since > 0, training, text, looked, written)
        if magic == MAGIC
        else None
    )


def _page(file: Path) -> mmap.mmap:
    """Create the file of a heartbeat, one page of zeros, and map it.

    A file of this name in a private folder is left from an ended process that had the same number.
    """
    while True:
        make_private(file.parent)
        file.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another rank has just removed the folder
            with create(file) as opened:
                opened.write(bytes(PAGE))
                opened.flush()
                return mmap.mmap(opened.fileno(), PAGE)


class Node:
    """The heartbeats in a folder, each mapped once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pages: dict[str, mmap.mmap] = {}

    def read(self) -> list[Beat]:
        """The heartbeats of ranks that have not ended, in the order of ranks."""
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


def rank_file(directory: Path, rank: int) -> Path:
    """Where the stacks of a rank are written."""
    return directory / f"rank{rank}.txt"


def write_own(directory: Path, rank: int, native: bool, until: float) -> None:
    """All threads of this process, called by one of them. native: with the frames below Python's, read until a monotonic time."""
    with contextlib.suppress(OSError), rank_file(directory, rank).open("a") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        if native:
            file.flush()
            file.write(native_stacks(os.getpid(), until))


def write_of(directory: Path, rank: int, process: int, requested: Path, until: float) -> None:
    """All threads of another process of this node that cannot write them, until a monotonic time.

    requested: its file of `on_request`, whose frames come first: a debugger may need longer than there is time.
    """
    with contextlib.suppress(OSError), rank_file(directory, rank).open("a") as file:
        file.write(f"process {process}, state {state(process)}\n")
        file.write(_request(process, requested))
        file.flush()
        file.write(native_stacks(process, until))


def on_request(path: Path) -> None:
    """From now on ON_REQUEST makes this process write the frames of the thread that gets it, its main thread, to `path`.

    Those of other threads, which run on, would be read while they change: that ended one process in four with a segmentation fault.
    """
    file = path.open("w")
    faulthandler.register(ON_REQUEST, file, all_threads=False)


def _request(process: int, requested: Path) -> str:
    """What the process writes when it is asked to. One that is stopped must run to answer, and is stopped again."""
    with contextlib.suppress(OSError):
        stopped = state(process).startswith(("T", "t"))
        _ask(process)
        os.kill(process, signal.SIGCONT)
        size, end = 0, time.monotonic() + 1
        while (size == 0 or requested.stat().st_size > size) and time.monotonic() < end:
            size = requested.stat().st_size
            time.sleep(0.02)
        if stopped:
            os.kill(process, signal.SIGSTOP)
        return requested.read_text()
    return ""


def _ask(process: int) -> None:
    """Send ON_REQUEST to the main thread: of a stopped process, any thread would take it when they all continue."""
    number = TGKILL.get(platform.machine())
    if number is None or ctypes.CDLL(None).syscall(number, process, process, int(ON_REQUEST)):
        os.kill(process, ON_REQUEST)


def state(process: int) -> str:
    """The kernel's state of the process, and the function of the kernel that it is in, if the kernel shows it."""
    words = []
    with contextlib.suppress(OSError):
        words += [
            line.split(maxsplit=1)[1]
            for line in Path(f"/proc/{process}/status").read_text().splitlines()
            if line.startswith("State:")
        ]
        words += [Path(f"/proc/{process}/wchan").read_text().strip("0")]
    return " ".join(filter(None, words)) or "unknown"


def native_stacks(process: int, until: float) -> str:
    """The frames below Python's of all threads, as far as a debugger reads them until a monotonic time.

    Empty where no debugger is installed or permitted.
    """
    command = next((words for words in DEBUGGERS if shutil.which(words[0])), None)
    if command is None:
        return ""
    seconds = max(0.0, until - time.monotonic())
    try:
        done = subprocess.run(
            [*command, str(process)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}\n"
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(
            errors="replace"
        ) + f"{command[0]} was not ready within {seconds:.0f} s\n"
    return done.stdout.decode(errors="replace")
