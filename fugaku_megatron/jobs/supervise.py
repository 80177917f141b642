r"""Start a run, and restart it from its last checkpoint after a fault, inside the same allocation of nodes.

    fugaku-megatron supervise --max-restarts 5 -- mpiexec -n 4 fugaku-megatron train ... --save DIR --load DIR
    fugaku-megatron supervise --hosts c1,c2,c3 --spare-nodes 1 --ranks-per-node 4 --launcher 'mpiexec -n {ranks} --host {slots}' \
        -- fugaku-megatron train ... --save DIR --load DIR

With --hosts a spare node replaces a failed one; without one the run continues with fewer data-parallel replicas and the same global
batch. --launcher may contain {ranks}, {nodes}, {hosts} (a,b), {slots} (a:4,b:4) and {map} (a file with the host of each rank).
SIGTERM and SIGUSR1 ask the trainer to save and exit. A run that finished, was refused or diverged is not restarted.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..checkpoint.manifest import latest_iteration
from ..cli.arguments import parse
from ..config.fields import check
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..host.cgroup import oom_kills
from ..observe.export.hours import HOURS, append, read_hours
from ..start.exit_codes import ExitCode
from ..text.named_files import JsonObject, read_text
from ..text.numbers import say
from .child import Ending, Launcher, Stop, ending

FRUITLESS = 2  # restarts in a row without a new checkpoint or newer copies in memory, after which the job ends
PROBE_SECONDS = 60.0  # for a trivial command on all nodes that are tested
TIMED = "--exit-duration-in-mins"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the supervisor's flags: restarts, nodes and launcher."""
    add = parser.add_argument
    add(
        "--max-restarts",
        type=int,
        default=3,
        help="after this many restarts the job ends (default: %(default)s)",
    )
    add(
        "--spare-nodes",
        type=int,
        default=0,
        help="how many of --hosts stay unused until another node fails",
    )
    add(
        "--hosts",
        help="nodes of the allocation, in the order of the ranks: a,b,c or @FILE with one on each line",
    )
    add("--ranks-per-node", type=int, default=1)
    add(
        "--launcher",
        help="command that starts a program on {ranks} ranks of the nodes {hosts}, {slots} or {map}",
    )
    parser.set_defaults(passed=[])


@dataclass
class Nodes:
    """Hosts of an allocation, in rank order. spares: hosts that the run leaves unused.

    ValueError if the run does not fit.
    """

    hosts: Sequence[str]
    ranks_per_node: int
    spares: int
    run: RunConfig
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(
            0 <= self.spares < len(self.hosts),
            f"--spare-nodes {self.spares} of {len(self.hosts)} --hosts: pass 0 to "
            f"{len(self.hosts) - 1}",
        )
        check(
            self.ranks_per_node >= 1,
            f"--ranks-per-node {self.ranks_per_node}: pass a number above 0",
        )
        layout = self.layout(len(self.hosts) - self.spares)
        size = layout.global_batch_size(self.run)
        self.run = replace(self.run, batch=replace(self.run.batch, global_batch_size=size))

    def layout(self, nodes: int) -> Layout:
        return Layout.from_run(self.run, nodes * self.ranks_per_node)

    @property
    def usable(self) -> list[str]:
        return [host for host in self.hosts if host not in self.lost]

    def choose(self) -> list[str]:
        """Return as many hosts as at first, or the most on which the run fits."""
        usable = self.usable
        for count in range(min(len(self.hosts) - self.spares, len(usable)), 0, -1):
            try:
                self.layout(count)
            except ValueError:
                continue
            return usable[:count]
        return []

    def find(self, name: str) -> str:
        """Return the host with this name, with or without a domain, or ""."""
        short = name.partition(".")[0]
        return next((host for host in self.usable if short and host.partition(".")[0] == short), "")

    def lose(
        self, named: str, used: Sequence[str], answers: Callable[[Sequence[str]], bool]
    ) -> list[str]:
        """Mark failed nodes as lost and return them.

        A spare node replaces a named node at once. Otherwise a trivial command runs on the nodes in
        use (`answers`): nodes on which it fails are lost, unless it fails on all.
        """
        host = self.find(named)
        if host and len(self.usable) > len(used):
            failed = [host]
        else:
            failed = silent(list(used), answers)
            failed = [] if len(failed) == len(used) > 1 else failed
        self.lost += failed
        return failed


def silent(hosts: list[str], answers: Callable[[Sequence[str]], bool]) -> list[str]:
    """Find the hosts on which a command fails, by halving."""
    if not hosts or answers(hosts):
        return []
    if len(hosts) == 1:
        return hosts
    middle = len(hosts) // 2
    return silent(hosts[:middle], answers) + silent(hosts[middle:], answers)


def flags_of(program: Sequence[str]) -> list[str]:
    """Return the training flags. ValueError if the command does not start the trainer."""
    for place, word in enumerate(program):
        name = word.rpartition("/")[2]
        if (
            name in ("pretrain_gpt.py", "pretrain_hybrid.py")
            or name == "train"
            and place
            and "megatron" in program[place - 1]
        ):
            return list(program[place + 1 :])
    raise ValueError(
        f"{' '.join(program):.80} does not start pretrain_gpt.py or fugaku-megatron train: pass its "
        "command"
    )


def run_of(program: Sequence[str]) -> RunConfig:
    """Return the run that a command starts. ValueError if a restart would not resume."""
    run = parse(flags_of(program)).run
    check(
        run.output.save is not None and run.output.save == run.output.load,
        f"--save {run.output.save} and --load {run.output.load}: pass the same folder to both, "
        "otherwise a restart would begin from the start",
    )
    check(
        run.output.ckpt_step is None,
        f"--ckpt-step {run.output.ckpt_step}: every restart would go back to it: omit the flag",
    )
    return run


@dataclass
class Supervisor:
    """A command with its restarts. launcher: words with placeholders; empty without --hosts."""

    program: list[str]
    run: RunConfig
    max_restarts: int
    launcher: list[str]
    nodes: Nodes | None
    stop: Stop
    begin: float = field(default_factory=time.monotonic)
    restarts: int = 0
    fruitless: int = 0

    def supervise(self) -> int:
        """Start until the run ends or restarts save no new checkpoint; return the exit code."""
        used = self.nodes.choose() if self.nodes else []
        while True:
            checkpoint = self._saved()
            previous = self._last_start()
            if self.stop.stop_requested:
                return self._end(ExitCode.FINISHED, "asked to stop before the start")
            end = self._start(used)
            self._record(end)
            if not end.restarts:
                return end.code
            saved = self._saved()
            gained = saved > checkpoint or self._copied_more(previous)
            self.fruitless = 0 if gained else self.fruitless + 1
            say(f"supervise: {end.text()}; the last checkpoint is of iteration {saved}")
            reason, code = self._reason_to_end(end)
            if reason:
                return self._end(code, reason)
            used = self._next_hosts(end, used)
            if self.nodes and not used:
                return self._end(end.code, "the run does not fit on the remaining nodes")
            self.restarts += 1
            newer = " or newer copies in memory" if self.run.output.save_memory else ""
            say(
                f"supervise: restart {self.restarts} of {self.max_restarts} from iteration {saved}{newer}{self._place(used)}"
            )

    def _reason_to_end(self, end: Ending) -> tuple[str, ExitCode]:
        if self.stop.stop_requested:
            return "asked to stop", ExitCode.FINISHED
        if self._minutes_left() == 0:
            return f"the time of {TIMED} is over: the next job continues", ExitCode.FINISHED
        if self.restarts >= self.max_restarts:
            return f"all restarts of --max-restarts {self.max_restarts} are used", end.code
        if self.fruitless > FRUITLESS:
            return f"{FRUITLESS} restarts in a row made no new checkpoint", end.code
        return "", end.code

    def _end(self, code: ExitCode, reason: str) -> int:
        say(f"supervise: {reason}; exit code {code:d}")
        return code

    def _saved(self) -> int:
        try:
            return latest_iteration(self.run.output.save or "") or 0
        except (ValueError, OSError):
            return 0

    def _last_start(self) -> list[JsonObject]:
        """Return the lines of the last start in the record of hours, its beginning first."""
        hours = self._hours()
        lines = read_hours(hours) if hours.is_file() else []
        starts = [number for number, line in enumerate(lines) if line["event"] == "start"]
        return lines[starts[-1] :] if starts else []

    def _copied_more(self, previous: Sequence[JsonObject]) -> bool:
        """Return True if the last start used or left newer copies in memory. previous: lines of the start before"""
        lines = self._last_start()
        if not lines or lines[:1] == previous[:1]:
            return False  # it has failed before it trained
        begun: int = previous[0]["iteration"] if previous else 0
        begins: int = lines[0]["iteration"]
        copies = sum(line.get("copies", 0) for line in lines)
        return begins > begun or copies > 1  # the last copy may be incomplete

    def _record(self, end: Ending) -> None:
        """Note the end in the run's record of hours, if the trainer has begun one."""
        hours = self._hours()
        if hours.is_file():
            with contextlib.suppress(OSError):  # not worth ending a run
                append(hours, event="end", code=end.code)

    def _hours(self) -> Path:
        return Path(self.run.output.save or "") / HOURS

    def _start(self, used: Sequence[str]) -> Ending:
        """Run the program, in a restart for the rest of --exit-duration-in-mins and with the first global batch."""
        words = list(self.program)
        left = self._minutes_left()
        if left is not None and self.restarts:
            words += [TIMED, f"{max(left, 0.01):.2f}"]
        if self.nodes and self.restarts:
            words += ["--global-batch-size", str(self.nodes.run.batch.global_batch_size)]
        with tempfile.TemporaryDirectory(prefix="supervise.") as folder:
            launcher = Launcher(self._command(used, words, Path(folder)))
            kills = oom_kills()
            with self.stop.forwarding(launcher):
                end = ending(*launcher.wait())
            return replace(end, out_of_memory=oom_kills() > kills)

    def _command(
        self,
        used: Sequence[str],
        program: Sequence[str],
        folder: Path,
        ranks_per_node: int | None = None,
    ) -> list[str]:
        if self.nodes is None:
            return [*self.launcher, *program]
        each = ranks_per_node or self.nodes.ranks_per_node
        file = folder / "map"
        file.write_text("".join(f"{host}\n" for host in used for _ in range(each)))
        values = {
            "{ranks}": str(len(used) * each),
            "{nodes}": str(len(used)),
            "{hosts}": ",".join(used),
            "{slots}": ",".join(f"{host}:{each}" for host in used),
            "{map}": str(file),
        }
        return [filled(word, values) for word in self.launcher] + list(program)

    def _minutes_left(self) -> float | None:
        minutes = self.run.training.exit_duration_in_mins
        return None if minutes is None else max(0.0, minutes - (time.monotonic() - self.begin) / 60)

    def _next_hosts(self, end: Ending, used: Sequence[str]) -> list[str]:
        if self.nodes is None:
            return []
        named = end.node if end.code in (ExitCode.LOST_RANK, ExitCode.HANG) else ""
        failed = self.nodes.lose(named, used, self._answers)
        if failed:
            say(f"supervise: no longer used: {', '.join(failed)}")
        return self.nodes.choose()

    def _answers(self, hosts: Sequence[str]) -> bool:
        with tempfile.TemporaryDirectory(prefix="supervise.") as folder:
            command = self._command(hosts, ["true"], Path(folder), ranks_per_node=1)
            try:
                return not subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS
                ).returncode
            except subprocess.TimeoutExpired:
                return False

    def _place(self, used: Sequence[str]) -> str:
        if self.nodes is None:
            return ""
        spare = len(self.nodes.usable) - len(used)
        return f" on {len(used)} nodes with data-parallel size {self.nodes.layout(len(used)).dp}; {spare} spare nodes"


def filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def read_hosts(text: str) -> list[str]:
    if text.startswith("@"):
        words = read_text(text[1:], "--hosts", "pass a file with one host on each line").split()
    else:
        words = text.split(",")
    hosts = list(dict.fromkeys(filter(None, words)))
    check(hosts, f"--hosts {text} names no host: pass a,b,c or @FILE")
    return hosts


def supervisor(args: argparse.Namespace, stop: Stop) -> Supervisor:
    """Build the supervisor of the command after --. ValueError for an incomplete set of flags."""
    check(
        args.passed,
        "pass the command after --: fugaku-megatron supervise -- mpiexec -n 4 fugaku-megatron train ...",
    )
    check(args.max_restarts >= 0, f"--max-restarts {args.max_restarts}: pass 0 or more")
    check(
        (args.hosts is None) == (args.launcher is None),
        "--hosts and --launcher belong together: pass both, or neither and a "
        "whole command after --",
    )
    check(
        args.hosts is not None or not args.spare_nodes,
        f"--spare-nodes {args.spare_nodes} needs --hosts and --launcher",
    )
    run = run_of(args.passed)
    placed = (
        Nodes(read_hosts(args.hosts), args.ranks_per_node, args.spare_nodes, run)
        if args.hosts
        else None
    )
    return Supervisor(
        list(args.passed), run, args.max_restarts, shlex.split(args.launcher or ""), placed, stop
    )


def main(args: argparse.Namespace) -> int:
    with Stop() as stop:
        return supervisor(args, stop).supervise()
