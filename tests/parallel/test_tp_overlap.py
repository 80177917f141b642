"""Rows that travel block by block behind products: against collectives, and training against the same run without it."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.comm.autograd import RowBlocks
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.host import kernels
from fugaku_megatron.nn.ops import Ops
from tests.helpers import small_run, train
from tests.threads import ThreadWorld

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
S, B, H = 12, 2, 5
COUNT = 3  # blocks of a part, which may have fewer rows


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4, 12])
def test_every_block_is_there_when_it_is_named(size):
    whole = randn(S, B, H, seed=1)

    def fn(comm):
        gathering = RowBlocks(comm, kernels, COUNT).gather(whole.chunk(size)[comm.rank])
        seen, first = torch.zeros(S * B, dtype=torch.int64), None
        for rows in gathering:
            assert torch.equal(gathering.rows[rows], whole.view(-1, H)[rows])
            seen[rows] += 1
            first = first or rows
        assert seen.tolist() == [1] * (S * B) and first.start == comm.rank * S * B // size
        assert torch.equal(gathering.wait(), whole)

    ThreadWorld(size).run(fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_a_reduce_scatter(size, dtype):
    values = [randn(S * B, H, seed=rank, dtype=dtype) for rank in range(size)]

    def fn(comm):
        blocks, mine = RowBlocks(comm, kernels, COUNT), values[comm.rank]
        gathering = blocks.gather(mine[: S * B // size])  # on its way at the same time
        total = blocks.sum(S * B, H, dtype)
        made = torch.zeros(S * B, dtype=torch.int64)
        for rows, block in total:
            block.copy_(mine[rows])
            made[rows] += 1
        assert made.tolist() == [1] * (S * B)
        assert torch.equal(gathering.wait(), torch.cat([v[: S * B // size] for v in values]))
        expected = comm.reduce_scatter(torch.empty(S * B // size, H, dtype=dtype), mine)
        assert torch.equal(total.wait(), expected)

    ThreadWorld(size).run(fn)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(AssertionError, match="5 rows over 2 ranks"):
        RowBlocks(SoloComm(0, 2), kernels, COUNT).sum(5, 2, torch.float32)


def losses(ranks: int, backend: str = "native", **changes) -> list[tuple[float, float]]:
    def fn(world):
        torch.set_num_threads(1)
        return [(r.loss, r.grad_norm) for r in train(world, run, 5, Ops.build(backend))]

    run = small_run(sequence_parallel=True, **DROPOUT, **changes)
    return ThreadWorld(ranks).run(fn)[0]


@pytest.mark.parametrize("changes", [
    {}, {"bf16": True}, {"backend": "torch"}, {"recompute_granularity": "full", "recompute_num_layers": 2},
    {"recompute_granularity": "selective"}, {"disable_bias_linear": True, "cache_packed_weights": True}, {"swiglu": True},
    {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"},
], ids=str)
def test_training_has_the_same_bits_on_two_ranks(changes):
    """A sum of two has no order, and a row of a product does not know in which block it is computed."""
    changes, ranks = {"tensor_model_parallel_size": 2, **changes}, 2 * changes.get("pipeline_model_parallel_size", 1)
    assert losses(ranks, tp_comm_overlap=True, **changes) == losses(ranks, **changes)


def test_training_agrees_on_four_ranks():
    changes = {"tensor_model_parallel_size": 4, "make_vocab_size_divisible_by": 4}
    together, apart = (torch.tensor(losses(4, tp_comm_overlap=overlap, **changes)) for overlap in (True, False))
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=0)
