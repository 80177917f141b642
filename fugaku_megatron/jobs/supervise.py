r"""Start a run, and start it again from its last checkpoint after a fault, inside the same allocation of nodes.

    fugaku-megatron supervise --max-restarts 5 -- mpiexec -n 4 fugaku-megatron train ... --save DIR --load DIR
    fugaku-megatron supervise --hosts c1,c2,c3 --spare-nodes 1 --ranks-per-node 4 --launcher 'mpiexec -n {ranks} --host {slots}' \
        -- fugaku-megatron train ... --save DIR --load DIR

With --hosts a failed node is replaced by a spare; without a spare the run goes on with fewer data-parallel replicas and the same
global batch. In --launcher stand {ranks}, {nodes}, {hosts} (a,b), {slots} (a:4,b:4) and {map} (a file with each rank's host).
SIGTERM and SIGUSR1 ask the trainer to save and leave. A run that finished, was refused or diverged is not started again.
Left out: what an end means (endings.py), which nodes are used (nodes.py). Test: pytest tests/test_supervise.py
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.manifest import latest_iteration
from ..comm.exit_codes import ExitCode
from ..run.checks import check
from ..run.config import RunConfig
from . import endings
from .child import Child, Stop
from .nodes import Nodes, run_of

FRUITLESS = 2  # restarts in a row that gained no iteration, after which a person must look
PROBE_SECONDS = 60.0  # for a trivial command on all nodes that are asked
TIMED = "--exit-duration-in-mins"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-restarts", type=int, default=3, help="after this many the job ends (default: %(default)s)")
    parser.add_argument("--spare-nodes", type=int, default=0, help="of --hosts, nodes that stay unused until another one fails")
    parser.add_argument("--hosts", help="nodes of the allocation, in the order of the ranks: a,b,c or @FILE with one on each line")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--launcher", help="starts a program on {ranks} ranks of the nodes {hosts}, {slots} or {map}")
    parser.set_defaults(passed=[])


@dataclass
class Supervisor:
    """A command with its restarts. launcher: words with placeholders before the program, empty for a command without nodes."""

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
        """Start until the run ends or nothing is gained any more; returns the exit code of the job."""
        used = self.nodes.choose() if self.nodes else []
        while True:
            before = self._saved()
            if self.stop.requested:
                return self._end(ExitCode.FINISHED, "asked to leave before the start")
            ending = self._start(used)
            if not ending.restarts:
                return ending.code
            saved = self._saved()
            self.fruitless = 0 if saved > before else self.fruitless + 1
            say(f"{ending.text()}; the last checkpoint is of iteration {saved}")
            reason, code = self._reason_to_end(ending)
            if reason:
                return self._end(code, reason)
            used = self._next_hosts(ending, used)
            if self.nodes and not used:
                return self._end(ending.code, "the run fits on none of the nodes that are left")
            self.restarts += 1
            say(f"restart {self.restarts} of {self.max_restarts} from iteration {saved}{self._place(used)}")

    def _reason_to_end(self, ending: endings.Ending) -> tuple[str, ExitCode]:
        """Why there is no other start, or "", and the exit code of the job then."""
        if self.stop.requested:
            return "asked to leave", ExitCode.FINISHED
        if self._minutes_left() == 0:
            return f"{TIMED} is over: the next job goes on", ExitCode.FINISHED
        if self.restarts >= self.max_restarts:
            return f"--max-restarts {self.max_restarts} are used up", ending.code
        if self.fruitless > FRUITLESS:
            return f"{FRUITLESS} restarts gained no checkpoint", ending.code
        return "", ending.code

    def _end(self, code: ExitCode, reason: str) -> int:
        say(f"{reason}; exit code {code:d}")
        return code

    def _saved(self) -> int:
        """The newest checkpoint's iteration; 0 for none, or where only the trainer can say what is wrong."""
        try:
            return latest_iteration(self.run.output.save) or 0
        except (ValueError, OSError):
            return 0

    def _start(self, used: Sequence[str]) -> endings.Ending:
        with tempfile.TemporaryDirectory(prefix="supervise.") as folder:
            child = Child(self._command(used, self._timed_program(), Path(folder)))
            with self.stop.forwarding(child):
                return endings.read(*child.wait())

    def _command(self, used: Sequence[str], program: Sequence[str], folder: Path, ranks_per_node: int | None = None) -> list[str]:
        """The launcher for these hosts and the program. folder: for {map}."""
        if self.nodes is None:
            return [*self.launcher, *program]
        each = ranks_per_node or self.nodes.ranks_per_node
        file = folder / "map"
        file.write_text("".join(f"{host}\n" * each for host in used))
        values = {"{ranks}": str(len(used) * each), "{nodes}": str(len(used)), "{hosts}": ",".join(used),
                  "{slots}": ",".join(f"{host}:{each}" for host in used), "{map}": str(file)}
        return [filled(word, values) for word in self.launcher] + list(program)

    def _timed_program(self) -> list[str]:
        """The program; the time that has passed is taken off its --exit-duration-in-mins. Another batch is not begun by fewer."""
        words, left = list(self.program), self._minutes_left()
        if left is not None and self.restarts:
            words += [TIMED, f"{max(left, 0.01):.2f}"]
        if self.nodes and self.restarts:
            words += ["--global-batch-size", str(self.nodes.run.batch.global_batch_size)]
        return words

    def _minutes_left(self) -> float | None:
        """Of --exit-duration-in-mins; None where it is not given."""
        minutes = self.run.training.exit_duration_in_mins
        return None if minutes is None else max(0.0, minutes - (time.monotonic() - self.begin) / 60)

    def _next_hosts(self, ending: endings.Ending, used: Sequence[str]) -> list[str]:
        if self.nodes is None:
            return []
        named = ending.node if ending.code in (ExitCode.LOST_RANK, ExitCode.HANG) else ""
        failed = self.nodes.lose(named, used, self._answers)
        if failed:
            say(f"left out from now on: {', '.join(failed)}")
        return self.nodes.choose()

    def _answers(self, hosts: Sequence[str]) -> bool:
        """Whether a trivial command runs on every host."""
        with tempfile.TemporaryDirectory(prefix="supervise.") as folder:
            command = self._command(hosts, ["true"], Path(folder), ranks_per_node=1)
            try:
                return not subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS).returncode
            except subprocess.TimeoutExpired:
                return False

    def _place(self, used: Sequence[str]) -> str:
        if self.nodes is None:
            return ""
        spare = len(self.nodes.usable) - len(used)
        return f" on {len(used)} nodes with data-parallel size {self.nodes.layout(len(used)).dp}; {spare} to spare"


def filled(word: str, values: dict[str, str]) -> str:
    """The word with its placeholders replaced."""
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def say(text: str) -> None:
    """One line of the job's log."""
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def read_hosts(text: str) -> list[str]:
    """The hosts of --hosts, each once. Raises ValueError when there are none."""
    if text.startswith("@"):
        try:
            words = Path(text[1:]).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--hosts {text}: {getattr(error, 'strerror', None) or 'no text'}: give a file with a host on each "
                             "line") from error
    else:
        words = text.split(",")
    hosts = list(dict.fromkeys(filter(None, words)))
    check(bool(hosts), f"--hosts {text}: names no host")
    return hosts


def supervisor(args: argparse.Namespace, stop: Stop) -> Supervisor:
    """What the flags describe. Raises ValueError for what could not be started again."""
    check(bool(args.passed), "give the command behind --: fugaku-megatron supervise -- mpiexec -n 4 fugaku-megatron train ...")
    check(args.max_restarts >= 0, f"--max-restarts {args.max_restarts}: give 0 or more")
    check((args.hosts is None) == (args.launcher is None), "--hosts and --launcher belong together: give both, or neither and a "
          "whole command behind --")
    check(args.hosts is not None or not args.spare_nodes, f"--spare-nodes {args.spare_nodes} needs --hosts and --launcher")
    run = run_of(args.passed)
    placed = Nodes(read_hosts(args.hosts), args.ranks_per_node, args.spare_nodes, run) if args.hosts else None
    return Supervisor(list(args.passed), run, args.max_restarts, shlex.split(args.launcher or ""), placed, stop)


def main(args: argparse.Namespace) -> int:
    """Supervise a run; returns its exit code."""
    with Stop() as stop:
        return supervisor(args, stop).supervise()
