"""Where a run goes on from, and what it says of settings that differ."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from fugaku_megatron.checkpoint.manifest import TRACKER
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.training.resume import differences, find_checkpoint, resume_training
from tests.helpers import make_trainer, small_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after three iterations of 16 samples, of a run that decays from 1e-3 over 20 iterations."""
    directory = tmp_path_factory.mktemp("checkpoint")
    trainer = make_trainer(SoloComm(), small_run())
    for _ in range(3):
        trainer.train_step()
    trainer.save(str(directory))
    trainer.close()
    return str(directory)


def lines(saved, **changes) -> list[str]:
    run = small_run(load=saved, **changes)
    return resume_training(make_trainer(SoloComm(), run), find_checkpoint(run, SoloComm()))


def test_the_same_settings_are_not_mentioned(saved):
    assert lines(saved) == [f"resumed from {saved} at iteration 3"]


@pytest.mark.parametrize(("changes", "phrase"), [
    ({"lr": 9.0}, "--lr is 9.0, was 0.001"), ({"weight_decay": 5.0}, "--weight-decay is 5.0, was 0.01"),
    ({"split": "50,50,0"}, "--split is 50,50,0, was 969,30,1"), ({"global_batch_size": 8}, "--global-batch-size is 8, was 16"),
    ({"seed": 5}, "--seed is 5, was 1234"), ({"bf16": True}, "--bf16 is True, was False"), ({"adam_beta2": 0.9}, "--adam-beta2"),
    ({"hidden_dropout": 0.1}, "--hidden-dropout is 0.1, was 0.0"), ({"clip_grad": 2.0}, "--clip-grad is 2.0, was 1.0"),
])
def test_every_setting_that_alters_the_curve_is_noted(saved, changes, phrase):
    assert sum(phrase in line and line.startswith("note: ") for line in lines(saved, **changes)) == 1


@pytest.mark.parametrize("changes", [{"log_interval": 7}, {"micro_batch_size": 4}, {"recompute_granularity": "full"},
                                     {"kernels": "torch"}, {"zero_stage": 1}, {"eval_iters": 3}])
def test_what_leaves_the_curve_alone_is_not_noted(saved, changes):
    run = small_run(**changes)
    assert differences(run, asdict(small_run())) == []


def test_a_longer_run_bends_the_learning_rate_and_says_so(saved):
    (_, note) = lines(saved, train_iters=200)
    assert "goes on from 9.850e-04 instead of 8.500e-04" in note and "3200 samples, was 320" in note
    assert "--use-checkpoint-opt_param-scheduler" in note and "--override-opt_param-scheduler" in note


def test_the_schedule_flags_do_what_megatrons_do(saved):
    assert len(lines(saved, train_iters=200, override_opt_param_scheduler=True)) == 1
    run = small_run(load=saved, train_iters=200, use_checkpoint_opt_param_scheduler=True)
    trainer = make_trainer(SoloComm(), run)
    (_, note) = resume_training(trainer, find_checkpoint(run, SoloComm()))
    assert "goes on from the checkpoint's 8.500e-04, not from this command line's 9.850e-04" in note
    assert trainer.train_step().learning_rate == pytest.approx(8.5e-4) and trainer.param_schedule.decay_samples == 320
    trainer.close()
    with pytest.raises(ValueError, match="exclude each other"):
        small_run(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)


def iteration(load, save=None) -> int | None:
    return find_checkpoint(small_run(load=str(load), save=save and str(save)), SoloComm()).iteration


def test_a_load_without_a_checkpoint_is_refused(saved, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for load, message in ((tmp_path / "file", "is a file"), (tmp_path / "typo", "holds no checkpoint"),
                          (tmp_path, "holds no checkpoint"), (tmp_path / "loop", "is a symbolic link to itself"),
                          (f"{saved}/iter_0000003", "give its parent .* and --ckpt-step 3")):
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
    """A directory with checkpoints of iterations 3 and 4; the tracker names 4."""
    trainer = make_trainer(SoloComm(), small_run())
    for iteration in range(1, 5):
        trainer.train_step()
        if iteration > 2:
            trainer.save(str(tmp_path))
    trainer.close()
    return tmp_path


def test_a_tracker_that_names_no_checkpoint_is_named_with_the_remedy(two):
    (two / TRACKER).write_text("0\n")
    with pytest.raises(ValueError) as raised:
        iteration(two, two)
    assert f"{two / TRACKER} names iteration 0, and iter_0000000 is missing: correct the number in that file" in str(raised.value)
    assert str(raised.value).endswith("Complete checkpoints: iterations 3, 4. Use iteration 4: --ckpt-step 4")


def test_a_tracker_that_names_an_older_checkpoint_is_noted(two):
    assert lines(str(two)) == [f"resumed from {two} at iteration 4"]
    (two / TRACKER).write_text("3\n")
    note = (f"note: {two / TRACKER} names iteration 3, and complete checkpoints of iterations 4 are newer: --ckpt-step 4 starts "
            "from the newest")
    assert lines(str(two)) == [f"resumed from {two} at iteration 3", note]
    assert lines(str(two), ckpt_step=3) == [f"resumed from {two} at iteration 3"], "the user has chosen"
    assert note in lines(str(two), finetune=True)
