"""The mappings against the computation that one rank would do with the whole tensors."""

import pytest
import torch

from fugaku_megatron.comm.autograd import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    gather_from_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from fugaku_megatron.comm.solo import SoloComm
from tests.recording import RecordingComm
from tests.threads import ThreadWorld

MAPPINGS = (
    copy_to_tensor_parallel, reduce_from_tensor_parallel, gather_from_tensor_parallel, gather_from_sequence_parallel,
    reduce_scatter_to_sequence_parallel,
)
S, B, H = 3, 2, 12  # sequence, micro-batch, hidden: H divides by 2, 3 and 4


def randn(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mlp(x, first, second):
    return (torch.tanh(x @ first) @ second).sin()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_parallel_mlp_equals_the_whole_one(size, inplace):
    x, first, second = (randn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(S, B, H), (H, H), (H, H)]))
    whole = mlp(x, first, second)
    whole.sum().backward()

    def fn(comm):
        own = x.detach().clone().requires_grad_()
        up = first.detach().chunk(comm.size, 1)[comm.rank].clone().requires_grad_()  # column parallel
        down = second.detach().chunk(comm.size, 0)[comm.rank].clone().requires_grad_()  # row parallel
        part = torch.tanh(copy_to_tensor_parallel(own, comm) @ up) @ down
        out = reduce_from_tensor_parallel(part, comm, inplace=inplace).sin()
        out.sum().backward()
        return out.detach(), own.grad, up.grad, down.grad

    for rank, (out, dx, dup, ddown) in enumerate(ThreadWorld(size).run(fn)):
        torch.testing.assert_close(out, whole.detach())
        torch.testing.assert_close(dx, x.grad)
        torch.testing.assert_close(dup, first.grad.chunk(size, 1)[rank])
        torch.testing.assert_close(ddown, second.grad.chunk(size, 0)[rank])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_mlp_between_parts_of_the_sequence_equals_the_whole_one(size):
    shapes = [(12, B, H), (H, H), (H, H)]
    x, first, second = (randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))
    whole = mlp(x, first, second)
    whole.square().sum().backward()

    def fn(comm):
        own = x.detach().chunk(comm.size, 0)[comm.rank].clone().requires_grad_()
        up = first.detach().chunk(comm.size, 1)[comm.rank].clone().requires_grad_()
        down = second.detach().chunk(comm.size, 0)[comm.rank].clone().requires_grad_()
        part = torch.tanh(gather_from_sequence_parallel(own, comm) @ up) @ down
        out = reduce_scatter_to_sequence_parallel(part, comm).sin()
        out.square().sum().backward()
        return out.detach(), own.grad, up.grad, down.grad

    results = ThreadWorld(size).run(fn)
    for found, expected, dim in zip(zip(*results), (whole.detach(), x.grad, first.grad, second.grad), (0, 0, 1, 0)):
        torch.testing.assert_close(torch.cat(found, dim), expected)


def test_a_sum_that_nobody_reads_is_left_out():
    def fn(comm):
        recorder, x = RecordingComm(comm, "tp"), torch.ones(4, 3, requires_grad=True)
        out = reduce_scatter_to_sequence_parallel(x, recorder, needs_values=False)
        assert out.shape == (2, 3) and recorder.records == []
        out.backward(torch.full((2, 3), comm.rank + 1.0))
        return x.grad[:, 0].tolist()

    assert ThreadWorld(2).run(fn) == [[1.0, 1.0, 2.0, 2.0]] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gather_works_on_the_last_dimension(size, dtype):
    x, weight = randn(S, B, H, seed=0).to(dtype), randn(S, B, H, seed=1).to(dtype)

    def fn(comm):
        part = x.chunk(comm.size, -1)[comm.rank].clone().requires_grad_()
        whole = gather_from_tensor_parallel(part, comm)
        (whole * weight).sum().backward()
        return whole.detach(), part.grad

    for rank, (whole, dpart) in enumerate(ThreadWorld(size).run(fn)):
        assert torch.equal(whole, x) and torch.equal(dpart, weight.chunk(size, -1)[rank])
        assert whole.dtype == dpart.dtype == dtype


def test_forward_and_backward_values():
    def fn(comm):
        x = torch.full((2,), float(comm.rank + 1), requires_grad=True)
        copied = copy_to_tensor_parallel(x, comm)
        (copied * (comm.rank + 1)).sum().backward()
        copy_grad, x.grad = x.grad, None
        reduced = reduce_from_tensor_parallel(x, comm)
        (reduced * 5).sum().backward()
        return copied.tolist(), copy_grad.tolist(), reduced.tolist(), x.grad.tolist()

    for rank, got in enumerate(ThreadWorld(3).run(fn)):
        assert got == ([rank + 1.0] * 2, [6.0] * 2, [6.0] * 2, [5.0] * 2)


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
        factor = comm.size if mapping in (copy_to_tensor_parallel, gather_from_sequence_parallel) else 1
        torch.testing.assert_close(x.grad, before * factor)

    ThreadWorld(2).run(fn)


def test_a_gradient_shared_by_two_branches_is_left_alone():
    def fn(comm):
        x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
        (copy_to_tensor_parallel(x, comm) + y).backward(torch.ones(3))  # add hands the same gradient to both
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


def test_in_place_over_a_saved_output_is_refused():
    def fn(comm):
        x = torch.ones(3, requires_grad=True)
        reduce_from_tensor_parallel(torch.exp(x), comm, inplace=True).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ThreadWorld(2).run(fn)


def test_in_place_copies_nothing():
    def fn(comm):
        part = torch.ones(3, requires_grad=True) * 2
        return reduce_from_tensor_parallel(part, comm, inplace=True).data_ptr() == part.data_ptr()

    assert ThreadWorld(2).run(fn) == [True, True]


@pytest.mark.parametrize("mapping, forward, backward", [
    (copy_to_tensor_parallel, [], [("all_reduce", 32)]),
    (reduce_from_tensor_parallel, [("all_reduce", 32)], []),
    (gather_from_tensor_parallel, [("all_gather", 32)], []),
    (gather_from_sequence_parallel, [("all_gather", 32)], [("reduce_scatter", 64)]),
    (reduce_scatter_to_sequence_parallel, [("reduce_scatter", 32)], [("all_gather", 16)]),
])
def test_traffic(mapping, forward, backward):
    def fn(comm):
        recorder = RecordingComm(comm, "tp")
        out = mapping(torch.ones(2, 4, requires_grad=True) * 1, recorder)
        assert recorder.records == forward
        out.sum().backward()
        assert recorder.records == forward + backward

    ThreadWorld(2).run(fn)


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(AssertionError, match="first dimension 5 over 2 ranks"):
        reduce_scatter_to_sequence_parallel(torch.ones(5, 2), SoloComm(0, 2))
