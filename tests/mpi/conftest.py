"""The fixture `mpi`: every test that takes it runs under MPICH and under Open MPI; a missing one is skipped by name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # verb_checks, shared with the tests on threads

import launch  # noqa: E402


@pytest.fixture(scope="session", params=sorted(launch.FIND))
def mpi(request):
    found = launch.FIND[request.param]()
    if found is None:
        pytest.skip(f"{request.param}: {launch.MISSING[request.param]}")
    return found
