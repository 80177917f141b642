"""fugaku_megatron.data.indexed: layout byte for byte, checks and atomicity."""

import os
import resource
import struct

import numpy as np
import pytest

from fugaku_megatron.data import indexed
from fugaku_megatron.data.indexed import IndexedDataset, IndexedDatasetWriter, best_dtype
from tests.threads import ThreadWorld

DOCUMENTS = [[1, 2, 3], [65000], [], [4, 5, 6, 7]]


@pytest.fixture
def prefix(tmp_path):
    prefix = str(tmp_path / "corpus")
    with IndexedDatasetWriter(prefix, best_dtype(65001)) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return prefix


def test_best_dtype():
    assert best_dtype(65499) == np.uint16 and best_dtype(65500) == np.int32


def test_round_trip(prefix):
    data = IndexedDataset(prefix)
    assert data.dtype == np.uint16 and len(data) == 4 and data.num_tokens == 8
    assert [data[i].tolist() for i in range(4)] == DOCUMENTS
    assert data.get(3, 1, 2).tolist() == [5, 6] and data.get(3, 2).tolist() == [6, 7]
    assert data.document_indices.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        data[0][0] = 1


def test_files_byte_for_byte(prefix):
    """The layout written out by hand from the format's description."""
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    index += struct.pack("<4i", 3, 1, 0, 4) + struct.pack("<4q", 0, 6, 8, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    with open(prefix + ".idx", "rb") as stream:
        assert stream.read() == index
    with open(prefix + ".bin", "rb") as stream:
        assert stream.read() == struct.pack("<8H", 1, 2, 3, 65000, 4, 5, 6, 7)


def test_int32_and_documents_of_several_sequences(tmp_path):
    prefix = str(tmp_path / "wide")
    with IndexedDatasetWriter(prefix, best_dtype(100_000)) as writer:
        writer.add_document(np.array([99_999, 1, 2]), lengths=[1, 2])
        writer.add_document([], lengths=[])
        writer.add_document([3])
    data = IndexedDataset(prefix)
    assert data.dtype == np.int32 and [data[i].tolist() for i in range(3)] == [[99_999], [1, 2], [3]]
    assert data.document_indices.tolist() == [0, 2, 2, 3]


def test_empty_dataset(tmp_path):
    with IndexedDatasetWriter(tmp_path / "none", "<u2"):
        pass
    data = IndexedDataset(tmp_path / "none")
    assert len(data) == 0 and data.num_tokens == 0 and len(data.tokens) == 0


def test_trailing_modes_are_accepted(prefix):
    with open(prefix + ".idx", "ab") as stream:
        stream.write(bytes(4))
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]


def test_missing_files(prefix):
    with pytest.raises(ValueError, match=r"corpus\.bin\.idx.*without \.bin or \.idx"):
        IndexedDataset(prefix + ".bin")
    os.remove(prefix + ".bin")
    with pytest.raises(ValueError, match=r"corpus\.bin: cannot be read \(No such file.*fugaku-megatron preprocess"):
        IndexedDataset(prefix)


def rewrite(path, change):
    with open(path, "rb") as stream:
        content = stream.read()
    with open(path, "wb") as stream:
        stream.write(change(content))


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
        (".idx", lambda b: b[:-8] + struct.pack("<q", 9), "document indices do not run from 0 to its 4"),
        (".bin", lambda b: b[:-2], r"corpus\.bin: 14 bytes, but .*corpus\.idx announces 16 .*fugaku-megatron preprocess"),
        (".bin", lambda b: b + b"\0\0", r"corpus\.bin: 18 bytes, but .*corpus\.idx announces 16"),
    ],
)
def test_damaged_files(prefix, suffix, change, message):
    rewrite(prefix + suffix, change)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(prefix)


def test_bin_is_opened_late_and_checked_again(prefix):
    data = IndexedDataset(prefix)
    rewrite(prefix + ".bin", lambda b: b[:-2])
    with pytest.raises(ValueError, match="14 bytes"):
        data[0]


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
def test_a_disk_without_room_is_named_and_nothing_is_left(tmp_path, documents):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        with pytest.raises(ValueError, match=r"x\.bin: cannot be written \(File too large\); .*its disk not full"):
            with IndexedDatasetWriter(tmp_path / "x", "<u2") as writer:
                for _ in range(documents):
                    writer.add_document(range(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", [[-1], [65536], np.array([70000])])
def test_writer_refuses_ids_that_do_not_fit(tmp_path, wrong):
    with pytest.raises(ValueError, match="do not fit uint16"), IndexedDatasetWriter(tmp_path / "x", "<u2") as writer:
        writer.add_document(wrong)


def test_writer_errors(tmp_path):
    with pytest.raises(ValueError, match="--output-prefix"):
        IndexedDatasetWriter(tmp_path / "no" / "folder", "<u2")
    with pytest.raises(ValueError, match="cannot be stored as uint32"):
        IndexedDatasetWriter(tmp_path / "x", np.uint32)
    with pytest.raises(ValueError, match="do not add up"), IndexedDatasetWriter(tmp_path / "x", "<u2") as writer:
        writer.add_document([1, 2], lengths=[1])
    assert os.listdir(tmp_path) == []


def test_only_rank_0_reads_the_index(prefix, monkeypatch):
    calls = []
    read = indexed._read_index
    monkeypatch.setattr(indexed, "_read_index", lambda name: calls.append(name) or read(name))
    results = ThreadWorld(3).run(lambda comm: IndexedDataset(prefix, comm))
    assert len(calls) == 1
    assert [[data[i].tolist() for i in range(4)] for data in results] == [DOCUMENTS] * 3


def test_errors_reach_every_rank(tmp_path):
    def message(comm):
        with pytest.raises(ValueError) as error:
            IndexedDataset(str(tmp_path / "none"), comm)
        return str(error.value)

    messages = ThreadWorld(3).run(message)
    assert len(set(messages)) == 1 and "none.idx" in messages[0]
