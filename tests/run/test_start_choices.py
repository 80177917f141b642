"""Choices of a run at its start by the planner's models: as few recomputed layers as fit, and the fastest schedule that fits."""

import subprocess
import sys
from dataclasses import replace
from itertools import repeat

import pytest
import torch

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs import run_schedule
from fugaku_megatron.costs.attention import attention_workspace_bytes
from fugaku_megatron.costs.memory import stage_memory
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.observe.resources import memory_watch as memory_module
from fugaku_megatron.pipeline.schedule_names import AUTO
from fugaku_megatron.planner import peak_memory, search
from fugaku_megatron.planner.system import System
from fugaku_megatron.run import limits
from fugaku_megatron.run.dry_run import report
from fugaku_megatron.run.limits import MachineLimits
from tests.checks.allocations import MICROBATCHES, PIPELINE, STAGES
from tests.helpers import small_run
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

SCHEDULES = {
    "1f1b": {},
    "interleaved": {"num_virtual_stages_per_pipeline_rank": 2},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zbv": {"pipeline_schedule": "zbv"},
}


def auto(name: str) -> tuple[RunConfig, Layout]:
    run = small_run(**PIPELINE, **SCHEDULES[name], recompute_auto=True)
    return run, Layout.from_run(run, STAGES)


def totals(run: RunConfig, layout: Layout) -> list[int]:
    """Return a rank's bytes in each stage."""
    lists = run_schedule.build_schedule(run, MICROBATCHES)
    return [
        stage_memory(run, layout, stage, lists.in_flight(stage)).total for stage in range(STAGES)
    ]


def settled(run: RunConfig, layout: Layout, limit: float) -> RunConfig:
    return run_schedule.with_recompute(
        run, layout, limit, run_schedule.build_schedule(run, MICROBATCHES).in_flight
    )


def all_again(run: RunConfig) -> RunConfig:
    stages = run_schedule.build_schedule(run, MICROBATCHES).placement.virtual_stages
    training = replace(
        run.training,
        recompute_auto=False,
        recompute_granularity="full",
        recompute_part_layers=tuple(repeat(16, stages)),
    )
    return replace(run, training=training)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_as_few_layers_as_fit(name, share):
    run, layout = auto(name)
    none = totals(run, layout)
    least = [min(pair) for pair in zip(none, totals(all_again(run), layout))]
    limit = max(least) + share * (max(none) - max(least))
    chosen = settled(run, layout, limit)
    assert max(totals(chosen, layout)) <= limit and not chosen.training.recompute_auto
    for stage in range(STAGES):
        again = run_schedule.recomputed_layers(chosen, stage)
        held = run_schedule.build_schedule(run, MICROBATCHES).in_flight(stage)
        assert (none[stage] <= limit) == (not any(again)), "a stage that fits recomputes nothing"
        if sum(again) > 1:
            parts = list(chosen.training.recompute_part_layers)
            for chunk, number in enumerate(
                run_schedule.spread(sum(again) - 1, [4 // len(again)] * len(again), held)
            ):
                parts[
                    run_schedule.build_schedule(run, MICROBATCHES).placement.virtual_stage(
                        stage, chunk
                    )
                ] = number
            fewer = replace(
                chosen, training=replace(chosen.training, recompute_part_layers=tuple(parts))
            )
            assert totals(fewer, layout)[stage] > limit, "one layer less does not fit"


def test_early_stages_recompute_and_late_ones_need_not():
    run, layout = auto("1f1b")
    limit = totals(run, layout)[2] + 1
    numbers = settled(run, layout, limit).training.recompute_part_layers
    assert numbers[0] >= numbers[1] > 0 == numbers[2] == numbers[3]
    assert settled(run, layout, 1e12).training.recompute_granularity is None
    assert settled(run, layout, 0).training.recompute_part_layers == (4, 4, 4, 4), (
        "no choice is enough"
    )


def test_chunks_that_hold_most_come_first():
    run, layout = auto("interleaved")
    limit = max(totals(run, layout)) - 1
    numbers = settled(run, layout, limit).training.recompute_part_layers
    assert numbers[0] > 0 and not any(numbers[STAGES:]), (
        "the first chunk of a stage is held longest"
    )


def test_the_dry_run_prints_the_choice():
    run = auto("1f1b")[0]
    run = replace(run, training=replace(run.training, memory_per_rank=258))
    text = report(run, STAGES)
    assert (
        "recompute: chosen for 8 MiB a rank (model): of the layers of each stage, 0: 3; 1: 3; 2: 2; 3: 0"
        in text
    )
    rows = [line.split("|") for line in text.splitlines() if line.count("|") > 5]
    assert [int(row[4]) for row in rows[1:]] == [3, 3, 2, 0] and all(
        int(row[-1].split()[0]) <= 8 for row in rows[1:]
    )


def test_all_ranks_choose_for_the_fullest_node(monkeypatch):
    run, layout = auto("1f1b")
    lines = ThreadWorld(4).run(lambda world: MachineLimits(world).tensor_bytes(run, layout))
    fixed = memory_module.PROCESS_BYTES + attention_workspace_bytes(run, torch.get_num_threads())
    assert lines == [int(limits.FIT * memory_module.node_bytes()) // 4 - fixed] * 4
    plans = ThreadWorld(4).run(lambda world: MachineLimits(world).resolve(Plan.of(run, world.size)))
    assert all(plan == plans[0] for plan in plans) and "none" in plans[0].choices[0]


# The schedule -----------------------------------------------------------------------------------------------------------------

SYSTEM = System.from_names("a64fx", "fugaku_megatron", 1152, 1)


def medium(**changes) -> tuple[RunConfig, Layout]:
    sizes = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 8,
        "micro_batch_size": 1,
        "global_batch_size": 36 * 7,
    }
    run = make_run(
        "13b", {**sizes, "zero_stage": 1, "vocab_size": 50257, "pipeline_schedule": AUTO, **changes}
    )
    return run, Layout.from_run(run, 1152)


@pytest.mark.parametrize("auto", [False, True])
def test_it_is_the_planners_schedule(auto):
    run, layout = medium(recompute_auto=auto)
    chosen, lines = search.resolve(run, layout, SYSTEM)
    held = frozenset(
        {
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "micro_batch_size",
            "ranks_per_node",
            "zero_stage",
            "sequence_parallel",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "pipeline_schedule",
            "recompute_auto",
        }
    )
    plans = search.search(run, SYSTEM, held).plans
    room = peak_memory.tensor_room(run, layout, SYSTEM)
    found = [c for c in search.scheduled(run, layout, SYSTEM, room) if c.fits]
    assert [c.seconds for c in found] == pytest.approx([plan.seconds for plan in plans])
    assert chosen == found[0].run == plans[0].run and not chosen.training.recompute_auto
    assert f"schedule: {found[0].name}, {plans[0].seconds:.3g} s an iteration; " in lines[
        0
    ] and lines[0].endswith("(model, a64fx)")
    assert len(lines) == 1 + auto


def test_what_does_not_fit_is_not_taken():
    run, layout = medium()
    room = peak_memory.tensor_room(run, layout, SYSTEM)
    found = search.scheduled(run, layout, SYSTEM, room)
    limits = [
        peak_memory.peak_mib(
            c.run,
            layout,
            SYSTEM,
        )
        for c in found
    ]
    tight = replace(run, training=replace(run.training, memory_per_rank=int(min(limits)) + 1))
    chosen, lines = search.resolve(tight, layout, SYSTEM)
    assert chosen.parallel.schedule == "1f1b" and f"no memory for {found[0].name}, " in lines[0]


def test_every_rank_and_the_dry_run_choose_the_same():
    run = small_run(
        num_layers=4, pipeline_model_parallel_size=2, pipeline_schedule=AUTO, recompute_auto=True
    )
    plans = ThreadWorld(4).run(lambda world: MachineLimits(world).resolve(Plan.of(run, world.size)))
    assert all(plan == plans[0] for plan in plans)
    assert plans[0].config.parallel.pipeline_schedule != AUTO
    assert plans[0].choices[0] in report(run, 4)


def test_one_stage_has_nothing_to_choose():
    run = small_run(pipeline_schedule=AUTO)
    assert MachineLimits().resolve(Plan.of(run, 1)) == Plan(run, Layout.from_run(run, 1))
    assert "schedule 1f1b" in report(run, 1)


def test_more_memory_is_used_where_there_are_micro_batches_for_it():
    assert search.pendings("zbv", 4, 4) == search.pendings("1f1b", 2, 8) == (None,)
    assert search.pendings("zbv", 5, 6) == (None, 8, 10)
    run, layout = medium(global_batch_size=36 * 24)
    chosen, lines = search.resolve(run, layout, SYSTEM)
    assert (
        best := chosen.parallel
    ).schedule == "zbv" and f"zbv holding {best.zero_bubble_max_pending_backward} " in lines[0]


def test_a_run_that_names_its_schedule_does_not_load_the_performance_model():
    """It takes time at the start of every rank, and only --pipeline-schedule auto asks it for anything."""
    program = """
import sys
import fugaku_megatron.run.pretrain
from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.run.limits import MachineLimits
from fugaku_megatron.costs.plan import Plan
run = make_run("124m", {"pipeline_model_parallel_size": 2, "recompute_auto": True, "memory_per_rank": 4000, "train_iters": 1})
print(MachineLimits().resolve(Plan.of(run, 2)).choices[0], [name for name in sys.modules if name.startswith("fugaku_megatron.planner")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("recompute: chosen for ") and done.stdout.endswith(" []\n")


@pytest.mark.parametrize(
    ("given", "hosts", "documents", "ways"),
    [
        (None, "aabb", False, None),
        (None, "abab", False, ("p2p",)),
        (None, "aaab", False, ("p2p",)),
        (None, "abab", True, None),
        (("a2a",), "abab", False, ("a2a",)),
        (("a2a+p2p", "a2a"), "abab", False, ("p2p", "a2a")),
    ],
)
def test_keys_are_passed_between_nodes(given, hosts, documents, ways):
    """The default, if ranks that share a sequence are on different nodes, and no documents divide the work."""
    run = small_run(
        num_layers=2,
        num_attention_heads=8,
        reset_attention_mask=documents,
        context_parallel_size=2,
        cp_comm_type=given,
    )

    def resolved(world):
        limits = MachineLimits(world, find_nodes(world, hosts[world.rank]))
        return limits.resolve(Plan.of(run, 4)).config.parallel.cp_comm_type

    assert ThreadWorld(4).run(resolved) == [ways] * 4
