"""Options of the test suite, and what every test file must leave as it was. A file's tests run in one process, in order."""

import os
import platform
from pathlib import Path

import pytest

import setup

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "fugaku_megatron"


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=3, help="how many times the kill-and-restart test kills a job")
    parser.addoption("--faults", type=int, default=2, help="how many faults of the campaign are drawn")


def old_library(folder):
    """Why a kernel library of the folder cannot be tested, in one line: it is of other sources. Empty when there is none such."""
    for library in sorted(folder.glob("_kernels*.so")):
        if setup.hash_in(library) != setup.source_hash():
            goal = "arm-ext" if "aarch64" in library.name and platform.machine() != "aarch64" else "kernels"
            return f"{library.name} was built from other sources than those in kernels_sve/ and setup.py: run make {goal}"
    return ""


def pytest_configure():
    """Tests of an old library would say nothing of the sources."""
    if reason := old_library(PACKAGE):
        pytest.exit(reason, returncode=1)


# Files of half a minute and more, about the longest first: begun last, one would run while the other worker has nothing to do.
LONGEST = ("arm/test_python.py", "mpi/test_pretrain.py", "mpi/test_layouts.py", "test_perf_plan.py", "arm/test_static.py",
           "test_benchmarks.py", "test_jobs_submit.py", "arm/test_codegen.py", "mpi/test_jobs_local.py", "test_schedules.py",
           "test_parallel.py", "mpi/test_hangs.py", "test_perf_fit.py", "mpi/test_shared_files.py", "mpi/test_faults.py",
           "mpi/test_stragglers.py", "mpi/test_two_hosts.py", "test_benchmark_tables.py")


def pytest_collection_modifyitems(items):
    """LONGEST, then the other files as they were collected; the tests of a file keep their order."""
    place = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


SET_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES}


@pytest.fixture(scope="module", autouse=True)
def same_environment_variables():
    """A variable that stays set changes the programs that later files start, and the compiler that they build with."""
    before = variables()
    yield
    assert variables() == before
