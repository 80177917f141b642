"""Where every thread of a rank stands: Python's frames by faulthandler, native ones by gdb or eu-stack where a system has them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

ON_REQUEST = signal.SIGUSR2  # a process that gets it writes where it is: its interpreter need not be free to
DEBUGGERS = (("eu-stack", "-p"), ("gdb", "-batch", "-nx", "-ex", "thread apply all backtrace", "-p"))


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
        os.kill(process, ON_REQUEST)
        os.kill(process, signal.SIGCONT)
        size, end = 0, time.monotonic() + 1
        while (size == 0 or requested.stat().st_size > size) and time.monotonic() < end:
            size = requested.stat().st_size
            time.sleep(0.02)
        if stopped:
            os.kill(process, signal.SIGSTOP)
        return requested.read_text()
    return ""


def state(process: int) -> str:
    """The kernel's state of the process, and the function of the kernel that it is in, if the kernel shows it."""
    words = []
    with contextlib.suppress(OSError):
        words += [line.split(maxsplit=1)[1] for line in Path(f"/proc/{process}/status").read_text().splitlines()
                  if line.startswith("State:")]
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
        done = subprocess.run([*command, str(process)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              timeout=seconds)
    except OSError as error:
        return f"{command[0]}: {error.strerror}\n"
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace") + f"{command[0]} was not ready within {seconds:.0f} s\n"
    return done.stdout.decode(errors="replace")
