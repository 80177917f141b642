"""Learning rates of a run whose batch grows: a length in iterations is as many iterations. And lengths that do not fit together."""

from __future__ import annotations

import pytest

from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.config.batches import samples_after, sizes_of
from fugaku_megatron.config.param_schedule import ParamSchedule
from fugaku_megatron.config.run_config import RunConfig
from tests.helpers import small_run

pytestmark = pytest.mark.unit

RAMPS = {
    "constant": {},
    "ramp": {"rampup_batch_size": (4, 4, 96)},
    "long ramp": {"rampup_batch_size": (2, 2, 400)},
    "steps": {"step_batch_size_schedule": "0:4 1600:16", "global_batch_size": None},
    "steps down": {"step_batch_size_schedule": "0:16 1600:8 4000:2", "global_batch_size": None},
}


def run_of(ramp: str, **changes) -> RunConfig:
    flags = {"train_iters": 30, "lr": 1.0, "min_lr": 0.0, "micro_batch_size": 1}
    return small_run(**{**flags, **RAMPS[ramp], **changes})


def size_of(run: RunConfig) -> int:
    return sizes_of(run, run.batch.global_batch_size or 16).global_batch_size


def rates(run: RunConfig, iterations: int = 31) -> list[float]:
    """Return the rate of each iteration, and the rate after the run."""
    size = size_of(run)
    schedule = ParamSchedule.from_run(run, size)
    sizes = sizes_of(run, size)
    return [schedule.learning_rate(samples_after(sizes, i)) for i in range(iterations)]


@pytest.mark.parametrize("ramp", RAMPS)
def test_warm_up_and_decay_take_their_iterations(ramp):
    found = rates(run_of(ramp, lr_warmup_iters=4))
    assert max(found[:4]) < 1.0 and found[4] == 1.0 and found[5] < 1.0
    assert found[29] > 0.0 and found[30] == pytest.approx(0.0, abs=1e-12)
    assert found[4:] == sorted(found[4:], reverse=True)


@pytest.mark.parametrize("ramp", RAMPS)
@pytest.mark.parametrize("more", [{}, {"lr_decay_iters": 20}])
def test_the_decay_of_wsd_takes_the_last_iterations(ramp, more):
    end = more.get("lr_decay_iters", 30)
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 8}
    found = rates(run_of(ramp, lr_warmup_iters=4, **wsd, **more))
    assert found[4 : end - 7] == [1.0] * (end - 11)
    assert 0.0 < found[end - 1] < found[end - 7] < 1.0
    assert found[end:] == pytest.approx([0.0] * (31 - end), abs=1e-12)


WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}


@pytest.mark.parametrize("ramp", RAMPS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {**WSD, "lr_warmup_iters": 10, "lr_wsd_decay_iters": 21},
            ("--lr-wsd-decay-iters 21", "--lr-warmup-iters 10", "--train-iters 30"),
        ),
        ({**WSD, "lr_wsd_decay_iters": 31}, ("--lr-wsd-decay-iters 31", "--train-iters 30")),
        (
            {**WSD, "lr_wsd_decay_iters": 11, "lr_decay_iters": 10},
            ("--lr-wsd-decay-iters 11", "--lr-decay-iters 10"),
        ),
        (
            {**WSD, "lr_warmup_fraction": 0.9, "lr_wsd_decay_iters": 20},
            ("--lr-wsd-decay-iters 20", "--lr-warmup-fraction 0.9"),
        ),
        ({"lr_warmup_iters": 30}, ("--lr-warmup-iters 30", "--train-iters 30")),
        (
            {"lr_warmup_iters": 12, "lr_decay_iters": 10},
            ("--lr-warmup-iters 12", "--lr-decay-iters 10"),
        ),
        ({"lr_warmup_fraction": 1.0}, ("--lr-warmup-fraction 1", "--train-iters 30")),
        ({"lr_warmup_iters": 30, "lr_decay_style": "constant"}, ("--lr-warmup-iters 30",)),
        (
            {"train_iters": None, "train_samples": 480, "lr_warmup_samples": 480},
            ("--lr-warmup-samples 480", "--train-samples 480"),
        ),
    ],
)
def test_lengths_that_do_not_fit_together_are_one_line(ramp, changes, words):
    run = run_of(ramp, **changes)
    with pytest.raises(ValueError) as caught:
        ParamSchedule.from_run(run, size_of(run))
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


def test_lengths_that_just_fit():
    for changes in (
        {"lr_warmup_iters": 10, "lr_wsd_decay_iters": 20},
        {"lr_warmup_fraction": 0.2, "lr_wsd_decay_iters": 24},
        {"lr_wsd_decay_iters": 30},
    ):
        assert min(rates(run_of("constant", **WSD, **changes))) >= -1e-12
    samples = {"train_iters": None, "train_samples": 480, "lr_warmup_samples": 80}
    run = run_of("ramp", **WSD, **samples, lr_wsd_decay_samples=400)
    assert ParamSchedule.from_run(run, 16).wsd_samples == 400
    with pytest.raises(
        ValueError, match="--lr-wsd-decay-samples 401, 401 samples, is longer than the 400"
    ):
        ParamSchedule.from_run(run_of("ramp", **WSD, **samples, lr_wsd_decay_samples=401), 16)


def test_a_schedule_beyond_the_run_is_noted():
    words = "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 8 --train-iters 10 --mock-data --lr 1".split()

    def notes(*more: str) -> list[str]:
        run = parse([*words, "--micro-batch-size", "4", *more]).run
        return ParamSchedule.from_run(run, 4).notes(run.training)

    assert notes() == notes("--lr-decay-iters", "10") == []
    (note,) = notes("--lr-decay-iters", "20")
    assert (
        "--lr-decay-iters 20, longer than the run, --train-iters 10: its last rate is 5.000e-01"
        in note
    )
    (note,) = notes("--lr-decay-iters", "200", "--lr-warmup-iters", "15")
    assert "--lr-warmup-iters 15, is longer than the run, --train-iters 10" in note
    assert notes("--lr-decay-iters", "20", "--lr-decay-style", "constant") == []
