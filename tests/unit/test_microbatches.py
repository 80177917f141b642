"""Micro-batches by number, whatever the order."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.training.step import MicroBatch, MicroBatchWindow


def source(count: int, read: list[int]):
    for index in range(count):
        read.append(index)
        yield MicroBatch(index, torch.full((3, 2), index), None, 2 * index)


def test_any_order_gives_each_micro_batch_its_own_tokens_and_sample():
    read: list[int] = []
    window = MicroBatchWindow(source(5, read))
    for index in (2, 0, 4, 1, 3):
        batch = window.fetch(index)
        assert (batch.index, batch.first_sample) == (index, 2 * index) and torch.all(batch.tokens == index)
    assert read == [0, 1, 2, 3, 4] and len(window) == 0, "read once, in data order, and nothing is held at the end"


def test_it_reads_no_further_than_the_schedule_asks():
    read: list[int] = []
    window = MicroBatchWindow(source(5, read))
    window.fetch(2)
    assert read == [0, 1, 2] and len(window) == 2


def test_several_chunks_fetch_the_same_micro_batch():
    window = MicroBatchWindow(source(2, []), uses=2)
    assert [window.fetch(i).index for i in (0, 1, 1, 0)] == [0, 1, 1, 0] and len(window) == 0
    with pytest.raises(KeyError, match="micro-batch 0"):
        window.fetch(0)


def test_a_micro_batch_that_the_iteration_lacks_is_an_error():
    with pytest.raises(KeyError, match="micro-batch 7 is not in this iteration"):
        MicroBatchWindow(source(2, [])).fetch(7)
