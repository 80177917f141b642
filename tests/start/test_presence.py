"""Names of ranks that wait for MPI."""

import os
import subprocess
import sys

import pytest

from fugaku_megatron.start import presence

pytestmark = pytest.mark.system


def test_ranks_that_do_not_wait_are_missing(monkeypatch):
    monkeypatch.setenv("PMIX_NAMESPACE", f"test-{os.getpid()}")
    monkeypatch.setenv("MPI_LOCALNRANKS", "3")
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    waiting = presence.Presence()
    assert waiting.missing() == [0, 2]
    program = "from fugaku_megatron.start.presence import Presence; Presence(); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        env={**os.environ, "MPI_LOCALRANKID": "2"},
    )
    while waiting.missing() != [0]:
        assert other.poll() is None
    other.communicate(b"\n")
    assert waiting.missing() == [0, 2]
