"""Names of this node's ranks in the kernel's list of sockets: before MPI has started, a waiting rank sees which others wait."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from .environment import first_set, processes, processes_of_node, rank

SOCKETS = Path("/proc/net/unix")
# Variables that are equal on the ranks of a job and differ between jobs: PMIx, Slurm. MPICH's ranks have one parent.
JOBS = ("PMIX_NAMESPACE", "SLURM_JOB_ID")


class Presence:
    """A socket with this rank's name; it ends with the process."""

    def __init__(self) -> None:
        job = first_set(JOBS) or str(os.getppid())
        self._prefix = f"fugaku-megatron/{os.getuid()}/{job}/"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):  # this process has the name
            self._socket.bind(f"\0{self._prefix}{rank()}")

    def missing(self) -> str:
        """Name the ranks that have no socket, or count this node's ranks if there are other nodes. OSError without Linux's list."""
        names = set(SOCKETS.read_text().split())
        ranks = range(processes()[1])
        others = [str(rank) for rank in ranks if f"@{self._prefix}{rank}" not in names]
        here = processes_of_node()
        if here < len(ranks):
            came = len(ranks) - len(others)
            return f"{came} of {here} ranks of node {socket.gethostname()} came"
        return f"rank(s) {', '.join(others)} did not come" if others else "all came"
