"""A flipped bit on one of three real ranks is found at the next comparison, with its rank."""

from __future__ import annotations

import platform

import pytest

from fugaku_megatron.comm.launcher import ExitCode
from tests.system.mpi import launch

pytestmark = pytest.mark.mpi


def test_one_flipped_bit_is_found_with_its_replica(mpich):
    job = mpich.run(3, str(launch.TESTS / "system" / "mpi" / "flipped_bit.py"))
    assert job.returncode == ExitCode.REPLICAS_DIFFER, job.stderr
    assert job.stdout.splitlines() == [
        f"weights differ after iteration 6: rank 2 (node {platform.node()}, replica 2) holds other bits in "
        "decoder.layers.1.mlp.linear_fc2.weight than 2 of 3 replicas. Nothing is saved; go on without that node from a checkpoint "
        "of iteration 3 or before, when the weights agreed"]
    assert "Traceback" not in job.stderr
