"""The witness of a node's ranks."""

import os
import subprocess
import sys
import threading

import pytest

from fugaku_megatron.start import witness

pytestmark = pytest.mark.system


@pytest.fixture
def ranks():
    """Start two processes that last; end them after the test."""
    started = {rank: subprocess.Popen(["sleep", "60"]) for rank in (3, 5)}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def watched(ranks, address):
    """Start watching ranks; return a function that waits for the line."""
    lines = []
    pids = {rank: process.pid for rank, process in ranks.items()}
    watches = threading.Event()
    thread = threading.Thread(
        target=lambda: lines.append(witness.watch(address, pids, watches.set))
    )
    thread.start()
    assert watches.wait(30)

    def line():
        thread.join(30)
        return lines[0]

    return line


def told(address, message, monkeypatch):
    """Send a message to the witness at an address."""
    monkeypatch.setattr(witness, "_addresses", [f"\0{address}"])
    witness.tell(message)


def test_first_killed_rank_is_named(ranks):
    line = watched(ranks, f"test/{os.getpid()}/killed")
    ranks[5].kill()
    assert line().startswith(f"rank 5 (process {ranks[5].pid}) on node ")


def test_rank_killed_just_after_the_start_is_named():
    """The rank is gone, process number and all, before a witness that starts slowly could look for it."""
    program = """
import os, subprocess
from fugaku_megatron.start import witness
rank = subprocess.Popen(["sleep", "60"])
witness.start({0: os.getpid(), 1: rank.pid}, 0)
rank.kill()
rank.wait()
"""
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert ended.stderr.startswith("rank 1 (process ")


def test_rank_that_left_is_not_named(ranks, monkeypatch):
    address = f"test/{os.getpid()}/left"
    line = watched(ranks, address)
    told(address, b"5", monkeypatch)
    ranks[5].kill()
    ranks[3].kill()
    assert line().startswith(f"rank 3 (process {ranks[3].pid}) on node ")


def test_job_that_a_rank_ended_names_nobody(ranks, monkeypatch):
    address = f"test/{os.getpid()}/failed"
    line = watched(ranks, address)
    told(address, witness.FAILED, monkeypatch)
    ranks[5].kill()
    assert line() == ""
