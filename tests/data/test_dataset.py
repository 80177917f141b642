"""Samples of documents: --split, --data-path, blending, and the indices against a plain walk over the documents."""

import numpy as np
import pytest

from fugaku_megatron.data import build
from fugaku_megatron.data.build import Builder, build_datasets
from fugaku_megatron.data.data_flags import parse_data_path, parse_split
from fugaku_megatron.data.dataset import BlendedDataset, DatasetConfig, GPTDataset, MockDataset
from fugaku_megatron.data.index_arrays import (
    sample_blocks,
)
from fugaku_megatron.data.indexed import IndexedDataset
from tests.checks.corpus import write

pytestmark = pytest.mark.unit


@pytest.fixture
def indexed(tmp_path):
    rng = np.random.default_rng(3)
    return IndexedDataset(write(tmp_path / "corpus", rng.integers(1, 90, 100)))


@pytest.mark.parametrize("num_samples", [None, 10, 300, 1000])
def test_samples_cut_the_documents_laid_end_to_end(indexed, num_samples):
    dataset, other = (
        GPTDataset(indexed, "train", range(5, 95), num_samples, DatasetConfig(16, seed))
        for seed in (1234, 1)
    )
    flat = np.concatenate([indexed[i] for i in dataset.document_index])
    assert len(dataset) == (len(flat) - 1) // 16 >= (num_samples or 1)
    assert sorted(dataset.shuffle_index) == list(range(len(dataset)))
    assert dataset.shuffle_index.tolist() != other.shuffle_index.tolist()
    for i in range(len(dataset)):
        begin = 16 * int(dataset.shuffle_index[i])
        sample = dataset[i]
        assert sample.dtype == np.int64 and sample.tolist() == flat[begin : begin + 17].tolist()
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {index} of a dataset of {len(dataset)}"):
            dataset[index]


def test_an_index_of_one_and_of_many_documents_and_its_last_epoch(tmp_path):
    indexed = IndexedDataset(write(tmp_path / "long", [1000]))
    dataset = GPTDataset(indexed, "train", range(1), None, DatasetConfig(10, 0))
    assert len(dataset) == 99
    assert all((np.diff(dataset[i]) == 1).all() and len(dataset[i]) == 11 for i in range(99))
    indexed = IndexedDataset(write(tmp_path / "one", [5, 0, 6]))
    assert len(GPTDataset(indexed, "train", range(3), None, DatasetConfig(10, 0))) == 1
    with pytest.raises(
        ValueError, match=r"train data of .*one: 11 tokens in 3 documents.*--seq-length 11 \+ 1"
    ):
        GPTDataset(indexed, "train", range(3), None, DatasetConfig(11, 0))
    indexed = IndexedDataset(write(tmp_path / "even", [16] * 100))
    few, many = (
        GPTDataset(indexed, "train", range(100), n, DatasetConfig(16, 5)) for n in (210, 290)
    )
    assert few.num_epochs == many.num_epochs == 3
    assert sorted(few.document_index[200:]) == list(range(100)) != sorted(many.document_index[200:])
    assert few.shuffle_index[:199].max() == 198 < many.shuffle_index[:199].max()


def test_token_ids_are_checked_at_start_and_as_fetched(tmp_path, monkeypatch):
    prefix = write(tmp_path / "big", [100] * 10, first_token=50)
    with pytest.raises(
        ValueError,
        match=r"big\.bin: token id 1049 is outside the vocabulary of 1049: use the tokenizer .* NullTokenizer "
        "of older versions of Megatron-LM adds token 1049, .*: pass --vocab-size 1050",
    ):
        build_datasets([prefix], "1", (10, 0, 0), Builder(16, 1, vocab_size=1049))
    monkeypatch.setattr(build, "CHECKED_AT_START", 400)  # the first document
    dataset = build_datasets([prefix], "1", (10, 0, 0), Builder(16, 1, vocab_size=1000))[0]
    failed = 0
    for i in range(len(dataset)):
        try:
            assert dataset[i].max() < 1000
        except ValueError as error:
            failed += "outside the vocabulary of 1000" in str(error)
    assert 3 <= failed <= 5  # the last 50 of 1000 tokens, in one document


def test_blended_dataset(tmp_path):
    parts = [MockDataset(10, 4, 100, seed) for seed in (1, 2)]
    blend = BlendedDataset(parts, [3, 1], 100)
    assert np.bincount(blend.dataset_index).tolist() == [75, 25] and len(blend) == 100
    for i in (0, 1, 50, 99):
        part = parts[blend.dataset_index[i]]
        assert np.array_equal(blend[i], part[int(blend.sample_index[i])])
    with pytest.raises(ValueError, match="dataset 0 has 100, its weight takes 150"):
        BlendedDataset(parts, [3, 1], 200)
    with pytest.raises(IndexError):
        blend[100]


def test_mock_dataset():
    dataset = MockDataset(50, 8, 1000, 7)
    samples = np.stack([dataset[i] for i in range(1000)])
    assert samples.shape == (1000, 9) and samples.dtype == np.int64
    assert (
        np.unique(samples).tolist() == list(range(50))
        and len({tuple(row.tolist()) for row in samples}) == 1000
    )
    assert np.array_equal(dataset[123], MockDataset(50, 8, 2000, 7)[123])
    assert not np.array_equal(dataset[123], MockDataset(50, 8, 1000, 8)[123])
    with pytest.raises(IndexError):
        dataset[1000]


def test_build_datasets_split_errors(tmp_path):
    prefix = write(tmp_path / "corpus", [50] * 10)
    with pytest.raises(
        ValueError, match=r"--split 1,99: none of the 10 documents of .*corpus falls to train"
    ):
        build_datasets([prefix], "1,99", (10, 1, 0), Builder(16, 1))
    other = write(tmp_path / "other", [50])
    with pytest.raises(ValueError, match=r"none of the 1 documents of .*other falls to valid"):
        build_datasets(["1", prefix, "1", other], "80,20", (10, 1, 0), Builder(16, 1))


@pytest.mark.parametrize(
    "split", ["", "a", "1,-1", "1,2,3,4", "1,,2", "1;2", "nan", "1e3", "0", "0,0,0"]
)
def test_malformed_split(split):
    with pytest.raises(ValueError, match="--split"):
        parse_split(split)
    shares = [parse_split(text) for text in ("969,30,1", " 1 ", ".5,1.")]
    assert shares == [[0.969, 0.03, 0.001], [1, 0, 0], [1 / 3, 2 / 3, 0]]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], "0 items"),
        (["1", "a", "2"], r"3 items \(1 a 2\)"),
        (["a", "1"], "expected a weight, got 'a'"),
        (["1", "a", "b", "c"], "expected a weight, got 'b'"),
        (["1", "a", "0", "b"], "weight 0 is not a positive"),
        (["-1", "a"], "weight -1 is not"),
        (["nan", "a"], "weight nan is not"),
        (["inf", "a"], "weight inf is not"),
    ],
)
def test_malformed_data_path(path, message):
    with pytest.raises(ValueError, match=f"--data-path: {message}"):
        parse_data_path(path)


def test_an_order_of_samples_beyond_memory_is_refused_before_it_is_built(tmp_path):
    prefix = write(tmp_path / "small", [100] * 10)
    with pytest.raises(
        ValueError,
        match=r"train data of .*small: the order of 1000000000 samples, which read its 9 documents "
        r"\d+ times, takes about \S+ GiB, and the node has 4.0 GiB: pass fewer --train-iters or --train-samples",
    ):
        build_datasets([prefix], "90,10", (10**9, 0, 0), Builder(16, 1, max_bytes=2**32))
    with pytest.raises(ValueError, match="valid data of .*: pass fewer --eval-iters"):
        build_datasets([prefix], "90,10", (10, 10**12, 0), Builder(16, 1, max_bytes=2**32))
    built = build_datasets([prefix], "90,10", (1000, 100, 0), Builder(16, 1, max_bytes=2**20))
    assert [len(data) >= n for data, n in zip(built, (1000, 100))] == [True, True]


def walk_samples(lengths, document_index, seq_length):
    """Build the sample index by walking over the documents, as Megatron-core's build_sample_idx (C++)."""
    samples = (int(lengths[document_index].sum()) - 1) // seq_length
    place = 0
    offset = 0
    index = [(place, offset)]
    for _ in range(samples):
        remaining = seq_length + 1
        while remaining:
            available = lengths[document_index[place]] - offset
            if available >= remaining:
                offset += remaining - 1  # the last token is also the first of the next sample
                remaining = 0
            else:
                remaining -= available
                place = place + 1
                offset = 0
        index.append((place, offset))
    return index


@pytest.mark.parametrize("seed", range(4))
def test_sample_index_equals_the_walk(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0 if seed % 2 else 1, 30, 200).astype(np.int32)
    lengths[rng.integers(200)] = 500
    order = np.concatenate([rng.permutation(200), rng.permutation(200)]).astype(np.int32)
    order = order[np.argmax(lengths[order] > 0) :]  # the walk starts on a token
    for seq_length in (1, 7, 64, 999):
        assert np.concatenate(list(sample_blocks(lengths, order, seq_length))).tolist() == [
            list(map(int, entry)) for entry in walk_samples(lengths, order, seq_length)
        ]
