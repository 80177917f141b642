"""Parts of a forward pass: their sum, what the nodes divide, and layouts that are refused."""

from dataclasses import replace

import pytest

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.planner.forward import (
    ATTENTION,
    ELEMENTWISE,
    EXCHANGE,
    PROJECTIONS,
    ROUTED,
    SCAN,
    Forward,
    forward,
)
from fugaku_megatron.planner.system import System

pytestmark = pytest.mark.unit

QWEN = {"seq_length": 1018, "micro_batch_size": 1}


def parts(nodes: int, recipe: str = "qwen3.6-35b-a3b", **changes) -> Forward:
    run = make_run(recipe, {**QWEN, **changes})
    return forward(run, System.from_names("a64fx", "fugaku_megatron", nodes))


def test_nodes_divide_experts_and_their_elements_alone():
    one = parts(1)
    many = parts(11)
    assert one.seconds[EXCHANGE] == 0.0 and many.seconds[EXCHANGE] > 0.0
    assert one.seconds[ROUTED] / many.seconds[ROUTED] == pytest.approx(256 / 24)
    for name in (PROJECTIONS, SCAN, ATTENTION):
        assert one.seconds[name] == many.seconds[name] > 0.0
    assert many.seconds[ELEMENTWISE] < one.seconds[ELEMENTWISE]
    assert sum(map(many.share, many.seconds)) == pytest.approx(1.0)


def test_projections_and_experts_compute_their_flops():
    seconds = parts(1).seconds
    flops = 30 * 2 * 1018 * 2048 * (12352 + 4096)
    assert 0.5 < flops / seconds[PROJECTIONS] / 6.144e12 < 0.92
    experts = 40 * 2 * 1018 * 8 * 3 * 2048 * 512
    assert 0.5 < experts / seconds[ROUTED] / 6.144e12 < 0.75, "one thread's curve at 32 rows"
    quantized = parts(1, int8=True).seconds
    assert 3 < seconds[PROJECTIONS] / quantized[PROJECTIONS] < 4
    assert quantized[SCAN] == seconds[SCAN]


def test_the_exchange_is_an_all_reduce_of_every_layer():
    bytes = 1018 * 2048 * 4
    fast = 40 * 2 * 10 / 11 * bytes / 6.345e9
    found = parts(11)
    assert found.fast_exchange == pytest.approx(fast)
    assert found.fast_exchange < found.seconds[EXCHANGE] < found.slow_exchange


def test_bounds_contain_the_shares():
    found = parts(11, int8=True)
    for name in found.seconds:
        low, high = found.bounds(name)
        assert 0 < low < found.share(name) < high < 1
    low, high = found.total_bounds
    assert low < found.total < high


def test_a_model_without_experts_exchanges_nothing():
    assert parts(4, recipe="124m").seconds[EXCHANGE] == 0.0


def test_parallel_layouts_are_refused():
    run = make_run("124m", QWEN)
    system = System.from_names("a64fx", "fugaku_megatron", 2, 4)
    with pytest.raises(ValueError, match="--forward models one rank on a node"):
        forward(run, system)
    parallel = replace(run.parallel, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="leave out the parallel sizes"):
        forward(replace(run, parallel=parallel), System.from_names("a64fx", "fugaku_megatron", 2))
