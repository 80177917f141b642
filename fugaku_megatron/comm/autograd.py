"""Megatron's tensor parallel mappings: pairs of forward and backward communication, as autograd functions.

    copy_to                  forward identity         backward all-reduce
    reduce_from              forward all-reduce       backward identity
    gather_from              forward all-gather       backward own part        (last dimension)
    gather_from_sequence     forward all-gather       backward reduce-scatter  (first dimension)
    reduce_scatter_to_seq.   forward reduce-scatter   backward all-gather      (first dimension)

`comm` is the tensor parallel communicator of t ranks; size 1 returns the input itself. Sources: Shoeybi et al. 2019
(arXiv:1909.08053), the conjugate operators f and g of figure 3; for the last two, sequence parallelism, Korthikanti et al. 2022
(arXiv:2205.05198), figure 5. Operations that gather their input themselves, so that they keep this rank's part of it only, call
`gather_sequence` and `reduce_scatter_sequence` in their own forward and backward. Left out: second derivatives.

Shapes: s sequence, b micro-batch, h hidden, t tensor parallel size.
"""

from __future__ import annotations

from collections.abc import Callable

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
    return tensor.detach().chunk(comm.size, dim=-1)[comm.rank].contiguous()  # (s, b, h / t)


def gather_sequence(tensor: Tensor, comm: Comm | None) -> Tensor:
    """(s / t, b, h) -> (s, b, h): the parts of all ranks, in a new tensor without gradient. comm None: `tensor` itself.

    The sequence is the first dimension, so a rank's part is one block of the result.
    """
    if comm is None:
        return tensor
    whole = tensor.new_empty(tensor.shape[0] * comm.size, *tensor.shape[1:])
    return comm.all_gather(whole, tensor.detach().contiguous())


def reduce_scatter_sequence(tensor: Tensor, comm: Comm | None) -> Tensor:
    """(s, b, h) -> (s / t, b, h): this rank's part of the sum over ranks, without gradient. comm None: `tensor` itself."""
    if comm is None:
        return tensor
    return comm.reduce_scatter(tensor.new_empty(_part_shape(tensor, comm)), tensor.detach().contiguous())


def _part_shape(tensor: Tensor, comm: Comm) -> tuple[int, ...]:
    length = tensor.shape[0]
    assert length % comm.size == 0, f"first dimension {length} over {comm.size} ranks"
    return length // comm.size, *tensor.shape[1:]


class _Mapping(Function):
    """forward(tensor, comm), and backward(grad, comm) on the gradient."""

    @staticmethod
    def forward(ctx, tensor, comm, forward, backward):
        ctx.comm, ctx.other_way = comm, backward
        return forward(tensor, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.other_way(grad, ctx.comm), None, None, None


class _SumInPlace(Function):
    @staticmethod
    def forward(ctx, tensor, comm):
        ctx.mark_dirty(tensor)  # autograd then refuses a backward that had saved the partial sum
        return comm.all_reduce(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _same(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.view_as(tensor)


def _unread(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.new_empty(1).expand(_part_shape(tensor, comm))


def _mapped(tensor: Tensor, comm: Comm, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Tensor:
    return tensor if comm.size == 1 else _Mapping.apply(tensor, comm, forward, backward)


def copy_to_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """Enter a column-parallel region: identity; gradients are summed over `comm`. Any shape."""
    return _mapped(tensor, comm, _same, _all_reduced)


def reduce_from_tensor_parallel(tensor: Tensor, comm: Comm, inplace: bool = False) -> Tensor:
    """Leave a row-parallel region: the sum over `comm`; gradients pass unchanged. Any shape.

    `inplace` saves the copy by overwriting `tensor` (contiguous, not a leaf): for an output nobody else reads. If an
    earlier operation had saved it, its backward raises RuntimeError.
    """
    if inplace and comm.size > 1:
        return _SumInPlace.apply(tensor, comm)
    return _mapped(tensor, comm, _all_reduced, _same)


def gather_from_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """(s, b, h / t) -> (s, b, h): concatenate the last dimension in rank order; gradients are cut to the own part."""
    return _mapped(tensor, comm, _gathered, _own_part)


def gather_from_sequence_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """(s / t, b, h) -> (s, b, h): enter a region of whole sequences; gradients are summed, each rank keeping its part."""
    return _mapped(tensor, comm, gather_sequence, reduce_scatter_sequence)


def reduce_scatter_to_sequence_parallel(tensor: Tensor, comm: Comm, needs_values: bool = True) -> Tensor:
    """(s, b, h) -> (s / t, b, h): leave a row-parallel region with this rank's part of the sum; gradients are gathered.

    needs_values: False leaves the sum out, where backward will follow and nobody reads the result; its values may be anything then.
    """
    return _mapped(tensor, comm, reduce_scatter_sequence if needs_values else _unread, gather_sequence)
