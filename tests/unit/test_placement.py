"""Threads, cores, NUMA nodes and denormals of a rank."""

import os
import subprocess
import sys

import pytest
import torch

from fugaku_megatron.host import kernels, runtime
from fugaku_megatron.host.runtime import Placement, cpu_quota, place, threads_per_rank


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("ranks, environ, cpus, options, threads", [
    (1, {}, 48, {}, 48), (4, {}, 48, {}, 12), (5, {}, 48, {}, 9), (8, {}, 2, {}, 1),  # the last: more ranks than CPUs
    (4, {}, 12, {"ranks_sharing": 1}, 12),  # bound by the launcher, one CMG each
    (1, {}, 48, {"quota": 6.5}, 6), (2, {}, 48, {"quota": 6.5}, 3), (1, {}, 48, {"quota": 0.5}, 1),
    (4, {}, 12, {"ranks_sharing": 1, "quota": 24.0}, 6),  # the quota is the node's, bound or not
    (4, {"OMP_NUM_THREADS": "48"}, 2, {"quota": 1.0}, 48), (1, {"OMP_NUM_THREADS": " 12,2 "}, 48, {}, 12),
    (1, {"OMP_NUM_THREADS": ""}, 48, {}, 48),
])
def test_threads_per_rank(ranks, environ, cpus, options, threads):
    assert threads_per_rank(ranks, environ, range(12, 12 + cpus), **options) == threads
    for text in ("0", "-1", "many", ",4", "1.5"):
        with pytest.raises(ValueError, match=f"OMP_NUM_THREADS should be a positive number, it is '{text}'"):
            threads_per_rank(1, {"OMP_NUM_THREADS": text}, range(4))


def test_hardware_threads_and_denormals(tmp_path):
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert runtime.physical_cores(range(4), tmp_path) == {0, 1}
    assert runtime.physical_cores([2, 3], tmp_path) == {2, 3}
    assert runtime.physical_cores([7, 8], tmp_path) == {7, 8}  # the kernel says nothing of these
    kernels.flush_denormals(True)
    assert (torch.tensor([1e-38]) * 0.1).item() == 0.0
    kernels.flush_denormals(False)
    assert (torch.tensor([1e-38]) * 0.1).item() > 0.0


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
    assert cpu_quota(tmp_path / "absent", tmp_path) is None


@pytest.fixture
def fugaku(tmp_path):
    """Sysfs of a node with two assistant cores (NUMA 0 and 1) and 48 compute cores (12 to 59, NUMA 4 to 7)."""
    nodes = {0: 0, 1: 1, **{cpu: 4 + (cpu - 12) // 12 for cpu in range(12, 60)}}
    for cpu, node in nodes.items():
        (tmp_path / f"cpu{cpu}" / f"node{node}").mkdir(parents=True)
    return tmp_path


ALL = [0, 1, *range(12, 60)]


def test_ranks_of_a_node_and_communication_get_its_cores(fugaku):
    assert runtime.compute_cores(ALL, fugaku) == list(range(12, 60))
    assert runtime.compute_cores(range(12, 24), fugaku) == list(range(12, 24))
    places = [place(ALL, [ALL] * 4, rank, {}, None, "auto", fugaku) for rank in range(4)]
    assert [p.cpus for p in places] == [tuple(range(12 + 12 * i, 24 + 12 * i)) for i in range(4)]
    assert {p.threads for p in places} == {12}
    assert place(ALL, [ALL], 0, {}, None, "auto", fugaku) == Placement(48, tuple(range(12, 60)))
    masks = [list(range(12 + 12 * i, 24 + 12 * i)) for i in range(4)]
    assert place(masks[2], masks, 2, {}, None, "auto", fugaku) == Placement(12, tuple(masks[2]))
    assert place(masks[0], [masks[0]] * 2, 1, {}, None, "pin", fugaku).cpus == tuple(range(18, 24))
    assert place(ALL, [ALL], 0, {}, None, "auto", fugaku, reserve=True) == Placement(47, tuple(range(12, 59)), 59)
    assert place(ALL, [ALL] * 2, 1, {"OMP_NUM_THREADS": "23"}, None, "auto", fugaku) == Placement(23, tuple(range(36, 59)), 59)
    assert place(ALL, [ALL], 0, {"OMP_NUM_THREADS": "48"}, None, "auto", fugaku, reserve=True).communication is None
    assert place(ALL, [ALL] * 4, 3, {}, None, "auto", fugaku, reserve=True) == Placement(12, tuple(range(48, 60)))  # too few


@pytest.mark.parametrize("environ, affinity, masks", [
    ({}, "none", [ALL] * 2), ({"OMP_PROC_BIND": "close"}, "auto", [ALL] * 2), ({"OMP_NUM_THREADS": "25"}, "pin", [ALL] * 2),
    ({}, "pin", [ALL, list(range(12, 24))]),  # overlapping, not equal
    ({}, "auto", [list(range(12, 24))]),  # one NUMA node: nothing to be near to
])
def test_who_is_not_pinned(fugaku, environ, affinity, masks):
    assert place(masks[0], masks, 0, environ, None, affinity, fugaku).cpus == ()


CHILD = """
import os, sys, torch
from fugaku_megatron.host import kernels, runtime
def tasks(): return len(os.listdir("/proc/self/task"))
cpus = tuple(int(c) for c in sys.argv[1].split(","))
torch.set_num_threads(len(cpus))
torch.ones(1 << 22).mul_(2)
before = tasks()
runtime.apply_placement(runtime.Placement(len(cpus), cpus), True)
print(kernels.thread_cpus())
torch.ones(1 << 22).mul_(2)
tiny = torch.full((1 << 16,), 1e-38)
print(int((tiny * 0.1).count_nonzero()))
print(tasks() - before)
"""


def _child(cpus):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    command = [sys.executable, "-c", CHILD, ",".join(map(str, cpus))]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.system
def test_every_thread_is_on_its_core_flushes_denormals_and_none_is_left_over():
    cpus = sorted(os.sched_getaffinity(0), reverse=True)[:2]
    places, denormals, threads = _child(cpus)
    assert places == str(cpus)
    assert denormals == "0"
    assert int(threads) == 0, "torch and the kernels share one pool"
