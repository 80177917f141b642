"""fugaku_megatron.data.indices against a plain walk over the documents."""

import time

import numpy as np
import pytest

from fugaku_megatron.data.indices import blending_blocks, build_document_index, build_shuffle_index, sample_blocks


def sample_index(lengths, document_index, seq_length):
    return np.concatenate(list(sample_blocks(lengths, document_index, seq_length)))


def blending_indices(weights, num_samples):
    datasets, samples = zip(*blending_blocks(weights, num_samples))
    return np.concatenate(datasets), np.concatenate(samples)


def walk_samples(lengths, document_index, seq_length):
    """The sample index by walking over the documents, as Megatron-core's build_sample_idx does (C++)."""
    samples = (int(lengths[document_index].sum()) - 1) // seq_length
    place, offset = 0, 0
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
                place, offset = place + 1, 0
        index.append((place, offset))
    return index


@pytest.mark.parametrize("seed", range(8))
def test_sample_index_equals_the_walk(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0 if seed % 2 else 1, 30, 200).astype(np.int32)
    lengths[rng.integers(200)] = 500
    order = np.concatenate([rng.permutation(200), rng.permutation(200)]).astype(np.int32)
    order = order[np.argmax(lengths[order] > 0) :]  # the walk starts on a token
    for seq_length in (1, 7, 64, 999):
        assert sample_index(lengths, order, seq_length).tolist() == [
            list(map(int, entry)) for entry in walk_samples(lengths, order, seq_length)
        ]


def test_sample_index_skips_empty_documents_at_the_beginning():
    index = sample_index(np.array([0, 0, 5], np.int32), np.arange(3), 2)
    assert index.tolist() == [[2, 0], [2, 2], [2, 4]]


def test_document_index_shuffles_all_epochs_together():
    documents = np.arange(10, 60)
    index = build_document_index(documents, 3, False, np.random.RandomState(1))
    expected = np.tile(documents, 3)
    np.random.RandomState(1).shuffle(expected)
    assert index.tolist() == expected.tolist() and index.dtype == np.int32
    assert set(index[:50].tolist()) != set(documents.tolist())  # epochs are mixed


def test_document_index_with_separate_last_epoch():
    documents = np.arange(10, 60)
    index = build_document_index(documents, 3, True, np.random.RandomState(1))
    assert sorted(index[:100]) == sorted(np.tile(documents, 2)) and sorted(index[100:]) == documents.tolist()
    assert index[:100].tolist() == build_document_index(documents, 2, False, np.random.RandomState(1)).tolist()


def test_shuffle_index_ranges():
    index = build_shuffle_index(30, 50, np.random.RandomState(3))
    assert sorted(index[:30]) == list(range(30)) and sorted(index[30:]) == list(range(30, 50))
    assert index[:30].tolist() != list(range(30)) and index[30:].tolist() != list(range(30, 50))
    assert index.dtype == np.uint32


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.5, 0.3, 0.2], [1 / 3] * 3, [0.1, 0.2, 0.65, 0.05], [1.0]])
def test_blend_keeps_every_beginning_near_the_weights(weights):
    datasets, samples = blending_indices(weights, 1000)
    for i, weight in enumerate(weights):
        taken = np.cumsum(datasets == i)
        assert np.all(np.abs(taken - weight * np.arange(1, 1001)) < len(weights))
        assert samples[datasets == i].tolist() == list(range(taken[-1]))
    assert datasets[0] == np.argmax(weights)  # the heaviest comes first


def test_blend_by_hand():
    """Errors weight * max(n, 1) - taken for 0.5, 0.25, 0.25; the first of equal ones is taken."""
    assert blending_indices([0.5, 0.25, 0.25], 8)[0].tolist() == [0, 1, 2, 0, 0, 1, 2, 0]


def test_billions_of_tokens_take_seconds():
    lengths = np.random.default_rng(0).integers(200, 1800, 10_000_000).astype(np.int32)  # 10 billion tokens
    began = time.perf_counter()
    rng = np.random.RandomState(1)
    documents = build_document_index(np.arange(len(lengths)), 1, False, rng)
    index = sample_index(lengths, documents, 2048)
    build_shuffle_index(len(index) - 1, len(index) - 1, rng)
    assert len(index) > 4_000_000 and time.perf_counter() - began < 30
