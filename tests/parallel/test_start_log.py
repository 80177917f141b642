"""What a run says before its first iteration."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import memory, run_schedule
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.training import memory_watch
from fugaku_megatron.training.dry_run import plan_stage
from tests.helpers import small_run
from tests.threads import ThreadWorld


def test_a_ranks_memory_is_the_dry_runs():
    run = make_run("124m", {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2, "global_batch_size": 8})
    layout = Layout.from_run(run, 8)
    for rank in range(8):
        plan = plan_stage(run, layout, rank // 2, run_schedule.of_run(run, layout.microbatches(run, 8)))
        assert memory_watch.rank_bytes(run, layout, rank) == plan.memory.total + memory_watch.PROCESS_BYTES


def test_a_model_that_does_not_fit_is_refused_with_both_figures():
    run = make_run("30b", {"global_batch_size": 1})
    with pytest.raises(ValueError) as error:
        memory_watch.check_memory(run, Layout.from_run(run, 1), SoloComm())
    needed, has = map(float, re.findall(r"([\d.]+) GiB", str(error.value)))
    assert needed > 400 and has == pytest.approx(memory_watch.node_bytes() / 2**30, abs=0.1)
    assert "--dry-run" in str(error.value) and "--checkpoint-activations" in str(error.value) and "\n" not in str(error.value)


def test_the_ranks_of_a_node_are_added_up(monkeypatch):
    run = small_run(pipeline_model_parallel_size=2)
    layout = Layout.from_run(run, 2)
    both = sum(memory_watch.rank_bytes(run, layout, rank) for rank in range(2))
    monkeypatch.setattr(memory_watch, "node_bytes", lambda: both)
    lines = ThreadWorld(2).run(lambda world: memory_watch.check_memory(run, layout, world))
    assert lines[0] == lines[1] and "2 ranks of this node" in lines[0] and "(model)" in lines[0]
    monkeypatch.setattr(memory_watch, "node_bytes", lambda: both // 2)
    with pytest.raises(ValueError, match="for its 2 ranks"):
        ThreadWorld(2).run(lambda world: memory_watch.check_memory(run, layout, world))


def test_the_index_of_the_data_counts_once_on_a_node(monkeypatch):
    mock, real = small_run(), small_run(mock_data=False, data_path=("corpus",), train_iters=10**6)
    layout, has = Layout.from_run(mock, 2), 2 * memory_watch.rank_bytes(mock, Layout.from_run(mock, 2), 0)
    monkeypatch.setattr(memory_watch, "BEYOND_DOUBT", 1.0)
    for room, run, fits in ((0, mock, True), (0, real, False), (memory.INDEX_MAX_BYTES, real, True)):
        monkeypatch.setattr(memory_watch, "node_bytes", lambda room=room: has + room)
        if fits:
            ThreadWorld(2).run(lambda world, run=run: memory_watch.check_memory(run, layout, world))
        else:
            with pytest.raises(ValueError, match="for its 2 ranks"):
                ThreadWorld(2).run(lambda world, run=run: memory_watch.check_memory(run, layout, world))
    assert memory.data_index_bytes(real, 1000) == 16_000 and memory.data_index_bytes(mock, 1000) == 0


def test_the_time_of_an_iteration_is_estimated_from_a_measured_peak(monkeypatch):
    run = small_run()
    monkeypatch.setattr(memory_watch, "fma_peak_gflops", lambda rounds: 1e-2)  # a slow machine: 10 MFLOP/s
    line = memory_watch.iteration_line(run, Layout.from_run(run, 1))
    low, high = map(float, re.search(r"about ([\d.]+) s to ([\d.]+) s", line).groups())
    assert high / low == pytest.approx(0.8 / 0.3, rel=0.1)


class Read:
    """A training set that is read several times."""

    num_epochs = 5012

    def __len__(self) -> int:
        return 97_655_808


def test_passes_over_the_data():
    assert memory_watch.data_line(Read()) == "data: 97,655,808 samples of training read the data 5,012 times (epochs)"
    assert memory_watch.data_line(MockDataset(8, 4, 2, 1)) is None and memory_watch.data_line(None) is None
    assert memory_watch.validation_line(MockDataset(8, 4, 2, 1)) is None and memory_watch.validation_line(None) is None
    Read.num_epochs = np.int64(1)
    assert memory_watch.data_line(Read()).endswith("at most once")
