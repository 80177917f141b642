"""Kinds of faults: each disturbs a trial, brings it to its end, and has a pattern that the log must match."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.two_hosts import DEVICE, why_not
from fugaku_megatron.checkpoint.manifest import list_iterations
from tests.campaigns.faults import jobs
from tests.campaigns.faults.jobs import ITERATIONS, VOCABULARY, Layout, on_two_hosts
from tests.campaigns.faults.trial import TooLate, Trial

# A signal before Python has come to its first line ends the rank.
ORDERLY = r"a signal asked to stop|supervise: asked to stop|a rank is lost \(signal (9|10|15),"


@dataclass(frozen=True)
class Kind:
    """A kind of fault. what: the fault; named: a pattern for the log; disturb: cause it, and return true if the run ended"""

    what: str
    named: str
    disturb: Callable[[Trial], bool]
    missing: Callable[[], str] = lambda: ""  # why it cannot be tried here
    layout: Callable[[int], Layout] | None = None  # the only one, of a fault's number


def killed(trial: Trial) -> bool:
    """A rank is killed; the supervisor starts the run again."""
    job = trial.start(supervised=True)
    trial.moment(job)
    with trial.needs(job):
        trial.victim(job).kill()
    return trial.end(job) == 0 or trial.finish()


def signalled(number: int) -> Callable[[Trial], bool]:
    """A signal to one rank or to the job's supervisor; the next start continues."""

    def disturb(trial: Trial) -> bool:
        job = trial.start(supervised=True)
        trial.moment(job)
        one = trial.victim(job)
        with trial.needs(job):
            (one if trial.rng.random() < 0.5 else psutil.Process(job.process.pid)).send_signal(
                number
            )
        trial.end(job)
        return trial.finish()

    return disturb


def no_sign_of(rank: str) -> str:
    """Return a pattern for the watchdog's line about a rank that has never moved."""
    return rf"no sign of life yet from ranks? .*\b{rank}\b"


def stopped(trial: Trial) -> bool:
    """A rank is stopped, as one that swaps or hangs in a driver; the watchdog names it and the supervisor starts the run again."""
    job = trial.start("--hang-timeout-in-secs", str(HANG_SECONDS), supervised=True)
    trial.moment(job)
    victim = trial.victim(job)
    with trial.needs(job):
        rank = victim.environ()["PMI_RANK"]
        trial.named = rf"rank {rank} \(node \S+\) stopped in|{no_sign_of(rank)}"
        victim.suspend()
    return trial.end(job) == 0 or trial.finish()


def link_down(trial: Trial) -> bool:
    """Two ranks on two hosts; the link between them goes down for good, and is up again for the next start."""
    job = trial.start("--hang-timeout-in-secs", str(HANG_SECONDS))
    trial.moment(job)
    trial.victim(job)
    wire = ["ip", "-n", trial.rng.choice(trial.layout.hosts), "link", "set", DEVICE]
    subprocess.run([*wire, "down"], check=True)
    over = trial.end(job) == 0
    subprocess.run([*wire, "up"], check=True)
    if over:  # nothing was sent any more
        raise TooLate
    return trial.finish()


def full_disk(trial: Trial) -> bool:
    """--save lies on a file system that is full after some KiB, and is enlarged for the next start."""
    trial.save.mkdir(parents=True)
    size = trial.rng.randint(40, 1500)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", trial.save], check=True)
    try:
        trial.run()
        subprocess.run(["mount", "-o", "remount,size=64m", trial.save], check=True)
        finished = trial.finish()
        shutil.copytree(trial.save, trial.folder / "kept")
    finally:
        subprocess.run(["umount", "-l", trial.save], check=True)
    trial.save.rmdir()
    (trial.folder / "kept").rename(trial.save)
    return finished


def mounts() -> str:
    return "" if os.geteuid() == 0 and shutil.which("mount") else "a small file system needs root"


def library(folder: Path) -> Path:
    """preload.c, compiled once for a campaign."""
    made = folder / "preload.so"
    if not made.exists():
        subprocess.run(
            [
                "cc",
                "-O1",
                "-shared",
                "-fPIC",
                "-o",
                made,
                Path(__file__).with_name("preload.c"),
                "-ldl",
            ],
            check=True,
        )
    return made


def disk(kind: str, low: int, high: int) -> Callable[[Trial], bool]:
    """One rank's call on a file below --save fails (error), or all take long (slow); the supervisor starts the run again."""

    def disturb(trial: Trial) -> bool:
        rank = trial.rng.randrange(trial.layout.ranks)
        mark = trial.folder / "failed"
        faults = {
            "KIND": kind,
            "PATH": trial.save,
            "RANK": rank,
            "CALL": trial.rng.randint(low, high),
            "MARK": mark,
        }
        job = trial.start(
            supervised=True,
            LD_PRELOAD=str(library(trial.folder.parent)),
            **{f"FAULT_{name}": str(value) for name, value in faults.items()},
        )
        code = trial.end(job)
        if kind == "error" and not mark.exists():
            raise TooLate
        return code == 0 and jobs.ended(trial.save)

    return disturb


def bad_gradient(trial: Trial) -> bool:
    """A result in one rank's attention backward has a NaN; the iteration is repeated, and the rank named."""
    rank = trial.rng.randrange(trial.layout.ranks)
    mark = trial.folder / "mark"
    call = trial.rng.randint(1, 2 * ITERATIONS)
    element = trial.rng.randrange(1 << 20)
    code = trial.run("--rerun-on-spike", FAULT_GRADIENT=f"{rank},{call},{element},{mark}")
    if code == 0 and not mark.exists():
        raise TooLate
    first = rank // 2 * 2  # of the two tensor-parallel ranks that share layers
    trial.named = rf"other bits: the cause is a machine, not the batch.* on (rank {rank} |ranks {first} to {first + 1},)"
    return code == 0 and jobs.ended(trial.save)


def compiler() -> str:
    return "" if shutil.which("cc") else "a disk that fails needs a C compiler"


def damage(path: Path, cut: bool, trial: Trial, step: int = 1) -> bytes:
    """Flip a bit in the last of every `step` bytes in a file, or cut the file; return its former content."""
    content = path.read_bytes()
    place = trial.rng.randrange(len(content) // step) * step + step - 1
    if cut:
        os.truncate(path, place)
    else:
        changed = bytearray(content)
        changed[place] ^= 1 << trial.rng.randrange(8)
        path.write_bytes(changed)
    return content


def damaged_checkpoint(cut: bool) -> Callable[[Trial], bool]:
    """A file below --save is damaged between two starts. After a refusal the run continues by --ckpt-step, else from a copy."""

    def disturb(trial: Trial) -> bool:
        trial.run("--exit-interval", str(trial.rng.randint(4, ITERATIONS - 2)))
        files = sorted(p for p in trial.save.rglob("*") if p.is_file() and p.stat().st_size)
        path = trial.rng.choice(files)
        content = damage(path, cut, trial)

        def repair(turn: int) -> tuple[str, ...]:
            whole = [i for i in list_iterations(trial.save) if f"iter_{i:07d}" not in str(path)]
            if turn == 1 and whole and "iter_" in str(path):
                return ("--ckpt-step", str(whole[-1]))
            if turn == 2:
                path.write_bytes(content)
            return ()

        finished = trial.finish(repair)
        trial.named = re.escape(path.name) if trial.codes[1] else ""
        return finished

    return disturb


def damaged_data(cut: bool) -> Callable[[Trial], bool]:
    """The data is damaged between two starts: .idx anywhere, .bin by a cut or by a bit that leaves the vocabulary."""

    def disturb(trial: Trial) -> bool:
        folder = trial.folder / "data"
        shutil.copytree(
            trial.data.parent,
            folder,
            ignore=lambda _, names: [n for n in names if not n.startswith("corpus")],
        )
        trial.data = folder / "corpus"
        trial.run("--exit-interval", str(trial.rng.randint(4, ITERATIONS - 2)))
        path = trial.data.with_suffix(trial.rng.choice([".idx", ".bin"]))
        high = path.suffix == ".bin" and not cut  # the high byte: a token of at least 256
        content = damage(path, cut, trial, step=2 if high else 1)
        finished = trial.finish(lambda turn: path.write_bytes(content) and () if turn == 1 else ())
        trial.named = re.escape(path.name) if trial.codes[1] else ""
        return finished

    return disturb


def memory_limit(trial: Trial) -> bool:
    """A rank may allocate only some MiB more."""
    job = trial.start("--hang-timeout-in-secs", str(HANG_SECONDS))
    trial.moment(job)
    victim = trial.victim(job)
    with trial.needs(job):
        rank = victim.environ()["PMI_RANK"]
        limit = victim.memory_info().vms + trial.rng.randrange(4 << 20)
        resource.prlimit(victim.pid, resource.RLIMIT_AS, (limit, limit))
    code = trial.end(job)
    # Python itself may have had no memory to start in.
    trial.named = (
        rf"out of memory|the address space|signal \d+|is gone|{no_sign_of(rank)}" if code else ""
    )
    return code == 0 and jobs.ended(trial.save) or trial.finish()


def two_jobs(trial: Trial) -> bool:
    """A second job on the same --save is refused; the first one is not disturbed."""
    first = trial.start()
    if not first.wait_for_iteration(trial.rng.randint(1, 6)):
        trial.end(first)
        raise TooLate
    first.process.send_signal(signal.SIGSTOP)
    for rank in first.ranks():
        rank.suspend()
    try:
        second = trial.start()
        code = second.end()
    finally:
        for rank in first.ranks():
            rank.resume()
        first.process.send_signal(signal.SIGCONT)
    trial.end(first)
    trial.log.append(second.text())
    return code == 2 and jobs.ended(trial.save)


ANY = ""
HANG_SECONDS = 10
KINDS = {
    "kill": Kind("SIGKILL of a rank", r"signal 9|asked to stop", killed),
    "term": Kind("SIGTERM to a rank or the job", ORDERLY, signalled(signal.SIGTERM)),
    "usr1": Kind("SIGUSR1 to a rank or the job", ORDERLY, signalled(signal.SIGUSR1)),
    "stop": Kind("SIGSTOP of a rank", "", stopped),
    "link-down": Kind(
        "the link between two hosts goes down",
        r"rank \d+ \(node|timed out|unreachable|Abort\(",
        link_down,
        why_not,
        on_two_hosts,
    ),
    "full-disk": Kind(
        "--save on a full file system", r"No space left on device", full_disk, mounts
    ),
    "io-error": Kind(
        "a call on a file of --save fails with EIO",
        r"Input/output error",
        disk("error", 0, 120),
        compiler,
    ),
    "slow-disk": Kind(
        "every call on a file of --save takes up to 20 ms", ANY, disk("slow", 100, 20000), compiler
    ),
    "checkpoint-bit": Kind("a flipped bit in a file of --save", ANY, damaged_checkpoint(cut=False)),
    "checkpoint-cut": Kind("a cut file of --save", ANY, damaged_checkpoint(cut=True)),
    "data-bit": Kind(
        "a flipped bit in .idx, or in .bin beyond the vocabulary", ANY, damaged_data(cut=False)
    ),
    "data-cut": Kind("a cut .idx or .bin", ANY, damaged_data(cut=True)),
    "memory": Kind("a limit on a rank's memory", ANY, memory_limit),
    "nan": Kind("a NaN in a gradient of a rank", "", bad_gradient),
    "two-jobs": Kind("a second job on the same --save", r"is in use by another job", two_jobs),
}
assert VOCABULARY < 256
