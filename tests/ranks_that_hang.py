"""A rank without MPI that hangs: python tests/ranks_that_hang.py FOLDER RANK RANKS SECONDS HOW; see test_watchdog.py.

Prints a line when it has come to where it hangs.
"""

import ctypes
import sys
import time
from pathlib import Path

from fugaku_megatron.watchdog.heartbeat import Heartbeat
from fugaku_megatron.watchdog.watch import HangSettings, Watchdog


def wait(heart):
    heart.wait(True)
    forever()


def forever():
    print("there", flush=True)
    time.sleep(1000)


def compute(heart):
    """Give no sign of life and hold Python's lock, but work, and then end as it should."""
    print("there", flush=True)
    for _ in range(6):
        sum(range(10**7))


def forward(heart):
    with heart.iteration(12), heart.phase("forward of micro-batch 3"):
        forever()


def hold_the_lock(heart):
    with heart.iteration(12), heart.phase("a kernel"):
        print("there", flush=True)
        ctypes.PyDLL(None).sleep(1000)


def main(folder, rank, ranks, seconds, how):
    watchdog = Watchdog(Heartbeat(Path(folder) / "node", int(rank)), HangSettings(float(seconds), Path(folder), None),
                        tuple(range(int(ranks))))
    globals()[how](watchdog.heart)
    watchdog.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
