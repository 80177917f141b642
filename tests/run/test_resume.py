"""Resuming a run: the place it resumes from, what it says of settings that differ, and its schedules, exactly as in Megatron-LM."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from fugaku_megatron.checkpoint.manifest import TRACKER
from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.param_schedule import ParamSchedule
from fugaku_megatron.run.resume import differences, resume_training
from tests.helpers import find_checkpoint, make_trainer, small_run

pytestmark = pytest.mark.unit


def checkpoints(directory, *iterations: int, **changes) -> str:
    """Save after these iterations of 16 samples in a run that decays from 1e-3 over 20 iterations."""
    trainer = make_trainer(SoloComm(), small_run(num_layers=1, **changes))
    for iteration in range(1, max(iterations) + 1):
        trainer.train_step()
        if iteration in iterations:
            trainer.save(str(directory))
    trainer.close()
    return str(directory)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return checkpoints(tmp_path_factory.mktemp("checkpoint"), 3)


def lines(saved, **changes) -> list[str]:
    run = small_run(num_layers=1, load=saved, **changes)
    return resume_training(make_trainer(SoloComm(), run), find_checkpoint(run, SoloComm()))


def test_a_longer_run_bends_the_learning_rate_and_says_so(saved):
    assert lines(saved) == [f"resumed from {saved} at iteration 3"]
    (_, note) = lines(saved, train_iters=200)
    assert (
        "continues from 9.850e-04 instead of 8.500e-04" in note and "3200 samples, was 320" in note
    )
    assert (
        "--use-checkpoint-opt_param-scheduler" in note and "--override-opt_param-scheduler" in note
    )


def test_a_longer_run_at_a_constant_rate_has_no_note(tmp_path):
    constant = {"lr_decay_style": "constant"}
    saved = checkpoints(tmp_path, 3, **constant)
    assert lines(saved, train_iters=200, **constant) == [f"resumed from {saved} at iteration 3"]


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"lr": 9.0}, "--lr is 9.0, was 0.001"),
        ({"weight_decay": 5.0}, "--weight-decay is 5.0, was 0.01"),
        ({"split": "50,50,0"}, "--split is 50,50,0, was 969,30,1"),
        ({"global_batch_size": 8}, "--global-batch-size is 8, was 16"),
        ({"seed": 5}, "--seed is 5, was 1234"),
        ({"bf16": True}, "--bf16 is True, was False"),
        ({"adam_beta2": 0.9}, "--adam-beta2"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout is 0.1, was 0.0"),
        ({"clip_grad": 2.0}, "--clip-grad is 2.0, was 1.0"),
    ],
)
def test_every_setting_that_alters_the_curve_is_noted(saved, changes, phrase):
    assert (
        sum(phrase in line and line.startswith("note: ") for line in lines(saved, **changes)) == 1
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"log_interval": 7},
        {"micro_batch_size": 4},
        {"recompute_granularity": "full"},
        {"kernels": "torch"},
        {"zero_stage": 1},
        {"eval_iters": 3},
    ],
)
def test_what_leaves_the_curve_alone_is_not_noted(saved, changes):
    run = small_run(**changes)
    assert differences(run, json.loads(json.dumps(asdict(small_run())))) == []


def test_the_schedule_flags_do_what_megatrons_do(saved):
    assert len(lines(saved, train_iters=200, override_opt_param_scheduler=True)) == 1
    run = small_run(
        num_layers=1, load=saved, train_iters=200, use_checkpoint_opt_param_scheduler=True
    )
    trainer = make_trainer(SoloComm(), run)
    (_, note) = resume_training(trainer, find_checkpoint(run, SoloComm()))
    assert (
        "continues from the checkpoint's 8.500e-04, not from this command line's 9.850e-04" in note
    )
    assert (
        trainer.train_step().learning_rate == pytest.approx(8.5e-4)
        and trainer.param_schedule.decay_samples == 320
    )
    trainer.close()


def iteration(load, save=None) -> int | None:
    return find_checkpoint(small_run(load=str(load), save=save and str(save)), SoloComm()).iteration


def test_a_load_without_a_checkpoint_is_refused(saved, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    for load, message in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "typo", "may be empty$"),
        ("Qwen/Qwen3-0.6B", "holds no checkpoint .* may be empty; nothing is downloaded"),
        (tmp_path, "holds no checkpoint"),
        (tmp_path / "hf", "convert --from-hf .*hf --save NEW, and pass NEW as --pretrained"),
        (tmp_path / "loop", "is a symbolic link to itself"),
        (f"{saved}/iter_0000003", "pass its parent .* and --ckpt-step 3"),
    ):
        with pytest.raises(ValueError, match=message):
            iteration(load, tmp_path / "elsewhere")


def test_only_an_empty_load_that_is_also_save_starts_anew(tmp_path):
    new = tmp_path / "new"
    assert iteration(new, new) is None
    new.mkdir()
    assert iteration(new, new) is None
    (new / "history.jsonl").write_text("")  # a run that ended before its first checkpoint
    (new / "iter_0000005.tmp").mkdir()
    assert iteration(new, new) is None
    (new / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="thesis.tex"):
        iteration(new, new)


@pytest.fixture
def two(tmp_path):
    """Save checkpoints of iterations 3 and 4; the tracker names 4."""
    checkpoints(tmp_path, 3, 4)
    return tmp_path


def test_a_tracker_that_names_another_checkpoint(two):
    assert lines(str(two)) == [f"resumed from {two} at iteration 4"]
    (two / TRACKER).write_text("3\n")
    note = (
        f"note: {two / TRACKER} names iteration 3, and complete checkpoints of iterations 4 are newer: --ckpt-step 4 starts "
        "from the newest"
    )
    assert lines(str(two)) == [f"resumed from {two} at iteration 3", note]
    assert lines(str(two), ckpt_step=3) == [f"resumed from {two} at iteration 3"], (
        "the user has chosen"
    )
    assert note in lines(str(two), finetune=True)
    (two / TRACKER).write_text("0\n")
    with pytest.raises(ValueError) as raised:
        iteration(two, two)
    assert (
        f"{two / TRACKER} names iteration 0, and iter_0000000 is missing: correct the number in that file"
        in str(raised.value)
    )
    assert str(raised.value).endswith(
        "Complete checkpoints: iterations 3, 4. Use iteration 4: --ckpt-step 4"
    )


BY_SAMPLES = {"train_iters": None, "train_samples": 1600}


def schedule(**changes) -> ParamSchedule:
    """Build the schedule of 100 iterations of 16 samples, rate 1 to 0.1."""
    return ParamSchedule.from_run(
        small_run(**{"train_iters": 100, "lr": 1.0, "min_lr": 0.1, **changes}), 16
    )


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_warm_up_and_decay_need_not_be_whole_samples(style):
    """megatron/core/optimizer_param_scheduler.py, get_lr: the decay's ratio is divided by its own length, and ends at 1."""
    # of 1600 samples: the decay has 0.32
    params = schedule(lr_warmup_fraction=0.9998, lr_decay_style=style)
    assert (
        params.learning_rate(1600) == pytest.approx(0.1, rel=1e-12)
        and params.learning_rate(1599) < 1.0
    )
    half = replace(params, warmup_samples=1599.5, decay_samples=1600.5)
    assert half.learning_rate(1600) == pytest.approx(0.1 + 0.9 * 0.5, rel=1e-12)
    assert schedule(train_iters=0, lr_decay_style=style).learning_rate(0) == 1.0
    # megatron/training/training.py, get_optimizer_param_scheduler: as it is
    params = schedule(lr_warmup_fraction=0.00333)
    assert params.warmup_samples == 0.00333 * 1600 != 5 and params.learning_rate(
        4
    ) == pytest.approx(4 / 5.328, rel=1e-15)
    # get_wd
    params = schedule(start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style=style)
    half = {"linear": 0.15, "cosine": 0.1 + 0.2 * 0.5 * (math.cos(math.pi * 0.75) + 1.0)}[style]
    rates = [params.weight_decay(samples) for samples in (400, 1600, 1601)]
    assert rates == [pytest.approx(half, rel=1e-15), pytest.approx(0.3, rel=1e-15), 0.3]


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4},
            {2: 0.5, 4: 1.0, 16: 0.5, 64: 0.25, 100: 0.2, 101: 0.1},
        ),
        # 1 / sqrt(16 n), not below --min-lr
        ({"lr_decay_style": "inverse-square-root"}, {1: 0.25, 25: 0.1, 101: 0.1}),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20},
            {0: 1, 80: 1, 90: 0.1 + 0.9 * (2**0.5 - 1), 100: 0.1, 101: 0.1},
        ),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "linear"},
            {80: 1, 85: 0.775, 90: 0.55, 100: 0.1},
        ),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "cosine"},
            {80: 1, 90: 0.55, 100: 0.1},
        ),
        (
            {
                "lr_decay_style": "WSD",
                "lr_wsd_decay_iters": 16,
                "lr_wsd_decay_style": "minus_sqrt",
                "lr_warmup_iters": 2,
            },
            {1: 0.5, 84: 1, 88: 0.55, 93: 0.325, 100: 0.1},
        ),
        (
            {
                "lr_decay_style": "WSD",
                "lr_wsd_decay_samples": 320,
                "lr_wsd_decay_style": "linear",
                **BY_SAMPLES,
            },
            {80: 1, 90: 0.55},
        ),
        ({"lr_warmup_iters": 4, "lr_warmup_init": 0.2}, {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 100: 0.1}),
    ],
)
def test_styles(flags, rates):
    """megatron/core/optimizer_param_scheduler.py, get_lr."""
    params = schedule(**flags)
    for iteration, rate in rates.items():
        assert params.learning_rate(16 * iteration) == pytest.approx(rate, rel=1e-12), iteration
    assert ParamSchedule.from_state(params.state()) == params


def test_the_same_numbers_in_tokens():
    """As forks with --train-tokens, --lr-decay-tokens and --lr-warmup-tokens: consumed tokens instead of steps."""
    s = small_run().model.seq_length
    by_tokens = schedule(
        train_iters=None,
        train_tokens=1600.0 * s,
        lr_decay_tokens=1200.0 * s,
        lr_warmup_tokens=100.5 * s,
    )
    assert (by_tokens.total_samples, by_tokens.decay_samples, by_tokens.warmup_samples) == (
        1600,
        1200,
        100.5,
    )
    assert by_tokens.learning_rate(50) == pytest.approx(50 / 100.5, rel=1e-15)
    assert by_tokens.learning_rate(700) == pytest.approx(
        0.1 + 0.9 * (1 - (700 - 100.5) / (1200 - 100.5)), rel=1e-15
    )
    run = parse(
        "--recipe 124m --train-tokens 3e11 --train-samples 200000000 --lr-decay-tokens 26e10 --lr-warmup-tokens 3e9".split()
    ).run
    assert (
        run.training.train_iters,
        run.training.train_samples,
        run.optimizer.lr_warmup_fraction,
    ) == (None, 200000000, None)
    params = ParamSchedule.from_run(run, 1024)
    assert (params.warmup_samples, params.decay_samples, params.total_samples) == (
        3e9 / 1024,
        26e10 / 1024,
        200000000,
    )


# Runs -------------------------------------------------------------------------------------------------------------------------

FP16 = {
    "fp16": True,
    "initial_loss_scale": 2.0**40,
    "hysteresis": 1,
    "lr_warmup_iters": 8,
    "train_iters": 40,
    "num_layers": 1,
}


def steps(trainer, count):
    results = [trainer.train_step() for _ in range(count)]
    trainer.close()
    return results


def test_skipped_steps_do_not_advance_the_schedule(tmp_path):
    """megatron/training/training.py, train_step: the scheduler steps only where the update succeeded."""
    torch.set_num_threads(1)
    run = small_run(**FP16, save=str(tmp_path), load=str(tmp_path))
    trainer = make_trainer(SoloComm(), run)
    results = steps(trainer, 26)
    updates = 0
    assert 3 < sum(result.skipped for result in results) < 24
    for result in results:
        assert result.learning_rate == trainer.param_schedule.learning_rate(16 * updates)
        updates += not result.skipped
    progress = trainer.progress
    assert (progress.consumed_samples, progress.scheduled_samples) == (16 * 26, 16 * updates)
    trainer.save(str(tmp_path))
    again = make_trainer(SoloComm(), run)
    assert len(resume_training(again, find_checkpoint(run, SoloComm()))) == 1
    assert again.progress == progress and steps(again, 1)[
        0
    ].learning_rate == trainer.param_schedule.learning_rate(16 * updates)


def test_a_checkpoint_from_before_goes_on_where_its_schedule_stood(tmp_path):
    torch.set_num_threads(1)
    run = small_run(num_layers=1, train_iters=20, save=str(tmp_path), load=str(tmp_path))
    trainer = make_trainer(SoloComm(), run)
    steps(trainer, 2)
    trainer.save(str(tmp_path))
    resume = find_checkpoint(run, SoloComm())
    del resume.state["progress"]["unscheduled"]
    for name in ("lr_warmup_init", "lr_wsd_decay_style", "no_load_optim"):
        del resume.state["param_schedule"]["config"][name], resume.config["optimizer"][name]
    del resume.state["param_schedule"]["wsd_samples"]
    again = make_trainer(SoloComm(), run)
    assert len(resume_training(again, resume)) == 1 and again.progress.scheduled_samples == 32


@pytest.mark.parametrize("given", ["no_load_optim", "no_load_lr_state"])
def test_what_is_not_loaded_begins_anew(tmp_path, given):
    """megatron/training/checkpointing.py, load_checkpoint: without the optimizer the scheduler is not loaded either."""
    torch.set_num_threads(1)
    run = small_run(
        num_layers=1, train_iters=20, lr_warmup_iters=4, save=str(tmp_path), load=str(tmp_path)
    )
    trainer = make_trainer(SoloComm(), run)
    steps(trainer, 3)
    trainer.save(str(tmp_path))
    anew = replace(run, optimizer=replace(run.optimizer, **{given: True}))
    again = make_trainer(SoloComm(), anew)
    lines = resume_training(again, find_checkpoint(anew, SoloComm()))
    assert f"note: --{given.replace('_', '-')}: " in lines[-1] and lines[-1].endswith(
        "begins anew, at 0.000e+00"
    )
    kept = given == "no_load_lr_state"
    assert (again.progress.iteration, again.progress.consumed_samples, again.optimizer.steps) == (
        3,
        48,
        3 * kept,
    )
    assert any(bool(part.exp_avg.any()) for part in again.optimizer.shards) == kept
    assert all(
        torch.equal(a.master, b.master)
        for a, b in zip(trainer.optimizer.shards, again.optimizer.shards)
    )
    assert [result.learning_rate for result in steps(again, 2)] == [0.0, run.optimizer.lr / 4]


def test_the_names_of_forks():
    words = "--recipe demo --mock-data --load x".split()
    assert parse([*words, "--override-lr-scheduler"]).run.optimizer.override_opt_param_scheduler
    assert parse(
        [*words, "--use-checkpoint-lr-scheduler"]
    ).run.optimizer.use_checkpoint_opt_param_scheduler
    run = parse([*words, "--no-load-lr-state", "--no-load-optim", "--no-load-rng"]).run.optimizer
    assert run.no_load_lr_state and run.no_load_optim
    assert parse([*words[:3], "--no-load-optim"]).notes == (
        "--no-load-optim has no effect without --load",
    )
