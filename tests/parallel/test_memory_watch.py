"""Memory in the log, and its steady growth."""

from __future__ import annotations

import mmap
import random
import re

import psutil
import pytest

from fugaku_megatron.comm.agreement import Nodes, find_nodes
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.host.allocator import free_bytes, node_bytes, usage
from fugaku_megatron.training import memory_watch
from fugaku_megatron.training.memory_watch import FIRST_ITERATIONS, SPAN, MemoryWatch, steady_growth
from tests.threads import ThreadWorld

MIB = 2**20
BASE = 900 * MIB


def hold(size: int) -> mmap.mmap | None:
    """That many bytes of the system's, whatever the allocator of this process keeps for later."""
    if not size:
        return None
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"1" * size)
    return block


def series(size, count: int = SPAN) -> list[tuple[int, int]]:
    return [(11 + i, BASE + int(size(i) * MIB)) for i in range(count)]


# The rule ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rate", [0.3, 1.0, 40.0])
@pytest.mark.parametrize("noise", [0.0, 1.0, 3.0])
def test_a_leak_is_told_with_its_rate(rate, noise):
    draw = random.Random(3)
    found = steady_growth(series(lambda i: rate * i + draw.gauss(0, noise * rate) + 200 * (draw.random() < 0.1)))
    assert found == pytest.approx(rate * MIB, rel=0.35)


def test_what_is_no_leak():
    draw = random.Random(4)
    assert steady_growth(series(lambda i: 0)) == 0
    assert steady_growth(series(lambda i: 0.1 * i)) == 0, "5 MiB in 50 iterations"
    for _ in range(200):
        assert steady_growth(series(lambda i: draw.gauss(0, 30))) == 0, "noise"
        step = draw.randrange(1, SPAN)
        assert steady_growth(series(lambda i, step=step: 500 * (i >= step) + draw.gauss(0, 1))) == 0, "a step"
        two = draw.sample(range(SPAN), 2)
        assert steady_growth(series(lambda i, two=two: sum(200 * (i >= at) for at in two) + draw.gauss(0, 1))) == 0, "two steps"
    assert steady_growth(series(lambda i: 100 * (i % 10))) == 0, "a saw"
    assert steady_growth(series(lambda i: 60 * (1 - 0.8**i))) == 0, "a start that settles"
    assert steady_growth(series(lambda i: -3 * i)) == 0 and steady_growth(series(lambda i: 3 * i, SPAN - 1)) == 0
    assert steady_growth([]) == 0 and steady_growth(series(lambda i: 9 * i)[::3]) == 0, "too few readings"


def test_readings_may_be_further_apart():
    assert steady_growth([(4 * i, BASE + 8 * MIB * i) for i in range(30)]) == 2 * MIB


# The system -------------------------------------------------------------------------------------------------------------------

def test_usage(tmp_path):
    before = usage()
    assert before.resident == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    block = hold(40 * MIB)
    after = usage()
    assert 30 * MIB < after.held - before.held < 80 * MIB and after.held <= after.resident and block
    (tmp_path / "status").write_text("Name:\tx\nVmRSS:\t   900 kB\nRssAnon:\t 300 kB\nRssFile:\t   400 kB\nRssShmem:\t   200 kB\n"
                                     "HugetlbPages:\t    2048 kB\n")
    given = usage(tmp_path / "status")
    assert (given.resident, given.shared, given.held) == (2948 * 1024, 200 * 1024, 2548 * 1024)
    assert usage(tmp_path / "absent").resident > 0


@pytest.mark.parametrize(("line", "folder", "files"), [
    ("0::/job/7", "job", {"memory.max": "5000000", "memory.current": "4000000", "memory.stat": "anon 1\ninactive_file 300000"}),
    ("4:cpu,memory:/job/7", "memory/job/7", {"memory.limit_in_bytes": "5000000", "memory.usage_in_bytes": "4000000",
                                             "memory.stat": "inactive_file 9\ntotal_inactive_file 300000"})])
def test_the_limit_of_a_job(tmp_path, line, folder, files):
    (tmp_path / "cgroup").write_text(line + "\n")
    (tmp_path / folder).mkdir(parents=True)
    assert free_bytes(tmp_path / "cgroup", tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert node_bytes(tmp_path / "cgroup", tmp_path) == psutil.virtual_memory().total
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text)
    assert free_bytes(tmp_path / "cgroup", tmp_path) == 1300000
    assert node_bytes(tmp_path / "cgroup", tmp_path) == 5000000
    (tmp_path / folder / next(iter(files))).write_text("max")
    assert free_bytes(tmp_path / "cgroup", tmp_path) > 1300000
    assert node_bytes(tmp_path / "cgroup", tmp_path) == psutil.virtual_memory().total


# Together ---------------------------------------------------------------------------------------------------------------------

def run(world, leaks, iterations: int = FIRST_ITERATIONS + SPAN, nodes: Nodes | None = None) -> list[tuple[int, str]]:
    """What is said by iterations in which this rank keeps so many MiB."""
    said, kept = [], []
    watch = MemoryWatch(world, nodes or find_nodes(world), lambda iteration, line: said.append((iteration, line)))
    for iteration in range(1, iterations + 1):
        kept.append(hold(int(leaks[world.rank] * MIB)))
        watch.read(iteration)
        if iteration % 20 == 0:
            resident, shared = watch.finish_interval(iteration, 30.0)
            assert 0 <= shared < resident
    return said


@pytest.fixture
def every_iteration(monkeypatch):
    monkeypatch.setattr(memory_watch, "READ_EVERY", 0.0)


def test_a_real_leak(every_iteration):
    (iteration, line), = run(SoloComm(), [4])
    match = re.fullmatch(r"memory grows: rank 0 \(node \S+\) by (\S+) MiB per iteration over the last 50 or more; its node or job "
                         r"has (\d+) MiB left, which last for the (\S+) MiB per iteration of its 1 ranks (\S+) (hours|minutes), "
                         r"(\d+) iterations", line)
    assert iteration == FIRST_ITERATIONS + SPAN and match, line
    assert 3.5 < float(match[1]) < 4.5 and match[1] == match[3]
    assert int(match[6]) == pytest.approx(float(match[2]) / float(match[1]), rel=0.01)
    hours = float(match[4]) / (1 if match[5] == "hours" else 60)
    assert hours == pytest.approx(int(match[6]) * 30 / 3600, rel=0.05, abs=0.06)


def test_no_leak(every_iteration):
    assert run(SoloComm(), [0]) == []


def test_the_fastest_rank_is_named_and_its_node_counted(monkeypatch, every_iteration):
    rates = {0: 1.0, 1: 3.0, 2: 0.0}
    monkeypatch.setattr(memory_watch, "free_bytes", lambda: 400 * MIB)
    monkeypatch.setattr(memory_watch, "steady_growth", lambda readings: readings[0][1])
    monkeypatch.setattr(memory_watch, "usage", lambda: None)

    def rank(world):
        said = []
        watch = MemoryWatch(world, find_nodes(world, "a" if world.rank < 2 else "b"), lambda iteration, line: said.append(line))
        watch._readings.append((1, int(rates[world.rank] * MIB)))
        for iteration in (100, 200):
            watch._tell(iteration, 60.0, rates[world.rank] * MIB)
        monkeypatch.setattr(memory_watch, "free_bytes", lambda: 190 * MIB)
        world.barrier()
        watch._tell(300, 60.0, rates[world.rank] * MIB)
        return said

    for said in ThreadWorld(3).run(rank):
        assert len(said) == 2, "told again when half of the iterations are gone"
        assert "rank 1 (node " in said[0] and "by 3.00 MiB per iteration" in said[0] and said[0].endswith(
            "400 MiB left, which last for the 4.00 MiB per iteration of its 2 ranks 1.7 hours, 100 iterations")
        assert said[1].endswith("of its 2 ranks 47.5 minutes, 48 iterations")
