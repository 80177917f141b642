"""Data set files: layout byte for byte, checks and atomicity, and the sample index."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from fugaku_megatron.data import dataset as dataset_module
from fugaku_megatron.data import index_arrays, index_cache, indexed
from fugaku_megatron.data.build import Builder, build_datasets
from fugaku_megatron.data.dataset import GPT_ARRAYS, DatasetConfig, GPTDataset
from fugaku_megatron.data.files import MappedFile
from fugaku_megatron.data.index_cache import IndexCache
from fugaku_megatron.data.indexed import IndexedDataset, IndexedDatasetWriter, best_dtype
from tests.checks.corpus import write as write_corpus
from tests.helpers import document_indices, largest_file, one_error
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

DOCUMENTS = [[1, 2, 3], [65000], [], [4, 5, 6, 7]]


@pytest.fixture
def prefix(tmp_path):
    prefix = str(tmp_path / "corpus")
    with IndexedDatasetWriter(prefix, best_dtype(65001)) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return prefix


def test_files_byte_for_byte(prefix):
    """The layout written out by hand from the format's description."""
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    index += struct.pack("<4i4q5q", 3, 1, 0, 4, 0, 6, 8, 8, 0, 1, 2, 3, 4)
    assert Path(prefix + ".idx").read_bytes() == index
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<8H", 1, 2, 3, 65000, 4, 5, 6, 7)


def test_int32_and_documents_of_several_sequences(tmp_path):
    prefix = str(tmp_path / "wide")
    with IndexedDatasetWriter(prefix, best_dtype(100_000)) as writer:
        writer._append(np.array([99_999, 1, 2, 3]), np.array([1, 2, 1]), np.array([2, 2, 3]))
    data = IndexedDataset(prefix)
    assert data.dtype == np.int32 and [data[i].tolist() for i in range(3)] == [
        [99_999],
        [1, 2],
        [3],
    ]
    assert document_indices(prefix) == [0, 2, 2, 3]


def test_empty_dataset(tmp_path):
    with IndexedDatasetWriter(tmp_path / "none", "<u2"):
        pass
    data = IndexedDataset(tmp_path / "none")
    assert len(data) == 0 and data.num_tokens == 0 and len(data.tokens) == 0


def test_trailing_modes_are_accepted(prefix):
    path = Path(prefix + ".idx")
    path.write_bytes(path.read_bytes() + bytes(4))
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]


def test_missing_files(prefix):
    with pytest.raises(ValueError, match=r"corpus\.bin\.idx.*without \.bin or \.idx"):
        IndexedDataset(prefix + ".bin")
    os.remove(prefix + ".bin")
    with pytest.raises(
        ValueError, match=r"corpus\.bin: cannot be read \(No such file.*fugaku-megatron preprocess"
    ):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda b: b"PK" + b[2:], r"corpus\.idx: begins with b'PK"),
        (".idx", lambda b: b"", r"corpus\.idx: begins with b''"),
        (".idx", lambda b: b[:20], r"truncated: 20 bytes, but its header alone takes 34"),
        (".idx", lambda b: b[:-1], r"truncated: 121 bytes, but its header announces 122"),
        (".idx", lambda b: b + b"\0", r"too long: 123 bytes, but its header announces 122"),
        (".idx", lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "version 2, dtype code 8"),
        (".idx", lambda b: b[:17] + b"\x63" + b[18:], "version 1, dtype code 99"),
        (".idx", lambda b: b[:34] + struct.pack("<i", -3) + b[38:], "do not follow"),
        (".idx", lambda b: b[:58] + struct.pack("<q", 2) + b[66:], "do not follow"),
        (
            ".idx",
            lambda b: b[:-8] + struct.pack("<q", 9),
            "document indices do not run from 0 to its 4",
        ),
        (
            ".bin",
            lambda b: b[:-2],
            r"corpus\.bin: 14 bytes, but .*corpus\.idx announces 16 .*fugaku-megatron preprocess",
        ),
        (".bin", lambda b: b + b"\0\0", r"corpus\.bin: 18 bytes, but .*corpus\.idx announces 16"),
    ],
)
def test_damaged_files(prefix, suffix, change, message):
    path = Path(prefix + suffix)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        IndexedDataset(prefix)


def test_nothing_is_overwritten_until_finished(prefix, tmp_path):
    before = {name: (tmp_path / name).read_bytes() for name in ("corpus.bin", "corpus.idx")}
    with pytest.raises(RuntimeError), IndexedDatasetWriter(prefix, "<u2") as writer:
        writer.add_document([9])
        assert {name: (tmp_path / name).read_bytes() for name in before} == before
        raise RuntimeError
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert sorted(os.listdir(tmp_path)) == ["corpus.bin", "corpus.idx"]
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        writer.add_document([9])
    assert IndexedDataset(prefix)[0].tolist() == [9] and len(os.listdir(tmp_path)) == 2


def test_interrupted_between_the_renames_leaves_no_index_of_another_bin(prefix, monkeypatch):
    def fail_on_index(source, target):
        if target.endswith(".idx"):
            raise OSError("interrupted")
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "replace", fail_on_index)
    with pytest.raises(OSError, match="interrupted"), IndexedDatasetWriter(prefix, "<u2") as writer:
        writer.add_document(range(8))  # as many tokens as before: sizes alone would not tell
    with pytest.raises(ValueError, match=r"corpus\.idx: cannot be read"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("documents", [4, 400])
def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, documents):
    with (
        largest_file(3000),
        pytest.raises(
            ValueError, match=r"x\.bin: cannot be written \(File too large\); .*its disk not full"
        ),
    ):
        with IndexedDatasetWriter(tmp_path / "x", "<u2") as writer:
            for _ in range(documents):
                writer.add_document(range(1000))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", [[-1], [65536], np.array([70000])])
def test_writer_refuses_ids_that_do_not_fit(tmp_path, wrong):
    with (
        pytest.raises(ValueError, match="do not fit uint16"),
        IndexedDatasetWriter(tmp_path / "x", "<u2") as writer,
    ):
        writer.add_document(wrong)


def test_writer_errors(tmp_path):
    with pytest.raises(ValueError, match="--output-prefix"):
        IndexedDatasetWriter(tmp_path / "no" / "folder", "<u2")
    with pytest.raises(ValueError, match="cannot be stored as uint32"):
        IndexedDatasetWriter(tmp_path / "x", np.uint32)
    assert os.listdir(tmp_path) == []


def test_only_rank_0_reads_the_index(prefix, monkeypatch):
    calls = []
    read = indexed._read_index
    monkeypatch.setattr(indexed, "_read_index", lambda name: calls.append(name) or read(name))
    results = ThreadWorld(3).run(lambda comm: IndexedDataset(prefix, comm))
    assert len(calls) == 1
    assert [[data[i].tolist() for i in range(4)] for data in results] == [DOCUMENTS] * 3


def test_errors_reach_every_rank(tmp_path):
    assert "none.idx" in one_error(3, lambda comm: IndexedDataset(str(tmp_path / "none"), comm))


MAPPED = IndexCache(in_memory=0)


@pytest.fixture
def corpus(tmp_path):
    lengths = np.random.default_rng(3).integers(0, 90, 100)
    lengths[:3] = 0
    return write_corpus(tmp_path / "corpus", lengths)


def build(corpus, cache=None, samples=1000, seed=1, comm=None):
    config = DatasetConfig(16, seed, comm=comm, cache=cache)
    return GPTDataset(IndexedDataset(corpus, comm), "train", range(5, 95), samples, config)


def arrays(dataset):
    return [getattr(dataset, name) for name in GPT_ARRAYS]


def same(a, b):
    return all(
        x.dtype == y.dtype and np.array_equal(x, y)
        for x, y in zip(arrays(a), arrays(b), strict=True)
    )


def folder(corpus):
    return Path(corpus, "cache", "GPTDataset_indices")


@pytest.mark.parametrize("samples", [None, 10, 300, 1000])
@pytest.mark.parametrize("block", [7, 2**20])
def test_files_hold_what_memory_would(corpus, samples, block, monkeypatch):
    in_memory = build(corpus, samples=samples)
    for module in (index_arrays, dataset_module):
        monkeypatch.setattr(module, "BLOCK", block)
    mapped = build(corpus, MAPPED, samples)
    assert same(mapped, in_memory) and same(build(corpus, samples=samples), in_memory)
    assert all(np.array_equal(mapped[i], in_memory[i]) for i in range(len(in_memory)))
    assert not mapped.shuffle_index.flags.writeable


def test_names_are_megatrons_and_numpy_reads_them(corpus):
    dataset = build(corpus, MAPPED)
    names = sorted(times(corpus))
    (base,) = {name.rsplit("-", 1)[0] for name in names}
    assert [name.rsplit("-", 1)[1] for name in names] == [
        "description.txt",
        *(f"{name}.npy" for name in sorted(GPT_ARRAYS)),
    ]
    assert len(base) == len("0123456789abcdef0123456789abcdef-GPTDataset-train")
    assert all(
        np.array_equal(np.load(f"{folder(corpus)}/{base}-{name}.npy"), getattr(dataset, name))
        for name in GPT_ARRAYS
    )
    description = json.loads((folder(corpus) / f"{base}-description.txt").read_text())
    expected = {"random_seed": 1, "sequence_length": 16, "index_split": "train"}
    assert expected.items() <= description.items()


def times(corpus):
    return {path.name: path.stat().st_mtime_ns for path in folder(corpus).iterdir()}


def test_an_index_is_built_once_and_anew_for_other_data(corpus, tmp_path):
    build(corpus, MAPPED)
    before = times(corpus)
    build(corpus, MAPPED)
    assert times(corpus) == before
    build(corpus, MAPPED, seed=2)
    assert len(times(corpus)) == 2 * len(before)
    write_corpus(tmp_path / "corpus", [40] * 100)
    assert same(build(corpus, MAPPED), build(corpus)) and len(times(corpus)) == 3 * len(before)


def test_a_killed_builder_leaves_nothing_that_is_taken_for_an_index(corpus, monkeypatch):
    expected = build(corpus)

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
            patch.setattr(
                index_cache.Path, "unlink", lambda self, **_: None
            )  # a killed process does not tidy up
            build(corpus, MAPPED)
        assert [*folder(corpus).glob("*.tmp")]
    for path in folder(corpus).iterdir():
        if path.suffix == ".tmp":
            os.utime(path, (time.time() - 7200,) * 2)
        else:
            os.truncate(path, 100)  # as a file system that lost its last blocks
    assert same(build(corpus, MAPPED), expected)
    assert len(os.listdir(folder(corpus))) == 4


def test_a_small_index_needs_no_file_and_a_named_folder_gets_one(corpus, tmp_path):
    build(corpus)
    assert not folder(corpus).exists()
    assert same(build(corpus, IndexCache(str(tmp_path / "named"))), build(corpus))
    assert len(os.listdir(tmp_path / "named")) == 4 and not folder(corpus).exists()


def test_a_folder_that_takes_no_files_is_a_note_for_a_small_index_and_an_error_for_a_large_one(
    corpus, tmp_path, capsys
):
    (tmp_path / "file").write_text("")
    named = str(tmp_path / "file" / "cache")
    assert same(build(corpus, IndexCache(named)), build(corpus))
    output = capsys.readouterr().out
    assert (
        output.startswith(f"note: --data-cache-path {named}: ")
        and "kept in memory" in output
        and output.count("\n") == 1
    )
    with pytest.raises(
        ValueError,
        match="cannot be written .*Not a directory.*another folder with --data-cache-path",
    ) as error:
        build(corpus, IndexCache(named, in_memory=0))
    assert "\n" not in str(error.value)


def test_rank_0_builds_and_all_ranks_read(corpus, monkeypatch):
    builders = []
    write_header = np.lib.format.write_array_header_1_0
    monkeypatch.setattr(
        index_cache.np.lib.format,
        "write_array_header_1_0",
        lambda *a: builders.append(1) or write_header(*a),
    )
    expected = build(corpus)
    for cache in (MAPPED, None):
        results = ThreadWorld(3).run(lambda comm, cache=cache: build(corpus, cache, comm=comm))
        assert all(same(result, expected) for result in results)
    assert len(builders) == 3


def test_a_rank_that_does_not_see_the_files_builds_its_own(corpus, tmp_path):
    def rank(comm):
        return build(
            corpus,
            IndexCache(str(tmp_path / f"disk_of_node_{comm.rank // 2}"), in_memory=0),
            comm=comm,
        )

    expected = build(corpus)
    assert all(same(dataset, expected) for dataset in ThreadWorld(4).run(rank))
    assert os.listdir(tmp_path / "disk_of_node_0") == os.listdir(tmp_path / "disk_of_node_1")
    (tmp_path / "disk_of_node_1" / os.listdir(tmp_path / "disk_of_node_1")[0]).unlink()
    (tmp_path / "disk_of_node_1").rename(tmp_path / "away")
    (tmp_path / "disk_of_node_1").write_text("")
    with pytest.raises(
        ValueError, match="rank [23]: the index of .* cannot be written .*pass another folder"
    ):
        ThreadWorld(4).run(rank)


def test_blends_are_kept_too(tmp_path):
    path = [
        "0.25",
        write_corpus(tmp_path / "a", [50] * 100),
        "0.75",
        write_corpus(tmp_path / "b", [50] * 40, first_token=100_000),
    ]
    expected, mapped = (
        build_datasets(path, "90,10", (400, 40, 0), Builder(16, 1, cache=cache))
        for cache in (None, MAPPED)
    )
    for a, b in zip(expected[:2], mapped[:2], strict=True):
        assert all(np.array_equal(a[i], b[i]) for i in range(len(a)))
    assert len(os.listdir(tmp_path / "a" / "cache" / "BlendedDataset_indices")) == 6


def test_pages_go_back_and_come_again(tmp_path):
    values = np.arange(4_000_000)
    np.save(tmp_path / "values.npy", values)
    file = MappedFile(tmp_path / "values.npy")
    array = file.array

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[2]) * os.sysconf(
                "SC_PAGE_SIZE"
            )  # shared pages: those of files

    start = resident()
    assert array.sum() == values.sum() and resident() > start + 30e6
    file.release()
    assert resident() < start + 8e6 and np.array_equal(array, values)
