"""Files of the data that change while a run reads them, or between two runs: one line that names the file, and no save."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fugaku_megatron as fm
from fugaku_megatron.checkpoint.manifest import list_iterations
from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.data.build import Builder, build_datasets
from fugaku_megatron.data.chat.chat_files import SUFFIX, ChatFiles, ChatWriter, signed
from fugaku_megatron.data.dataset import RELEASE_EVERY, DatasetConfig, GPTDataset
from fugaku_megatron.data.index_cache import IndexCache
from fugaku_megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from fugaku_megatron.data.unchanged import other_files, records
from fugaku_megatron.run.loop import Session
from fugaku_megatron.run.resume import resume_training
from fugaku_megatron.start.exit_codes import ExitCode
from tests.checks.library import FLAGS
from tests.checks.session import Writer
from tests.helpers import find_checkpoint, make_trainer, one_error, small_run

pytestmark = pytest.mark.unit

DOCUMENTS = 40


def write(prefix: Path, documents: int = DOCUMENTS, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for _ in range(documents):
            writer.add_document(rng.integers(0, 96, 50))
    return prefix


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    """Write another content of the same size into the file, as cp does."""
    content = path.read_bytes()
    path.write_bytes(content[::-1])
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


def replace(path: Path) -> None:
    """Rename another file of the same size and time to this name."""
    aside = path.with_name("aside")
    shutil.copy2(path, aside)
    aside.rename(path)


WORDS = {
    cut: "bytes and had",
    empty: "has 0 bytes and had",
    overwrite: "it was written at",
    replace: "replaced by another file",
    Path.unlink: "is not there any more",
}


@pytest.mark.parametrize("change", WORDS)
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_every_change_of_a_file_is_one_line_with_its_name(tmp_path, suffix, change):
    data = IndexedDataset(write(tmp_path / "d"))
    data.check()
    change(tmp_path / f"d{suffix}")
    with pytest.raises(ValueError, match=WORDS[change]) as caught:
        data.check()
    assert str(tmp_path / f"d{suffix}") in str(caught.value) and "\n" not in str(caught.value)


def chats(prefix: Path) -> ChatFiles:
    with ChatWriter(prefix, "<u2") as writer:
        for _ in range(DOCUMENTS):
            writer.add_document(signed(np.arange(50), np.arange(50) % 2 == 0))
    return ChatFiles(prefix)


@pytest.mark.parametrize("change", WORDS)
def test_a_mask_is_checked_as_well(tmp_path, change):
    files = chats(tmp_path / "c")
    change(tmp_path / f"c{SUFFIX}")
    with pytest.raises(ValueError, match=rf"c\{SUFFIX} changed .*{WORDS[change]}"):
        files.check()


@pytest.mark.parametrize("suffix", [".idx", ".bin", SUFFIX])
def test_a_file_that_is_cut_is_named_when_it_is_read(tmp_path, suffix):
    """Mapped files would end the process by SIGBUS here."""
    files = chats(tmp_path / "c")
    assert files.get(0).tolist() == [*range(50)] and files.trained(0, 2).tolist() == [True, False]
    empty(tmp_path / f"c{suffix}")
    with pytest.raises(ValueError, match=rf"c\{suffix} changed .*: it has 0 bytes and had \d"):
        for chat in range(DOCUMENTS):
            files.get(chat)
            files.trained(chat, 50)


def test_what_evaluate_reads_is_checked(tmp_path):
    tokens = IndexedDataset(write(tmp_path / "d")).tokens
    assert len(tokens) == 50 * DOCUMENTS and len(tokens[10:20]) == 10
    assert np.asarray(tokens[10:20]).tolist() == np.asarray(tokens).tolist()[10:20]
    cut(tmp_path / "d.bin")
    with pytest.raises(ValueError, match=r"d\.bin changed"):
        np.asarray(tokens)


@pytest.mark.parametrize("array", ["document_index", "sample_index", "shuffle_index"])
def test_an_index_that_is_cut_is_named(tmp_path, array):
    cache = IndexCache(str(tmp_path / "cache"))
    train = build_datasets(
        [str(write(tmp_path / "d"))], "1", (100, 0, 0), Builder(16, 1, cache=cache)
    )[0]
    assert train is not None and len(train[0]) == 17
    (path,) = (tmp_path / "cache").glob(f"*{array}.npy")
    empty(path)
    with pytest.raises(ValueError, match=rf"{array}\.npy: 0 bytes, and \d+ when it was opened"):
        train[1]


def test_open_files_are_checked_while_they_are_read(tmp_path):
    data = IndexedDataset(write(tmp_path / "d"))
    train = GPTDataset(data, "train", range(DOCUMENTS), 100, DatasetConfig(16, 1))
    assert len(train[0]) == 17
    overwrite(tmp_path / "d.bin")
    with pytest.raises(ValueError, match=r"d\.bin changed while it was in use: it was written at"):
        for sample in range(RELEASE_EVERY):
            train[sample]


def test_a_file_that_is_read_later_for_the_first_time_is_compared(tmp_path):
    data = IndexedDataset(write(tmp_path / "d"))
    replace(tmp_path / "d.bin")
    with pytest.raises(ValueError, match=r"d\.bin changed while it was in use: it was replaced"):
        data.get(0)


# Runs -------------------------------------------------------------------------------------------------------------------------


def run_of(tmp_path: Path, **changes) -> RunConfig:
    flags = {"mock_data": False, "data_path": (str(tmp_path / "d"),), "split": "80,20,0"}
    return small_run(**{**flags, "num_layers": 1, "train_iters": 6, **changes})


def trainer_of(world: Comm, tmp_path: Path, run: RunConfig):
    """Build a trainer whose first rank reads files."""
    trainer = make_trainer(world, run)
    if world.rank == 0:
        paths = [str(tmp_path / "d")]
        trainer.train, trainer.valid, _ = build_datasets(
            paths, "80,20,0", (200, 20, 0), Builder(16, 1)
        )
        trainer.data_files = records((trainer.train, trainer.valid))
    return trainer


def test_every_rank_ends_with_the_line_of_the_one_that_reads(tmp_path):
    write(tmp_path / "d")

    def check(world: Comm) -> None:
        with closing(trainer_of(world, tmp_path, run_of(tmp_path))) as trainer:
            trainer.check_data()
            world.barrier()
            if world.rank == 0:
                overwrite(tmp_path / "d.idx")
            trainer.check_data()

    message = one_error(2, check)
    assert message.startswith(f"{tmp_path / 'd'}.idx changed while it was in use")


@pytest.mark.parametrize(
    ("change", "valid_sizes", "flags"),
    [
        (Path.unlink, (), {"save_interval": 2}),
        (replace, (), {"save_interval": 2, "keep_last": 1}),
        (Path.unlink, (20,), {"save_interval": 100, "eval_interval": 3, "eval_iters": 1}),
        (replace, (), {"save_interval": None, "save": None}),
        (replace, (), {"save_interval": 2, "async_save": True}),
    ],
)
def test_a_run_whose_data_changes_ends_and_saves_nothing(tmp_path, change, valid_sizes, flags):
    write(tmp_path / "d")
    run = run_of(tmp_path, **{"save": str(tmp_path / "s"), **flags})
    trainer = trainer_of(SoloComm(), tmp_path, run)
    signals = SimpleNamespace(stop_requested=False)
    session = Session(trainer, Writer(), 6, valid_sizes, signals=signals)
    step = trainer.train_step

    def changing_step():
        result = step()
        if trainer.progress.iteration == 3:
            change(tmp_path / "d.bin")
        return result

    trainer.train_step = changing_step
    with closing(trainer), pytest.raises(SystemExit) as end:
        session.run()
    assert end.value.code == ExitCode.USER_ERROR == 2
    saved = [2] if flags["save_interval"] == 2 else []
    assert (list_iterations(tmp_path / "s") if (tmp_path / "s").exists() else []) == saved
    (line,) = [line for line in session.writer.lines if line.startswith("leaving after")]
    assert f"{tmp_path / 'd'}.bin changed while it was in use: " in line and WORDS[change] in line


def test_the_library_saves_and_evaluates_nothing_of_changed_data(tmp_path):
    write(tmp_path / "d")
    config = fm.Config(**FLAGS, train_iters=4, split="80,20,0")
    trainer = fm.Trainer(config, str(tmp_path / "d"))
    for _ in trainer.steps(2):
        pass
    trainer.save(tmp_path / "s")
    trainer.evaluate()
    overwrite(tmp_path / "d.bin")
    with pytest.raises(ValueError, match=r"d\.bin changed while it was in use"):
        trainer.save(tmp_path / "s")
    with pytest.raises(ValueError, match=r"d\.bin changed while it was in use"):
        trainer.evaluate()
    trainer.close()
    assert list_iterations(tmp_path / "s") == [2]


@pytest.mark.parametrize(
    ("documents", "seed", "note"),
    [
        (DOCUMENTS, 0, None),
        (30, 0, r"30 documents with 1,500 tokens, had 40 documents with 2,000 tokens"),
        (DOCUMENTS, 5, r"40 documents with 2,000 tokens, had 40 documents with 2,000 tokens"),
    ],
)
def test_a_resumed_run_says_that_its_data_is_other_data(tmp_path, documents, seed, note):
    write(tmp_path / "d")
    saved = str(tmp_path / "s")
    with closing(trainer_of(SoloComm(), tmp_path, run_of(tmp_path))) as trainer:
        trainer.train_step()
        trainer.save(saved)
    write(tmp_path / "d", documents, seed)
    run = run_of(tmp_path, load=saved)
    with closing(trainer_of(SoloComm(), tmp_path, run)) as trainer:
        lines = resume_training(trainer, find_checkpoint(run, SoloComm()))
    notes = [line for line in lines if "not the files that the checkpoint was trained on" in line]
    assert len(notes) == (note is not None)
    assert note is None or (note in notes[0] and f"{tmp_path / 'd'}.bin" in notes[0])


def test_data_that_was_copied_elsewhere_is_not_noted(tmp_path):
    first = IndexedDataset(write(tmp_path / "d"))
    (tmp_path / "copy").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"d{suffix}", tmp_path / "copy" / f"d{suffix}")
    second = IndexedDataset(tmp_path / "copy" / "d")
    assert first.record()["crc32"] == second.record()["crc32"]
    assert other_files([first.record()], [{**second.record(), "path": first.prefix}]) == []
    assert other_files([], [second.record()]) == [], "of an earlier version, or another prefix"
