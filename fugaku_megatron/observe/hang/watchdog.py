"""Each rank's watchdog thread: reads its node's heartbeats, reports a stuck rank, and ends the job.

It uses neither MPI nor another process, because either may hang. A node's lowest rank with an awake
watchdog judges and logs; every rank writes its stacks.
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
from pathlib import Path
from typing import NamedTuple

from ...start import environment, exit_codes
from ...text.written_files import make_folder, write_text
from ..log.screen import append
from . import hang_verdict
from .hang_verdict import FAN, STOPPED, Census, Link, Message, Standing
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

SHORTEST = 60.0  # s, smallest default limit
ITERATIONS = 10.0  # default limit in units of the slowest iteration
OUTSIDE = 600.0  # s, default limit outside iterations and before the first one is measured
LOOK = 1.0  # s between looks
WINDOW = 0.5  # s between readings of a process's counters
BUSY = 0.05  # fraction of a core above which a process is active
MOVED = 2**16  # bytes read and written in a window above which a process is active
GONE = 5.0  # s for the launcher to end a job after a process has ended
STACKS = 6.0  # s for the ranks of a node to write their stacks
SPREAD = 9.0  # s for other nodes to learn of the end and write their stacks; 15 s in total
PATIENCE = 60.0  # s for another rank to end the job
END = "end"  # file with the reason for the end


class HangSettings(NamedTuple):
    """Watchdog settings.

    seconds: --hang-timeout-in-secs; None: from measured iterations
    uneven: factor on an iteration's time, for example if one rank's experts receive all tokens
    """

    seconds: float | None
    directory: Path
    log_file: str | None
    uneven: int = 1


class ProcessActivity:
    """Activity by the kernel's counters, for long phases without a beat. A watchdog stays below BUSY and MOVED."""

    def __init__(self) -> None:
        # process -> time, processor seconds, bytes
        self._last: dict[int, tuple[float, float, int]] = {}

    def active(self, process: int) -> bool:
        """Return True if a process computed or read and wrote since the last call, at most once in WINDOW."""
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
        last_time, last_seconds, last_moved = self._last.get(process, (now, seconds, moved))
        self._last[process] = (now, seconds, moved)
        return moved - last_moved > MOVED or seconds - last_seconds > BUSY * (now - last_time)


class Watchdog:
    """Watchdog of one rank, inactive if `heart` has no file.

    local: ranks of this node, () if unknown
    alone: other nodes are not heard
    """

    def __init__(
        self,
        heart: Heartbeat,
        settings: HangSettings,
        local: tuple[int, ...] = (),
        alone: bool = False,
    ) -> None:
        self.heart = heart
        self.settings = settings
        self.local = local
        self.alone = alone
        self.link: Link | None = None  # to other nodes
        self.slowest = 0.0  # iteration, s
        self.host = platform.node()
        self._node = Node(heart.file.parent) if heart.file else None
        self._activity = ProcessActivity()
        self._last_active: dict[int, float] = {}  # process -> time
        self._since = time.monotonic()  # start, or the last time this process was stopped
        self._stopped = threading.Event()
        self._ends_job = False
        heart.introduce(heart.rank, self._limit())
        self.period = min(LOOK, heart.limit / 10)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if self._node:
            on_request(requested(self._node.folder, os.getpid()))
            self._thread.start()

    @classmethod
    def start(cls, settings: HangSettings) -> Watchdog:
        """Start this process's watchdog, inactive for 0 seconds. Its rank comes from the launcher."""
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
        return cls.start(HangSettings(0.0, Path(), None))

    def measured(self, seconds: float) -> None:
        if seconds > self.slowest:
            self.slowest = seconds
            self.heart.introduce(self.heart.rank, self._limit())

    def placed(
        self, rank: int, folder: Path | None, local: tuple[int, ...], link: Link | None
    ) -> None:
        if self._node and folder:
            self.heart.move(folder)
            self.heart.introduce(rank, self.heart.limit)
            self.local = local
            self.alone = False
            self.link = link
            self._node = Node(folder)

    def close(self) -> None:
        """Stop watching. Does not return if the watchdog ends the job: its thread ends this process."""
        self._stopped.set()
        if self._node:
            self._thread.join(2 * self.period)
            if self._ends_job:
                self._thread.join()
        if self.link:
            self.link.leave()
        self.heart.close()

    def _limit(self) -> float:
        if self.settings.seconds is not None:
            return self.settings.seconds
        if not self.slowest:
            return OUTSIDE
        return max(SHORTEST, max(ITERATIONS, self.settings.uneven) * self.slowest)

    # Thread

    @property
    def _here(self) -> Node:
        assert self._node is not None
        return self._node

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self.period):
            now = time.monotonic()
            if now - last > max(hang_verdict.ASLEEP, 3 * self.period):
                self._since = now  # this process was stopped itself
            last = now
            self.heart.look()
            if (self._here.folder / END).exists():
                self._end(self._read_end())
            beats = self._here.read()
            if self.link:
                self.link.receive(now)
            awake = [beat.process for beat in beats if now - beat.looked < hang_verdict.ASLEEP]
            if awake[:1] == [os.getpid()]:
                self._judge(self._census(beats, now), now)

    def _judge(self, own: Census, now: float) -> None:
        whole = own
        alone = self.alone
        late = 0.0
        if self.link:
            whole, alone, late = self._hear(self.link, own, now)
        found = hang_verdict.judge(whole, alone, late)
        if found is None:
            return
        name = time.strftime("hang_%Y%m%d_%H%M%S")
        directory = str(self.settings.directory.absolute() / name)
        end = self._publish({**found._asdict(), "directory": directory, "speaks": True})
        if end["process"] == os.getpid():
            self._say(f"{found.text}; stacks of all ranks: {end['directory']}")
            if self.link:
                self.link.announce(end)
        self._end(end)

    def _hear(self, link: Link, own: Census, now: float) -> tuple[Census, bool, float]:
        """Return the census of nodes below, True if others are not heard, and seconds to wait for the node above."""
        limit = self.heart.limit
        whole = link.whole(own, limit, now)
        link.report(own, whole, limit, now)
        if link.end:
            link.announce(link.end)
            self._end(self._publish({**link.end, "speaks": False}))
        if link.number == 0:
            return whole, whole.nodes < link.count, 0.0
        if alone := link.alone(limit, now):
            return whole, alone, 0.0
        late = link.number % FAN * self.period  # stagger the children of a silent node
        if not link.deserted(limit, now):
            late = late + limit + 4 * hang_verdict.ASLEEP
        return whole, alone, late

    def _census(self, beats: list[Beat], now: float) -> Census:
        stuck: list[Standing] = []
        waiting: list[Standing] = []
        moving: list[Standing] = []
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
        missing = tuple(sorted(set(self.local) - {beat.rank for beat in beats}))
        return hang_verdict.count(stuck, waiting, moving=moving, missing=missing)

    def _standing(self, beat: Beat, now: float) -> Standing:
        moved = max(beat.moved, self._since, self._last_active.get(beat.process, 0.0))
        limit = beat.limit
        if not beat.training:
            if not beat.waits and self._activity.active(beat.process):
                moved = now
                self._last_active[beat.process] = now
            if self.settings.seconds is None:
                limit = max(limit, OUTSIDE)
        how = STOPPED
        if now - moved > min(GONE, limit / 2) and not lives(beat.process):
            how = hang_verdict.GONE
            limit = min(limit, GONE)
        return Standing(beat.rank, self.host, beat.what, now - moved, limit, how)

    # End of the job

    def _publish(self, end: Message) -> Message:
        """Write the reason for the end unless another rank was faster; return the written reason."""
        end = {**end, "process": os.getpid()}
        aside = self._here.folder / f"{END}.{os.getpid()}"
        write_text(aside, json.dumps(end))
        try:
            os.link(aside, self._here.folder / END)
        except FileExistsError:
            return self._read_end()
        return end

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode(errors="surrogateescape"))
        with contextlib.suppress(OSError):
            append(self.settings.log_file, line)

    def _read_end(self) -> Message:
        end: Message = json.loads((self._here.folder / END).read_text())
        return end

    def _end(self, end: Message) -> None:
        """Write this rank's stacks; exit once the node's ranks have written theirs."""
        self._ends_job = True
        directory = Path(end["directory"])
        leads = end["process"] == os.getpid()
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            make_folder(directory)
        write_own(
            directory,
            self.heart.rank,
            native=not end["stuck"] or self.heart.rank in end["stuck"],
            until=begin + STACKS,
        )
        self.heart.look(written=True)
        if leads:
            self._write_stuck(directory, end["stuck"], begin + STACKS)
            self._await(self._all_written, begin + STACKS + LOOK)
            others = 0.0  # s for the stacks of other nodes
            if self.link:
                others = SPREAD if end["speaks"] else PATIENCE
            time.sleep(max(0.0, begin + others - time.monotonic()))
            exit_codes.wait_until_read(sys.__stderr__ or sys.stderr)
            exit_codes.abort(end["code"])
            if environment.HYDRA in os.environ:  # it does not hear a rank after MPI_Finalize
                self._kill(end["stuck"])
        else:  # the launcher exits with the code of the rank that ends first
            self._await(lambda: not lives(end["process"]), begin + PATIENCE)
            time.sleep(hang_verdict.ASLEEP)
            self._kill(end["stuck"])
        os._exit(end["code"])

    def _kill(self, ranks: list[int]) -> None:
        """Kill this node's other processes of these ranks: the launcher waits for them."""
        for beat in self._here.read():
            if beat.rank in ranks and beat.process != os.getpid():
                with contextlib.suppress(OSError):
                    os.kill(beat.process, signal.SIGKILL)

    def _all_written(self) -> bool:
        latest = time.monotonic() - hang_verdict.ASLEEP
        return all(beat.written or beat.looked < latest for beat in self._here.read())

    def _write_stuck(self, directory: Path, ranks: list[int], until: float) -> None:
        others = {*ranks} - {self.heart.rank}
        stuck = [b for b in self._here.read() if b.rank in others and lives(b.process)]
        with ThreadPoolExecutor(max(1, len(stuck))) as pool:
            for beat in stuck:
                file = requested(self._here.folder, beat.process)
                pool.submit(write_of, directory, beat.rank, beat.process, file, until)

    def _await(self, condition: Callable[[], bool], until: float) -> None:
        while time.monotonic() < until and not condition():
            self.heart.look(written=True)
            time.sleep(0.05)


def requested(folder: Path, process: int) -> Path:
    return folder / f"{process}.stacks"
