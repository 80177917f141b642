"""Ranks that the report starts by mpiexec."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ..config.fields import check
from . import record
from .record import STARTED

MOST_RANKS_ALONE = 4  # that are started where a node has one NUMA domain
GIB_OF_RANK = 4.0  # memory that a rank should find
PROBE = "from mpi4py import MPI; import sys; sys.exit(MPI.COMM_WORLD.size != 2)"
PROBE_SECONDS = 60


def default_ranks() -> int:
    """Return a rank for each NUMA domain with cores of this process, or a power of two on one
    domain, as memory allows.
    """
    from ..host import allocator, cgroup
    from ..host.cpu_binding import proposed_ranks
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
    spent = f"{time.monotonic() - STARTED:.1f}"
    command = [sys.executable, "-m", "fugaku_megatron", *sys.argv[1:], "--ranks", "1"]
    os.execv(mpiexec, [*start, "-n", str(ranks), *command, "--spent", spent])


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
