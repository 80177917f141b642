"""Megatron's tensor parallel mappings: the four pairs of forward and backward communication, as autograd functions.

    copy_to      forward identity        backward all-reduce
    reduce_from  forward all-reduce      backward identity
    gather_from  forward all-gather      backward own part     (last dimension)
    scatter_to   forward own part        backward all-gather   (last dimension)

`comm` is the tensor parallel communicator of t ranks; size 1 returns the input itself. Source: Shoeybi et al. 2019
(arXiv:1909.08053), the conjugate operators f and g of figure 3. Left out: sequence parallelism, second derivatives.

Shapes: s sequence, b micro-batch, h hidden, t tensor parallel size.
Test: pytest tests/test_comm_autograd.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .base import Comm


def _all_reduced(tensor: Tensor, comm: Comm) -> Tensor:
    # A copy, because autograd may hand one gradient tensor to several branches, or keep an output for its backward.
    return comm.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format))


def _gathered(tensor: Tensor, comm: Comm) -> Tensor:
    parts = tensor.new_empty((comm.size, *tensor.shape))  # (t, s, b, h / t)
    comm.all_gather(parts, tensor.detach().contiguous())
    return torch.cat(parts.unbind(0), dim=-1)  # (s, b, h)


def _own_part(tensor: Tensor, comm: Comm) -> Tensor:
    width = tensor.shape[-1]
    assert width % comm.size == 0, f"last dimension {width} over {comm.size} ranks"
    return tensor.detach().chunk(comm.size, dim=-1)[comm.rank].contiguous()  # (s, b, h / t)


class _CopyTo(Function):
    @staticmethod
    def forward(ctx, tensor, comm):
        ctx.comm = comm
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _all_reduced(grad, ctx.comm), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx, tensor, comm, inplace):
        if not inplace:
            return _all_reduced(tensor, comm)
        ctx.mark_dirty(tensor)  # autograd then refuses a backward that had saved the partial sum
        return comm.all_reduce(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx, tensor, comm):
        ctx.comm = comm
        return _gathered(tensor, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _own_part(grad, ctx.comm), None


class _ScatterTo(Function):
    @staticmethod
    def forward(ctx, tensor, comm):
        ctx.comm = comm
        return _own_part(tensor, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _gathered(grad, ctx.comm), None


def copy_to_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """Enter a column-parallel region: identity; gradients are summed over `comm`. Any shape."""
    return tensor if comm.size == 1 else _CopyTo.apply(tensor, comm)


def reduce_from_tensor_parallel(tensor: Tensor, comm: Comm, inplace: bool = False) -> Tensor:
    """Leave a row-parallel region: the sum over `comm`; gradients pass unchanged. Any shape.

    `inplace` saves the copy by overwriting `tensor` (contiguous, not a leaf): for an output nobody else reads. If an
    earlier operation had saved it, its backward raises RuntimeError.
    """
    return tensor if comm.size == 1 else _ReduceFrom.apply(tensor, comm, inplace)


def gather_from_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """(s, b, h / t) -> (s, b, h): concatenate the last dimension in rank order; gradients are cut to the own part."""
    return tensor if comm.size == 1 else _GatherFrom.apply(tensor, comm)


def scatter_to_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """(s, b, h) -> (s, b, h / t): keep the own part of the last dimension; gradients are gathered."""
    return tensor if comm.size == 1 else _ScatterTo.apply(tensor, comm)
