"""A rank without MPI that hangs: python tests/system/hanging_rank.py FOLDER RANK RANKS SECONDS HOW [NODE NODES PORT PORT_ABOVE]

Prints a line when it has imported everything, starts its watchdog when it gets one and prints another, and hangs when it gets the
second: on a busy machine ranks come seconds apart, which a watchdog of seconds would take for a hang. NODE ...: its node is one of
several. See test_watchdog.py.
"""

import ctypes
import select
import sys
import time
from pathlib import Path

from fugaku_megatron.watchdog.heartbeat import Heartbeat
from fugaku_megatron.watchdog.verdict import Link, open_socket
from fugaku_megatron.watchdog.watch import HangSettings, Watchdog


def wait(heart):
    heart.wait(True)
    forever()


def forever():
    time.sleep(1000)


def compute(heart):
    """Give no sign of life and hold Python's lock, but work, and then end as it should."""
    for _ in range(6):
        sum(range(10**7))


def forward(heart):
    with heart.iteration(12), heart.phase("forward of micro-batch 3"):
        forever()


def hold_the_lock(heart):
    with heart.iteration(12), heart.phase("a kernel"):
        ctypes.PyDLL(None).sleep(1000)


def main(folder, rank, ranks, seconds, how, node="0", *others):
    print("there", flush=True)
    sys.stdin.readline()
    watchdog = Watchdog(Heartbeat(Path(folder) / f"node{node}", int(rank)), HangSettings(float(seconds), Path(folder), None),
                        () if others else tuple(range(int(ranks))))
    if others:
        nodes, port, above = map(int, others)
        watchdog.host = f"made-up {node}"
        watchdog.link = Link(int(node), nodes, 7, open_socket("127.0.0.1", port), [("127.0.0.1", above)] * (int(node) > 0))
    print("watched", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        watchdog.heart.enter("start")
    globals()[how](watchdog.heart)
    watchdog.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
