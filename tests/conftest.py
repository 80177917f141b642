"""Options of the test suite."""


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, help="how many times the kill-and-restart test kills a job")
