"""The model costs the lists that the trainer walks, and the planner searches them with the layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_megatron.config import features
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.recipes import gpt_13b
from fugaku_megatron.config.run_config import ParallelConfig
from fugaku_megatron.perf import model, plan_text, search
from fugaku_megatron.perf.model import System
from fugaku_megatron.perf.software import with_schedule
from fugaku_megatron.pipeline.parts import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from fugaku_megatron.pipeline.timeline import walk

SYSTEM = System.from_names("a64fx", "fugaku_megatron", 13824, 1)
LAYOUT = Layout(13824, 6, 8, 288)
RUN = replace(gpt_13b(), parallel=ParallelConfig(tensor_model_parallel_size=6, pipeline_model_parallel_size=8, zero_stage=1))
KINDS = [("1f1b", 1), ("interleaved", 2), ("interleaved", 5), ("zb-h1", 1), ("zb-h1", 5), ("zbv", 2)]
HELD = frozenset({"tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "ranks_per_node",
                  "recompute_granularity", "zero_stage", "sequence_parallel"})


def stepped(name: str, chunks: int) -> model.Step:
    return model.step(with_schedule(RUN, name, chunks), LAYOUT, SYSTEM, SYSTEM.parameters)


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_the_pipeline_is_the_schedules_own_list(name, chunks):
    step = stepped(name, chunks)
    assert (step.schedule.name, step.schedule.placement.chunks, step.schedule.microbatches) == (name, chunks, 7)
    assert step.pipeline == pytest.approx(walk(step.schedule, step.costs), rel=1e-9)
    assert step.least_seconds <= step.seconds and stepped("1f1b", 1).least_seconds <= step.seconds * (1 + 1e-9)


def test_the_halves_of_a_backward_are_the_whole():
    whole, halves = stepped("1f1b", 1).costs.of, stepped("zb-h1", 1).costs.of
    for stage in range(8):
        assert halves[BACKWARD_INPUT][stage][0] + halves[BACKWARD_WEIGHT][stage][0] == pytest.approx(whole[BACKWARD][stage][0])
        assert halves[BACKWARD_WEIGHT][stage][0] > 0.1 * whole[BACKWARD][stage][0]


def test_chunks_and_split_backwards_shrink_the_bubble():
    bubbles = {kind: stepped(*kind).bubble_fraction for kind in KINDS}
    assert bubbles["1f1b", 1] > bubbles["interleaved", 2] > bubbles["interleaved", 5]
    assert bubbles["1f1b", 1] > bubbles["zb-h1", 1] > bubbles["zbv", 2] > bubbles["zb-h1", 5]
    assert bubbles["interleaved", 5] > bubbles["zb-h1", 5]


def found(held: frozenset[str] = HELD, run=RUN, system: System = SYSTEM) -> search.Search:
    return search.search(run, system, held)


def test_the_search_tries_every_schedule_that_fits_in_memory():
    plans = found().plans
    tried = {(p.run.parallel.schedule, p.run.parallel.num_virtual_stages_per_pipeline_rank) for p in plans}
    chunked = {*(("interleaved", v) for v in (2, 3, 4, 5)), *(("zb-h1", v) for v in (3, 4))}
    assert tried == {("1f1b", None), ("zb-h1", None), ("zbv", None)} | chunked
    assert plans[0].seconds == min(p.seconds for p in plans) and plans[0].run.parallel.schedule == "zb-h1"
    assert plan_text.schedule_name(plans[0].run) == f"zb-h1 {plans[0].run.parallel.num_virtual_stages_per_pipeline_rank}"


def test_a_schedule_of_the_command_line_is_kept():
    run = with_schedule(RUN, "zbv", 2)
    assert {p.run.parallel.schedule for p in found(HELD | {"pipeline_schedule"}, run).plans} == {"zbv"}
    assert {p.run.parallel.schedule for p in found(HELD | {"pipeline_schedule"}).plans} == {"1f1b"}


def test_without_the_features_there_is_1f1b_alone():
    code = SYSTEM.software.without(features.INTERLEAVED)
    assert "interleaved" not in {p.run.parallel.schedule for p in found(system=replace(SYSTEM, software=code)).plans}
    bare = replace(SYSTEM, software=code.without(features.ZERO_BUBBLE))
    assert {p.run.parallel.schedule for p in found(system=bare).plans} == {"1f1b"}
    assert bare.software.cut(with_schedule(RUN, "zbv", 2)).parallel.schedule == "1f1b"
