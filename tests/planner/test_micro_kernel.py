"""Cycles of an INT8 matmul: the tile is the kernels', the loop's limits, the grid of threads, and what is left out only shortens."""

import re
from pathlib import Path

import pytest

from fugaku_megatron.planner import machine, micro_kernel
from fugaku_megatron.planner.micro_kernel import Core, busiest_tiles, int8_matmul, k_loop_cycles

pytestmark = pytest.mark.unit

TUNING = Path(__file__).resolve().parents[2] / "kernels_sve" / "tuning.h"
A64FX = machine.load("a64fx")
CORE = Core(**A64FX.core)


def test_the_tile_and_the_costs_of_packing_are_those_of_the_kernels():
    text = TUNING.read_text()
    block = text[text.index("struct sve512") :]
    rows, vectors = re.search(r"GEMM_MR = (\d+), GEMM_NR_VECTORS = (\d+)", block).groups()
    assert (micro_kernel.ROWS, micro_kernel.VECTORS) == (int(rows), int(vectors))
    pack, stream = re.search(r"PACK_COST = (\d+), STREAM_COST = (\d+)", text).groups()
    assert (micro_kernel.PACK_COST, micro_kernel.STREAM_COST) == (int(pack), int(stream))


@pytest.mark.parametrize(
    "change, cycles",
    [
        ({}, 12.0),  # 24 dot products in two pipes
        ({"pipes": 4}, 10.25),  # 41 instructions, four decoded in a cycle
        ({"loads": 1}, 14.0),
        ({"dot_latency": 15}, 15.0),
    ],
)
def test_a_step_takes_the_longest_of_its_limits(change, cycles):
    assert k_loop_cycles(CORE._replace(**change)) == cycles


def test_the_busiest_thread_of_the_grid_that_the_kernels_choose():
    assert busiest_tiles(12, 32, 32, 1) == 1
    assert busiest_tiles(672, 640, 32, 12) == 19 * 5
    assert busiest_tiles(12 * 24, 32 * 12, 32, 12) == 24


def test_a_share_of_the_peak():
    found = int8_matmul(A64FX, (672, 640, 512), 12)
    assert 0.7 < found.low < found.share < found.high < 1
    peak = A64FX.peak_tflops["int8"] * 1e12 / 4
    assert found.share == pytest.approx(2 * 672 * 640 * 512 / found.seconds / peak)
    longer = int8_matmul(A64FX, (672, 640, 4096), 12)
    assert longer.share > found.share, "the ends of tiles count less"
    assert longer.seconds < 8 * found.seconds
    assert int8_matmul(A64FX, (12, 32, 512), 12).share < 0.1, "one thread works"


def test_a_machine_without_a_core_is_refused():
    with pytest.raises(ValueError, match="--matmul needs the rates of a core, .* machine grace"):
        int8_matmul(machine.load("grace"), (64, 64, 64), 1)
