"""Batch ramp-up and the length of a run."""

import pytest

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.config.batches import RampUp, length, run_length
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.sample_rules import StepSizes
from fugaku_megatron.config.training import TrainingConfig

pytestmark = pytest.mark.unit


def walked(size, iterations):
    """Return the samples consumed after 0, 1, 2 ... iterations."""
    consumed = [0]
    for _ in range(iterations):
        consumed.append(consumed[-1] + size(consumed[-1]))
    return consumed


def test_ramp_up_is_megatrons():
    """megatron/core/num_microbatches_calculator.py of core 0.16: a step is a floating-point share of the samples, and the full size
    holds beyond them. In exact arithmetic the third ramp would be full at 280 samples."""
    for start, increment, samples, full in [
        (16, 8, 6000, 64),
        (32, 32, 977, 192),
        (16, 4, 280, 68),
        (4, 4, 100, 4),
        (1, 1, 7, 3),
    ]:
        ramp = RampUp(start, increment, samples, full)
        increments = (full - start) // increment
        for consumed in range(samples + 50):
            expected = full
            if consumed <= samples and increments:
                expected = start + increment * int(consumed / (samples / increments))
            assert ramp(consumed) == expected, (ramp, consumed)
            change = ramp.next_change(consumed)
            assert (
                change is None and expected == full or ramp(change - 1) == expected < ramp(change)
            )
        assert list(ramp.sizes()) == list(range(start, full + 1, increment))
    assert RampUp(8, 8, 0, 64)(0) == 64
    assert [RampUp(16, 4, 280, 68)(consumed) for consumed in (280, 281)] == [64, 68]
    assert length(TrainingConfig(train_iters=3), RampUp(16, 4, 280, 68), 0, 280) == (
        3,
        280 + 64 + 68 + 68,
    )


@pytest.mark.parametrize("ramp", [RampUp(8, 1, 0, 8), RampUp(4, 4, 100, 16)])
def test_length_of_a_resumed_run(ramp):
    consumed = walked(ramp, 30)
    for begun in range(20):
        for training in (
            TrainingConfig(train_iters=25),
            TrainingConfig(train_samples=consumed[25]),
        ):
            assert length(training, ramp, begun, consumed[begun]) == (25, consumed[25]), (
                "the same flags, the same end"
            )
    assert length(TrainingConfig(train_iters=6), RampUp(2, 1, 0, 2), 4, 32) == (6, 36), (
        "four iterations of 8 samples before"
    )
    assert length(TrainingConfig(train_samples=32), RampUp(8, 1, 0, 8), 4, 16) == (6, 32), (
        "four iterations of 4 samples before"
    )
    assert length(TrainingConfig(train_samples=32), ramp, 4, 40) == (4, 40), "nothing left"
    assert length(TrainingConfig(train_iters=3), ramp, 4, 40) == (3, 40)


def test_steps_of_the_batch_size_are_megatrons():
    """megatron/core/num_microbatches_calculator.py: a size holds from its threshold on, whole samples of the tokens."""
    steps = StepSizes.parse(
        "0:4 0.1K:8,1k:12", seq_length=8
    )  # from samples 0, 12 (100 tokens) and 125
    assert [steps(n) for n in (0, 11, 12, 124, 125, 10**9)] == [
        4,
        4,
        8,
        8,
        12,
        12,
    ] and steps.sizes() == [4, 8, 12]
    consumed = walked(steps, 30)
    assert consumed[:5] == [0, 4, 8, 12, 20]
    for iterations, end in enumerate(consumed):
        assert length(TrainingConfig(train_iters=iterations), steps) == (iterations, end)
        if end:
            assert length(TrainingConfig(train_samples=end), steps) == (iterations, end)
    run = make_run(
        "demo", {"step_batch_size_schedule": "0:4 1M:16", "micro_batch_size": 2, "mock_data": True}
    )
    assert (
        run.batch.global_batch_size == 16 and Layout.from_run(run, 2).global_batch_size(run) == 16
    )
    assert run_length(run, 16) == (1600, 6400), "all below the 7812 samples of 1M tokens"
