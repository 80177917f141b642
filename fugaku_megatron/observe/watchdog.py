"""The watchdog: a thread of each rank that looks at the heartbeats of its node, says who is stuck, and ends the job.

    watchdog = Watchdog.start(HangSettings(seconds=None, directory=Path("."), log_file=None))
    watchdog.heart.phase(...)           what this rank does

It needs nothing that may be what hangs: no MPI, no other process. The lowest rank of a node whose watchdog is awake judges and
speaks; all write their stacks. Left out: what nodes report to each other (hang_verdict.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ..start import environment, exit_codes
from . import hang_verdict
from .hang_verdict import FAN, STOPPED, Census, Link, Standing, Verdict
from .heartbeat import (
    Beat,
    Heartbeat,
    Node,
    lives,
    node_folder,
    on_request,
    remove_dead,
    stat_words,
    write_of,
    write_own,
)

SHORTEST, ITERATIONS = 60.0, 10.0  # by default: s, and times the slowest iteration, without a move


OUTSIDE = 600.0  # s: the same at the start, in a save, and until an iteration was measured


LOOK = 1.0  # s between two looks


WINDOW, BUSY, MOVED = (
    0.5,
    0.05,
    2**16,
)  # s, and the part of a core or the bytes read and written in them that say that a rank works


GONE = 5.0  # s that a launcher gets to end a job of which a process is gone


STACKS = (
    6.0  # s for the ranks of a node to write their stacks, from when they know that the job ends
)


SPREAD = 9.0  # s for other nodes to hear of the end and write theirs; the job ends within 15 s


PATIENCE = 60.0  # s for another rank to end the job


END = "end"  # the file in which the ranks of a node read why the job ends


@dataclass(frozen=True)
class HangSettings:
    """seconds: --hang-timeout-in-secs; None: from the iterations. directory: gets a folder of stacks. log_file: gets the line.

    uneven: how many times as long an iteration may become, as where one rank's experts get the tokens of all.
    """

    seconds: float | None
    directory: Path
    log_file: str | None
    uneven: int = 1


class Work:
    """Whether processes compute, read or write, by the kernel's counters: for long work without a sign of life in between.

    A watchdog's own looks stay below BUSY and MOVED.
    """

    def __init__(self) -> None:
        self._last: dict[
            int, tuple[float, float, int]
        ] = {}  # process -> time, processor seconds, bytes

    def seen(self, process: int) -> bool:
        """Whether the process has worked in the last window; False until it is over."""
        now = time.monotonic()
        if now - self._last.get(process, (0.0, 0.0, 0))[0] < WINDOW:
            return False
        try:
            words = stat_words(process)
            seconds = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
            moved = sum(
                int(line.split()[1])
                for line in Path(f"/proc/{process}/io").read_text().splitlines()
            )
        except (OSError, ValueError):
            return False
        before, self._last[process] = (
            self._last.get(process, (now, seconds, moved)),
            (now, seconds, moved),
        )
        return moved - before[2] > MOVED or seconds - before[1] > BUSY * (now - before[0])


class Watchdog:
    """The watchdog of one rank.

    heart: its heartbeat; without a file of its node there is nothing to watch. local: the ranks of this node, () where that is not
    known. alone: there are other nodes, and it does not hear of them.
    """

    def __init__(
        self,
        heart: Heartbeat,
        settings: HangSettings,
        local: tuple[int, ...] = (),
        alone: bool = False,
    ) -> None:
        self.heart, self.settings, self.local, self.alone = heart, settings, local, alone
        self.link: Link | None = None  # to other nodes
        self.slowest = 0.0  # s of an iteration
        self.host = platform.node()
        self._node, self._work = Node(heart.file.parent) if heart.file else None, Work()
        self._worked: dict[int, float] = {}  # process -> when it was seen to work last
        self._since = time.monotonic()  # from when on this process has run without a stop
        self._stopped = threading.Event()
        heart.introduce(heart.rank, self._limit())
        self.period = min(LOOK, heart.limit / 10)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if self._node:
            on_request(requested(self._node.folder, os.getpid()))
            self._thread.start()

    @classmethod
    def start(cls, settings: HangSettings) -> Watchdog:
        """The watchdog of this process, as far as its launcher says who it is; of nothing where settings.seconds is 0."""
        if settings.seconds == 0:
            return cls(Heartbeat(), settings)
        remove_dead()
        size = environment.processes()[1]
        whole = size == environment.processes_of_node()
        return cls(
            Heartbeat(node_folder(), environment.rank()),
            settings,
            tuple(range(size)) if whole else (),
            not whole,
        )

    @classmethod
    def off(cls) -> Watchdog:
        """That of a process that nobody watches."""
        return cls.start(HangSettings(0.0, Path(), None))

    def measured(self, seconds: float) -> None:
        """An iteration took so long."""
        if seconds > self.slowest:
            self.slowest = seconds
            self.heart.introduce(self.heart.rank, self._limit())

    def placed(
        self, rank: int, folder: Path | None, local: tuple[int, ...], link: Link | None
    ) -> None:
        """After MPI has started: this rank, the folder of its node, the ranks there, and how to reach other nodes."""
        if self._node and folder:
            self.heart.move(folder)
            self.heart.introduce(rank, self.heart.limit)
            self.local, self.alone, self.link, self._node = local, False, link, Node(folder)

    def close(self) -> None:
        """The run has ended as it should."""
        self._stopped.set()
        if self._node:
            self._thread.join(2 * self.period)
        if self.link:
            self.link.leave()
        self.heart.close()

    def _limit(self) -> float:
        if self.settings.seconds is not None:
            return self.settings.seconds
        return (
            max(SHORTEST, max(ITERATIONS, self.settings.uneven) * self.slowest)
            if self.slowest
            else OUTSIDE
        )

    # The thread -------------------------------------------------------------------------------------------------------------------

    @property
    def _here(self) -> Node:
        """The heartbeats of this node: the thread runs only where there is one."""
        assert self._node is not None
        return self._node

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self.period):
            now = time.monotonic()
            if now - last > max(hang_verdict.ASLEEP, 3 * self.period):
                self._since = (
                    now  # this process was stopped itself: what it missed counts from now on
                )
            last = now
            self.heart.look()
            if (self._here.folder / END).exists():
                self._end(self._read_end())
            beats = self._here.read()
            if self.link:
                self.link.receive(now)
            if self._leads(beats, now):
                self._judge(self._census(beats, now), now)

    def _judge(self, own: Census, now: float) -> None:
        """End the job if a rank is stuck. Of several nodes the first one judges; another does if that one does not."""
        whole, alone, late = own, self.alone, 0.0
        if self.link:
            whole, alone, late = self._hear(self.link, own, now)
        if found := hang_verdict.judge(whole, alone, late):
            self._end(self._write_end(found))

    def _hear(self, link: Link, own: Census, now: float) -> tuple[Census, bool, float]:
        """What is known of all nodes below, whether others are not heard, and the s that the node above has to speak first."""
        limit = self.heart.limit
        whole = link.whole(own, limit, now)
        link.report(own, whole, limit, now)
        if link.end:
            self._end(self._pass_on(link, link.end))
        if link.number == 0:
            return whole, whole.nodes < link.count, 0.0
        if alone := link.alone(limit, now):
            return whole, alone, 0.0
        late = (
            link.number % FAN * self.period
        )  # all nodes that report to a silent one find that out
        return (
            whole,
            alone,
            late if link.deserted(limit, now) else late + limit + 4 * hang_verdict.ASLEEP,
        )

    def _leads(self, beats: list[Beat], now: float) -> bool:
        awake = [beat.process for beat in beats if now - beat.looked < hang_verdict.ASLEEP]
        return bool(awake) and awake[0] == os.getpid()

    def _census(self, beats: list[Beat], now: float) -> Census:
        stuck, waiting, moving = [], [], []
        for beat in beats:
            standing = self._standing(beat, now)
            asleep = now - max(beat.looked, self._since) > max(
                hang_verdict.ASLEEP, standing.limit / 2
            )
            if beat.waits and not asleep and standing.how == STOPPED:
                waiting.append(standing)
            elif standing.how == hang_verdict.GONE or standing.seconds > standing.limit / 2:
                stuck.append(standing)
            else:
                moving.append(standing)
        return hang_verdict.count(
            stuck, waiting, moving, tuple(sorted(set(self.local) - {beat.rank for beat in beats}))
        )

    def _standing(self, beat: Beat, now: float) -> Standing:
        moved = max(beat.moved, self._since, self._worked.get(beat.process, 0.0))
        limit = beat.limit
        if not beat.training:
            if not beat.waits and self._work.seen(beat.process):
                self._worked[beat.process] = moved = now
            limit = limit if self.settings.seconds is not None else max(limit, OUTSIDE)
        gone = now - moved > min(GONE, limit / 2) and not lives(beat.process)
        how, limit = (hang_verdict.GONE, min(limit, GONE)) if gone else (STOPPED, limit)
        return Standing(beat.rank, self.host, beat.what, now - moved, limit, how)

    # The end ----------------------------------------------------------------------------------------------------------------------

    def _write_end(self, found: Verdict) -> dict:
        """Log why the job ends, and write it for the other ranks of this node."""
        name = time.strftime("hang_%Y%m%d_%H%M%S")
        end = {
            **asdict(found),
            "directory": str(self.settings.directory.absolute() / name),
            "speaks": True,
        }
        end = self._publish(end)
        if end["process"] == os.getpid():
            self._say(f"{found.text}; stacks of all ranks: {end['directory']}")
            if self.link:
                self.link.announce(end)
        return end

    def _pass_on(self, link: Link, end: dict) -> dict:
        """Another node has said why the job ends."""
        link.announce(end)
        return self._publish({**end, "speaks": False})

    def _publish(self, end: dict) -> dict:
        """Write why the job ends for the ranks of this node. Returns what they read: another rank may have been first."""
        end = {**end, "process": os.getpid()}
        aside = self._here.folder / f"{END}.{os.getpid()}"
        aside.write_text(json.dumps(end))
        try:
            os.link(aside, self._here.folder / END)
        except FileExistsError:  # another rank was faster
            return self._read_end()
        return end

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode(errors="surrogateescape"))
        with contextlib.suppress(OSError):
            if self.settings.log_file:
                with open(
                    self.settings.log_file, "a", encoding="utf-8", errors="surrogateescape"
                ) as log:
                    log.write(f"{line}\n")

    def _read_end(self) -> dict:
        return json.loads((self._here.folder / END).read_text())

    def _end(self, end: dict) -> None:
        """Write the stacks of this rank, and end it when those of the whole node are written."""
        directory, leads, begin = (
            Path(end["directory"]),
            end["process"] == os.getpid(),
            time.monotonic(),
        )
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
        write_own(
            directory,
            self.heart.rank,
            native=not end["stuck"] or self.heart.rank in end["stuck"],
            until=begin + STACKS,
        )
        self.heart.look(written=True)
        if leads:
            self._write_stuck(directory, end["stuck"], begin + STACKS)
            self._await(
                lambda: all(
                    beat.written or time.monotonic() - beat.looked > hang_verdict.ASLEEP
                    for beat in self._here.read()
                ),
                begin + STACKS + LOOK,
            )
            others = (
                (SPREAD if end["speaks"] else PATIENCE) if self.link else 0.0
            )  # until other nodes have written theirs
            time.sleep(max(0.0, begin + others - time.monotonic()))
            exit_codes.wait_until_read(sys.__stderr__ or sys.stderr)
            exit_codes.abort(end["code"])
        else:  # a launcher ends with the code of the rank that ends first, and ends the others
            self._await(lambda: not lives(end["process"]), begin + PATIENCE)
            time.sleep(hang_verdict.ASLEEP)
            self._kill(end["stuck"])
        os._exit(end["code"])

    def _write_stuck(self, directory: Path, ranks: list[int], until: float) -> None:
        """The stacks of ranks of this node that do not write them themselves, all at once."""
        stuck = [
            b
            for b in self._here.read()
            if b.rank in ranks and b.rank != self.heart.rank and lives(b.process)
        ]
        with ThreadPoolExecutor(max(1, len(stuck))) as pool:
            for beat in stuck:
                pool.submit(
                    write_of,
                    directory,
                    beat.rank,
                    beat.process,
                    requested(self._here.folder, beat.process),
                    until,
                )

    def _await(self, condition: Callable[[], bool], until: float) -> None:
        """Stay awake until the condition holds, or until a monotonic time."""
        while time.monotonic() < until and not condition():
            self.heart.look(written=True)
            time.sleep(0.05)

    def _kill(self, ranks: list[int]) -> None:
        for beat in self._here.read():
            if beat.rank in ranks and beat.process != os.getpid():
                with contextlib.suppress(OSError):
                    os.kill(beat.process, signal.SIGKILL)


def requested(folder: Path, process: int) -> Path:
    """Where a process writes its stacks on request."""
    return folder / f"{process}.stacks"
