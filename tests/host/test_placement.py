"""Threads, cores, NUMA nodes and denormals of a rank."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from fugaku_megatron.comm import node as shared_node
from fugaku_megatron.host import cgroup, runtime, topology
from fugaku_megatron.host.allocator import usage
from fugaku_megatron.host.binding_problems import problems
from fugaku_megatron.host.cpu_binding import (
    CpuBinding,
    Rank,
    map_ranks,
    mapping,
    place,
    proposed_ranks,
    requested_threads,
)
from fugaku_megatron.host.topology import Node, format_list, parse_list
from tests.checks.topology import SERVERS, _write, tree

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", SERVERS)
def test_a_whole_server_gets_a_rank_for_each_domain(tmp_path, name):
    shape, ranks, threads, cores, text = SERVERS[name]
    node = Node.read(tree(tmp_path, **shape))
    assert node.describe() == text
    assert proposed_ranks(node, [node.cpus], {}, None) == ranks
    placed = map_ranks(node, ranks)
    assert [format_list(rank.binding.cpus) for rank in placed] == cores
    assert {rank.binding.threads for rank in placed} == {threads} and problems(
        node, placed, {}
    ) == []
    allowed = [node.cpus for _ in range(ranks)]
    assert [place(node, allowed, i, {}).cpus for i in range(ranks)] == [
        rank.binding.cpus for rank in placed
    ], "as a real start places them"
    alone = problems(node, map_ranks(node, 1), {})
    assert (
        len(alone) == 1
        and f"this node suits {ranks} ranks, one for each domain (mpiexec -n {ranks} on one node; "
        in alone[0]
    )
    assert f"srun --ntasks-per-node {ranks} --cpus-per-task {threads * node.smt})" in alone[
        0
    ] and alone[0].endswith("and has 1")


def test_cpus_that_alternate_between_domains_and_memory_without_cpus(tmp_path):
    domains = {d: [*range(d, 16, 4)] for d in range(4)} | {
        4: []
    }  # Intel's older numbering, and a GPU's memory
    node = Node.read(tree(tmp_path, domains, 1, 16, lambda cpu: (cpu % 8, cpu % 8 + 8)))
    assert [rank.binding.cpus for rank in map_ranks(node, 4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert "rank 1: 2 threads pinned to cores 1,5 (domain 1)" in mapping(node, map_ranks(node, 4))
    assert [rank.binding.cpus for rank in map_ranks(node, 2)] == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert [rank.binding.cpus for rank in map_ranks(node, 8)][:3] == [(0,), (4,), (1,)]


@pytest.mark.parametrize(
    "ranks, environ, quota, threads, why",
    [
        (1, {}, None, 48, ""),
        (4, {}, None, 12, ""),
        (5, {}, None, 9, ""),
        (100, {}, None, 1, ""),
        (1, {}, 3.0, 3, "limited by the cgroup's quota of 3 CPUs"),
        (2, {}, 6.5, 3, "limited by the cgroup's quota of 6.5 CPUs"),
        (1, {}, 0.5, 1, "limited by the cgroup's quota of 0.5 CPUs"),
        (4, {}, 96.0, 12, ""),
        (2, {"SLURM_CPUS_PER_TASK": "10"}, None, 10, "limited by SLURM_CPUS_PER_TASK=10"),
        (
            2,
            {"SLURM_CPUS_PER_TASK": "10", "SLURM_CPUS_ON_NODE": "8"},
            None,
            4,
            "limited by SLURM_CPUS_ON_NODE=8",
        ),
        (
            2,
            {"SLURM_CPUS_PER_TASK": "24", "SLURM_CPUS_ON_NODE": "48"},
            None,
            24,
            "",
        ),  # the mask says as much
        (1, {"OMP_NUM_THREADS": "48", "SLURM_CPUS_PER_TASK": "2"}, 1.0, 48, ""),
        (1, {"OMP_NUM_THREADS": " 12,2 "}, None, 12, ""),
        (1, {"OMP_NUM_THREADS": ""}, None, 48, ""),
    ],
)
def test_threads_under_limits(tmp_path, ranks, environ, quota, threads, why):
    node = Node.read(tree(tmp_path, {0: range(48)}))
    found = place(node, [node.cpus for _ in range(ranks)], 0, environ, quota, "pin")
    assert found.threads == threads and found.why == why


def test_wrong_numbers_of_threads():
    for text in ("0", "-1", "many", ",4", "1.5"):
        with pytest.raises(
            ValueError, match=f"OMP_NUM_THREADS should be a positive number, it is '{text}'"
        ):
            requested_threads({"OMP_NUM_THREADS": text})


def test_a_cgroup_of_three_cpus_proposes_no_rank_more(tmp_path):
    node = Node.read(tree(tmp_path, **SERVERS["EPYC 2 x 96, NPS4"][0]))
    assert (
        proposed_ranks(node, [node.cpus], {}, 3.0) == 1
        and proposed_ranks(node, [node.cpus], {}, 30.0) == 2
    )
    one = Rank(0, tuple(node.cpus), place(node, [node.cpus], 0, {}, 3.0))
    assert one.binding.cpus == (0, 1, 2) and problems(node, [one], {}, 3.0) == []
    assert mapping(node, [one]).endswith(
        "rank 0: 3 threads pinned to cores 0-2 (domain 0), limited by the cgroup's quota of 3 CPUs"
    )
    many = [Rank(i, tuple(node.cpus), place(node, [node.cpus] * 8, i, {}, 3.0)) for i in range(8)]
    [line] = problems(node, many, {}, 3.0)
    assert (
        line.startswith("8 threads compute under the cgroup's quota of 3 CPUs")
        and "at most 3 ranks" in line
    )
    few = [1, 2, 193]  # a cpuset of three CPUs, of which two share a core: the mask says it
    assert (
        place(node, [few], 0, {}).threads == 2
        and problems(node, [Rank(0, tuple(few), place(node, [few], 0, {}))], {}) == []
    )
    slurm = {"SLURM_CPUS_ON_NODE": "20", "SLURM_CPUS_PER_TASK": "20"}
    assert proposed_ranks(node, [node.cpus], slurm, None) == 1


def test_problems_of_a_mapping(tmp_path):
    node = Node.read(
        tree(
            tmp_path,
            **{**SERVERS["Xeon 2 x 56, SNC-4"][0], "gib": {0: 8, **dict.fromkeys(range(1, 8), 64)}},
        )
    )

    def ranks(masks, environ=(), **options):
        return [
            Rank(i, tuple(mask), place(node, masks, i, dict(environ), **options), 9 << 30)
            for i, mask in enumerate(masks)
        ]

    def found(masks, environ=(), cpuset=None, memory=None, **options):
        return problems(node, ranks(masks, environ, **options), dict(environ), None, cpuset, memory)

    domain = [[cpu for core in d.cores for cpu in core] for d in node.domains]
    assert found([domain[1], domain[2]]) == []
    [small] = found([domain[0]])
    assert small.startswith("NUMA domain 0 has 8 GiB where another has 64")
    assert found([domain[1]] * 2) == []
    [threads] = found([domain[1]], {"OMP_NUM_THREADS": "28"})
    assert threads.startswith(
        "rank 0 computes with 28 threads on 14 cores, where they wait for each other"
    )
    [shared] = found([[14], [126]])  # two hardware threads of a core
    assert shared.startswith("ranks 0-1 compute with 2 threads on 1 core,")
    spanning, *_ = found([node.cpus] * 3)
    assert spanning.startswith("ranks 0-2 compute on several NUMA domains") and spanning.endswith(
        "and has 3"
    )
    assert "mpiexec -n 8 on one node; srun --ntasks-per-node 8 --cpus-per-task 28" in spanning
    [unpinned] = found([domain[1] + domain[2]] * 2, affinity="none")
    assert "pass --thread-affinity pin" in unpinned
    [idle] = found([[14], [15]], cpuset=set(node.cpus))
    assert idle.startswith(
        "the masks of this node's ranks hold 2 of the 112 cores that the job may use"
    )
    [remote] = found([domain[1], domain[2]], memory={1})
    assert remote.startswith("the job may not use the memory of NUMA domain 2")
    [much] = found([[cpu] for cpu in range(14, 22)])
    assert much.startswith("the ranks of NUMA domain 1 need 72 GiB and it has 64")
    line = mapping(node, ranks([[cpu] for cpu in range(14, 26)]))
    assert (
        line.endswith("; ... rank 11: 1 thread on core 25 (domain 1), not pinned")
        and line.count("rank ") == 8
    )


def test_the_set_of_cpus_in_the_kernels_form():
    assert (
        parse_list("0-2,8\n") == [0, 1, 2, 8]
        and parse_list("") == []
        and format_list([8, 1, 0, 2]) == "0-2,8"
    )


def test_the_saved_tree_of_this_machine_is_read_as_the_machine(tmp_path):
    subprocess.run(["bash", "-c", topology.SAVE.replace("DIR", str(tmp_path))], check=True)
    assert Node.read(tmp_path) == Node.read()
    with pytest.raises(
        ValueError,
        match="--sys-root .*none: there is no CPU in .*: save a machine's tree there with `cp --par",
    ):
        Node.read(tmp_path / "none")


def test_a_window_is_first_touched_by_the_rank_that_writes_it():
    pages = mmap.mmap(-1, 2 * shared_node.SEGMENT_BYTES)  # shared memory of two ranks
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    window = SimpleNamespace(Shared_query=lambda rank: (SimpleNamespace(address=address), 1))
    mpi = SimpleNamespace(
        Win=SimpleNamespace(Allocate_shared=lambda *arguments: window), INFO_NULL=None
    )
    comm = SimpleNamespace(Get_size=lambda: 2, Get_rank=lambda: 1, Barrier=lambda: None)
    before = usage().shared
    held = shared_node._Window(mpi, comm)
    assert usage().shared - before == shared_node.SEGMENT_BYTES
    for half in held.halves:
        half[1] = 1
    assert usage().shared - before == shared_node.SEGMENT_BYTES, "the segment of rank 1"
    held.flags[0][0] = 1
    assert usage().shared - before == shared_node.SEGMENT_BYTES + mmap.PAGESIZE, (
        "and no page of rank 0's"
    )


def test_the_thread_that_calls_mpi_stays_near_the_ranks_cores(tmp_path):
    cpu = min(os.sched_getaffinity(0))
    found = []

    def work():
        runtime.apply_to_communication(CpuBinding(1, (cpu,)), Node.read())
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [set(Node.read().core_of(cpu))]


@pytest.mark.parametrize(
    "groups, files, quota",
    [
        (
            "0::/job/step\n",
            {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "350000 100000\n"},
            3.5,
        ),
        (
            "0::/job/step\n",
            {"job/step/cpu.max": "200000 100000\n", "job/cpu.max": "350000 100000\n"},
            2.0,
        ),
        ("0::/elsewhere/on/the/host\n", {"cpu.max": "400000 100000\n"}, 4.0),
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, None),
        (
            "5:cpu,cpuacct:/job\n",
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            "5:cpuacct,cpu:/job\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "800000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            8.0,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        (
            "3:cpuset:/job\n",
            {"cpuset/job/cpu.cfs_quota_us": "1\n", "cpuset/job/cpu.cfs_period_us": "1\n"},
            None,
        ),
    ],
)
def test_cpu_quota_of_both_cgroup_versions(tmp_path, monkeypatch, groups, files, quota):
    _write(tmp_path / "proc_cgroup", groups)
    for name, text in files.items():
        _write(tmp_path / "sys" / name, text)
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "sys")
    monkeypatch.setattr(cgroup, "PROC", tmp_path / "proc_cgroup")
    assert cgroup.cpu_quota() == quota
    monkeypatch.setattr(cgroup, "PROC", tmp_path / "absent")
    assert cgroup.cpu_quota() is None


@pytest.fixture
def fugaku(tmp_path):
    """Return a node with two assistant cores (NUMA 0 and 1) and 48 compute cores (12 to 59, NUMA 4 to 7)."""
    return Node.read(tree(tmp_path, **SERVERS["A64FX 4 x 12"][0]))


ALL = [0, 1, *range(12, 60)]


def test_ranks_of_a_node_and_communication_get_its_cores(fugaku):
    assert fugaku.cores(ALL) == list(range(12, 60)) and fugaku.cores(range(12, 24)) == list(
        range(12, 24)
    )
    assert fugaku.cores([0, 1]) == [0, 1], "whoever is bound to assistant cores stays there"
    places = [place(fugaku, [ALL] * 4, rank, {}) for rank in range(4)]
    assert [p.cpus for p in places] == [tuple(range(12 + 12 * i, 24 + 12 * i)) for i in range(4)]
    assert {p.threads for p in places} == {12}
    assert place(fugaku, [ALL], 0, {}) == CpuBinding(48, tuple(range(12, 60)))
    masks = [list(range(12 + 12 * i, 24 + 12 * i)) for i in range(4)]
    assert place(fugaku, masks, 2, {}) == CpuBinding(12, tuple(masks[2]))
    assert place(fugaku, [masks[0]] * 2, 1, {}, None, "pin").cpus == tuple(range(18, 24))
    assert place(fugaku, [ALL], 0, {}, reserve=True) == CpuBinding(47, tuple(range(12, 59)), 59)
    assert place(fugaku, [ALL] * 2, 1, {"OMP_NUM_THREADS": "23"}) == CpuBinding(
        23, tuple(range(36, 59)), 59
    )
    assert place(fugaku, [ALL], 0, {"OMP_NUM_THREADS": "48"}, reserve=True).communication is None
    assert place(fugaku, [ALL] * 4, 3, {}, reserve=True) == CpuBinding(
        12, tuple(range(48, 60))
    )  # too few
    part = [*range(12, 24), 30, 31]
    assert place(fugaku, [part], 0, {}).cpus == tuple(part), (
        "a small part of a domain computes as well"
    )


@pytest.mark.parametrize(
    "environ, affinity, masks, why",
    [
        ({}, "none", [ALL] * 2, "not pinned"),
        ({"OMP_PROC_BIND": "close"}, "auto", [ALL] * 2, "placed by OMP_PROC_BIND"),
        ({"OMP_NUM_THREADS": "25"}, "pin", [ALL] * 2, ""),
        ({}, "pin", [ALL, list(range(12, 24))], ""),  # overlapping, not equal
        ({}, "auto", [list(range(12, 24))], "not pinned"),  # one NUMA node: nothing to be near to
    ],
)
def test_who_is_not_pinned(fugaku, environ, affinity, masks, why):
    binding = place(fugaku, masks, 0, environ, None, affinity)
    assert binding.cpus == () and binding.why == why


CHILD = """
import os, sys, torch
from fugaku_megatron.host import kernels, runtime
def tasks(): return len(os.listdir("/proc/self/task"))
cpus = tuple(int(c) for c in sys.argv[1].split(","))
torch.set_num_threads(len(cpus))
torch.ones(1 << 22).mul_(2)
before = tasks()
runtime.apply_binding(runtime.CpuBinding(len(cpus), cpus), True)
print(kernels.thread_cpus())
torch.ones(1 << 22).mul_(2)
tiny = torch.full((1 << 16,), 1e-38)
print(int((tiny * 0.1).count_nonzero()))
print(tasks() - before)
"""


def _child(cpus):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    command = [sys.executable, "-c", CHILD, ",".join(map(str, cpus))]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.system
def test_every_thread_is_on_its_core_flushes_denormals_and_none_is_left_over():
    cpus = sorted(os.sched_getaffinity(0), reverse=True)[:2]
    places, denormals, threads = _child(cpus)
    assert places == str(cpus)
    assert denormals == "0"
    assert int(threads) == 0, "torch and the kernels share one pool"


START = """
import os, sys
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.host import runtime
os.sched_setaffinity(0, {int(sys.argv[1])})
print(runtime.init(SoloComm(), runtime.ProcessSettings(allocator="stock")))
"""


@pytest.mark.system
@pytest.mark.skipif(len(Node.read().cores(os.sched_getaffinity(0))) < 2, reason="needs two cores")
def test_a_mask_of_one_cpu_is_respected_and_reported():
    cpu = max(os.sched_getaffinity(0))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "SLURM_"))}
    command = [sys.executable, "-c", START, str(cpu)]
    first, cores, *notes = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "1 ranks x 1 threads" in first
    assert (
        cores.startswith(f"cores: {Node.read().describe()}; rank 0: 1 thread ")
        and f" core {cpu} (domain " in cores
    )
    if topology.cpuset() and len(Node.read().cores(topology.cpuset())) > 1:
        assert notes[0].startswith("note: the masks of this node's ranks hold 1 of the ")
