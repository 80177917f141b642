"""Signals, time limit, threads, limits, allocator. Run: pytest tests/test_runtime.py"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from fugaku_megatron import runtime
from fugaku_megatron.comm.local import ThreadWorld
from fugaku_megatron.runtime import ExitTimer, StopSignals, cpu_quota, threads_per_rank


@pytest.mark.parametrize("number", runtime.STOP_SIGNALS)
def test_a_signal_only_asks_to_stop_and_handlers_come_back(number):
    before = {n: signal.getsignal(n) for n in runtime.STOP_SIGNALS}
    with StopSignals() as signals:
        assert not signals.stop_requested and signals.received is None
        os.kill(os.getpid(), number)
        assert signals.stop_requested and signals.received == number
    assert {n: signal.getsignal(n) for n in runtime.STOP_SIGNALS} == before


CHILD = """
import sys, time
from fugaku_megatron.runtime import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    while not signals.stop_requested:
        time.sleep(0.01)
    print("stopping", flush=True)
    time.sleep(float(sys.argv[1]))
print("saved", flush=True)
"""


def _child(seconds):
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    return process


def test_after_one_signal_a_process_can_save_and_leave_with_code_0():
    process = _child(0)
    assert process.communicate(timeout=30)[0] == "saved\n"
    assert process.returncode == 0


def test_a_second_signal_ends_at_once():
    process = _child(600)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == -signal.SIGTERM and time.monotonic() - start < 20


def test_outside_the_main_thread_nothing_is_installed():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopSignals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.stop_requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_exit_timer_counts_minutes():
    now = [100.0]
    timer, never = ExitTimer(1.5, lambda: now[0]), ExitTimer(None)
    now[0] += 89.9
    assert not timer.expired
    now[0] += 0.2
    assert timer.expired and not never.expired
    with pytest.raises(ValueError, match="--exit-duration-in-mins must be above 0, got 0"):
        ExitTimer(0)


def test_a_flag_of_one_rank_is_known_to_all():
    assert ThreadWorld(3).run(lambda comm: runtime.any_rank(comm, comm.rank == 2)) == [True] * 3
    assert ThreadWorld(3).run(lambda comm: runtime.any_rank(comm, False)) == [False] * 3


def test_denormals_are_flushed():
    try:
        if not runtime.flush_denormals():
            pytest.skip("this CPU cannot flush denormals")
        assert (torch.tensor([1e-38]) * 0.1).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert (torch.tensor([1e-38]) * 0.1).item() > 0.0


@pytest.mark.parametrize("ranks, environ, cpus, options, threads", [
    (1, {}, 48, {}, 48),
    (4, {}, 48, {}, 12),
    (5, {}, 48, {}, 9),
    (8, {}, 2, {}, 1),                                     # more ranks than CPUs
    (4, {}, 12, {"ranks_sharing": 1}, 12),                 # bound by the launcher, one CMG each
    (1, {}, 48, {"quota": 6.5}, 6),
    (2, {}, 48, {"quota": 6.5}, 3),
    (4, {}, 12, {"ranks_sharing": 1, "quota": 24.0}, 6),   # the quota is the node's, bound or not
    (1, {}, 48, {"quota": 0.5}, 1),
    (4, {"OMP_NUM_THREADS": "48"}, 2, {"quota": 1.0}, 48),
    (1, {"OMP_NUM_THREADS": " 12,2 "}, 48, {}, 12),
    (1, {"OMP_NUM_THREADS": ""}, 48, {}, 48),
])
def test_threads_per_rank(ranks, environ, cpus, options, threads):
    assert threads_per_rank(ranks, environ, range(12, 12 + cpus), **options) == threads


@pytest.mark.parametrize("text", ["0", "-1", "many", ",4", "1.5"])
def test_an_omp_num_threads_that_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS should be a positive number, it is '{text}'"):
        threads_per_rank(1, {"OMP_NUM_THREADS": text}, range(4))


def test_ranks_that_share_cpus_are_counted():
    bound = [set(range(12 * i, 12 * i + 12)) for i in range(4)]
    assert [runtime.ranks_sharing(mask, bound) for mask in bound] == [1] * 4
    assert runtime.ranks_sharing(range(48), [range(48)] * 4) == 4


def test_hardware_threads_of_a_core_count_once(tmp_path):
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert runtime.physical_cores(range(4), tmp_path) == {0, 1}
    assert runtime.physical_cores([2, 3], tmp_path) == {2, 3}
    assert runtime.physical_cores([7, 8], tmp_path) == {7, 8}  # the kernel says nothing of these


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("cgroup, files, quota", [
    ("0::/job/step\n", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "350000 100000\n"}, 3.5),
    ("0::/job/step\n", {"job/step/cpu.max": "200000 100000\n", "job/cpu.max": "350000 100000\n"}, 2.0),
    ("0::/elsewhere/on/the/host\n", {"cpu.max": "400000 100000\n"}, 4.0),
    ("0::/job\n", {"job/cpu.max": "max 100000\n"}, None),
    ("5:cpu,cpuacct:/job\n", {"cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
                              "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}, 1.5),
    ("5:cpuacct,cpu:/job\n0::/\n", {"cpu/cpu.cfs_quota_us": "800000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8.0),
    ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ("3:cpuset:/job\n", {"cpuset/job/cpu.cfs_quota_us": "1\n", "cpuset/job/cpu.cfs_period_us": "1\n"}, None),
])
def test_cpu_quota_of_both_cgroup_versions(tmp_path, cgroup, files, quota):
    _write(tmp_path / "proc_cgroup", cgroup)
    for name, text in files.items():
        _write(tmp_path / "sys" / name, text)
    assert cpu_quota(tmp_path / "proc_cgroup", tmp_path / "sys") == quota


def test_no_cgroups_mean_no_quota(tmp_path):
    assert cpu_quota(tmp_path / "absent", tmp_path) is None


MAPS = "7f0-7f1 r-xp 00000000 08:01 12 {}\n7f2-7f3 r-xp 00000000 08:01 13 /usr/lib64/libc-2.28.so\n"


@pytest.mark.parametrize("library, name", [
    ("/opt/lib/libtcmalloc.so.4.5.3", "tcmalloc"),
    ("/opt/lib/libtcmalloc_minimal.so.4", "tcmalloc"),
    ("/usr/lib/libjemalloc.so.2", "jemalloc"),
    ("/usr/lib/libmimalloc.so.2.1", "mimalloc"),
    ("/opt/FJSVxos/mmm/lib64/libmpg.so.1", "libmpg"),
    ("/opt/FJSVxos/mmm/lib64/libmpg.so.1\n1-2 r-xp 0 08:01 9 /lib/libtcmalloc.so", "tcmalloc"),
])
def test_allocators_are_known_by_their_library(library, name):
    assert runtime.allocator_name(MAPS.format(library)) == name


@pytest.mark.parametrize("library", ["/home/libtcmalloc.so/data.txt", "/usr/lib/libmpgraph.so.1", "[heap]"])
def test_other_libraries_are_no_allocator(library):
    assert runtime.allocator_name(MAPS.format(library)) not in runtime._ALLOCATORS.values()


def test_the_allocator_of_this_process_is_glibc_with_its_version():
    if "LD_PRELOAD" in os.environ or not os.path.exists("/proc/self/maps"):
        pytest.skip("another allocator may be preloaded")
    assert runtime.allocator_name().split()[0] == "glibc" and "." in runtime.allocator_name()


@pytest.mark.parametrize("text, name", [
    ("processor\t: 0\nmodel name\t: AMD EPYC 9554\nflags\t\t: fpu\n", "AMD EPYC 9554"),
    ("processor\t: 0\nCPU implementer\t: 0x46\nCPU part\t: 0x001\n", "Fujitsu A64FX"),
    ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "Arm Neoverse V2"),
    ("CPU implementer\t: 0x41\nCPU part\t: 0xfff\n", "Arm CPU, implementer 0x41 part 0xfff"),
])
def test_cpu_models(text, name):
    assert runtime.cpu_model(text) == name


def test_the_summary_is_one_line_with_what_matters():
    line = runtime.machine_summary("MPICH Version:\t4.3\nrelease", 2, 6)
    assert "\n" not in line and "2 ranks x 6 threads" in line and line.endswith("MPI MPICH Version: 4.3 release")
    assert runtime.cpu_model() in line and runtime.allocator_name() in line and f"torch {torch.__version__}" in line
