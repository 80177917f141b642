"""A process beside a node's ranks that names the first one to end without an exception: MPICH's launcher names a process id alone.

    python witness.py ADDRESS RANK:PID ...

It sees ranks end through process file descriptors, and needs nothing but Python's library. Each rank sends its number when it
leaves, or FAILED when it ends the job itself. Every command imports this module, so its functions import what they need.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial

FAILED = b"failed"
_addresses: list[str] = []  # of this process's witness


def start(ranks: Mapping[int, int], rank: int) -> None:
    """Start a witness on the first of a node's ranks, and wait until it watches; on all ranks, tell it of an orderly end.

    A rank that ends before the first one returns may be missed: a barrier follows.

    ranks: process id of each rank on this node
    """
    import subprocess

    first = min(ranks)
    address = f"\0fugaku-megatron/{os.getuid()}/witness/{ranks[first]}"
    if rank == first:
        named = [f"{each}:{pid}" for each, pid in ranks.items()]
        watching, started = os.pipe()
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, address[1:], *named],
            stdin=subprocess.DEVNULL,
            stdout=started,
            start_new_session=True,  # the launcher ends the ranks' sessions
        )
        os.close(started)
        os.read(watching, 1)  # ends when the witness closes its standard output
        os.close(watching)
    _addresses.append(address)
    atexit.register(tell, str(rank).encode())


def tell(message: bytes = FAILED) -> None:
    """Send a message to the witness, if there is one."""
    import socket

    for address in _addresses:
        with (
            contextlib.suppress(OSError),  # it has ended
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.sendto(message, address)


def watch(address: str, ranks: Mapping[int, int], watches: Callable[[], object]) -> str:
    """Wait for the ranks' ends. Return a line if one ended without a message, else nothing.

    watches: called when no end is missed any more
    """
    import select
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{address}")
        receiver.setblocking(False)
        alive = {os.pidfd_open(pid): rank for rank, pid in ranks.items()}
        watches()
        while alive:
            ended = select.select([receiver.fileno(), *alive], [], [])[0]
            left = set()
            with contextlib.suppress(BlockingIOError):
                while (message := receiver.recv(64)) != FAILED:
                    left.add(int(message))
                return ""
            alive = {file: rank for file, rank in alive.items() if rank not in left}
            killed = [alive[file] for file in ended if file in alive]
            if killed:
                names = ", ".join(f"{rank} (process {ranks[rank]})" for rank in killed)
                return f"rank {names} on node {socket.gethostname()} ended without MPI_Finalize: killed?"
    return ""


if __name__ == "__main__":
    words = [word.split(":") for word in sys.argv[2:]]
    with contextlib.suppress(OSError):  # Linux before 5.3
        pids = {int(rank): int(pid) for rank, pid in words}
        if line := watch(sys.argv[1], pids, partial(os.close, 1)):
            print(line, file=sys.stderr, flush=True)
