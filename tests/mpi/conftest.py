"""The fixture `mpi`: every test that takes it runs under MPICH and under Open MPI; a missing one is skipped by name."""

import pytest

from tests.mpi import launch


@pytest.fixture(scope="session", params=sorted(launch.FIND))
def mpi(request):
    found = launch.FIND[request.param]()
    if found is None:
        pytest.skip(f"{request.param}: {launch.MISSING[request.param]}")
    return found


@pytest.fixture(scope="session")
def kills(request):
    """How often test_pretrain.py kills a job: --kills N."""
    return request.config.getoption("--kills")
