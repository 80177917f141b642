"""Options of the test suite. `make test TEST_WORKERS=2` runs two files at a time (pytest-xdist): a file shares its fixtures."""


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, help="how many times the kill-and-restart test kills a job")
