"""Token files of llm.c, modded-nanogpt and nanoGPT as --data-path."""

import re

import numpy as np
import pytest

from fugaku_megatron.data import token_files
from fugaku_megatron.data.build import Builder, build_datasets
from fugaku_megatron.data.dataset import DatasetConfig, GPTDataset
from fugaku_megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from fugaku_megatron.data.token_files import TokenFile, is_token_file, open_tokens
from fugaku_megatron.data.unchanged import check_unchanged, records
from fugaku_megatron.run.checks import check_data
from tests.fault_injection import run
from tests.helpers import small_run
from tests.threads import ThreadWorld

pytestmark = pytest.mark.unit

MAGICS = {"gpt-2": (20240520, 1, "<u2"), "llama-3": (20240801, 7, "<u4"), "nanoGPT": (0, 0, "<u2")}
TOKENS = np.random.default_rng(7).integers(0, 60_000, 1000)


def write(path, kind="gpt-2", tokens=TOKENS, count=None):
    """Write a file as the data scripts do. count: of the header, where it is wrong"""
    magic, version, dtype = MAGICS[kind]
    header = np.zeros(256, "<i4")
    header[:3] = (magic, version, len(tokens) if count is None else count)
    begin = header.tobytes() if magic else b""
    path.write_bytes(begin + tokens.astype(dtype).tobytes())
    return str(path)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(token_files, "PIECE", 64)


@pytest.mark.parametrize("kind", MAGICS)
def test_tokens_are_read_in_place(tmp_path, kind):
    data = open_tokens(write(tmp_path / "shard.bin", kind))
    assert isinstance(data, TokenFile) and data.num_tokens == 1000 and len(data) == 16
    assert np.array_equal(np.concatenate([data[i] for i in range(16)]), TOKENS)
    assert np.array_equal(np.asarray(data.tokens), TOKENS)
    assert data.read_lengths(0, 16).tolist() == [64] * 15 + [40]
    assert data.get(3, 5, 7).tolist() == TOKENS[197:204].tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard.bin"]


def test_samples_are_those_of_an_indexed_dataset_of_the_pieces(tmp_path):
    file = TokenFile(write(tmp_path / "shard.bin"))
    with IndexedDatasetWriter(str(tmp_path / "pieces"), np.dtype("<u2")) as writer:
        for start in range(0, 1000, 64):
            writer.add_document(TOKENS[start : start + 64])
    pieces = IndexedDataset(tmp_path / "pieces")
    ours, expected = (
        GPTDataset(data, "train", range(2, 16), 150, DatasetConfig(16, 5))
        for data in (file, pieces)
    )
    assert len(ours) == len(expected)
    assert all(np.array_equal(a, b) for a, b in ((ours[i], expected[i]) for i in range(len(ours))))


def test_a_split_and_a_blend_on_two_ranks(tmp_path):
    first = write(tmp_path / "first.bin")
    second = write(tmp_path / "second.bin", "nanoGPT", TOKENS[::-1])

    def build(world):
        config = Builder(seq_length=16, seed=1, vocab_size=60_000, comm=world)
        train, valid, _ = build_datasets(["3", first, "1", second], "8,2,0", (40, 8, 0), config)
        return [part[index].tolist() for part in (train, valid) for index in range(8)]

    one, other = ThreadWorld(2).run(build)
    assert one == other and len(one) == 16


def test_a_changed_file_is_found(tmp_path):
    path = tmp_path / "shard.bin"
    data = GPTDataset(TokenFile(write(path)), "train", range(16), None, DatasetConfig(16, 5))
    (record,) = records([data])
    assert record["documents"] == 16 and record["tokens"] == 1000
    write(path, tokens=TOKENS[:900])
    with pytest.raises(ValueError, match="shard.bin changed while it was in use"):
        check_unchanged([data])
    (other,) = records(
        [GPTDataset(TokenFile(path), "train", range(15), None, DatasetConfig(16, 5))]
    )
    assert other["crc32"] != record["crc32"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([20240520, 2, 8], "<i4").tobytes(), r"magic 20240520 with version \[2\]; known"),
        (np.array([20240520], "<i4").tobytes(), r"magic 20240520 with version \[\]; known"),
        (np.array([20240801, 7, 9], "<i4").tobytes(), r"its header announces \[9\] tokens of 4"),
        (b"", "its 0 bytes are no tokens of 2 bytes"),
        (b"abc", "its 3 bytes are no tokens of 2 bytes"),
    ],
)
def test_another_file_is_refused(tmp_path, content, message):
    path = tmp_path / "shard.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
        check_data(small_run(mock_data=False, data_path=(str(path),)))


def test_a_file_that_is_cut_is_refused(tmp_path):
    path = write(tmp_path / "shard.bin", count=1200)
    with pytest.raises(ValueError, match="3024 bytes, but its header announces"):
        TokenFile(path)


def test_the_file_of_a_prefix_is_none(tmp_path):
    with IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3])
    assert not is_token_file(tmp_path / "corpus.bin")
    with pytest.raises(ValueError, match=r"pass the prefix without \.bin"):
        check_data(small_run(mock_data=False, data_path=(str(tmp_path / "corpus.bin"),)))


FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96 --micro-batch-size 1 "
    "--global-batch-size 2 --lr 1e-3 --train-iters 2 --eval-iters 1 --log-interval 1 --allocator stock"
)


def test_a_run_trains_on_a_file_and_validates_on_another(tmp_path, capsys):
    train = write(tmp_path / "train.bin", "nanoGPT", TOKENS % 90)
    valid = write(tmp_path / "val.bin", "nanoGPT", TOKENS % 80)
    run("train", *FLAGS.split(), "--train-data-path", train, "--valid-data-path", valid)
    said = capsys.readouterr().out
    assert re.search(r"iteration +2/", said) and "validation loss at iteration 2" in said
