"""The operations of a training step as a value, which layers get when they are built.

    ops = Ops.build("native")                                     the C++ kernels for every family
    ops = Ops.build({"gemm": "native", "attention": "torch", ...})
    y = ops.linear(x, weight, bias)

Autograd carries activation gradients only: weight gradients are accumulated in a parameter's `main_grad`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...host import kernels as native_kernels
from ...host.observed import Observed
from ..attention import context_parallel as _shared_attention
from ..backward import backward, recompute
from ..dropout_key import DropoutKey
from ..parameter import WeightCache
from . import (
    absorbed,
    activation,
    attention_blocks,
    delta_net,
    experts,
    gemm,
    grouped_gemm,
    loss,
    overlapped,
)
from . import attention as _attention
from . import dropout as _dropout
from . import embedding as _embedding
from . import latent_qkv as _latent_qkv
from . import mlp as _mlp
from . import norm as _norm
from . import rotary as _rotary
from .backend import BACKENDS, FAMILIES, Backend

__all__ = [
    "BACKENDS",
    "FAMILIES",
    "DropoutKey",
    "Int8",
    "Ops",
    "backward",
    "quantize_activations",
    "recompute",
]

DATA_GRADIENTS = ("linear_data_gradient", "grouped_linear_data_gradient")
WEIGHT_GRADIENTS = ("linear_weight_gradient", "grouped_linear_weight_gradient")
LAYER_MATMULS = ("linear_forward", "linear_data_gradient", "pack_weight", "packed_weight_size")
GROUPED_MATMULS = ("grouped_linear_forward", "grouped_linear_data_gradient")


def _with_keyword(kernels: Any, names: tuple[str, ...], **keyword: bool) -> Any:
    """Return `kernels` whose functions `names` get one more keyword."""
    return Observed(
        kernels, names, lambda _, matmul, args, kwargs: matmul(*args, **kwargs, **keyword)
    )


def quantize_activations(kernels: Any) -> Any:
    """Return `kernels` whose forward matmuls with weights in eight bits quantize the activations too."""
    return Observed(
        kernels,
        ("linear_forward", "grouped_linear_forward"),
        lambda _, matmul, args, kwargs: matmul(*args, **kwargs, int8="scales" in kwargs),
    )


@dataclass(frozen=True)
class Int8:
    """Matmuls that --int8 quantizes besides forward and the data gradients of linear layers.

    stochastic: gradients of layer outputs are rounded up or down at random.
    """

    weight_gradients: bool = False
    head: bool = False
    stochastic: bool = False


@dataclass(frozen=True)
class Ops(Backend):
    """Operations of a training step, with a backend for each family: see `build`."""

    matmul = gemm.matmul
    data_gradient = gemm.data_gradient
    weight_gradient = gemm.weight_gradient
    outer_sum = gemm.outer_sum
    linear = gemm.linear
    grouped_matmul = grouped_gemm.grouped_matmul
    grouped_data_gradient = grouped_gemm.grouped_data_gradient
    grouped_weight_gradient = grouped_gemm.grouped_weight_gradient
    grouped_outer_sum = grouped_gemm.grouped_outer_sum

    activate = activation.activate
    activation_gradient = activation.activation_gradient
    mlp = _mlp.mlp

    column_linear = overlapped.column_linear
    row_linear = overlapped.row_linear
    overlapped_mlp = overlapped.overlapped_mlp

    route = experts.route
    sort_pairs = experts.sort_pairs
    permute = experts.permute
    unpermute = experts.unpermute
    scaled_gate = experts.scaled_gate
    scaled_gate_gradient = experts.scaled_gate_gradient

    attention = _attention.attention
    cached_attention = _attention.cached_attention
    attend_block = attention_blocks.attend_block
    attend_to_earlier = attention_blocks.attend_to_earlier
    add_block_gradients = attention_blocks.add_block_gradients
    shared_attention = _shared_attention.shared_attention

    delta_gates = delta_net.delta_gates
    gated_delta_rule = delta_net.gated_delta_rule
    cached_delta_rule = delta_net.cached_delta_rule
    causal_convolution = delta_net.causal_convolution
    cached_convolution = delta_net.cached_convolution
    gated_rms_norm = delta_net.gated_rms_norm

    norm = _norm.norm
    bias_dropout_add_norm = _norm.bias_dropout_add_norm
    bias_dropout_add = _dropout.bias_dropout_add
    rotary = _rotary.rotary
    latent_qkv = _latent_qkv.latent_qkv
    rotate_parts = _latent_qkv.rotate_parts
    absorb_queries = absorbed.absorb_queries
    latents_to_values = absorbed.latents_to_values
    dropout = _dropout.dropout

    embedding = _embedding.embedding
    add_position = _embedding.add_position

    head_loss = loss.head_loss

    @staticmethod
    def build(
        choice: str | Mapping[str, str] = "native",
        *,
        fp16_sum_length: int = 0,
        bf16x3: bool = False,
        keep_packed_weights: bool = False,
        int8: Int8 | None = None,
        kernels: Any = native_kernels,
        few_rows: int = 0,
    ) -> Ops:
        """Build the operations on "native" or "torch" kernels, or with a backend for each family, "native" by default.

        fp16_sum_length, few_rows: see `Backend`.
        bf16x3: FP32 matmuls multiply each operand as the sum of three BF16 numbers.
        int8: matmuls of linear layers quantize their operands. Weights are packed once for each optimizer step.
        Raises ValueError for an unknown family or backend.
        """
        chosen = dict.fromkeys(FAMILIES, choice) if isinstance(choice, str) else dict(choice)
        for family, name in chosen.items():
            if family not in FAMILIES or name not in BACKENDS:
                raise ValueError(
                    f"kernels {name} for {family}: pass {' or '.join(BACKENDS)}, for {', '.join(FAMILIES)}"
                )
        if bf16x3:
            names = (*LAYER_MATMULS, "linear_weight_gradient")
            kernels = _with_keyword(kernels, names, bf16x3=True)
        ops = Ops(
            {**dict.fromkeys(FAMILIES, "native"), **chosen},
            kernels,
            fp16_sum_length=fp16_sum_length,
            weight_cache=WeightCache(kernels) if keep_packed_weights else None,
            few_rows=few_rows,
        )
        if int8 is None:
            return ops
        quantized = (*LAYER_MATMULS, *GROUPED_MATMULS)
        gradients = WEIGHT_GRADIENTS if int8.weight_gradients else ()
        kernels = _with_keyword(kernels, (*quantized, *gradients), int8=True)
        if int8.stochastic:
            kernels = _with_keyword(kernels, (*DATA_GRADIENTS, *gradients), stochastic=True)
        return replace(
            ops,
            kernels=kernels,
            weight_cache=WeightCache(kernels),
            unquantized=ops,
            int8_head=int8.head,
        )
