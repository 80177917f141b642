"""Measure this machine for training: a laptop, a node, or all nodes of a job; says what is wrong with it and how to fix it.

    fugaku-megatron report                                         starts one rank for each NUMA domain, if there is an mpiexec
    mpiexec -n 8 fugaku-megatron report --output report.json       the ranks of a job, on one node or on several
    fugaku-megatron report --compare A.json B.json                 two reports next to each other, with ratios

report.json (all figures, for --compare and for --machine of plan and predict), report.html (with plots) and report.txt are written
after every section, marked partial until the last. Names of users, hosts and paths are left out unless --with-names is passed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..cli.output_files import check_file
from ..config.fields import check
from ..start import environment
from ..text.named_files import JsonObject
from . import record

if TYPE_CHECKING:
    from ..comm.base import Comm
    from .context import Context

NAMES = tuple(record.SHARES)
MOST_RANKS_ALONE = 4  # that are started where a node has one NUMA domain
GIB_OF_RANK = 4.0  # memory that a rank should find
PROBE = "from mpi4py import MPI; import sys; sys.exit(MPI.COMM_WORLD.size != 2)"
PROBE_SECONDS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.json"),
        metavar="FILE.json",
        help="the report; the page and the text stand next to it (default: report.json)",
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time that the run may take (default: 10)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        metavar="SECTION",
        help=f"measure only these: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="file system whose checkpoints are timed (default: the folder for temporary files)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="without a launcher: start so many ranks by mpiexec (default: one for each NUMA domain, "
        "or up to 4 on one domain; 1: start none)",
    )
    parser.add_argument(
        "--with-names",
        action="store_true",
        help="keep the names of user, host and folder in the files",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="print two reports next to each other, and measure nothing",
    )
    parser.add_argument("--shrunk", action="store_true", help=argparse.SUPPRESS)  # shapes for tests


def check_arguments(args: argparse.Namespace) -> None:
    check(
        0 < args.minutes <= 1440,
        f"--minutes is {args.minutes:g}: pass a number above 0, at most 1440",
    )
    check(args.output.suffix == ".json", f"--output {args.output}: pass a name that ends in .json")
    for suffix in (".json", ".html", ".txt"):
        check_file("--output", args.output.with_suffix(suffix))
    check(
        args.save is None or args.save.is_dir() and os.access(args.save, os.W_OK),
        f"--save {args.save} is not a folder that can be written: make it, or leave --save out",
    )
    check(args.ranks is None or args.ranks > 0, f"--ranks is {args.ranks}: pass a number above 0")
    check(
        args.ranks is None or args.ranks == 1 or not environment.processes()[0],
        f"--ranks {args.ranks}: a launcher started the ranks already: leave it out",
    )


def main(args: argparse.Namespace) -> int:
    if args.compare:
        print(record.compared(*args.compare))
        return 0
    check_arguments(args)
    from ..comm.base import SoloComm
    from ..comm.job import run_or_abort

    launched = bool(environment.processes()[0])
    kernels_alone = set(args.only or NAMES) <= {"host", "kernels"}
    if not launched and not kernels_alone:
        restart_with_ranks(args)
    run_or_abort(lambda world: measure(world, args), None if launched else SoloComm())
    return 0


# Starting ranks -------------------------------------------------------------------------------------------------------------------


def default_ranks() -> int:
    """Return a rank for each NUMA domain with cores of this process, or a power of two on one
    domain, as memory allows.
    """
    from ..host import allocator, cgroup
    from ..host.placement import proposed_ranks
    from ..host.topology import Node

    node = Node.read()
    mask = sorted(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota()
    cores = len(node.cores(mask))
    limit = min(cores, int(quota or cores), int(allocator.free_bytes() / 2**30 / GIB_OF_RANK))
    if len(node.parts(mask)) > 1:
        return max(1, min(proposed_ranks(node, [mask], os.environ, quota), limit))
    return max((power for power in (1, 2, MOST_RANKS_ALONE) if power <= limit), default=1)


def restart_with_ranks(args: argparse.Namespace) -> None:
    """Become mpiexec with this command; return for one rank or without a working MPI."""
    ranks = default_ranks() if args.ranks is None else args.ranks
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    mpiexec = shutil.which("mpiexec", path=path)
    if ranks == 1 or mpiexec is None:
        why = "no mpiexec was found"
        if args.ranks:
            why = "--ranks 1"
        elif ranks == 1:
            why = "one core"
        record.progress(f"one rank: {why}")
        return
    start = [mpiexec, *launcher_options(mpiexec)]
    try:
        probe = subprocess.run(
            [*start, "-n", "2", sys.executable, "-c", PROBE],
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
        works = probe.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        works = False
    if not works:
        check(
            args.ranks is None,
            f"--ranks {args.ranks}: mpiexec does not start ranks with mpi4py here: repair MPI, or leave --ranks out",
        )
        record.progress("one rank: mpiexec does not start ranks with mpi4py here")
        return
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    record.progress(f"starting {ranks} ranks by mpiexec")
    os.execv(
        mpiexec,
        [*start, "-n", str(ranks), sys.executable, "-m", "fugaku_megatron", "report", *words(args)],
    )


def launcher_options(mpiexec: str) -> list[str]:
    """Return options for Open MPI, which otherwise binds a rank to one core."""
    done = subprocess.run(
        [mpiexec, "--version"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return ["--bind-to", "none"] if "Open MPI" in done.stdout or "OpenRTE" in done.stdout else []


def words(args: argparse.Namespace) -> list[str]:
    line = ["--output", str(args.output), "--minutes", str(args.minutes)]
    if args.only:
        line += ["--only", *args.only]
    if args.save:
        line += ["--save", str(args.save)]
    if args.with_names:
        line.append("--with-names")
    if args.shrunk:
        line.append("--shrunk")
    return line


# Measuring ------------------------------------------------------------------------------------------------------------------------


def sections() -> dict[str, Callable[[Context], JsonObject]]:
    """Return name -> function for every rank, in the report's order."""
    from ..host.machine import facts
    from . import communication, kernel_rates, layers, storage, training

    def host_section(context: Context) -> JsonObject:
        found = context.world.all_gather_object(
            {**facts(), "mapping": context.mapping} if context.nodes.leads else None
        )
        return {"nodes": [node for node in found if node]}

    return {
        "host": host_section,
        "kernels": kernel_rates.kernel_section,
        "communication": communication.communication_section,
        "training": training.training_section,
        "layers": layers.layers_section,
        "storage": storage.storage_section,
    }


def measure(world: Comm, args: argparse.Namespace) -> None:
    """Measure and write section by section. Collective."""
    from .findings import findings, text
    from .hours import hours
    from .page import page

    budget = record.Budget(args.minutes)
    report = None
    if world.rank == 0:
        report = record.Record(args.output, budget, {".html": page, ".txt": text}, args.with_names)
        report.write()
        end_with_signal(report)
    context = make_context(world, args)
    chosen = [name for name in NAMES if name in (args.only or NAMES)]
    for number, name in enumerate(chosen):
        result = one_section(context, budget, chosen, number)
        if report:
            found = report.data["sections"]
            found[name] = result
            report.data |= {"findings": findings(found), "hours": hours(found)}
            if context.machine:
                report.data["machine"] = context.machine
            report.write()
    if report:
        report.end("finished", complete=True)
        shown = args.output.with_suffix(".txt")
        print(shown.read_text(encoding="utf-8"), end="")
        print(f"wrote {args.output}, {args.output.with_suffix('.html')} and {shown}")


def make_context(world: Comm, args: argparse.Namespace) -> Context:
    """Set up this rank as for a training run. Collective."""
    from ..comm.agreement import find_nodes
    from ..host import allocator, runtime
    from ..host.energy import Counters
    from .context import SHRUNK, Context, Scale

    nodes = find_nodes(world)
    before = os.sched_getaffinity(0)
    _, *mapping = runtime.init(world, nodes=nodes).splitlines()  # the first line names the host
    pinned = os.sched_getaffinity(0) != before
    return Context(
        world=world,
        nodes=nodes,
        scale=SHRUNK if args.shrunk else Scale(),
        pinned=pinned,
        mapping=mapping,
        save=args.save,
        free=allocator.free_bytes(),
        energy=Counters.find() if nodes.leads else Counters(""),
    )


def one_section(
    context: Context, budget: record.Budget, chosen: list[str], number: int
) -> JsonObject:
    """Measure a section within its time, which rank 0 decides. Collective."""
    import time

    name = chosen[number]
    following = tuple(chosen[number + 1 :])
    context.seconds = context.agreed(budget.of(name, following))
    context.begin = time.monotonic()
    if context.world.rank == 0:
        record.progress(
            f"{number + 1}/{len(chosen)} {name}, up to {record.clock(context.seconds)}; "
            f"{record.clock(budget.used)} used, at most {record.clock(budget.left)} left"
        )
    result = sections()[name](context)
    return {**result, "seconds": time.monotonic() - context.begin}


def end_with_signal(report: record.Record) -> None:
    def end(number: int, frame: FrameType | None) -> NoReturn:
        report.end(f"ended by {signal.Signals(number).name}", complete=False)
        record.progress(f"ended by {signal.Signals(number).name}; {report.path} is partial")
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
