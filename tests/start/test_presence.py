"""Names of ranks that wait for MPI."""

import os
import subprocess
import sys

import pytest

from fugaku_megatron.start import presence

pytestmark = pytest.mark.system


def test_ranks_that_do_not_wait_are_named(monkeypatch):
    monkeypatch.setenv("PMIX_NAMESPACE", f"test-{os.getpid()}")
    monkeypatch.setenv("MPI_LOCALNRANKS", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    waiting = presence.Presence()
    assert waiting.missing() == "rank(s) 0, 2 did not come"
    program = "from fugaku_megatron.start.presence import Presence; waiting = Presence(); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        env={**os.environ, "OMPI_COMM_WORLD_RANK": "2"},
    )
    while waiting.missing() != "rank(s) 0 did not come":
        assert other.poll() is None
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "6")
    assert waiting.missing().startswith("2 of 3 ranks of node ")
    other.communicate(b"\n")
    assert waiting.missing().startswith("1 of 3 ranks of node ")
