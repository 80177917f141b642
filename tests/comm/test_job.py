"""Reports and waits in run_or_abort, without MPI; tests/comm/test_mpi.py ends real jobs."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from fugaku_megatron.comm import job as job_module
from fugaku_megatron.comm.agreement import everywhere
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.comm.job import describe, init, run_or_abort
from fugaku_megatron.start import environment as environment_module
from fugaku_megatron.start import exit_codes
from tests.processes import ROOT, run_python

pytestmark = pytest.mark.system


@pytest.fixture
def alone(monkeypatch):
    """No launcher around these tests, and no MPI in this process."""
    for name in (*environment_module.SIZES, *environment_module.RANKS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)


def end(error, rank=0):
    """Return a rank's exit code if its main raises `error`."""

    def main(comm):
        raise error

    with pytest.raises(SystemExit) as exit:
        run_or_abort(main, SoloComm(rank, 4))
    return exit.value.code


def marked(error):
    with pytest.raises(type(error)) as caught, everywhere():
        raise error
    return caught.value


def test_a_result_is_returned():
    assert run_or_abort(lambda comm: comm.size, SoloComm(1, 4)) == 4


@pytest.mark.parametrize(
    "error, code, text",
    [
        (ValueError("wrong\n   flag"), 2, "rank 3: wrong flag\n"),
        (KeyboardInterrupt(), 130, "rank 3: interrupted\n"),
        (SystemExit(0), 0, ""),
        (SystemExit(7), 7, ""),
        (SystemExit("no data"), 1, "rank 3: no data\n"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (
            OSError(28, "No space left on device"),
            141,
            "rank 3: standard output: No space left on device\n",
        ),
        (
            OSError(36, "File name too long", "nnn"),
            2,
            "rank 3: nnn: File name too long: correct the path\n",
        ),
    ],
)
def test_codes_and_single_lines(error, code, text, capsys, monkeypatch):
    monkeypatch.setattr(job_module, "GRACE", 0.0)
    assert end(error, rank=3) == code
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch.so: failed to map segment from shared object"),
        RuntimeError("std::bad_alloc"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:116] . DefaultCPUAllocator: can't allocate memory: you tried to get 8"
        ),
    ],
)
def test_memory_that_is_refused_is_one_line(error, capsys):
    assert end(error, 1) == 1
    text = capsys.readouterr().err
    assert text.startswith("rank 1: out of memory") and text.count("\n") == 1


def test_a_rank_whose_imports_find_no_memory_ends_by_a_signal():
    """Its launcher would not end the others for an exit code."""
    code = "from fugaku_megatron.cli import program\ndef work():\n    raise MemoryError\nprogram.guarded('a command', work)"
    said = run_python("-c", code, code=-9, PMI_SIZE="2", PMI_RANK="1").stderr
    assert said.startswith("a command: rank 1: out of memory: ") and said.count("\n") == 1


def test_a_bug_shows_its_traceback(capsys):
    assert end(KeyError("lost")) == 1
    text = capsys.readouterr().err
    assert text.startswith("rank 0: Traceback") and text.endswith("KeyError: 'lost'\n")
    assert "in main" in text


@pytest.mark.parametrize(
    "rank, error, waits",
    [
        (0, ValueError("x"), []),
        (0, marked(ValueError("x")), []),
        (1, ValueError("x"), [job_module.GRACE]),
        (1, marked(ValueError("x")), [exit_codes.GRACE_EVERYWHERE]),
        (1, marked(SystemExit("x")), [exit_codes.GRACE_EVERYWHERE]),
    ],
)
def test_other_ranks_leave_the_report_to_rank_0(rank, error, waits, capsys, monkeypatch):
    slept = []  # s, and what was said before
    monkeypatch.setattr(
        job_module,
        "time",
        SimpleNamespace(sleep=lambda seconds: slept.append((seconds, capsys.readouterr().err))),
    )
    end(error, rank)
    assert (
        slept == [(seconds, "") for seconds in waits]
        and capsys.readouterr().err == f"rank {rank}: x\n"
    )


@pytest.mark.parametrize("read_after, limit", [(0.3, 30.0), (None, 0.5)])
def test_the_end_waits_for_the_reader_of_the_report(read_after, limit):
    reader, writer = os.pipe()
    with open(writer, "w") as stream, open(reader) as other_end:
        print("the report", file=stream, flush=True)
        begin = time.monotonic()
        if read_after:
            threading.Timer(read_after, other_end.readline).start()
        exit_codes.wait_until_read(stream, limit=limit)
        waited = time.monotonic() - begin
        assert read_after <= waited < limit if read_after else waited >= limit


def test_one_process_needs_no_mpi(alone):
    world = init()
    assert (world.rank, world.size, describe(world)) == (0, 1, "no MPI, 1 rank(s)")


@pytest.mark.parametrize("variable", environment_module.SIZES)
def test_several_processes_need_mpi(alone, variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    assert init().size == 1
    monkeypatch.setenv(variable, "4")
    message = f"{variable}=4 but MPI cannot be loaded .*pip install mpi4py mpich"
    with pytest.raises(ValueError, match=message):
        init()


LIMITED = """
import resource, sys
from fugaku_megatron.comm.job import run_or_abort
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3])))
run_or_abort(lambda comm: print(*resource.getrlimit(getattr(resource, sys.argv[1]))))
"""


@pytest.mark.parametrize(
    "limit, low, message",
    [
        (
            "RLIMIT_NOFILE",
            32,
            "the limit of open files is 32, and MPI needs 72 with 2 ranks on a node: raise it by `ulimit -n 72`",
        ),
        pytest.param(
            "RLIMIT_FSIZE",
            1024000,
            "the limit of the size of a file in KiB is 1000, and MPI needs 12288 with 2 ranks on a node: raise "
            "it by `ulimit -f 12288`",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_limit_that_mpi_cannot_live_with_is_named_before_it_starts(limit, low, message):
    def started(hard, code):
        return run_python("-c", LIMITED, limit, low, hard, code=code, MPI_LOCALNRANKS="2")

    started(low, 2).mistake(f"rank 0: {message} ")
    raised = started(1 << 30 if limit == "RLIMIT_FSIZE" else 256, 0)
    assert int(raised.stdout.split()[0]) >= 72


def test_an_address_space_too_small_for_mpi_is_named_before_it_starts():
    low = str(700000 << 10)
    said = run_python("-c", LIMITED, "RLIMIT_AS", low, low, code=2, MPI_LOCALNRANKS="2").stderr
    found = re.fullmatch(
        r"rank 0: the limit of the address space in KiB is 700000, and MPI needs (\d+) with 2 ranks on a node: raise it by "
        r"`ulimit -v (\d+)` .*\n",
        said,
    )
    assert found and found[1] == found[2]
    enough = str((int(found[1]) + 400000) << 10)  # a library of another size
    run_python("-c", LIMITED, "RLIMIT_AS", enough, enough, code=0)


def test_an_address_space_too_small_for_torch_is_named_before_it_is_loaded():
    started = "ulimit -v 500000; exec {} -m fugaku_megatron train --mock-data --recipe demo"
    ended = subprocess.run(
        ["bash", "-c", started.format(sys.executable)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "the limit of the address space in KiB is 500000" in ended.stderr


@pytest.mark.parametrize(("ranks", "free", "needed"), [(1, 1000, 1184), (8, 8192, 8576)])
def test_shared_memory_too_small_for_mpi_is_named_before_it_starts(
    ranks, free, needed, monkeypatch
):
    monkeypatch.setenv("MPI_LOCALNRANKS", str(ranks))
    usage = SimpleNamespace(free=free << 10)
    monkeypatch.setattr(environment_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError) as raised:
        environment_module.check_limits()
    assert str(raised.value).startswith(
        f"/dev/shm has {free} KiB left, and MPI needs {needed} with "
    )
    usage.free = needed << 10
    environment_module.check_limits()


@pytest.mark.parametrize("size, filled", [("8k", 0), ("8k", 2), ("2m", 512)])
def test_a_full_shared_memory_ends_a_start_with_a_line(size, filled, small_shared_memory):
    program = f"{sys.executable} -m fugaku_megatron train --mock-data --recipe demo"
    ended = small_shared_memory(size, filled, program)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert re.search(r"/dev/shm has \d+ KiB left, and MPI needs 1184 with 1 rank", ended.stderr)


@pytest.fixture
def small_shared_memory():
    """Runs a command with a small /dev/shm of its own, of which `filled` pages are in use."""
    mount = "mount -t tmpfs -o size={},nr_inodes=1000 none /dev/shm"
    probe = ["unshare", "-m", "sh", "-c", mount.format("1m")]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("a mount of its own needs root")

    def run(size, filled, program):
        fill = f"head -c {filled * 4096} /dev/zero > /dev/shm/leftover; "
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", f"{mount.format(size)} && {fill} exec {program}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    return run


@pytest.mark.parametrize(
    "module, absent", [("comm.job", {"mpi4py"}), ("start.signals", {"mpi4py", "torch"})]
)
def test_importing_loads_no_mpi(module, absent):
    program = f"import sys, fugaku_megatron.{module}; sys.exit(bool({absent} & sys.modules.keys()))"
    run_python("-c", program)


def test_one_process_reports_what_fails_everywhere(alone, monkeypatch, capsys):
    monkeypatch.setattr(exit_codes, "GRACE_START", 0.2)
    exit_codes.report_everywhere("no such flag")
    assert capsys.readouterr().err == "no such flag\n"
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "10")
    begin = time.monotonic()
    exit_codes.report_everywhere("no such flag")
    assert capsys.readouterr().err == "" and time.monotonic() - begin >= 0.3


def test_a_bug_in_a_thread_ends_the_process():
    program = """
import threading, time
from fugaku_megatron.comm.job import run_or_abort
from fugaku_megatron.comm.base import SoloComm
def main(comm):
    threading.Thread(target=lambda: 1 / 0).start()
    time.sleep(600)
run_or_abort(main, SoloComm())
"""
    said = run_python("-c", program, code=1).stderr
    assert "rank 0: Traceback" in said and "ZeroDivisionError" in said
