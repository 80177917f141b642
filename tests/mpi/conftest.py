"""The fixtures `mpi`, the MPI that --mpi names, and `mpich`. A missing MPI is skipped with the reason."""

import pytest

from tests.mpi import launch


def pytest_collection_modifyitems(config, items):
    """A second MPI is of interest to the tests that take the fixture `mpi` alone."""
    if config.getoption("--mpi") == "openmpi":
        taking = [item for item in items if "mpi" in item.fixturenames]
        config.hook.pytest_deselected(items=[item for item in items if item not in taking])
        items[:] = taking


def installed(name: str) -> launch.MPI:
    found = launch.FIND[name]()
    if found is None:
        pytest.skip(f"{name}: {launch.MISSING[name]}")
    return found


@pytest.fixture(scope="session")
def mpi(request):
    return installed(request.config.getoption("--mpi"))


@pytest.fixture(scope="session")
def mpich():
    return installed("mpich")


@pytest.fixture(scope="session")
def kills(request):
    """How often test_pretrain.py kills a job: --kills N."""
    return request.config.getoption("--kills")
