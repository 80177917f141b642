"""The step model: its breakdown adds up, its monotonies are those of the machine, rows of the tables go through it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.recipes import gpt_30b, gpt_124m
from fugaku_megatron.config.run_config import ParallelConfig, TrainingConfig
from fugaku_megatron.perf.model import System, outside, predict, step
from fugaku_megatron.perf.software import fitted
from fugaku_megatron.reproduction.rows import load, predict_row

AC = TrainingConfig(recompute_granularity="full")
RUN_30B = replace(gpt_30b(), training=AC, parallel=ParallelConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=48))
RUN_124M = replace(gpt_124m(), training=AC)


@pytest.mark.parametrize("run, nodes", [(RUN_30B, 384), (RUN_124M, 1), (RUN_124M, 64)])
def test_the_breakdown_adds_up(run, nodes):
    made = predict(run, System.from_names("a64fx", "torch1.10", nodes))
    assert sum(made.breakdown.values()) == pytest.approx(made.seconds)
    assert made.lower < made.seconds < made.upper and min(made.breakdown.values()) >= 0


def test_the_bubble_is_near_the_textbooks():
    assert predict(RUN_30B, System.from_names("a64fx", "torch1.10", 6144)).bubble_fraction == pytest.approx(47 / 95, abs=0.15)


def seconds(software: str, nodes: int = 1, ghz: float | None = None, run=RUN_124M) -> float:
    return predict(run, System.from_names("a64fx", software, nodes, ghz=ghz), with_band=False).seconds


def test_what_must_be_faster_is():
    assert seconds("fugaku_megatron") < seconds("torch1.10+tcmalloc") < seconds("torch1.10") < seconds("torch1.7")
    assert seconds("torch1.10", ghz=2.2) == pytest.approx(seconds("torch1.10", ghz=2.0) / 1.10, rel=1e-3)
    assert seconds("torch1.10", run=gpt_124m()) < seconds("torch1.10")


def test_two_nodes_without_tcmalloc_cost_more_per_sample():
    assert 2 * seconds("torch1.10", nodes=2) / seconds("torch1.10") > 1.15
    assert 2 * seconds("torch1.10+tcmalloc", nodes=2) / seconds("torch1.10+tcmalloc") < 1.02


def test_without_a_cause_it_takes_no_time():
    system, layout = System.from_names("a64fx", "torch1.10", 192), Layout(192, 4, 48, 1)
    values = fitted("a64fx").values
    whole, less = (step(RUN_30B, layout, system, values, without=cause) for cause in ("", "tensor_parallel"))
    assert less.slowest.tensor_parallel == 0 < whole.slowest.tensor_parallel and less.seconds < whole.seconds


@pytest.mark.parametrize("row", [r for r in load() if r.problem() is None and r.line % 7 == 0],
                         ids=lambda r: f"{r.table.id}-{r.line}")
def test_rows_of_the_tables_go_through(row):
    made = predict_row(row)
    assert made.seconds > 0 and made.memory_mib_max > 0


def test_an_impossible_row_says_why():
    row = next(r for r in load() if r.status == "impossible")
    with pytest.raises(ValueError, match="= 128 ranks, but the row has 64"):
        predict_row(row)


def test_outside_the_fitted_range_is_said():
    assert outside({"nodes": (1, 64)}, {"nodes": 128}) == ["nodes 128 is outside the fitted 1 to 64"]
    large = predict(RUN_30B, System.from_names("a64fx", "torch1.10", 12288), with_band=False)
    assert any("nodes 12288" in w for w in large.warnings)
    carried_over = predict(RUN_124M, System.from_names("fx700", "fugaku_megatron", 1), with_band=False)
    assert any("never measured on fx700" in w for w in carried_over.warnings)
    assert any("not fitted" in w for w in carried_over.warnings)


def test_numbers_that_no_node_has_are_refused():
    with pytest.raises(ValueError, match="--nodes is 0"):
        System.from_names("a64fx", "fugaku_megatron", 0)
    with pytest.raises(ValueError, match="--ranks-per-node is 9: pass 1 to 8"):
        System.from_names("a100", "megatron-a100", 1, 9)
