"""The prefetching thread: order, errors, depth and threads."""

import time
from contextlib import closing

import psutil
import pytest
import torch

from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.data.prefetcher import Prefetcher
from fugaku_megatron.data.sampler import micro_batches
from tests.time_limit import wait_until

pytestmark = pytest.mark.unit


def test_prefetcher_keeps_order_ends_and_raises_the_source_error_in_turn():
    with closing(Prefetcher(iter(range(100)), depth=3)) as items:
        assert list(items) == list(range(100))
        assert list(items) == []
    assert not items._thread.is_alive()

    def source():
        yield 1
        raise ValueError("token id 9 is outside the vocabulary")

    with closing(Prefetcher(source())) as items:
        assert next(items) == 1
        for _ in range(2):
            with pytest.raises(ValueError, match="token id 9"):
                next(items)


def test_prefetcher_runs_no_further_than_depth_and_closes_while_full():
    produced = []
    with closing(Prefetcher((produced.append(i) or i for i in range(100)), depth=3)) as items:
        assert next(items) == 0
        assert wait_until(lambda: len(produced) >= 4)
        time.sleep(0.02)
        assert produced == [0, 1, 2, 3]
    items = Prefetcher(iter(range(1000)), depth=1)
    next(items)
    items.close()
    items.close()
    assert not items._thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        next(items)


def test_loading_in_the_background_starts_no_second_openmp_team():
    large = MockDataset(vocab_size=1000, seq_length=4096, num_samples=128, seed=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.ones(2**22).add_(1)  # the main thread's own team
        before = psutil.Process().num_threads()
        with closing(Prefetcher(micro_batches(large, 0, lambda _: 64, 64, 0, 1), depth=2)) as items:
            assert next(items).shape == next(items).shape == (4097, 64)
            assert (
                psutil.Process().num_threads() <= before + 1
            )  # libgomp may end idle threads of a former, larger team
    finally:
        torch.set_num_threads(threads)
