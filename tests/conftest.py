"""Options of the test suite, and what every test file must leave as it was. A file's tests run in one process, in order."""

import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, help="how many times the kill-and-restart test kills a job")
    parser.addoption("--faults", type=int, default=2, help="how many faults of the campaign are drawn")


SET_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES}


@pytest.fixture(scope="module", autouse=True)
def same_environment_variables():
    """A variable that stays set changes the programs that later files start, and the compiler that they build with."""
    before = variables()
    yield
    assert variables() == before
