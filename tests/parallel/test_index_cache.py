"""The data index in files: the order that memory gives, whoever built it."""

import json
import os
import time

import numpy as np
import pytest

from fugaku_megatron.data import dataset as dataset_module
from fugaku_megatron.data import index_cache, indices
from fugaku_megatron.data.build import build_datasets
from fugaku_megatron.data.dataset import GPT_ARRAYS, GPTDataset
from fugaku_megatron.data.files import MappedFile
from fugaku_megatron.data.index_cache import IndexCache
from fugaku_megatron.data.indexed import IndexedDataset
from tests.threads import ThreadWorld
from tests.unit.test_dataset import write

MAPPED = IndexCache(in_memory=0)


@pytest.fixture
def prefix(tmp_path):
    lengths = np.random.default_rng(3).integers(0, 90, 100)
    lengths[:3] = 0
    return write(tmp_path / "corpus", lengths)


def build(prefix, cache=None, samples=1000, seed=1, comm=None, documents=None):
    documents = range(5, 95) if documents is None else documents
    return GPTDataset(IndexedDataset(prefix, comm), "train", documents, samples, 16, seed, cache=cache, comm=comm)


def arrays(dataset):
    return [getattr(dataset, name) for name in GPT_ARRAYS]


def same(a, b):
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def folder(prefix):
    return os.path.join(prefix, "cache", "GPTDataset_indices")


@pytest.mark.parametrize("samples", [None, 10, 300, 1000])
@pytest.mark.parametrize("block", [7, 2**20])
def test_files_hold_what_memory_would(prefix, samples, block, monkeypatch):
    in_memory = build(prefix, samples=samples, documents=np.arange(5, 95))
    for module in (indices, dataset_module):
        monkeypatch.setattr(module, "BLOCK", block)
    mapped = build(prefix, MAPPED, samples)
    assert same(mapped, in_memory) and same(build(prefix, samples=samples), in_memory)
    assert all(np.array_equal(mapped[i], in_memory[i]) for i in range(len(in_memory)))
    assert not mapped.shuffle_index.flags.writeable


def test_names_are_megatrons_and_numpy_reads_them(prefix):
    dataset = build(prefix, MAPPED)
    names = sorted(os.listdir(folder(prefix)))
    (base,) = {name.rsplit("-", 1)[0] for name in names}
    assert [name.rsplit("-", 1)[1] for name in names] == ["description.txt", *(f"{name}.npy" for name in sorted(GPT_ARRAYS))]
    assert len(base) == len("0123456789abcdef0123456789abcdef-GPTDataset-train")
    assert all(np.array_equal(np.load(f"{folder(prefix)}/{base}-{name}.npy"), getattr(dataset, name)) for name in GPT_ARRAYS)
    with open(f"{folder(prefix)}/{base}-description.txt") as file:
        description = json.load(file)
    assert description["random_seed"] == 1 and description["sequence_length"] == 16 and description["index_split"] == "train"


def times(prefix):
    return {name: os.stat(os.path.join(folder(prefix), name)).st_mtime_ns for name in os.listdir(folder(prefix))}


def test_an_index_is_built_once_and_anew_for_other_data(prefix, tmp_path):
    build(prefix, MAPPED)
    before = times(prefix)
    build(prefix, MAPPED)
    assert times(prefix) == before
    build(prefix, MAPPED, seed=2)
    assert len(times(prefix)) == 2 * len(before)
    write(tmp_path / "corpus", [40] * 100)
    assert same(build(prefix, MAPPED), build(prefix)) and len(times(prefix)) == 3 * len(before)


def test_a_killed_builder_leaves_nothing_that_is_taken_for_an_index(prefix, monkeypatch):
    expected = build(prefix)

    class Killed(BaseException):
        pass

    replace = index_cache.Path.replace
    for renames in range(4):
        left = [renames]

        def stopping(self, target, left=left):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return replace(self, target)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(index_cache.Path, "replace", stopping)
            patch.setattr(index_cache.Path, "unlink", lambda self, **_: None)  # a killed process does not tidy up
            build(prefix, MAPPED)
        assert any(name.endswith(".tmp") for name in os.listdir(folder(prefix)))
    for name in os.listdir(folder(prefix)):
        path = os.path.join(folder(prefix), name)
        if name.endswith(".tmp"):
            os.utime(path, (time.time() - 7200,) * 2)
        else:
            os.truncate(path, 100)  # as a file system that lost its last blocks
    assert same(build(prefix, MAPPED), expected)
    assert len(os.listdir(folder(prefix))) == 4


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, os.path.getsize(path) - 1), os.remove,
                                    lambda path: os.truncate(path, 0)])
def test_a_damaged_index_is_built_again(prefix, damage):
    build(prefix, MAPPED)
    for name in sorted(os.listdir(folder(prefix))):
        damage(os.path.join(folder(prefix), name))
        assert same(build(prefix, MAPPED), build(prefix))


def test_a_small_index_needs_no_file_and_a_named_folder_gets_one(prefix, tmp_path):
    build(prefix)
    assert not os.path.exists(folder(prefix))
    assert same(build(prefix, IndexCache(str(tmp_path / "named"))), build(prefix))
    assert len(os.listdir(tmp_path / "named")) == 4 and not os.path.exists(folder(prefix))


def test_a_folder_that_takes_no_files_is_a_note_for_a_small_index_and_an_error_for_a_large_one(prefix, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    named = str(tmp_path / "file" / "cache")
    assert same(build(prefix, IndexCache(named)), build(prefix))
    output = capsys.readouterr().out
    assert output.startswith(f"note: --data-cache-path {named}: ") and "kept in memory" in output and output.count("\n") == 1
    with pytest.raises(ValueError, match="cannot be written .*Not a directory.*another folder with --data-cache-path") as error:
        build(prefix, IndexCache(named, in_memory=0))
    assert "\n" not in str(error.value)


def test_rank_0_builds_and_all_ranks_read(prefix, monkeypatch):
    builders, write_header = [], np.lib.format.write_array_header_1_0
    monkeypatch.setattr(index_cache.np.lib.format, "write_array_header_1_0", lambda *a: builders.append(1) or write_header(*a))
    expected = build(prefix)
    for cache in (MAPPED, None):
        results = ThreadWorld(3).run(lambda comm, cache=cache: build(prefix, cache, comm=comm))
        assert all(same(result, expected) for result in results)
    assert len(builders) == 3


def test_a_rank_that_does_not_see_the_files_builds_its_own(prefix, tmp_path):
    def rank(comm):
        return build(prefix, IndexCache(str(tmp_path / f"disk_of_node_{comm.rank // 2}"), in_memory=0), comm=comm)

    expected = build(prefix)
    assert all(same(dataset, expected) for dataset in ThreadWorld(4).run(rank))
    assert os.listdir(tmp_path / "disk_of_node_0") == os.listdir(tmp_path / "disk_of_node_1")
    (tmp_path / "disk_of_node_1" / os.listdir(tmp_path / "disk_of_node_1")[0]).unlink()
    (tmp_path / "disk_of_node_1").rename(tmp_path / "away")
    (tmp_path / "disk_of_node_1").write_text("")
    with pytest.raises(ValueError, match="rank [23]: the index of .* cannot be written .*pass another folder"):
        ThreadWorld(4).run(rank)


def test_blends_are_kept_too(tmp_path):
    path = ["0.25", write(tmp_path / "a", [50] * 100), "0.75", write(tmp_path / "b", [50] * 40, first_token=100_000)]
    expected, mapped = (build_datasets(path, "90,10", 16, (400, 40, 0), 1, cache=cache) for cache in (None, MAPPED))
    for a, b in zip(expected[:2], mapped[:2], strict=True):
        assert all(np.array_equal(a[i], b[i]) for i in range(len(a)))
    assert len(os.listdir(tmp_path / "a" / "cache" / "BlendedDataset_indices")) == 6


def test_pages_go_back_and_come_again(tmp_path):
    values = np.arange(4_000_000)
    np.save(tmp_path / "values.npy", values)
    file = MappedFile(tmp_path / "values.npy")
    array = file.npy()

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")  # shared pages: those of files

    start = resident()
    assert array.sum() == values.sum() and resident() > start + 30e6
    file.release()
    assert resident() < start + 8e6 and np.array_equal(array, values)
