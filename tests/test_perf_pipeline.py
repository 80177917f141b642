"""The fast pipeline time equals the walk through schedule.py's own lists."""

from __future__ import annotations

import numpy as np
import pytest

from fugaku_megatron.perf.pipeline import makespan, walk


@pytest.mark.parametrize("seed", range(40))
def test_makespan_equals_the_walked_lists(seed):
    draw = np.random.default_rng(seed)
    stages, microbatches = int(draw.integers(1, 9)), int(draw.integers(1, 40))
    forward, backward = draw.uniform(0.5, 2, stages), draw.uniform(0.5, 3, stages)
    transfer = float(draw.choice([0.0, 0.1, 1.0]))
    assert makespan(forward, backward, transfer, microbatches) == pytest.approx(
        walk(forward, backward, transfer, microbatches), rel=1e-12)


def test_equal_stages_give_the_textbook_bubble():
    assert makespan([1.0] * 8, [2.0] * 8, 0.0, 16) == pytest.approx(3.0 * (16 + 8 - 1))


def test_the_slowest_stage_sets_the_pace():
    slow_last = makespan([1.0] * 4, [2.0] * 3 + [5.0], 0.0, 65) - makespan([1.0] * 4, [2.0] * 3 + [5.0], 0.0, 64)
    assert slow_last == pytest.approx(6.0)
