"""The replaced ATen operators: a row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import activations, adamw, attention, embedding, losses, matmul, norms
from .build import Dispatch


class Operator(NamedTuple):
    """A replaced operator.

    name: ATen's, with the overload
    serve: gets the operator's arguments; returns its value, or NotImplemented before anything is written
    smallest: smaller calls stay with PyTorch: multiply-adds of a product, or of attention's scores of a sample, else elements of the
        first tensor, or the mean of the first list
    why: reason for `smallest`
    """

    name: str
    serve: Callable[..., object]
    smallest: int
    why: str


_PRODUCT = 1 << 20
_PRODUCT_WHY = "PyTorch's own takes about as long as the call of Python, 10 us"
_STEP = 1 << 18
_STEP_WHY = (
    "a kernel is called once for each tensor: with 2^16 elements PyTorch takes 37 us and the kernel "
    "43, with 2^18 117 and 103 (one thread of Zen 4)"
)
_ATTENTION = 1 << 22
_ATTENTION_WHY = "packing a smaller sample takes longer than the kernels gain"
_LAYER_NORM = 1 << 17
_LAYER_NORM_WHY = (
    "PyTorch takes 44 us in FP32 and 61 in BF16, the kernels 50 and 60 (one thread of Zen 4)"
)
_ELEMENTS = 1 << 15
_ELEMENTS_WHY = "PyTorch takes as long as the kernels with the call of Python, 20 to 40 us"
_SILU = 1 << 18
_SILU_WHY = (
    "PyTorch takes 59 us and 71 for the gradient, the kernels 56 and 69 (one thread of Zen 4)"
)
_LOSS = 1 << 20
_LOSS_WHY = "the small operators around the kernels take 150 us"

OPERATORS = (
    Operator("mm", matmul.mm, _PRODUCT, _PRODUCT_WHY),
    Operator("mm.out", matmul.mm, _PRODUCT, _PRODUCT_WHY),
    Operator("addmm", matmul.addmm, _PRODUCT, _PRODUCT_WHY),
    Operator("addmm.out", matmul.addmm, _PRODUCT, _PRODUCT_WHY),
    Operator("bmm", matmul.bmm, _PRODUCT, _PRODUCT_WHY),
    Operator("bmm.out", matmul.bmm, _PRODUCT, _PRODUCT_WHY),
    Operator("_grouped_mm", matmul.grouped_mm, _PRODUCT, _PRODUCT_WHY),
    Operator(
        "embedding_dense_backward",
        embedding.embedding_dense_backward,
        1 << 17,
        "with 768 columns and 2^16 elements PyTorch takes 25 us and the kernel 29, with 2^18 58 and 52 "
        "(one thread of Zen 4)",
    ),
    Operator("_fused_adam_", adamw.adam, _STEP, _STEP_WHY),
    Operator("_fused_adamw_", adamw.adamw, _STEP, _STEP_WHY),
    Operator(
        "_scaled_dot_product_flash_attention_for_cpu",
        attention.flash_attention,
        _ATTENTION,
        _ATTENTION_WHY,
    ),
    Operator(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        attention.flash_attention_backward,
        _ATTENTION,
        _ATTENTION_WHY,
    ),
    Operator("native_layer_norm", norms.layer_norm, _LAYER_NORM, _LAYER_NORM_WHY),
    Operator("native_layer_norm_backward", norms.layer_norm_backward, _LAYER_NORM, _LAYER_NORM_WHY),
    Operator("rms_norm", norms.rms_norm, _ELEMENTS, _ELEMENTS_WHY),
    Operator("gelu", activations.gelu, _ELEMENTS, _ELEMENTS_WHY),
    Operator("gelu.out", activations.gelu, _ELEMENTS, _ELEMENTS_WHY),
    Operator("gelu_", activations.gelu_in_place, _ELEMENTS, _ELEMENTS_WHY),
    Operator("gelu_backward", activations.gelu_backward, _ELEMENTS, _ELEMENTS_WHY),
    Operator("gelu_backward.grad_input", activations.gelu_backward, _ELEMENTS, _ELEMENTS_WHY),
    Operator("silu", activations.silu, _SILU, _SILU_WHY),
    Operator("silu.out", activations.silu, _SILU, _SILU_WHY),
    Operator("silu_", activations.silu_in_place, _SILU, _SILU_WHY),
    Operator("silu_backward", activations.silu_backward, _SILU, _SILU_WHY),
    Operator("silu_backward.grad_input", activations.silu_backward, _SILU, _SILU_WHY),
    Operator("cross_entropy_loss", losses.cross_entropy, _LOSS, _LOSS_WHY),
)


def install(dispatch: Dispatch) -> bool:
    """Register every operator and the default step of Adam; return False if a process imports the package for the second time."""
    if not dispatch.install():
        return False
    for row in OPERATORS:
        dispatch.set(row.name, row.serve, row.smallest)
    adamw.fuse_default_step()
    return True


@contextmanager
def smallest(dispatch: Dispatch, size: int) -> Iterator[None]:
    """Serve calls from `size` on inside the block, for tests."""
    before = {row.name: dispatch.exchange_smallest(row.name, size) for row in OPERATORS}
    try:
        yield
    finally:
        for name, value in before.items():
            dispatch.exchange_smallest(name, value)
