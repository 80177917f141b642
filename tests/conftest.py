"""Options of the test suite. `make test` runs two files at a time (pytest-xdist): the tests of a file share its fixtures."""


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, help="how many times the kill-and-restart test kills a job")
