"""Counts of a rank's work agree with accounting's FLOPs, whatever the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_megatron.config.layout import Layout, placement
from fugaku_megatron.config.recipes import gpt_30b, gpt_124m
from fugaku_megatron.config.run_config import ParallelConfig, RunConfig, TrainingConfig
from fugaku_megatron.costs import accounting, memory
from fugaku_megatron.perf import model, software, work

EAGER = software.load("torch1.10")


def flops(counted: work.Work) -> int:
    return sum(2 * p.m * p.n * p.k * p.count * p.times for p in counted.products)


def expected(run: RunConfig, recompute: str | None) -> float:
    """accounting's count; the whole square of attention is computed here, not half of it."""
    model_config = run.model
    square = model_config.num_layers * model_config.seq_length**2 * model_config.hidden_size
    if recompute == "full":
        return accounting.hardware_flops(run, 1)
    return accounting.model_flops(run, 1) + 6 * square + (4 * square if recompute == "selective" else 0)


def pieces_flops(pieces) -> int:
    return sum(flops(piece) * times for piece, times in pieces)


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("tp, pp, schedule", [(1, 1, None), (4, 3, None), (1, 3, "zbv")])
def test_products_are_accountings_flops(recompute, tp, pp, schedule):
    run = replace(gpt_124m(), training=TrainingConfig(recompute_granularity=recompute), parallel=ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_schedule=schedule))
    layout, parts = Layout(tp * pp, tp, pp, 1), placement(run).parts
    works = [model.part_work(run, layout, part, EAGER) for part in range(parts)]
    total = tp * sum(pieces_flops(forward) + pieces_flops(backward) for forward, backward, _ in works)
    assert total == pytest.approx(expected(run, recompute), rel=1e-12)
    linear = sum(r.flops_forward for r in accounting.layer_records(run, tp) if r.name != "attention")
    assert sum(pieces_flops(weights) for _, _, weights in works) == run.model.num_layers * linear


def test_our_recompute_leaves_out_what_nobody_reads():
    run = replace(gpt_124m(), training=TrainingConfig(recompute_granularity="full", recompute_num_layers=3))
    ours, eager = (work.layers_again(run, 1, accounting.recompute_groups(12, "uniform", 3), software.load(name))
                   for name in ("fugaku_megatron", "torch1.10"))
    fc2 = next(r for r in accounting.layer_records(run, 1) if r.name == "linear_fc2")
    assert flops(eager) - flops(ours) == 4 * fc2.flops_forward


def test_tensor_sizes_of_the_30b_tables():
    sizes = work.tensors(gpt_30b(), 4)
    assert sizes["hidden"] == 2048 * 7168 * 4 and sizes["scores"] == 14 * 2048 * 2048 * 4


def test_repeat_multiplies_everything():
    once = work.phases(gpt_124m(), 1, EAGER)["layer_forward"]
    twice = work.repeat(once, 2)
    assert flops(twice) == 2 * flops(once) and twice.moved == 2 * once.moved and twice.calls == 2 * once.calls
    assert sum(s * t for s, t in twice.allocations) == 2 * sum(s * t for s, t in once.allocations)


def test_native_attention_moves_no_scores():
    native = software.load("fugaku_megatron")
    assert work.phases(gpt_124m(), 1, native)["layer_forward"].moved < work.phases(gpt_124m(), 1, EAGER)["layer_forward"].moved / 5


def test_native_logits_come_in_accountings_chunks():
    run, native = gpt_124m(), software.load("fugaku_megatron")
    rows = memory.logits_rows(run, Layout(1, 1, 1, 1))
    assert rows < run.model.seq_length
    for phase, number in (("head_forward", 1), ("head_backward", 2)):
        products = work.phases(run, 1, native)[phase].products
        assert len(products) == number and all(rows in (p.m, p.n, p.k) and p.times * rows == 1024 for p in products)
        assert flops(work.phases(run, 1, native)[phase]) == flops(work.phases(run, 1, EAGER)[phase])
