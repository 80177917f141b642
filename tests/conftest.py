"""Options of the test suite, and which tests may run beside each other: `make test` runs two at a time."""

import pytest

BUILDERS = ("tests/arm/", "tests/test_wheel.py", "tests/test_setup", "tests/kernels/test_dispatch.py")  # they compile into build/


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, help="how many times the kill-and-restart test kills a job")


def pytest_collection_modifyitems(items):
    """The tests of a file stay together and share its fixtures; what compiles into one folder waits for each other."""
    for item in items:
        file = item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group("builders" if file.startswith(BUILDERS) else file))
