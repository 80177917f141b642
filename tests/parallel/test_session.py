"""When a run saves, and what it keeps: by iterations, by the clock of rank 0, at the end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fugaku_megatron.checkpoint.manifest import latest_iteration, list_iterations
from fugaku_megatron.comm.launcher import ExitCode
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.arguments import parse
from fugaku_megatron.data import indexed
from fugaku_megatron.logs import plot
from fugaku_megatron.training import pretrain
from fugaku_megatron.training.session import DIVERGED_STEPS, Session
from tests.helpers import make_trainer, small_run
from tests.recording import RecordingComm
from tests.threads import ThreadWorld

LONG, SHORT = 1e6, 1e-9  # minutes


class Writer:
    """A log that keeps what is printed."""

    printing = False

    def __init__(self):
        self.lines = []
        self.print = self.lines.append

    def event(self, iteration, line):
        self.print(line)

    def add(self, metrics):
        pass

    def flush(self):
        pass


def session(world, directory, **changes):
    torch.set_num_threads(1)
    run = small_run(**{"num_layers": 2, "save": str(directory), "train_iters": 5, **changes})
    signals = SimpleNamespace(stop_requested=False)
    return Session(make_trainer(world, run), Writer(), run.training.train_iters, False, signals=signals)


def run(world, directory, **changes):
    """The iterations that were saved, by what the log says."""
    made = session(world, directory, **changes)
    made.run()
    made.trainer.close()
    return [int(line.split()[4]) for line in made.writer.lines if line.startswith("saved checkpoint of iteration ")]


@pytest.mark.parametrize(("changes", "saved"), [
    ({}, [5]),
    ({"save_interval": 2}, [2, 4, 5]),
    ({"save_interval_in_mins": SHORT}, [1, 2, 3, 4, 5]),
    ({"save_interval_in_mins": LONG}, [5]),
    ({"save_interval_in_mins": LONG, "save_interval": 3}, [3, 5]),
])
def test_intervals_by_iterations_and_by_time(tmp_path, changes, saved):
    assert run(SoloComm(), tmp_path, **changes) == saved == list_iterations(tmp_path)


@pytest.mark.parametrize(("minutes", "saved"), [((SHORT, LONG), [1, 2, 3, 4, 5]), ((LONG, SHORT), [5])])
def test_the_clock_of_rank_0_decides_for_all(tmp_path, minutes, saved):
    ranks = ThreadWorld(2).run(lambda world: run(world, tmp_path, save_interval_in_mins=minutes[world.rank]))
    assert ranks == [saved, saved]


def test_time_counts_from_the_last_save(tmp_path):
    made = session(SoloComm(), tmp_path, save_interval_in_mins=LONG)
    first = made.save_timer
    made._save(str(tmp_path))
    assert made.save_timer is not first
    made.trainer.close()


@pytest.mark.parametrize("keep", [1, 2])
def test_keep_last(tmp_path, keep):
    run(SoloComm(), tmp_path, save_interval=1, keep_last=keep)
    assert list_iterations(tmp_path) == [3, 4, 5][-keep:] and latest_iteration(tmp_path) == 5
    assert not list(tmp_path.glob("*.tmp"))


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
    assert end.value.code == ExitCode.DIVERGED == 3 and made.trainer.progress.iteration == 1 + DIVERGED_STEPS
    assert list_iterations(tmp_path) == [1] and latest_iteration(tmp_path) == 1
    assert made.writer.lines[-1].startswith("diverged: ") and f"last checkpoint in {tmp_path}" in made.writer.lines[-1]


def test_a_save_that_fell_into_skipped_steps_is_made_up_for(tmp_path, monkeypatch):
    made = session(SoloComm(), tmp_path, train_iters=6, save_interval=3)
    train_step = made.trainer.train_step
    monkeypatch.setattr(made.trainer, "train_step", lambda: replace(train_step(), skipped=made.trainer.progress.iteration == 3))
    made.run()
    made.trainer.close()
    assert list_iterations(tmp_path) == [4, 6]


class Picture:
    """A process that draws until somebody waits for it."""

    def __init__(self, events):
        self.events, self.code = events, None
        events.append("start")

    def poll(self):
        return self.code

    def wait(self):
        self.events.append("wait")
        self.code = 0


def test_saves_do_not_wait_for_the_picture_of_an_earlier_one(tmp_path, monkeypatch):
    """Five saves while the first picture is being drawn: one more of all losses at the end."""
    events = []
    monkeypatch.setattr(plot, "start_loss_curve", lambda *words: Picture(events))
    monkeypatch.setattr(Writer, "printing", True)
    assert run(SoloComm(), tmp_path, save_interval=1) == [1, 2, 3, 4, 5]
    assert events == ["start", "wait", "start", "wait"]


@pytest.mark.parametrize(("flags", "message"), [
    (["--data-path", "{d}/whole", "{d}/none"], "none.idx: cannot be read .No such file or directory.; .*: is --data-path"),
    (["--data-path", "0.5", "{d}/half", "x", "{d}/whole"], "--data-path: 'x' stands where a weight is due"),
    (["--train-data-path", "{d}/whole", "--valid-data-path", "{d}/half"], "half.bin: cannot be read"),
])
def test_data_that_is_not_there_is_found_first_and_by_one_rank(tmp_path, monkeypatch, flags, message):
    for name in ("whole.idx", "whole.bin", "half.idx"):
        (tmp_path / name).write_bytes(b"")
    looked, unreadable = [], indexed.unreadable
    monkeypatch.setattr(indexed, "unreadable", lambda path: looked.append(path) or unreadable(path))
    monkeypatch.setattr(pretrain, "hold", None)  # what comes next
    words = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8", "--micro-batch-size",
             "1", "--train-iters", "1", "--vocab-size", "32", *(word.format(d=tmp_path) for word in flags)]

    def start(world):
        with pytest.raises(ValueError, match=message) as wrong:
            pretrain.pretrain(parse(words), world, None)
        return str(wrong.value)

    told = ThreadWorld(2).run(start)
    assert told[0] == told[1] and "\n" not in told[0] and len(looked) == len(set(looked))
