"""Indices of micro-batches, and micro-batches by number in any order."""

import numpy as np
import pytest
import torch

from fugaku_megatron.config.batches import RampUp
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.data.sampler import fetch, micro_batches
from fugaku_megatron.training.micro_batches import MicroBatch, MicroBatchWindow

pytestmark = pytest.mark.unit

DATASET = MockDataset(vocab_size=1000, seq_length=6, num_samples=96, seed=3)


def test_samples_lie_in_columns_and_do_not_depend_on_the_layout():
    samples = fetch(DATASET, range(10, 14))
    assert samples.shape == (7, 4) and samples.dtype == np.int64 and samples.flags.c_contiguous
    assert all(np.array_equal(samples[:, b], DATASET[10 + b]) for b in range(4))
    one = np.concatenate(list(micro_batches(DATASET, 0, lambda _: 8, 8, 0, 1)), 1)
    rest = [micro_batches(DATASET, 24, lambda _: 8, 2, rank, 4) for rank in range(4)]
    four = np.concatenate([batch for step in zip(*rest) for batch in step], 1)
    assert np.array_equal(one[:, 24:], four)


def test_micro_batches_follow_the_ramp_and_stop_before_a_part_batch():
    ramp = RampUp(4, 4, 24, 12)  # steps of 4 samples until 12, of 8 until 24 or beyond, then of 12
    sizes = []
    consumed = 0
    while consumed + ramp(consumed) <= 96:
        sizes.append(ramp(consumed))
        consumed += sizes[-1]
    assert sizes == [4, 4, 4, 8, 8] + [12] * 5
    parts = [list(micro_batches(DATASET, 0, ramp, 2, rank, 2)) for rank in range(2)]
    assert [len(part) for part in parts] == [consumed // 4] * 2
    columns = [batch[:, b] for pair in zip(*parts) for batch in pair for b in range(2)]
    assert all(np.array_equal(column, DATASET[i]) for i, column in enumerate(columns))


def source(count: int, read: list[int]):
    for index in range(count):
        read.append(index)
        yield MicroBatch(index, torch.full((3, 2), index), 2 * index)


def test_a_window_reads_as_far_as_asked_and_refuses_the_rest():
    read: list[int] = []
    window = MicroBatchWindow(source(5, read))
    window.fetch(2)
    assert read == [0, 1, 2] and len(window) == 2
    window = MicroBatchWindow(source(2, []), uses=2)
    assert [window.fetch(i).index for i in (0, 1, 1, 0)] == [0, 1, 1, 0] and len(window) == 0
    with pytest.raises(KeyError, match="micro-batch 0"):
        window.fetch(0)
    with pytest.raises(KeyError, match="micro-batch 7 is not in this iteration"):
        MicroBatchWindow(source(2, [])).fetch(7)
