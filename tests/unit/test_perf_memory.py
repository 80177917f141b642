"""Memory: the published formula of saved activations, ZeRO, stages in flight, and this project's own accounting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.recipes import gpt_30b, gpt_124m
from fugaku_megatron.config.run_config import ParallelConfig, PrecisionConfig, TrainingConfig
from fugaku_megatron.costs import accounting
from fugaku_megatron.costs import memory as rank_memory
from fugaku_megatron.perf import memory, software
from fugaku_megatron.perf.machine import MIB, load
from fugaku_megatron.perf.software import MemoryParameters
from fugaku_megatron.pipeline.parts import Held

EAGER = software.load("torch1.10")
PLAIN = MemoryParameters(base_mib=0, peer_mib=0)


@pytest.mark.parametrize("tp", [1, 4])
def test_sixteen_bits_keep_what_korthikanti_equation_2_says(tp):
    run = replace(gpt_30b(), precision=PrecisionConfig(bf16=True))
    s, b, h, a = run.model.seq_length, 1, run.model.hidden_size, run.model.num_attention_heads
    assert memory.layer_saved_bytes(run, tp) == pytest.approx(s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp)))


def test_this_project_is_counted_by_accounting():
    run, layout = gpt_124m(), Layout(1, 1, 1, 1)
    used = memory.stage_mib(run, layout, 0, software.load("fugaku_megatron"), 1, PLAIN)
    assert used == pytest.approx(rank_memory.stage_memory(run, layout, 0, [Held((1,), (0,))]).total / MIB)


def test_the_first_stage_holds_most_and_full_recompute_least():
    cut = ParallelConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=48)
    plain = replace(gpt_30b(), parallel=cut)
    full = replace(plain, training=TrainingConfig(recompute_granularity="full"))
    layout = Layout(384, 8, 48, 1)

    def used(run, stage):
        return memory.stage_mib(run, layout, stage, EAGER, 1, PLAIN)

    assert used(plain, 0) > used(plain, 1) > used(plain, 40)
    assert used(full, 0) < used(plain, 0) / 2


def test_zero_spreads_what_is_sharded():
    parameters = MemoryParameters(base_mib=0, peer_mib=0, state_bytes=4, sharded_bytes=12)
    run = replace(gpt_124m(), parallel=ParallelConfig(zero_stage=1))
    alone, eight = (memory.stage_mib(run, Layout(n, 1, 1, n), 0, EAGER, 1, parameters) for n in (1, 8))
    assert (alone - eight) * MIB == pytest.approx(12 * 7 / 8 * accounting.stage_parameters(run, Layout(1, 1, 1, 1), 0))


def test_the_limit_of_a_rank():
    assert memory.limit_mib(load("a64fx"), EAGER, 1) == pytest.approx(28.5 * 1024)
    assert memory.limit_mib(load("a64fx"), EAGER, 4) == pytest.approx(28.5 * 256)
