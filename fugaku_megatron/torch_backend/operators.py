"""The replaced ATen operators: a row for those that stay with PyTorch below one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import activations, adamw, attention, embedding, losses, matmul, norms
from .build import Dispatch

Serve = Callable[..., object]


class Family(NamedTuple):
    """Replaced operators.

    smallest: smaller calls stay with PyTorch: multiply-adds of a product, or of attention's scores of a sample, else elements of the
        first tensor, or the mean of the first list. Above 0, so that these tensors are not empty, and FP32 or BF16
    why: reason for `smallest`
    serve: for each name of ATen, with the overload: gets the operator's arguments; returns its value, or NotImplemented before
        anything is written
    """

    smallest: int
    why: str
    serve: dict[str, Serve]


def _in_place(serve: Serve) -> Serve:
    """Return the operator that writes its value to its first argument."""
    return lambda x, *options: serve(x, *options, x)


FAMILIES = (
    Family(
        1 << 20,
        "PyTorch's own takes about as long as the call of Python, 10 us",
        {
            "mm": matmul.mm,
            "mm.out": matmul.mm,
            "addmm": matmul.addmm,
            "addmm.out": matmul.addmm,
            "bmm": matmul.bmm,
            "bmm.out": matmul.bmm,
            "_grouped_mm": matmul.grouped_mm,
        },
    ),
    Family(
        1 << 17,
        "with 768 columns and 2^16 elements PyTorch takes 25 us and the kernel 29, with 2^18 58 and 52 (one thread of Zen 4)",
        {"embedding_dense_backward": embedding.embedding_dense_backward},
    ),
    Family(
        1 << 18,
        "a kernel is called once for each tensor: with 2^16 elements PyTorch takes 37 us and the kernel "
        "43, with 2^18 117 and 103 (one thread of Zen 4)",
        {"_fused_adam_": adamw.adam, "_fused_adamw_": adamw.adamw},
    ),
    Family(
        1 << 22,
        "packing a smaller sample takes longer than the kernels gain",
        {
            "_scaled_dot_product_flash_attention_for_cpu": attention.flash_attention,
            "_scaled_dot_product_flash_attention_for_cpu_backward": attention.flash_attention_backward,
        },
    ),
    Family(
        1 << 17,
        "PyTorch takes 44 us in FP32 and 61 in BF16, the kernels 50 and 60 (one thread of Zen 4)",
        {
            "native_layer_norm": norms.layer_norm,
            "native_layer_norm_backward": norms.layer_norm_backward,
        },
    ),
    Family(
        1 << 15,
        "PyTorch takes as long as the kernels with the call of Python, 20 to 40 us",
        {
            "rms_norm": norms.rms_norm,
            "gelu": activations.gelu,
            "gelu.out": activations.gelu,
            "gelu_": _in_place(activations.gelu),
            "gelu_backward": activations.gelu_backward,
            "gelu_backward.grad_input": activations.gelu_backward,
        },
    ),
    Family(
        1 << 18,
        "PyTorch takes 59 us and 71 for the gradient, the kernels 56 and 69 (one thread of Zen 4)",
        {
            "silu": activations.silu,
            "silu.out": activations.silu,
            "silu_": _in_place(activations.silu),
            "silu_backward": activations.silu_backward,
            "silu_backward.grad_input": activations.silu_backward,
        },
    ),
    Family(
        1 << 20,
        "the small operators around the kernels take 150 us",
        {"cross_entropy_loss": losses.cross_entropy},
    ),
)


def install(dispatch: Dispatch) -> bool:
    """Register every operator and the default step of Adam; return False if a process imports the package for the second time."""
    if not dispatch.install():
        return False
    for family in FAMILIES:
        for name, serve in family.serve.items():
            dispatch.set(name, serve, family.smallest)
    adamw.fuse_default_step()
    return True


@contextmanager
def every_size(dispatch: Dispatch) -> Iterator[None]:
    """Serve calls of every size inside the block, for tests."""
    names = [name for family in FAMILIES for name in family.serve]
    before = {name: dispatch.exchange_smallest(name, 1) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            dispatch.exchange_smallest(name, value)
