"""A rank without MPI that hangs: python tests/observe/hanging_rank.py FOLDER RANK RANKS SECONDS HOW [NODE NODES SOCKET PORT_ABOVE]

Prints a line when it has imported everything, starts its watchdog when it gets one, prints another when it is in touch with other
nodes, and hangs when it gets the second: on a busy machine ranks come seconds apart, which a watchdog of seconds would take for a
hang. NODE ...: its node is one of several, and it inherits a socket. See test_watchdog.py.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from fugaku_megatron.observe.hang.hang_verdict import Link
from fugaku_megatron.observe.hang.heartbeat import Heartbeat, Node
from fugaku_megatron.observe.hang.watchdog import HangSettings, Watchdog


def wait(watchdog):
    watchdog.heart.wait(True)
    forever()


def leave_once_judged(watchdog):
    """Come to the end while the watchdog ends the job, as when a stopped rank is continued to write its stack."""
    watchdog.heart.wait(True)
    while not any(watchdog.settings.directory.glob("hang_*")):
        time.sleep(0.01)


def stop_while_waiting(watchdog):
    watchdog.heart.wait(True)
    os.kill(os.getpid(), signal.SIGSTOP)
    forever()


def forever():
    time.sleep(1000)


def compute(watchdog):
    """Compute without a sign of life, with Python's lock held, and end."""
    end = time.monotonic() + 1.25 * watchdog.heart.limit
    while time.monotonic() < end:
        sum(range(10**7))


def long_iteration(watchdog):
    """Take longer for an iteration than the limit, and less for each micro-batch."""
    pieces = 8
    with watchdog.heart.iteration(12):
        for micro_batch in range(pieces):
            with watchdog.heart.phase(f"forward of micro-batch {micro_batch}"):
                time.sleep(1.5 * watchdog.heart.limit / pieces)


def wait_for_a_long_iteration(watchdog):
    """Wait longer than the limit for a rank that moves."""
    watchdog.heart.wait(True)
    time.sleep(1.5 * watchdog.heart.limit)
    watchdog.heart.wait(False)


def forward(watchdog, number=0):
    """Send this rank a signal once others know its phase."""
    with watchdog.heart.iteration(12), watchdog.heart.phase("forward of micro-batch 3"):
        if number:
            report(watchdog)
            os.kill(os.getpid(), number)
        forever()


def stop(watchdog):
    forward(watchdog, signal.SIGSTOP)


def die(watchdog):
    forward(watchdog, signal.SIGKILL)


def hold_the_lock(watchdog):
    with watchdog.heart.iteration(12), watchdog.heart.phase("a kernel"):
        ctypes.PyDLL(None).sleep(1000)


def report(watchdog):
    """Until a report to other nodes that was begun after the call is sent: when the next one is."""
    for _ in range(2 * bool(watchdog.link)):
        last = watchdog.link._reported
        while watchdog.link._reported == last:
            time.sleep(0.01)


def in_touch(watchdog):
    """Return whether reports between nodes have gone both ways, if this rank reports for its node; otherwise true."""
    link = watchdog.link
    reports = link and Node(watchdog.heart.folder).read()[0].process == os.getpid()
    return not reports or link._parent or len(link._children) == link.count - 1


def main(folder, rank, ranks, seconds, how, node="0", *others):
    print("there", flush=True)
    sys.stdin.readline()
    watchdog = Watchdog(
        Heartbeat(Path(folder) / f"node{node}", int(rank)),
        HangSettings(float(seconds), Path(folder), None),
        () if others else tuple(range(int(ranks))),
    )
    if others:
        nodes, inherited, above = map(int, others)
        opened = socket.socket(fileno=inherited)
        opened.setblocking(False)
        watchdog.host = f"made-up {node}"
        addresses = [("127.0.0.1", above)] if int(node) > 0 else []
        watchdog.link = Link(int(node), nodes, 7, opened, addresses)
    while not in_touch(watchdog):
        watchdog.heart.enter("start")
        time.sleep(0.05)
    print("watched", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        watchdog.heart.enter("start")
    globals()[how](watchdog)
    watchdog.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
