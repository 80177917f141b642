"""Checkpoints on four ranks: round trips, interruptions, every damage by name."""

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from fugaku_megatron.checkpoint import manifest
from fugaku_megatron.checkpoint import save as save_module
from fugaku_megatron.checkpoint.load import open_checkpoint
from fugaku_megatron.checkpoint.manifest import (
    Description,
    latest_iteration,
    list_iterations,
)
from fugaku_megatron.checkpoint.save import check_replaces, check_writable
from fugaku_megatron.checkpoint.shards import Shard
from tests.fault_injection import flip_file_bit
from tests.helpers import largest_file, load_checkpoint, one_error, save_checkpoint
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

WORLD = 4
LAYOUT = {"world_size": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
CONFIG = {"num_layers": 1, "hidden_size": 6}
STATE = {"consumed_samples": 4096, "loss_scale": 65536.0, "lr": 0.1 + 0.2, "name": "é"}


def _shards(rank, seed):
    """Return two rows in a matrix, and a flat range in another."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    start = 12 * rank
    return [
        Shard("w", whole[2 * rank : 2 * rank + 2].bfloat16(), (8, 6), (2 * rank, 0), (2, 6)),
        Shard("m", whole.view(-1)[start : start + 12].clone(), (8, 6), (0, 0), (8, 6), start),
    ]


def _zeroed(shards):
    for shard in shards:
        shard.tensor.zero_()
    return shards


def _save(directory, iteration=100, seed=1, keep=None):
    def rank(comm):
        return save_checkpoint(
            directory,
            _shards(comm.rank, seed),
            comm,
            Description(iteration, LAYOUT, CONFIG, {**STATE, "seed": seed}, keep),
        )

    return ThreadWorld(WORLD).run(rank)


def _save_failure(directory, shards_of, iteration=100, **state):
    """Return a failing save's message. shards_of: rank -> shards"""
    description = Description(iteration, LAYOUT, CONFIG, state)
    return one_error(
        WORLD, lambda comm: save_checkpoint(directory, shards_of(comm.rank), comm, description)
    )


def _load(directory, seed=1, **arguments):
    """Load on four ranks and hold every tensor to the values of `seed`; returns (iteration, state)."""

    def rank(comm):
        shards = _zeroed(_shards(comm.rank, seed))
        outcome = load_checkpoint(directory, shards, comm, **arguments)
        for got, expected in zip(shards, _shards(comm.rank, seed)):
            assert torch.equal(got.tensor, expected.tensor), got.key
        return outcome

    outcomes = ThreadWorld(WORLD).run(rank)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def _load_failure(directory, untouched=True, **arguments):
    """Return a failing load's message. A load that fails before it opens a tensor file changes no tensor."""

    def work(comm):
        shards = _shards(comm.rank, 1)
        before = [shard.tensor.clone() for shard in shards]
        try:
            load_checkpoint(directory, shards, comm, **arguments)
        finally:
            assert not untouched or all(
                torch.equal(a, shard.tensor) for a, shard in zip(before, shards)
            )

    return one_error(WORLD, work)


def test_round_trip_of_slices_and_flat_ranges(tmp_path):
    final = tmp_path / "iter_0000100"
    assert _save(tmp_path) == [final for _ in range(WORLD)]
    assert _load(tmp_path) == (100, {**STATE, "seed": 1})
    assert latest_iteration(tmp_path) == 100
    assert sorted(os.listdir(tmp_path)) == ["iter_0000100", manifest.TRACKER]
    assert len(list(final.glob("rank_*.safetensors"))) == WORLD


def test_files_get_the_permissions_of_the_directory(tmp_path):
    mode = os.umask(0o027)
    try:
        _save(tmp_path)
    finally:
        os.umask(mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*.*")} == {0o640}


def test_keep_leaves_the_newest_and_what_is_not_ours(tmp_path):
    (tmp_path / "iter_0000001").mkdir()  # Megatron's, say
    for iteration in (10, 20, 30):
        _save(tmp_path, iteration, keep=2)
    assert list_iterations(tmp_path) == [20, 30]
    assert (tmp_path / "iter_0000001").is_dir()
    _save(tmp_path, 15, keep=1)  # started again from 10: later ones are not of this run, and stay
    assert list_iterations(tmp_path) == [15, 20, 30]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        save_checkpoint(tmp_path, [], None, Description(40, LAYOUT, CONFIG, {}, 0))


class _Stop(BaseException):
    """Raised in place of a power cut: nothing may catch it and tidy up."""


@pytest.mark.parametrize("second", [100, 110])
def test_a_save_interrupted_anywhere_leaves_a_whole_checkpoint(tmp_path, monkeypatch, second):
    """Stop before each step that changes the directory: the old or the new checkpoint loads."""

    def rank(comm, iteration, value):
        shards = [Shard.whole("w", torch.full((3,), value))]
        description = Description(iteration, {"world_size": 1}, {}, {"value": value}, 1)
        save_checkpoint(tmp_path, shards, comm, description)

    seen = set()
    for stop_at in range(40):
        shutil.rmtree(tmp_path)
        ThreadWorld(1).run(rank, 100, 1.0)
        if not _interrupted(monkeypatch, stop_at, lambda: ThreadWorld(1).run(rank, second, 2.0)):
            break
        seen.add(_whole_value(tmp_path))
        ThreadWorld(1).run(rank, 120, 3.0)
        assert _whole_value(tmp_path) == 3.0
        assert sorted(os.listdir(tmp_path)) == ["iter_0000120", manifest.TRACKER]
    assert seen == {1.0, 2.0} and 8 <= stop_at < 39


def test_a_checkpoint_left_between_two_renames_is_loaded_and_outlives_a_failing_save(tmp_path):
    (_save(tmp_path, seed=9)[0]).rename(tmp_path / "iter_0000100.old")
    assert _load(tmp_path, seed=9)[0] == 100 and list_iterations(tmp_path) == [100]
    message = _save_failure(tmp_path, lambda rank: [], 110, x=torch.ones(1))
    assert "TypeError: Object of type Tensor is not JSON serializable" in message
    assert _load(tmp_path, seed=9)[0] == 100


def test_a_removal_that_fails_halfway_only_warns_and_leaves_no_half_checkpoint(
    tmp_path, monkeypatch
):
    def half(path, **options):
        next(path.glob("*.safetensors")).unlink()
        raise OSError(5, "Input/output error", str(path))

    _save(tmp_path, 10)
    monkeypatch.setattr(shutil, "rmtree", half)
    with pytest.warns(
        UserWarning,
        match="old checkpoint .*iter_0000010 could not be removed: .*Input/output error",
    ):
        _save(tmp_path, 20, keep=1)
    assert _load(tmp_path)[0] == 20
    assert not (tmp_path / "iter_0000010").exists()


def _interrupted(monkeypatch, stop_at, work):
    left = [stop_at]

    def guarded(function):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise _Stop
            left[0] -= 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        steps = [(Path, name) for name in ("mkdir", "rename", "replace")]
        steps += [(save_module, name) for name in ("write_tensors", "write_text")]
        steps += [(manifest, "write_text"), (shutil, "rmtree"), (os, "fsync")]
        for holder, name in steps:
            patch.setattr(holder, name, guarded(getattr(holder, name)))
        try:
            work()
        except _Stop:
            return True
    return False


def _whole_value(directory):
    def rank(comm):
        tensor = torch.zeros(3)
        _, state = load_checkpoint(directory, [Shard.whole("w", tensor)], comm)
        assert tensor.tolist() == [state["value"]] * 3
        return state["value"]

    return ThreadWorld(1).run(rank)[0]


def test_a_disk_that_refuses_the_bytes_fails_on_all_ranks_and_loses_nothing(tmp_path):
    _save(tmp_path, 90, seed=9)
    big = [Shard.whole("big", torch.zeros(1 << 16))]
    with largest_file(1 << 16):
        message = _save_failure(tmp_path, lambda rank: big if rank == 2 else [])
    assert message.startswith(f"--save {tmp_path}: iteration 100 is not saved: rank 2: ")
    assert "iter_0000100.tmp/rank_00002.safetensors" in message and "File too large" in message
    assert _load(tmp_path, seed=9)[0] == 90
    assert sorted(os.listdir(tmp_path)) == ["iter_0000090", manifest.TRACKER]


def test_a_shard_given_by_two_ranks_is_refused(tmp_path):
    message = _save_failure(tmp_path, lambda rank: [Shard.whole("w", torch.ones(2))])
    said = "w is saved by two ranks, in rank_00000.safetensors and rank_00001.safetensors"
    assert said in message


def test_a_foreign_directory_of_the_same_name_is_not_replaced(tmp_path):
    foreign = tmp_path / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"precious")
    message = _save_failure(tmp_path, lambda rank: [])
    assert "iter_0000100 exists and is not a whole checkpoint" in message
    assert "move it away" in message
    assert foreign.read_bytes() == b"precious"


def test_check_writable_names_flag_path_rank_and_reason(tmp_path):
    (tmp_path / "file").write_text("")
    message = one_error(WORLD, lambda comm: check_writable(tmp_path / "file" / "b", comm))
    assert (
        message.startswith(f"--save {tmp_path}/file/b is not writable: ")
        and "Not a directory" in message
    )
    (tmp_path / ".write_probe_rank_00003").mkdir()
    message = one_error(WORLD, lambda comm: check_writable(tmp_path, comm))
    assert f"rank 3: {tmp_path}/.write_probe_rank_00003: Is a directory" in message


def test_check_writable_creates_the_directory_and_leaves_nothing_in_it(tmp_path):
    """Only some ranks check here, and name their own flag."""
    ThreadWorld(WORLD).run(lambda comm: check_writable(tmp_path / "a", comm, "--profile-dir", (1,)))
    assert os.listdir(tmp_path / "a") == []
    (tmp_path / "file").write_text("")
    message = one_error(
        WORLD, lambda comm: check_writable(tmp_path / "file", comm, "--profile-dir", (1,))
    )
    assert message == (
        f"--profile-dir {tmp_path}/file is not writable: rank 1: {tmp_path}/file: File exists. "
        "Pass another --profile-dir or change the permissions"
    )


def _replaces(save, load, loaded):
    ThreadWorld(WORLD).run(lambda comm: check_replaces(save, load, loaded, comm))


def test_checkpoints_that_were_not_loaded_are_not_replaced(tmp_path):
    own = tmp_path / "own"
    other = tmp_path / "other"
    _replaces(own, None, None)  # nothing there
    _save(own, 90)
    _save(own, 100)
    for loaded_from in (None, other):
        with pytest.raises(
            ValueError,
            match=f"--save {own} holds checkpoints of iterations 90, 100, .*--load is {loaded_from}: ",
        ):
            _replaces(own, loaded_from, None)
    _replaces(own, own / ".." / "own", 90)  # 100 is replaced when the run gets there
    (own / "iter_0000100" / manifest.MANIFEST).write_text("{")
    _replaces(own, own, 100)
    with pytest.raises(
        ValueError, match="iter_0000100 exists and is not a whole checkpoint .*; move it away"
    ):
        _replaces(own, own, 90)  # before the ten iterations, not after them


def test_the_state_is_read_without_the_tensors(tmp_path):
    _truncate(_save(tmp_path, 90)[0] / "rank_00001.safetensors")
    _save(tmp_path, 100)
    expected = _load(tmp_path)[1]
    assert ThreadWorld(WORLD).run(lambda comm: open_checkpoint(tmp_path, comm, 100).state) == [
        expected for _ in range(WORLD)
    ]
    message = one_error(WORLD, lambda comm: open_checkpoint(tmp_path, comm, 110))
    assert message == (
        f"--load {tmp_path}: {tmp_path}/iter_0000110/manifest.json is missing. Complete checkpoints: iterations "
        "100. Use iteration 100: --ckpt-step 100"
    )


def test_nothing_there_means_start_anew_and_loading_it_is_an_error(tmp_path):
    assert latest_iteration(tmp_path) is None and latest_iteration(tmp_path / "absent") is None
    message = _load_failure(tmp_path)
    assert (
        message
        == f"--load {tmp_path}: no checkpoint there: {tmp_path}/{manifest.TRACKER} does not exist"
    )


def test_a_missing_or_foreign_tracker_never_means_start_anew(tmp_path):
    _save(tmp_path, 90, seed=9)
    (tmp_path / manifest.TRACKER).unlink()
    assert _load(tmp_path, seed=9)[0] == 90, "a first save was ended before it wrote the tracker"
    _save(tmp_path, 100, seed=9)
    (tmp_path / manifest.TRACKER).unlink()
    assert (
        "is missing next to checkpoints of iterations 90, 100; choose one by --ckpt-step"
        in _load_failure(tmp_path)
    )
    assert _load(tmp_path, seed=9, iteration=90)[0] == 90
    (tmp_path / manifest.TRACKER).write_text("release\n")
    with pytest.raises(ValueError, match="it holds 'release'"):
        latest_iteration(tmp_path)


def test_a_cut_tracker_never_means_an_older_checkpoint(tmp_path):
    tracker = tmp_path / manifest.TRACKER
    for iteration in (1, 12):
        _save(tmp_path, iteration)
    tracker.write_text("12")
    assert _load(tmp_path)[0] == 12, "only the end of line is missing"
    tracker.write_text("1\n")
    assert _load(tmp_path)[0] == 1, "somebody's choice"
    tracker.write_text("1")
    assert _load_failure(tmp_path) == (
        f"--load {tmp_path}: {tracker} holds '1' without an end of line and may be cut: checkpoints "
        "of iterations 12 are newer; choose one by --ckpt-step"
    )
    tracker.write_text("2\n")
    assert _load_failure(tmp_path) == (
        f"--load {tmp_path}: {tracker} names iteration 2, and iter_0000002 is missing: correct "
        "the number in that file, or choose an iteration by --ckpt-step. Complete checkpoints: "
        "iterations 1, 12. Use iteration 12: --ckpt-step 12"
    )


def _truncate(path):
    os.truncate(path, 100)


@pytest.mark.parametrize(
    "damage, problem",
    [
        (_truncate, "rank_00001.safetensors has 100 bytes, the manifest says "),
        (flip_file_bit, "rank_00001.safetensors has CRC-32 "),
        (Path.unlink, "rank_00001.safetensors is missing"),
    ],
)
def test_a_damaged_file_fails_on_all_ranks_and_the_previous_iteration_is_named_and_loads(
    tmp_path, damage, problem
):
    _save(tmp_path, 80, seed=8)
    _save(tmp_path, 90, seed=9)
    damage(_save(tmp_path, 100)[0] / "rank_00001.safetensors")
    message = _load_failure(tmp_path, untouched=False)
    assert message.startswith(f"--load {tmp_path}: rank 1: ") and problem in message
    assert message.endswith(
        ". Complete checkpoints: iterations 80, 90. Use iteration 90: --ckpt-step 90"
    )
    assert _load(tmp_path, seed=9, iteration=90)[0] == 90


def test_damage_without_another_checkpoint_says_so(tmp_path):
    _truncate(_save(tmp_path)[0] / "rank_00000.safetensors")
    assert list_iterations(tmp_path) == []
    assert _load_failure(tmp_path, untouched=False).endswith(
        f". No other checkpoint in {tmp_path} is complete"
    )
