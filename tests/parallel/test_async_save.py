"""Saves behind the run: one consistent iteration, published when all ranks are done, errors on all ranks, memory as modelled."""

from __future__ import annotations

import resource
import threading

import pytest
import torch

from fugaku_megatron.checkpoint import save as save_module
from fugaku_megatron.checkpoint.manifest import Folders, latest_iteration, list_iterations
from fugaku_megatron.checkpoint.save import BackgroundSave, Description, Snapshot, save_steps, shard_writer
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs.memory import stage_memory
from fugaku_megatron.pipeline.parts import Held
from fugaku_megatron.training.dry_run import report
from tests.helpers import make_trainer, small_run, whole_tensors
from tests.parallel.test_session import session
from tests.threads import ThreadWorld

RANKS = 2
ASYNC = {"async_save": True}
HELD = [Held((1,), (0,))]  # one micro-batch between forward and backward


class Gate:
    """Holds the writing of files until it is opened."""

    def __init__(self, monkeypatch):
        self.opened, write = threading.Event(), save_module.write_tensors
        monkeypatch.setattr(save_module, "write_tensors", lambda *given: self.opened.wait(30) and write(*given))


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def begin(comm, directory, shards, iteration=1):
    return BackgroundSave(save_steps(directory, shard_writer(comm.rank, shards), Description(iteration, {}, {}, {}), Folders(comm)))


def test_a_save_appears_when_every_rank_has_written(tmp_path, gate):
    def rank(comm):
        saving = begin(comm, tmp_path, [Shard(f"w{comm.rank}", torch.ones(3), (3,), (0,), (3,))])
        comm.barrier()
        assert not saving.done and latest_iteration(tmp_path) is None
        comm.barrier()
        gate.opened.set()
        saving.finish()
        return latest_iteration(tmp_path)

    assert ThreadWorld(RANKS).run(rank) == [1, 1] and list_iterations(tmp_path) == [1]


def test_a_snapshot_keeps_the_values_of_its_moment():
    tensor = torch.arange(6.0).view(2, 3)
    shard = Shard("w", tensor, (2, 3), (0, 0), (2, 3))
    snapshot = Snapshot([shard])
    (taken,) = snapshot.take([shard])
    tensor.zero_()
    assert taken.tensor.tolist() == [0.0, 1, 2, 3, 4, 5] and taken.record() == shard.record() and snapshot.nbytes == 24
    assert snapshot.take([shard])[0].tensor.data_ptr() == taken.tensor.data_ptr(), "the same memory every time"


def test_what_is_written_is_the_iteration_of_the_copy(tmp_path, gate):
    """Training goes on while the files are written, and changes nothing in them."""
    layout = {"num_layers": 2, "tensor_model_parallel_size": 2, "zero_stage": 1, "save": str(tmp_path), **ASYNC}

    def rank(world):
        torch.set_num_threads(1)
        trainer, again = (make_trainer(world, small_run(**layout)) for _ in range(2))
        trainer.train_step()
        expected = whole_tensors(trainer, "weight")
        saving = trainer.save_behind(str(tmp_path))
        after = trainer.train_step().loss
        world.barrier()
        gate.opened.set()
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
    try:
        made.run()
    finally:
        made.trainer.close()
    return made


@pytest.mark.parametrize("changes", [{"save_interval": 2}, {"save_interval": 1, "keep_last": 2}, {}])
def test_a_run_saves_what_it_would_have_waited_for(tmp_path, changes):
    expected = session(SoloComm(), tmp_path / "waiting", **changes)
    expected.run()
    expected.trainer.close()
    lines = ThreadWorld(RANKS).run(lambda world: run_session(world, tmp_path / "behind", **changes).writer.lines)[0]
    assert lines == [line.replace("waiting", "behind") for line in expected.writer.lines]
    assert list_iterations(tmp_path / "behind") == list_iterations(tmp_path / "waiting")
    assert latest_iteration(tmp_path / "behind") == 5


def test_training_goes_on_while_a_save_is_written(tmp_path, gate):
    made = session(SoloComm(), tmp_path, save_interval=2, train_iters=4, **ASYNC)
    step, seen = made.trainer.train_step, []

    def watched():
        result = step()
        seen.append(latest_iteration(tmp_path))
        if made.trainer.progress.iteration == 4:
            gate.opened.set()
        return result

    made.trainer.train_step = watched
    made.run()
    made.trainer.close()
    assert seen == [None] * 4 and list_iterations(tmp_path) == [2, 4]


def test_a_disk_that_refuses_the_bytes_ends_the_run_with_one_line(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def rank(world):
        with pytest.raises(ValueError) as caught:
            run_session(world, tmp_path, save_interval=2, train_iters=50)
        return str(caught.value)

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        messages = set(ThreadWorld(RANKS).run(rank))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (message,) = messages
    assert message.startswith(f"--save {tmp_path}: iteration 2 is not saved: rank 0: ") and "File too large" in message
    assert "\n" not in message and list_iterations(tmp_path) == [] and not list(tmp_path.glob("iter_*"))


def test_a_bug_in_the_writing_thread_is_raised_by_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(save_module, "write_tensors", lambda *given: 1 // 0)
    with pytest.raises(ValueError, match="rank 0: ZeroDivisionError"):
        run_session(SoloComm(), tmp_path)


def test_the_copy_is_in_the_model_and_in_the_plan(tmp_path):
    def held(world):
        return make_trainer(world, small_run(zero_stage=1, save=str(tmp_path), **ASYNC))._snapshot.nbytes

    for ranks in (1, 2):
        run = small_run(zero_stage=1, save=str(tmp_path), **ASYNC)
        with_copy, plain = (stage_memory(r, Layout.from_run(r, ranks), 0, HELD) for r in (run, small_run(zero_stage=1)))
        assert max(ThreadWorld(ranks).run(held)) <= with_copy.saving <= 1.05 * max(ThreadWorld(ranks).run(held))
        assert with_copy.total == plain.total + with_copy.saving and plain.saving == 0
    assert "|    saving |" in report(run, 1) and "saving" not in report(small_run(), 1)
    assert stage_memory(small_run(**ASYNC), Layout.from_run(run, 1), 0, HELD).saving == 0, "nothing is saved"
