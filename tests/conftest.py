"""Options of the test suite, the kind of each test, fixtures that start runs, and what every test file must leave as it was."""

import gc
import importlib.util
import os
import platform
import shlex
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from fugaku_megatron.host import kernels
from fugaku_megatron.host.machine import cpu_model
from tests.mpi import launch

pytest.register_assert_rewrite("tests.checks")

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "fugaku_megatron"
# Every test file names its kind: pytestmark = pytest.mark.unit
KINDS = ("unit", "kernels", "parallel", "system", "arm", "campaigns")
STARTS_PROCESSES = ("system", "campaigns", "docs", "mpi")
# Files of which one test takes a minute. They go first: at the end the other workers would wait for it.
LONGEST = (TESTS / "benchmarks" / "test_benchmarks.py", TESTS / "jobs" / "test_local.py")


def pytest_addoption(parser):
    parser.addoption(
        "--mpi",
        choices=("mpich", "openmpi"),
        default="mpich",
        help="the MPI that tests of MPI jobs use",
    )
    parser.addoption(
        "--best-target",
        action="store_true",
        help="test the kernels on the best vector target of this CPU alone",
    )
    parser.addoption(
        "--kills", type=int, default=1, help="how many times the kill-and-restart test kills a job"
    )
    parser.addoption(
        "--share",
        type=share,
        default=(0, 1),
        metavar="N/M",
        help="of each test's cases only every M-th, from the N-th on (N from 0)",
    )
    parser.addoption(
        "--share-tests",
        type=share,
        default=(0, 1),
        metavar="N/M",
        help="of the tests marked full only every M-th, from the N-th on",
    )
    parser.addoption(
        "--share-from",
        type=int,
        default=2,
        metavar="CASES",
        help="--share leaves out cases of tests that have at least so many; unit tests are whole unless they are full",
    )


def share(text: str) -> tuple[int, int]:
    """Return (N, M) of N/M, with N modulo M."""
    number, total = map(int, text.split("/"))
    return number % total, total


def old_library(folder):
    """Return a line if the folder has a kernel library of other sources than those in kernels_sve/ and setup.py."""
    # The library of the emulated Python was checked by the Python that built it.
    if importlib.util.find_spec("setuptools") is None:
        return ""
    import setup

    for library in sorted(folder.glob("_kernels*.so")):
        if setup.hash_in(library) != setup.source_hash():
            goal = (
                "arm-ext"
                if "aarch64" in library.name and platform.machine() != "aarch64"
                else "kernels"
            )
            return f"{library.name} was built from other sources than those in kernels_sve/ and setup.py: run make {goal}"
    return ""


def pytest_configure(config):
    """Refuse an old library, and draw the same examples in every run, without a deadline on a busy machine.

    A shell's background job ignores interrupts, and so would every process that tests interrupt. Commands in this process
    leave torch's allocator alone: tests measure what it allocates.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if reason := old_library(PACKAGE):
        pytest.exit(reason, returncode=1)
    kernels.use_arena = lambda size: "tests measure torch's allocator"
    if importlib.util.find_spec("hypothesis"):  # not in the emulated Python
        from hypothesis import settings

        settings.load_profile("ci")
    config.pluginmanager.register(OneShare())


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    """Resolve every test's kind. A second MPI is for tests that take `mpi`.

    A test that starts processes while other workers use the same cores runs again when it fails; the report names it.
    """
    shares_cores = hasattr(config, "workerinput") and config.pluginmanager.hasplugin(
        "rerunfailures"
    )
    if config.getoption("--mpi") == "openmpi":
        items[:] = [item for item in items if "mpi" in item.fixturenames]
    resolve_kinds(items)
    for item in items:
        if shares_cores and any(mark.name in STARTS_PROCESSES for mark in item.iter_markers()):
            item.add_marker(pytest.mark.flaky(reruns=1))


def resolve_kinds(items):
    """Replace the kind of a file by the kind of each of its tests, which is the file's unless the test is marked itself."""
    of_file = {}
    for module in {item.getparent(pytest.Module) for item in items}:
        kinds = [mark for mark in module.own_markers if mark.name in KINDS]
        if len(kinds) != 1:
            raise pytest.UsageError(
                f"{module.nodeid}: a test file has one kind: add pytestmark = pytest.mark.unit, or another of {', '.join(KINDS)}"
            )
        of_file[module] = kinds[0].name
        module.own_markers.remove(kinds[0])
    for item in items:
        if not any(mark.name in KINDS for mark in item.iter_markers()):
            item.add_marker(of_file[item.getparent(pytest.Module)])


def marked(item, name):
    return item.get_closest_marker(name) is not None


def test_of(item):
    """Return the name of an item's test, without its case."""
    return item.nodeid.partition("[")[0]


class OneShare:
    """Deselects the tests and cases of other shares, after -m and -k. A test with fewer cases than shares keeps one of them.

    A unit test that is not marked full keeps all: thousands of its cases take the seconds of a few jobs.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        number, total = config.getoption("--share")
        first, step = config.getoption("--share-tests")
        many = config.getoption("--share-from")
        cases = Counter(map(test_of, items))
        long = [*dict.fromkeys(test_of(item) for item in items if marked(item, "full"))]
        left_to_others = set(long) - set(long[first::step])
        seen = Counter()
        kept = []
        left_out = []
        for item in items:
            test = test_of(item)
            is_whole = cases[test] < many or (marked(item, "unit") and not marked(item, "full"))
            period = 1 if is_whole else min(total, cases[test])
            is_kept = test not in left_to_others and seen[test] % period == number % period
            (kept if is_kept else left_out).append(item)
            seen[test] += 1
        items[:] = sorted(kept, key=lambda item: item.path not in LONGEST)
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """Keep the collector away from modules and collected tests, and torch from starting threads for small tensors.

    Half a million objects live until the end. The collector would visit them in every test.
    """
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Print the CPU, and why a test failed the first time that passed, or failed otherwise, when it ran again."""
    terminalreporter.write_line(f"CPU: {cpu_model()}; kernels: {kernels.active()}")
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"first run of {report.nodeid}", sep="-")
        terminalreporter.write_line(report.longreprtext)


SET_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES}


@pytest.fixture(scope="module", autouse=True)
def same_environment_variables():
    """Refuse a file that leaves a variable set: later files start programs and compilers with it."""
    before = variables()
    yield
    assert variables() == before


@pytest.fixture(scope="module", autouse=True)
def denormal_numbers():
    """Undo what training in this process has switched on: hypothesis draws no numbers where small ones become zero."""
    torch.set_flush_denormal(False)


def installed(name: str) -> launch.MPI:
    """Return an MPI, or skip the test with the reason why it is missing."""
    found = launch.FIND[name]()
    if found is None:
        pytest.skip(f"{name}: {launch.MISSING[name]}")
    return found


@pytest.fixture(scope="session")
def mpi(request):
    """Return the MPI of --mpi."""
    return installed(request.config.getoption("--mpi"))


@pytest.fixture(scope="session")
def mpich():
    return installed("mpich")


@pytest.fixture(scope="session")
def kills(request):
    """Return how often the kill-and-restart test kills a job: --kills N."""
    return request.config.getoption("--kills")


@pytest.fixture
def alone(capsys, monkeypatch):
    """Train on one rank in this process and check the exit code. Memory, cores and threads stay."""
    import torch

    from fugaku_megatron.cli.arguments import parse
    from fugaku_megatron.comm.base import SoloComm
    from fugaku_megatron.comm.job import run_or_abort
    from fugaku_megatron.host import runtime
    from fugaku_megatron.observe.hang.heartbeat import Heartbeat
    from fugaku_megatron.observe.hang.watchdog import HangSettings, Watchdog
    from fugaku_megatron.observe.log import loss_plot
    from fugaku_megatron.run.pretrain import pretrain

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(loss_plot, "start_loss_curve", lambda *words: subprocess.Popen(["true"]))
    before = runtime.CpuBinding(torch.get_num_threads(), ())

    torch.set_num_threads(1)

    def run(*flags: object, code: int = 0) -> launch.Result:
        own = launch.words(*flags, "--allocator stock --thread-affinity none")
        watchdog = Watchdog(Heartbeat(), HangSettings(None, Path(), None))
        ended = 0
        try:
            run_or_abort(lambda world: pretrain(parse(own), world, watchdog), SoloComm())
        except SystemExit as end:
            ended = end.code
        return launch.Result(ended, *capsys.readouterr(), seconds=0.0).check(code)

    yield run
    runtime.apply_binding(before, False)


@pytest.fixture
def command(capsys):
    """Run fugaku-megatron in this process on a command line, given in pieces, and check the exit code."""
    from fugaku_megatron.cli import program

    def run(*parts: object, code: int | None = 0, start=program.main) -> launch.Result:
        ended = start(shlex.split(" ".join(map(str, parts))))
        return launch.Result(ended, *capsys.readouterr(), seconds=0.0).check(code)

    return run
