"""Data files that are no files: refused at once, with their names."""

import json
import os

import pytest

from fugaku_megatron.data.files import unreadable
from fugaku_megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from fugaku_megatron.data.tokenizer import GPT2BPETokenizer
from tests.file_damage import OTHER_KINDS, replace
from tests.parallel.test_generate import write_tokenizer
from tests.time_limit import time_limit


@pytest.fixture(autouse=True)
def limited():
    with time_limit():
        yield


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_datasets(tmp_path, suffix, kind):
    with IndexedDatasetWriter(tmp_path / "corpus", "uint16") as writer:
        writer.add_document([1, 2, 3])
    replace(tmp_path / f"corpus{suffix}", kind)
    with pytest.raises(ValueError, match=rf"corpus\{suffix}: cannot be read \(.*{kind}.*preprocess"):
        IndexedDataset(tmp_path / "corpus")


def test_a_bin_that_is_replaced_after_its_index_was_read(tmp_path):
    with IndexedDatasetWriter(tmp_path / "corpus", "uint16") as writer:
        writer.add_document([1, 2, 3])
    data = IndexedDataset(tmp_path / "corpus")
    replace(tmp_path / "corpus.bin", "a FIFO")
    with pytest.raises(ValueError, match=r"corpus\.bin: cannot be read \(it is a FIFO"):
        data[0]


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize(("name", "flag"), [("vocab.json", "--vocab-file"), ("merges.txt", "--merge-file")])
def test_vocabularies(tmp_path, name, flag, kind):
    write_tokenizer(tmp_path)
    replace(tmp_path / name, kind)
    with pytest.raises(ValueError, match=rf"{flag} .*{name}: cannot be read \(.*{kind}"):
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"a": ' + "7" * 5000 + "}", "", "\0", "nan"])
def test_a_vocabulary_that_no_reader_can_hold(tmp_path, text):
    write_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text(text)
    with pytest.raises(ValueError, match=r"--vocab-file .*vocab\.json: (not JSON|expected one JSON object)") as caught:
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert len(str(caught.value)) < 500


def test_ids_that_are_no_ids(tmp_path):
    write_tokenizer(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    for wrong in (10**4000, -1, 257, True, None):
        (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "!": wrong}))
        with pytest.raises(ValueError, match=r"--vocab-file .*vocab\.json: (the ids of|expected one JSON object)"):
            GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")


def test_a_path_with_a_zero_byte_and_a_missing_permission(tmp_path):
    assert "null" in unreadable("a\0b")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    if not os.access(tmp_path / "secret", os.R_OK):  # root may read everything
        assert unreadable(tmp_path / "secret") == "Permission denied"
