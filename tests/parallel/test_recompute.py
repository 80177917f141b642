"""What --recompute-auto chooses: as few layers of each stage and chunk as fit, and the bits of a run that recomputes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs import run_schedule
from fugaku_megatron.costs.memory import stage_memory
from fugaku_megatron.training import memory_watch, start_choices
from fugaku_megatron.training.dry_run import report
from tests.helpers import make_trainer, small_run, train
from tests.threads import ThreadWorld

STAGES, MICROBATCHES = 4, 8
MODEL = {"num_layers": 16, "hidden_size": 64, "seq_length": 128, "max_position_embeddings": 128, "micro_batch_size": 2,
         "global_batch_size": 2 * MICROBATCHES, "pipeline_model_parallel_size": STAGES, "pipeline_split": "even"}
SCHEDULES = {"1f1b": {}, "interleaved": {"num_virtual_stages_per_pipeline_rank": 2}, "zb-h1": {"pipeline_schedule": "zb-h1"},
             "zbv": {"pipeline_schedule": "zbv"}}


def auto(name: str) -> tuple[RunConfig, Layout]:
    run = small_run(**MODEL, **SCHEDULES[name], recompute_auto=True)
    return run, Layout.from_run(run, STAGES)


def totals(run: RunConfig, layout: Layout) -> list[int]:
    """Bytes of a rank of each stage."""
    lists = run_schedule.of_run(run, MICROBATCHES)
    return [stage_memory(run, layout, stage, lists.held(stage)).total for stage in range(STAGES)]


def settled(run: RunConfig, layout: Layout, limit: float) -> RunConfig:
    return run_schedule.with_recompute(run, layout, limit, run_schedule.of_run(run, MICROBATCHES).held)


def all_again(run: RunConfig) -> RunConfig:
    training = replace(run.training, recompute_auto=False, recompute_granularity="full",
                       recompute_part_layers=(16,) * run_schedule.of_run(run, MICROBATCHES).placement.parts)
    return replace(run, training=training)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_as_few_layers_as_fit(name, share):
    run, layout = auto(name)
    none = totals(run, layout)
    least = [min(pair) for pair in zip(none, totals(all_again(run), layout))]
    limit = max(least) + share * (max(none) - max(least))
    chosen = settled(run, layout, limit)
    assert max(totals(chosen, layout)) <= limit and not chosen.training.recompute_auto
    for stage in range(STAGES):
        again, held = run_schedule.layers_again(chosen, stage), run_schedule.of_run(run, MICROBATCHES).held(stage)
        assert (none[stage] <= limit) == (not any(again)), "a stage that fits recomputes nothing"
        if sum(again) > 1:
            parts = list(chosen.training.recompute_part_layers)
            for chunk, number in enumerate(run_schedule.spread(sum(again) - 1, [4 // len(again)] * len(again), held)):
                parts[run_schedule.of_run(run, MICROBATCHES).placement.part(stage, chunk)] = number
            fewer = replace(chosen, training=replace(chosen.training, recompute_part_layers=tuple(parts)))
            assert totals(fewer, layout)[stage] > limit, "one layer less does not fit"


def test_early_stages_recompute_and_late_ones_need_not():
    run, layout = auto("1f1b")
    limit = totals(run, layout)[2] + 1
    numbers = settled(run, layout, limit).training.recompute_part_layers
    assert numbers[0] >= numbers[1] > 0 == numbers[2] == numbers[3]
    assert settled(run, layout, 1e12).training.recompute_granularity is None
    assert settled(run, layout, 0).training.recompute_part_layers == (4, 4, 4, 4), "no choice is enough"


def test_chunks_that_hold_most_come_first():
    run, layout = auto("interleaved")
    limit = max(totals(run, layout)) - 1
    numbers = settled(run, layout, limit).training.recompute_part_layers
    assert numbers[0] > 0 and not any(numbers[STAGES:]), "the first chunk of a stage is held longest"


def curve(world: Comm, changes: dict) -> list[tuple[float, float]]:
    run = small_run(num_layers=8, hidden_dropout=0.1, attention_dropout=0.2, pipeline_model_parallel_size=2, **changes)
    return [(result.loss, result.grad_norm) for result in train(world, run, 4)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_recomputed_changes_no_bit(name):
    parts = (3, 1) if name in ("1f1b", "zb-h1") else (2, 0, 1, 2)
    choices = ({}, {"recompute_granularity": "full", "recompute_part_layers": parts},
               {"recompute_granularity": "full", "recompute_part_layers": (9,) * len(parts)})
    curves = [ThreadWorld(2).run(curve, {**SCHEDULES[name], **choice}) for choice in choices]
    assert curves[0] == curves[1] == curves[2]


def test_a_run_resumes_with_another_choice_to_the_bit(tmp_path):
    def interrupted(world: Comm, before: tuple[int, ...], after: tuple[int, ...]) -> list[float]:
        losses = []
        for numbers, iterations in ((before, 2), (after, 2)):
            trainer = make_trainer(world, small_run(num_layers=8, pipeline_model_parallel_size=2, pipeline_schedule="zbv",
                                                    recompute_granularity="full", recompute_part_layers=numbers))
            if losses:
                trainer.load(str(tmp_path / str(before[0])))
            losses += [trainer.train_step().loss for _ in range(iterations)]
            trainer.save(str(tmp_path / str(before[0])))
            trainer.close()
        return losses

    one, other = (ThreadWorld(2).run(interrupted, *pair)[0] for pair in (((0,) * 4, (0,) * 4), ((2, 1, 0, 0), (0, 0, 1, 2))))
    assert one == other


def test_the_dry_run_prints_the_choice():
    run = auto("1f1b")[0]
    run = replace(run, training=replace(run.training, memory_per_rank=258))
    text = report(run, STAGES)
    assert "recompute: chosen for 8 MiB a rank (model): of the layers of each stage, 0: 3; 1: 3; 2: 2; 3: 0" in text
    rows = [line.split("|") for line in text.splitlines() if line.count("|") > 5]
    assert [int(row[4]) for row in rows[1:]] == [3, 3, 2, 0] and all(int(row[-1].split()[0]) <= 8 for row in rows[1:])


def test_all_ranks_choose_for_the_fullest_node(monkeypatch):
    run, layout = auto("1f1b")
    lines = ThreadWorld(4).run(lambda world: start_choices.room(run, layout, world))
    assert lines == [int(start_choices.FIT * memory_watch.node_bytes()) // 4 - memory_watch.PROCESS_BYTES] * 4
    chosen = ThreadWorld(4).run(lambda world: start_choices.settle(run, layout, world))
    assert all(pair == chosen[0] for pair in chosen) and "none" in chosen[0][1][0]


@pytest.mark.parametrize(("changes", "message"), [
    ({"recompute_auto": True, "recompute_granularity": "full"}, "--recompute-auto and --recompute-granularity full exclude"),
    ({"recompute_part_layers": (1, 0)}, "--recompute-part-layers 1 0 needs --recompute-granularity full, and it is None"),
    ({"recompute_part_layers": (1, -1), "recompute_granularity": "full"}, "--recompute-part-layers 1 -1: pass 0 or more"),
    ({"recompute_part_layers": (1, 1), "recompute_granularity": "full", "recompute_method": "block"}, "--recompute-method block"),
    ({"recompute_auto": True, "memory_per_rank": 0}, "--memory-per-rank is 0"),
    ({"recompute_part_layers": (1, 1, 1), "recompute_granularity": "full"}, "has 3 numbers .* makes 2 parts: pass 2"),
])
def test_mistakes(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        Layout.from_run(small_run(pipeline_model_parallel_size=2, **changes), 2)
    assert "\n" not in str(caught.value)
