"""--pipeline-schedule auto: the planner's schedule, the same on every rank and in a dry run, and within memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.perf import memory, search
from fugaku_megatron.perf.model import System
from fugaku_megatron.pipeline.parts import AUTO
from fugaku_megatron.training import start_choices
from fugaku_megatron.training.dry_run import report
from tests.helpers import small_run, train
from tests.threads import ThreadWorld

SYSTEM = System.from_names("a64fx", "fugaku_megatron", 1152, 1)


def medium(**changes) -> tuple[RunConfig, Layout]:
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8, "micro_batch_size": 1, "global_batch_size": 36 * 7}
    run = make_run("13b", {**sizes, "zero_stage": 1, "vocab_size": 50257, "pipeline_schedule": AUTO, **changes})
    return run, Layout.from_run(run, 1152)


@pytest.mark.parametrize("auto", [False, True])
def test_it_is_the_planners_schedule(auto):
    run, layout = medium(recompute_auto=auto)
    chosen, lines = search.settled(run, layout, SYSTEM)
    held = frozenset({"tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "ranks_per_node",
                      "zero_stage", "sequence_parallel", "overlap_grad_reduce", "overlap_param_gather",
                      "pipeline_schedule", "recompute_auto"})
    plans = search.search(run, SYSTEM, held).plans
    room = memory.tensor_room(run, layout, SYSTEM.machine, SYSTEM.software, SYSTEM.nodes)
    found = [c for c in search.scheduled(run, layout, SYSTEM, room) if c.fits]
    assert [c.seconds for c in found] == pytest.approx([plan.seconds for plan in plans])
    assert chosen == found[0].run == plans[0].run and not chosen.training.recompute_auto
    assert f"schedule: {found[0].name}, {plans[0].seconds:.3g} s an iteration; " in lines[0] and lines[0].endswith("(model, a64fx)")
    assert len(lines) == 1 + auto


def test_what_does_not_fit_is_not_taken():
    run, layout = medium()
    room = memory.tensor_room(run, layout, SYSTEM.machine, SYSTEM.software, SYSTEM.nodes)
    found = search.scheduled(run, layout, SYSTEM, room)
    limits = [memory.peak_mib(c.run, layout, SYSTEM.software, SYSTEM.nodes, SYSTEM.software.memory(SYSTEM.machine)) for c in found]
    tight = replace(run, training=replace(run.training, memory_per_rank=int(min(limits)) + 1))
    chosen, lines = search.settled(tight, layout, SYSTEM)
    assert chosen.parallel.schedule == "1f1b" and f"no memory for {found[0].name}, " in lines[0]


def test_every_rank_and_the_dry_run_choose_the_same():
    run = small_run(num_layers=4, pipeline_model_parallel_size=2, pipeline_schedule=AUTO, recompute_auto=True)
    layout = Layout.from_run(run, 4)
    settled = ThreadWorld(4).run(lambda world: start_choices.settle(run, layout, world))
    assert all(pair == settled[0] for pair in settled)
    chosen, lines = settled[0]
    assert chosen.parallel.pipeline_schedule != AUTO and lines[0] in report(run, 4)
    losses = [ThreadWorld(2).run(lambda world, run=run: [r.loss for r in train(world, run, 3)])[0] for run in (
        chosen, small_run(num_layers=4, pipeline_model_parallel_size=2))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_one_stage_has_nothing_to_choose():
    run = small_run(pipeline_schedule=AUTO)
    assert start_choices.settle(run, Layout.from_run(run, 1)) == (run, []) and "schedule 1f1b" in report(run, 1)


def test_a_run_that_names_its_schedule_does_not_load_the_performance_model():
    """It takes time at the start of every rank, and only --pipeline-schedule auto asks it for anything."""
    program = """
import sys
import fugaku_megatron.training.pretrain
from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.training.start_choices import settle
run = make_run("124m", {"pipeline_model_parallel_size": 2, "recompute_auto": True, "memory_per_rank": 4000, "train_iters": 1})
print(settle(run, Layout.from_run(run, 2))[1][0], [name for name in sys.modules if name.startswith("fugaku_megatron.perf")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("recompute: chosen for ") and done.stdout.endswith(" []\n")


def test_chunks_are_not_given_beside_it():
    with pytest.raises(ValueError, match="rank 2 is for --pipeline-schedule interleaved and zb-h1, not auto"):
        small_run(pipeline_model_parallel_size=2, pipeline_schedule=AUTO, num_virtual_stages_per_pipeline_rank=2)
    with pytest.raises(ValueError, match="--zero-bubble-max-pending-backward 3 is for --pipeline-schedule zb-h1 and zbv, not auto"):
        small_run(pipeline_model_parallel_size=2, pipeline_schedule=AUTO, zero_bubble_max_pending_backward=3)


def test_more_memory_is_used_where_there_are_micro_batches_for_it():
    assert search.pendings("zbv", 4, 4) == search.pendings("1f1b", 2, 8) == (None,)
    assert search.pendings("zbv", 5, 6) == (None, 8, 10)
    run, layout = medium(global_batch_size=36 * 24)
    chosen, lines = search.settled(run, layout, SYSTEM)
    assert (best := chosen.parallel).schedule == "zbv" and f"zbv holding {best.zero_bubble_max_pending_backward} " in lines[0]
