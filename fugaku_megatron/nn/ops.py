"""The operations of a training step, and which kernels run them.

    ops.use("native")                       the C++ kernels for all (default where they are faster: see `autotune`)
    ops.use({**ops.choice(), "attention": "torch"})

Each is an autograd function over tensors (s, b, h). Weight gradients are accumulated straight into `parameter.main_grad` (the flat
FP32 buffer), so autograd carries activation gradients only. Left out: communication (`comm.autograd`, `layers`).
Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads of this rank, d head size, v vocabulary of this rank.
Test: pytest tests/test_ops.py
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..comm.base import Comm
from . import native_ops, packing, torch_ops
from .shared import MaskPlace, backward, dropout, recompute

__all__ = ["FAMILIES", "MaskPlace", "add_position", "attention", "bias_dropout_add", "bias_dropout_add_layer_norm", "choice",
           "backward", "dropout", "embedding", "head_loss", "layer_norm", "linear", "mlp", "recompute", "use",
           "use_fp16_accumulation", "use_packed_weights", "weights_changed"]

FAMILIES = ("gemm", "attention", "rowwise", "loss", "embedding")
_MODULES = {"native": native_ops, "torch": torch_ops}
_choice = dict.fromkeys(FAMILIES, "native")


def use(kernels: str | Mapping[str, str]) -> None:
    """Run all operations on "native" or "torch" kernels, or each family on its own; for the whole process.

    Raises ValueError for other names.
    """
    wanted = dict.fromkeys(FAMILIES, kernels) if isinstance(kernels, str) else dict(kernels)
    for family, name in wanted.items():
        if family not in FAMILIES or name not in _MODULES:
            raise ValueError(f"kernels {name} for {family}: give {' or '.join(_MODULES)}, for {', '.join(FAMILIES)}")
    _choice.update(wanted)


def choice() -> dict[str, str]:
    """Which kernels run each family."""
    return dict(_choice)


def use_fp16_accumulation(chunk: int) -> None:
    """Sum products of FP16 linear layers in FP16 over `chunk` terms, then in FP32, on native kernels; 0: in FP32. For the whole
    process. Products then raise ValueError where the kernels' target has no FP16 arithmetic."""
    native_ops.use_fp16_accumulation(chunk)


def use_packed_weights(enabled: bool) -> None:
    """Keep weights packed for the native matrix kernels between calls of weights_changed(), or not; for the whole process."""
    packing.use(enabled)


def weights_changed() -> None:
    """To be called after every change of a weight."""
    packing.weights_changed()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias. x (..., in), weight (out, in), bias (out) -> (..., out)."""
    return _MODULES[_choice["gemm"]].linear(x, weight, bias)


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, graph_only: bool = False) -> Tensor:
    """gelu(x W1^T + bias1) W2^T, tanh approximation, without the second bias. x (s, b, h), W1 (f, h), W2 (h, f) -> (s, b, h).

    graph_only: backward will follow, and nobody reads the result, whose values may be anything then, nor x again, whose memory
    backward may use.
    """
    return _MODULES[_choice["gemm"]].mlp(x, weight1, bias1, weight2, graph_only)


def attention(qkv: Tensor, head_size: int, p: float, mask: MaskPlace) -> Tensor:
    """Causal self-attention of this rank's heads, dropout on probabilities. qkv (s, b, n 3 d), Megatron's order -> (s, b, n d)."""
    return _MODULES[_choice["attention"]].attention(qkv, head_size, p, mask)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Layer norm over the last dimension. x (..., h), weight and bias (h)."""
    return _MODULES[_choice["rowwise"]].layer_norm(x, weight, bias, epsilon)


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float, mask: MaskPlace, graph_only: bool = False) -> Tensor:
    """residual + dropout(x + bias). x and residual (s, b, h), bias (h) -> (s, b, h). graph_only: as in `mlp`, for the result."""
    return _MODULES[_choice["rowwise"]].bias_dropout_add(x, bias, residual, p, mask, graph_only)


def bias_dropout_add_layer_norm(x: Tensor, bias: Tensor, residual: Tensor, p: float, mask: MaskPlace, weight: Tensor,
                                norm_bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(sum, layer_norm(sum)), sum being that of `bias_dropout_add`."""
    function = _MODULES[_choice["rowwise"]].bias_dropout_add_layer_norm
    return function(x, bias, residual, p, mask, weight, norm_bias, epsilon)


def embedding(tokens: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
    """Rows of a table whose first row here is `first_row`, zeros for rows of others. tokens (s, b), weight (v, h) -> (s, b, h)."""
    return _MODULES[_choice["embedding"]].embedding(tokens, weight, first_row)


def add_position(x: Tensor, weight: Tensor) -> Tensor:
    """x (s, b, h) + the first s rows of weight (positions, h)."""
    return _MODULES[_choice["embedding"]].add_position(x, weight)


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, tp: Comm, first_row: int, factor: float,
              rows_at_once: int | None = None) -> Tensor:
    """Mean cross-entropy of the logits x W^T, the vocabulary being split over `tp`, softmax in FP32.

    x (s, b, h), weight (v, h), labels (s, b) -> (). `factor` must be the gradient that backward will bring (the loss is multiplied
    by it afterwards): native kernels accumulate weight gradients while they hold the logits, and where x needs a gradient, they
    leave it in x's memory.
    """
    return _MODULES[_choice["loss"]].head_loss(x, weight, labels, tp, first_row, factor, rows_at_once)
