"""Checkpoints on node disks: found if every rank has a copy from the same run."""

import os
import shutil
from contextlib import closing

import pytest

from fugaku_megatron.checkpoint import node_copy
from fugaku_megatron.checkpoint.manifest import TRACKER, latest_iteration, list_iterations
from fugaku_megatron.run.resume import resume_training
from tests.checks.session import session
from tests.fault_injection import flip_file_bit
from tests.helpers import find_checkpoint, largest_file, small_run
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

RANKS = 4
LAYOUT = {
    "num_layers": 2,
    "tensor_model_parallel_size": 2,
    "zero_stage": 1,
    "lr_decay_style": "constant",
}


def paths(tmp_path, **changes):
    return {
        **LAYOUT,
        "save_local": str(tmp_path / "local"),
        "load": str(tmp_path / "save"),
        **changes,
    }


def run(tmp_path, iterations: int, **changes) -> list[float]:
    """Train to an iteration from --load or --save-local, and return the losses."""

    def rank(world):
        made = session(
            world, tmp_path / "save", **paths(tmp_path, train_iters=iterations, **changes)
        )
        resume_training(made.trainer, find_checkpoint(made.trainer.run, world))
        step = made.trainer.train_step
        losses = []
        made.trainer.train_step = lambda: (result := step(), losses.append(result.loss))[0]
        with closing(made.trainer):
            made.run()
        return losses

    return ThreadWorld(RANKS).run(rank)[0]


def found(tmp_path, ranks=RANKS, **changes) -> tuple[int | None, str | None]:
    """Return the iteration that a start would load, and --save-local if it is the source."""

    def rank(world):
        resume = find_checkpoint(
            small_run(save=str(tmp_path / "save"), **paths(tmp_path, **changes)), world
        )
        return resume.iteration, resume.checkpoint and resume.checkpoint.node

    return ThreadWorld(ranks).run(rank)[0]


def forget_shared(tmp_path, iteration: int) -> None:
    """As if the job had ended before the shared copy of the last iteration was whole."""
    save = tmp_path / "save"
    for newer in [number for number in list_iterations(save) if number > iteration]:
        shutil.rmtree(save / f"iter_{newer:07d}")
    (save / TRACKER).write_text(f"{iteration}\n")


@pytest.mark.parametrize("changes", [{}, {"async_save": True}], ids=["waiting", "async"])
def test_the_newest_of_either_goes_on_with_the_same_bits(tmp_path, changes):
    straight = run(tmp_path / "straight", 6)
    assert run(tmp_path, 4, save_interval=2, **changes) == straight[:4]
    local = str(tmp_path / "local")
    shared = tmp_path / "save"
    assert list_iterations(shared) == [2, 4] and found(tmp_path) == (4, None), (
        "the shared one, where it is as new"
    )
    assert sorted(os.listdir(local)) == [f"rank_{rank:05d}" for rank in range(RANKS)]
    assert all(
        os.listdir(tmp_path / "local" / name) == ["iter_0000004"] for name in os.listdir(local)
    )
    forget_shared(tmp_path, 2)
    assert found(tmp_path) == (4, local)
    assert found(tmp_path, ckpt_step=2) == (2, None)
    assert run(tmp_path, 6, **changes) == straight[4:] and list_iterations(shared) == [2, 6]


def test_a_first_checkpoint_that_is_on_the_nodes_only(tmp_path):
    run(tmp_path, 2)
    shutil.rmtree(tmp_path / "save" / "iter_0000002")
    (tmp_path / "save" / TRACKER).unlink()
    assert found(tmp_path) == (2, str(tmp_path / "local"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    run(directory, 4, save_interval=2)
    forget_shared(directory, 2)
    return directory


@pytest.fixture
def newer(made, tmp_path):
    """Iteration 2 in --save, 2 and 4 on the nodes."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    assert found(tmp_path)[0] == 4
    return tmp_path


def copy_of(tmp_path, rank: int):
    return tmp_path / "local" / f"rank_{rank:05d}" / "iter_0000004"


def alter_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"optimizer_steps":4', '"optimizer_steps":3'))


@pytest.mark.parametrize(
    "damage",
    [
        shutil.rmtree,
        lambda folder: os.truncate(folder / "rank_00001.safetensors", 100),
        alter_manifest,
        lambda folder: folder.rename(f"{folder}.tmp"),
    ],
    ids=["missing", "truncated", "altered", "not published"],
)
def test_where_one_copy_is_not_whole_the_shared_one_is_loaded(newer, damage):
    damage(copy_of(newer, 1))
    assert found(newer) == (2, None)
    assert run(newer, 5, save_interval=2) and found(newer)[0] == 5, (
        "and what is left disturbs no later save"
    )


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(2, {}), (RANKS, {"tensor_model_parallel_size": 1}), (RANKS, {"ddp_bucket_size": 1000})],
)
def test_another_layout_loads_the_shared_one(newer, ranks, changes):
    assert found(newer, ranks, **changes) == (2, None)


def test_copies_of_another_run_are_left_alone(newer):
    (newer / "save").rename(newer / "elsewhere")
    assert found(newer) == (None, None), "a new directory of that name"
    (newer / "save").mkdir()
    (newer / "save" / node_copy.RUN).write_text("another run")
    assert found(newer) == (None, None)
    run(newer, 1)
    assert found(newer) == (1, None)
    shutil.rmtree(newer / "save")
    (newer / "elsewhere").rename(newer / "save")
    assert found(newer) == (2, None), "the new run's copies replaced the old ones"


def test_a_flipped_bit_in_a_copy_is_one_line_with_a_remedy(newer):
    path = copy_of(newer, 1) / "rank_00001.safetensors"
    flip_file_bit(path, -3, 1)
    with pytest.raises(ValueError) as caught:
        run(newer, 5)
    message = str(caught.value)
    assert (
        message.startswith(f"--save-local {newer}/local: rank 1: {path} has CRC-32 ")
        and "\n" not in message
    )
    assert message.endswith("Omit --save-local once to continue from the shared directory")
    assert found(newer, save_local=None) == (2, None)


def test_the_run_waits_for_the_node_and_not_for_the_shared_disk(tmp_path, monkeypatch):
    """Without --async-save: node copies reach the shared directory while training changes the weights."""
    copies = []
    copy = node_copy.copy_verified
    monkeypatch.setattr(
        node_copy, "copy_verified", lambda *given: copies.append(given) or copy(*given)
    )
    run(tmp_path, 3, save_interval=2)
    assert len(copies) == 2 * RANKS, "each file once, after iterations 2 and 3"
    shared = sorted((tmp_path / "save" / "iter_0000003").glob("rank_*"))
    assert [path.read_bytes() for path in shared] == [
        (tmp_path / "local" / path.stem / "iter_0000003" / path.name).read_bytes()
        for path in shared
    ]


def test_a_copy_that_changed_on_its_disk_does_not_reach_the_shared_directory(tmp_path, monkeypatch):
    copy = node_copy.copy_verified

    def damaged(source, entry, path):
        if source.name == "rank_00002.safetensors":
            flip_file_bit(source)
        copy(source, entry, path)

    monkeypatch.setattr(node_copy, "copy_verified", damaged)
    with pytest.raises(
        ValueError,
        match=r"--save .* iteration 2 is not saved: rank 2: .*local/rank_00002/.* has CRC-32 ",
    ):
        run(tmp_path, 2)
    assert list_iterations(tmp_path / "save") == []


def test_a_full_disk_of_a_node_ends_the_run_with_one_line(tmp_path):
    with largest_file(1 << 14), pytest.raises(ValueError) as caught:
        run(tmp_path, 2)
    message = str(caught.value)
    assert (
        message.startswith(f"--save-local {tmp_path}/local: iteration 2 is not saved: rank 0: ")
        and "\n" not in message
    )
    assert "File too large" in message and latest_iteration(tmp_path / "save") is None


@pytest.mark.parametrize(
    "held",
    [
        [[1, 3], [1, 3]],
        [[3], [1]],
        [[], [1]],
        [[2, 4, 7], [1, 2, 5, 6]],
        [[5, 3, 1], [4, 3, 2], [6, 3]],
    ],
)
def test_the_newest_that_every_rank_has(held, monkeypatch):
    monkeypatch.setattr(
        node_copy, "list_iterations", lambda folder: sorted(held[int(folder.name[-5:])])
    )
    monkeypatch.setattr(node_copy, "read_head", lambda folder, number: {})
    ranks = ThreadWorld(len(held)).run(
        lambda comm: node_copy.newest_everywhere("x", comm, lambda head: True)
    )
    assert ranks == [max(set.intersection(*map(set, held)), default=0)] * len(held)
