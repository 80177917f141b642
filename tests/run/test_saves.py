"""Saves and kept checkpoints, also next to training: by iterations, by rank 0's clock, at the end."""

import re
import threading
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from fugaku_megatron.checkpoint import save as save_module
from fugaku_megatron.checkpoint.manifest import latest_iteration, list_iterations
from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs.memory import stage_memory
from fugaku_megatron.data import indexed
from fugaku_megatron.observe.log import loss_plot
from fugaku_megatron.pipeline.instructions import InFlight
from fugaku_megatron.run import pretrain as pretrain_module
from fugaku_megatron.run.dry_run import report
from fugaku_megatron.run.loop import DIVERGED_STEPS
from fugaku_megatron.start.exit_codes import ExitCode
from tests.checks.session import Writer, run, session
from tests.helpers import largest_file, make_trainer, one_error, small_run, whole_tensors
from tests.recording import RecordingComm
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

LONG, SHORT = 1e6, 1e-9  # minutes


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({}, [5]),
        ({"save_interval": 2}, [2, 4, 5]),
        ({"save_interval_in_mins": LONG, "save_interval": 3}, [3, 5]),
    ],
)
def test_intervals_by_iterations_and_by_time(tmp_path, changes, saved):
    assert run(SoloComm(), tmp_path, **changes) == saved == list_iterations(tmp_path)


@pytest.mark.parametrize(
    ("minutes", "saved"), [((SHORT, LONG), [1, 2, 3, 4, 5]), ((LONG, SHORT), [5])]
)
def test_the_clock_of_rank_0_decides_for_all(tmp_path, minutes, saved):
    ranks = ThreadWorld(2).run(
        lambda world: run(world, tmp_path, save_interval_in_mins=minutes[world.rank])
    )
    assert ranks == [saved, saved]


def test_a_save_interval_by_time_adds_no_collective(tmp_path):
    def calls(directory, **changes):
        world = RecordingComm(SoloComm())
        run(world, directory, **changes)
        return [call[1] for call in world.log]

    assert calls(tmp_path / "a", save_interval_in_mins=LONG) == calls(tmp_path / "b") != []


def test_a_diverged_run_ends_with_its_own_code_and_keeps_the_last_good_checkpoint(tmp_path):
    made = session(SoloComm(), tmp_path, train_iters=20, lr=1e30, save_interval=1, keep_last=1)
    with pytest.raises(SystemExit) as end:
        made.run()
    made.trainer.close()
    assert (
        end.value.code == ExitCode.DIVERGED == 3
        and made.trainer.progress.iteration == 1 + DIVERGED_STEPS
    )
    assert list_iterations(tmp_path) == [1] and latest_iteration(tmp_path) == 1
    assert (
        made.writer.lines[-1].startswith("diverged: ")
        and f"last checkpoint in {tmp_path}" in made.writer.lines[-1]
    )


def test_a_save_that_fell_into_skipped_steps_is_made_up_for(tmp_path, monkeypatch):
    made = session(SoloComm(), tmp_path, train_iters=6, save_interval=3)
    train_step = made.trainer.train_step
    monkeypatch.setattr(
        made.trainer,
        "train_step",
        lambda: replace(train_step(), skipped=made.trainer.progress.iteration == 3),
    )
    made.run()
    made.trainer.close()
    assert list_iterations(tmp_path) == [4, 6]


def test_saves_do_not_wait_for_the_picture_of_an_earlier_one(tmp_path, monkeypatch):
    """Five saves while the first picture is being drawn: one more of all losses at the end."""
    pictures = []

    def start(*words):
        pictures.append(Mock(**{"poll.return_value": None}))
        pictures[-1].wait.side_effect = lambda: setattr(pictures[-1].poll, "return_value", 0)
        return pictures[-1]

    monkeypatch.setattr(loss_plot, "start_loss_curve", start)
    monkeypatch.setattr(Writer, "printing", True)
    assert run(SoloComm(), tmp_path, save_interval=1) == [1, 2, 3, 4, 5]
    assert [picture.wait.call_count for picture in pictures] == [1, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--data-path", "{d}/whole", "{d}/none"],
            "none.idx: cannot be read .No such file or directory.; .*: is --data-path",
        ),
        (
            ["--data-path", "0.5", "{d}/half", "x", "{d}/whole"],
            "--data-path: expected a weight, got 'x'",
        ),
        (
            ["--train-data-path", "{d}/whole", "--valid-data-path", "{d}/half"],
            "half.bin: cannot be read",
        ),
    ],
)
def test_data_that_is_not_there_is_found_first_and_by_one_rank(
    tmp_path, monkeypatch, flags, message
):
    for name in ("whole.idx", "whole.bin", "half.idx"):
        (tmp_path / name).write_bytes(b"")
    looked = []
    unreadable = indexed.unreadable
    monkeypatch.setattr(indexed, "unreadable", lambda path: looked.append(path) or unreadable(path))
    monkeypatch.setattr(pretrain_module, "hold", None)  # what comes next
    words = [
        *(
            "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 "
            "--micro-batch-size 1 --train-iters 1 --vocab-size 32"
        ).split(),
        *(word.format(d=tmp_path) for word in flags),
    ]

    assert re.search(
        message, one_error(2, lambda world: pretrain_module.pretrain(parse(words), world, None))
    )
    assert len(looked) == len(set(looked))


RANKS = 2
ASYNC = {"async_save": True}
HELD = [InFlight((1,), (0,))]  # one micro-batch between forward and backward


@pytest.fixture
def opened(monkeypatch):
    """Make files wait for an event before they are written."""
    event = threading.Event()
    write = save_module.write_tensors
    monkeypatch.setattr(
        save_module, "write_tensors", lambda *given: event.wait(300) and write(*given)
    )
    return event


def test_what_is_written_is_the_iteration_of_the_copy(tmp_path, opened):
    """Training goes on while the files are written, and changes nothing in them."""
    layout = {
        "num_layers": 2,
        "tensor_model_parallel_size": 2,
        "zero_stage": 1,
        "save": str(tmp_path),
        **ASYNC,
    }

    def rank(world):
        trainer, again = (make_trainer(world, small_run(**layout)) for _ in range(2))
        trainer.train_step()
        expected = whole_tensors(trainer, "weight")
        saving = trainer.save_in_background(str(tmp_path))
        after = trainer.train_step().loss
        world.barrier()
        opened.set()
        saving.finish()
        again.load(str(tmp_path))
        found = whole_tensors(again, "weight")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert again.progress.iteration == 1 and again.train_step().loss == after
        trainer.close()
        again.close()

    ThreadWorld(4).run(rank)


def run_session(world, directory, **changes):
    made = session(world, directory, **ASYNC, **changes)
    with closing(made.trainer):
        made.run()
    return made


@pytest.mark.parametrize("changes", [{"save_interval": 1, "keep_last": 2}, {}])
def test_a_run_saves_what_it_would_have_waited_for(tmp_path, changes):
    expected = session(SoloComm(), tmp_path / "waiting", **changes)
    expected.run()
    expected.trainer.close()
    lines = ThreadWorld(RANKS).run(
        lambda world: run_session(world, tmp_path / "async", **changes).writer.lines
    )[0]
    assert lines == [line.replace("waiting", "async") for line in expected.writer.lines]
    assert list_iterations(tmp_path / "async") == list_iterations(tmp_path / "waiting")
    assert latest_iteration(tmp_path / "async") == 5


def test_training_goes_on_while_a_save_is_written(tmp_path, opened):
    made = session(SoloComm(), tmp_path, save_interval=2, train_iters=4, **ASYNC)
    step = made.trainer.train_step
    seen = []

    def watched():
        result = step()
        seen.append(latest_iteration(tmp_path))
        if made.trainer.progress.iteration == 4:
            opened.set()
        return result

    made.trainer.train_step = watched
    made.run()
    made.trainer.close()
    assert seen == [None] * 4, "a save appears when all is written"
    assert list_iterations(tmp_path) == [2, 4]


def test_a_disk_that_refuses_the_bytes_ends_the_run_with_one_line(tmp_path):
    with largest_file(1 << 14):
        message = one_error(
            RANKS, lambda world: run_session(world, tmp_path, save_interval=2, train_iters=50)
        )
    assert (
        message.startswith(f"--save {tmp_path}: iteration 2 is not saved: rank 0: ")
        and "File too large" in message
    )
    assert list_iterations(tmp_path) == [] and not list(tmp_path.glob("iter_*"))


def test_the_copy_is_in_the_model_and_in_the_plan(tmp_path):
    def held(world):
        return make_trainer(
            world, small_run(zero_stage=1, save=str(tmp_path), **ASYNC)
        )._snapshot.nbytes

    for ranks in (1, 2):
        run = small_run(zero_stage=1, save=str(tmp_path), **ASYNC)
        with_copy, plain = (
            stage_memory(r, Layout.from_run(r, ranks), 0, HELD)
            for r in (run, small_run(zero_stage=1))
        )
        assert (
            max(ThreadWorld(ranks).run(held))
            <= with_copy.saving
            <= 1.05 * max(ThreadWorld(ranks).run(held))
        )
        assert with_copy.total == plain.total + with_copy.saving and plain.saving == 0
    assert "|    saving |" in report(run, 1) and "saving" not in report(small_run(), 1)
    assert stage_memory(small_run(**ASYNC), Layout.from_run(run, 1), 0, HELD).saving == 0, (
        "nothing is saved"
    )
