"""Expected memory and time in a run's first lines; memory in the log, and its steady growth."""

import mmap
import random
import re
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.agreement import Nodes, find_nodes
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.costs import memory
from fugaku_megatron.costs.attention import attention_workspace_bytes
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.host.allocator import free_bytes, node_bytes, usage
from fugaku_megatron.observe.resources import memory_watch as memory_module
from fugaku_megatron.observe.resources.memory_watch import (
    FIRST_ITERATIONS,
    SPAN,
    MemoryWatch,
    steady_growth,
)
from fugaku_megatron.run import announce
from fugaku_megatron.run.dry_run import plan_stage
from tests.checks.control_group import make_control_group
from tests.helpers import small_run
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


def test_a_ranks_memory_is_the_dry_runs():
    run = make_run(
        "124m",
        {
            "pipeline_model_parallel_size": 4,
            "tensor_model_parallel_size": 2,
            "global_batch_size": 8,
        },
    )
    whole = Plan.of(run, 8)
    for rank in range(8):
        plan = plan_stage(whole, rank // 2)
        kernels = attention_workspace_bytes(
            run, torch.get_num_threads()
        )  # of threads that a dry run does not know
        assert (
            memory_module.rank_bytes(whole, rank)
            == plan.memory.total + kernels + memory_module.PROCESS_BYTES
        )


def test_a_model_that_does_not_fit_is_refused_with_both_figures():
    run = make_run("30b", {"global_batch_size": 1})
    with pytest.raises(ValueError) as error:
        memory_module.check_memory(Plan.of(run, 1), SoloComm())
    needed, has = map(float, re.findall(r"([\d.]+) GiB", str(error.value)))
    assert needed > 400 and has == pytest.approx(memory_module.node_bytes() / 2**30, abs=0.1)
    assert (
        "--dry-run" in str(error.value)
        and "--checkpoint-activations" in str(error.value)
        and "\n" not in str(error.value)
    )


def test_a_plan_computes_the_memory_of_a_stage_once(monkeypatch):
    """The allocator, the check and the dry run read one value."""
    stages = []
    stage_memory = memory.stage_memory

    def counted(run, layout, stage, *more):
        stages.append(stage)
        return stage_memory(run, layout, stage, *more)

    monkeypatch.setattr(memory, "stage_memory", counted)
    plan = Plan.of(small_run(pipeline_model_parallel_size=2), 2)
    for rank in (0, 1, 0):
        memory_module.rank_bytes(plan, rank)
    plan_stage(plan, 1)
    assert stages == [0, 1]


def test_the_ranks_of_a_node_are_added_up(monkeypatch):
    plan = Plan.of(small_run(pipeline_model_parallel_size=2), 2)
    both = sum(memory_module.rank_bytes(plan, rank) for rank in range(2))
    monkeypatch.setattr(memory_module, "node_bytes", lambda: both)
    lines = ThreadWorld(2).run(lambda world: memory_module.check_memory(plan, world))
    assert lines[0] == lines[1] and "2 ranks of this node" in lines[0] and "(model)" in lines[0]
    monkeypatch.setattr(memory_module, "node_bytes", lambda: both // 2)
    with pytest.raises(ValueError, match="for its 2 ranks"):
        ThreadWorld(2).run(lambda world: memory_module.check_memory(plan, world))


def test_the_time_of_an_iteration_is_estimated_from_a_measured_peak(monkeypatch):
    run = small_run()
    monkeypatch.setattr(announce, "fma_peak_gflops", lambda rounds: 1e-2)  # 10 MFLOP/s
    line = announce.iteration_line(Plan.of(run, 1))
    low, high = map(float, re.search(r"about ([\d.]+) s to ([\d.]+) s", line).groups())
    assert high / low == pytest.approx(0.8 / 0.3, rel=0.1)


def test_passes_over_the_data():
    class Read(MockDataset):
        num_epochs = 5012

        def __len__(self) -> int:
            return 97_655_808

    data = Read(8, 4, 2, 1)
    assert (
        announce.data_line(data)
        == "data: 97,655,808 samples of training read the data 5,012 times (epochs)"
    )
    assert announce.data_line(MockDataset(8, 4, 2, 1)) is None and announce.data_line(None) is None
    assert (
        announce.validation_line(MockDataset(8, 4, 2, 1)) is None
        and announce.validation_line(None) is None
    )
    data.num_epochs = np.int64(1)
    assert announce.data_line(data).endswith("at most once")


MIB = 2**20
BASE = 900 * MIB


def hold(size: int) -> mmap.mmap | None:
    """Map that many bytes from the system, independent of this process's allocator."""
    if not size:
        return None
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"1" * size)
    return block


def series(size, count: int = SPAN) -> list[tuple[int, int]]:
    return [(11 + i, BASE + int(size(i) * MIB)) for i in range(count)]


@pytest.mark.parametrize(("rate", "noise"), [(0.3, 0.0), (1.0, 3.0), (40.0, 1.0)])
def test_a_leak_is_told_with_its_rate(rate, noise):
    draw = random.Random(3)
    found = steady_growth(
        series(lambda i: rate * i + draw.gauss(0, noise * rate) + 200 * (draw.random() < 0.1))
    )
    assert found == pytest.approx(rate * MIB, rel=0.35)


def test_what_is_no_leak():
    draw = random.Random(4)
    assert steady_growth(series(lambda i: 0)) == 0
    assert steady_growth(series(lambda i: 0.1 * i)) == 0, "5 MiB in 50 iterations"
    for _ in range(50):
        assert steady_growth(series(lambda i: draw.gauss(0, 30))) == 0, "noise"
        step = draw.randrange(1, SPAN)
        assert (
            steady_growth(series(lambda i, step=step: 500 * (i >= step) + draw.gauss(0, 1))) == 0
        ), "a step"
        two = draw.sample(range(SPAN), 2)
        assert (
            steady_growth(
                series(lambda i, two=two: sum(200 * (i >= at) for at in two) + draw.gauss(0, 1))
            )
            == 0
        ), "two steps"
    assert steady_growth(series(lambda i: 100 * (i % 10))) == 0, "a saw"
    assert steady_growth(series(lambda i: 60 * (1 - 0.8**i))) == 0, "a start that settles"
    assert (
        steady_growth(series(lambda i: -3 * i)) == 0
        and steady_growth(series(lambda i: 3 * i, SPAN - 1)) == 0
    )
    assert steady_growth([(4 * i, BASE + 8 * MIB * i) for i in range(30)]) == 2 * MIB, (
        "readings may be further apart"
    )
    assert steady_growth([]) == 0 and steady_growth(series(lambda i: 9 * i)[::3]) == 0, (
        "too few readings"
    )


def test_usage(tmp_path):
    before = usage()
    assert before.resident == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    block = hold(40 * MIB)
    after = usage()
    assert 30 * MIB < after.held - before.held < 80 * MIB and after.held <= after.resident and block
    (tmp_path / "status").write_text(
        "Name:\tx\nVmRSS:\t   900 kB\nRssAnon:\t 300 kB\nRssFile:\t   400 kB\nRssShmem:\t   200 kB\n"
        "HugetlbPages:\t    2048 kB\n"
    )
    given = usage(tmp_path / "status")
    assert (given.resident, given.shared, given.held) == (2948 * 1024, 200 * 1024, 2548 * 1024)
    assert usage(tmp_path / "absent").resident > 0


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        (
            "0::/job/7",
            "job",
            {
                "memory.max": "5000000",
                "memory.current": "4000000",
                "memory.stat": "anon 1\ninactive_file 300000",
            },
        ),
        (
            "4:cpu,memory:/job/7",
            "memory/job/7",
            {
                "memory.limit_in_bytes": "5000000",
                "memory.usage_in_bytes": "4000000",
                "memory.stat": "inactive_file 9\ntotal_inactive_file 300000",
            },
        ),
    ],
)
def test_the_limit_of_a_job(tmp_path, monkeypatch, line, folder, files):
    machine = SimpleNamespace(available=10**9, total=2 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    make_control_group(monkeypatch, tmp_path, line, folder)
    assert free_bytes() == machine.available
    assert node_bytes() == machine.total
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text)
    assert free_bytes() == 1300000
    assert node_bytes() == 5000000
    (tmp_path / folder / next(iter(files))).write_text("max")
    assert free_bytes() == machine.available
    assert node_bytes() == machine.total


def run(
    world, leaks, iterations: int = FIRST_ITERATIONS + SPAN, nodes: Nodes | None = None
) -> list[tuple[int, str]]:
    """Return log lines if this rank keeps so many MiB in each iteration."""
    said = []
    kept = []
    watch = MemoryWatch(
        world, nodes or find_nodes(world), lambda iteration, line: said.append((iteration, line))
    )
    for iteration in range(1, iterations + 1):
        kept.append(hold(int(leaks[world.rank] * MIB)))
        watch.end(SimpleNamespace(seconds=30.0))
        if iteration % 20 == 0:
            values = watch.finish_interval(iteration)
            assert 0 <= values["shared_mib"] < values["resident_mib"]
    return said


@pytest.fixture
def every_iteration(monkeypatch):
    monkeypatch.setattr(memory_module, "READ_EVERY", 0.0)


def test_a_real_leak(every_iteration):
    assert run(SoloComm(), [0]) == []
    ((iteration, line),) = run(SoloComm(), [4])
    match = re.fullmatch(
        r"memory grows: rank 0 \(node \S+\) by (\S+) MiB per iteration over the last 50 or more; its node or job "
        r"has (\d+) MiB left, and its 1 ranks grow by (\S+) MiB per iteration: they last for (\S+) "
        r"(hours|minutes), which is (\d+) iterations",
        line,
    )
    assert iteration == FIRST_ITERATIONS + SPAN and match, line
    assert 3.5 < float(match[1]) < 4.5 and match[1] == match[3]
    assert int(match[6]) == pytest.approx(float(match[2]) / float(match[1]), rel=0.01)
    hours = float(match[4]) / (1 if match[5] == "hours" else 60)
    assert hours == pytest.approx(int(match[6]) * 30 / 3600, rel=0.05, abs=0.06)


def test_the_fastest_rank_is_named_and_its_node_counted(monkeypatch, every_iteration):
    rates = {0: 1.0, 1: 3.0, 2: 0.0}
    monkeypatch.setattr(memory_module, "free_bytes", lambda: 400 * MIB)
    monkeypatch.setattr(memory_module, "steady_growth", lambda readings: readings[0][1])
    monkeypatch.setattr(memory_module, "usage", lambda: None)

    def rank(world):
        said = []
        watch = MemoryWatch(
            world,
            find_nodes(world, "a" if world.rank < 2 else "b"),
            lambda iteration, line: said.append(line),
        )
        watch._readings.append((1, int(rates[world.rank] * MIB)))
        watch._seconds = 60.0
        for iteration in (100, 200):
            watch._tell(iteration, rates[world.rank] * MIB)
        monkeypatch.setattr(memory_module, "free_bytes", lambda: 190 * MIB)
        world.barrier()
        watch._tell(300, rates[world.rank] * MIB)
        return said

    for said in ThreadWorld(3).run(rank):
        assert len(said) == 2, "told again when half of the iterations are gone"
        assert (
            "rank 1 (node " in said[0]
            and "by 3.00 MiB per iteration" in said[0]
            and said[0].endswith(
                "400 MiB left, and its 2 ranks grow by 4.00 MiB per iteration: they last for 1.7 hours, which is 100 iterations"
            )
        )
        assert said[1].endswith("they last for 47.5 minutes, which is 48 iterations")
