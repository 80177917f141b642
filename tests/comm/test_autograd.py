"""Autograd collectives and row blocks overlapped with matmuls, against one rank."""

import pytest
import torch

from fugaku_megatron.comm.autograd import (
    Gathering,
    RowBlocks,
    Summing,
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    gather_from_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.host import kernels
from tests.recording import RecordingComm
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

MAPPINGS = (
    copy_to_tensor_parallel,
    reduce_from_tensor_parallel,
    gather_from_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_scatter_to_sequence_parallel,
)
S, B, H = 3, 2, 12  # sequence, micro-batch, hidden: H divides by 2, 3 and 4


def randn(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_a_sum_that_nobody_reads_is_left_out():
    def fn(comm):
        recorder = RecordingComm(comm, "tp")
        x = torch.ones(4, 3, requires_grad=True)
        out = reduce_scatter_to_sequence_parallel(x, recorder, needs_values=False)
        assert out.shape == (2, 3) and recorder.records == []
        out.backward(torch.full((2, 3), comm.rank + 1.0))
        return x.grad[:, 0].tolist()

    assert ThreadWorld(2).run(fn) == [[1.0, 1.0, 2.0, 2.0]] * 2


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_one_rank_gets_its_input_back(mapping):
    x = torch.ones(2, 3, requires_grad=True)
    recorder = RecordingComm(SoloComm())
    assert mapping(x, recorder) is x and recorder.log == []


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_the_input_is_left_alone(mapping):
    def fn(comm):
        x = torch.full((2, 4), float(comm.rank + 1), requires_grad=True)
        kept = torch.exp(x)  # saves its output for backward
        before = kept.detach().clone()
        out = mapping(kept, comm)
        assert torch.equal(kept, before)
        out.sum().backward()
        factor = (
            comm.size if mapping in (copy_to_tensor_parallel, gather_from_sequence_parallel) else 1
        )
        torch.testing.assert_close(x.grad, before * factor)

    ThreadWorld(2).run(fn)


def test_a_gradient_shared_by_two_branches_is_left_alone():
    def fn(comm):
        x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
        (copy_to_tensor_parallel(x, comm) + y).backward(
            torch.ones(3)
        )  # add hands the same gradient to both
        return x.grad.tolist(), y.grad.tolist()

    assert ThreadWorld(2).run(fn) == [([2.0] * 3, [1.0] * 3)] * 2


def test_expanded_and_transposed_tensors_are_taken():
    def fn(comm):
        x = randn(4, 6, seed=comm.rank).t().requires_grad_()  # not contiguous
        for mapping in MAPPINGS:
            mapping(x, comm).sum().backward()  # sum's gradient is expanded: stride 0
        return x.grad

    for grad in ThreadWorld(2).run(fn):
        assert torch.equal(grad, torch.full((6, 4), 2.0 + 1 + 1 + 2 + 1, dtype=torch.float64))


ROWS = 12
BATCH = 2
WIDTH = 5
COUNT = 3  # blocks of a part, which may have fewer rows


def rows_of(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 12])
def test_every_block_is_there_when_it_is_named(size):
    whole = rows_of(ROWS, BATCH, WIDTH, seed=1)

    def fn(comm):
        gathering = Gathering(RowBlocks(comm, kernels, COUNT), whole.chunk(size)[comm.rank])
        seen = torch.zeros(ROWS * BATCH, dtype=torch.int64)
        first = None
        for rows in gathering:
            assert torch.equal(gathering.rows[rows], whole.view(-1, WIDTH)[rows])
            seen[rows] += 1
            first = first or rows
        assert (
            seen.tolist() == [1] * (ROWS * BATCH)
            and first.start == comm.rank * ROWS * BATCH // size
        )
        assert torch.equal(gathering.wait(), whole)

    ThreadWorld(size).run(fn)


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.float32)]
)
def test_sums_have_the_bits_of_a_reduce_scatter(size, dtype):
    values = [rows_of(ROWS * BATCH, WIDTH, seed=rank, dtype=dtype) for rank in range(size)]

    def fn(comm):
        blocks = RowBlocks(comm, kernels, COUNT)
        mine = values[comm.rank]
        gathering = Gathering(blocks, mine[: ROWS * BATCH // size])  # on its way at the same time
        total = Summing(blocks, ROWS * BATCH, WIDTH, dtype)
        made = torch.zeros(ROWS * BATCH, dtype=torch.int64)
        for rows, block in total:
            block.copy_(mine[rows])
            made[rows] += 1
        assert made.tolist() == [1] * (ROWS * BATCH)
        assert torch.equal(gathering.wait(), torch.cat([v[: ROWS * BATCH // size] for v in values]))
        expected = comm.reduce_scatter(torch.empty(ROWS * BATCH // size, WIDTH, dtype=dtype), mine)
        assert torch.equal(total.wait(), expected)

    ThreadWorld(size).run(fn)
