"""The operations of a training step as a value: which backend runs what.

    ops = Ops.build("native")                                     the C++ kernels for every family
    ops = Ops.build({"gemm": "native", "attention": "torch", ...})
    y = ops.linear(x, weight, bias)

Layers get an `Ops` when they are built and call nothing else. Each operation is an autograd function over tensors (s, b, h). Weight
gradients are accumulated straight into a parameter's `main_grad` (flat FP32 buffer), so autograd carries activation gradients only.
Left out: communication (`comm.autograd`, `layers`), except inside the loss and of a matmul's split input (`sequence`).
Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads of this rank, g of their groups, d head size, v vocabulary of this
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ..comm.autograd import RowBlocks
from ..comm.base import Comm
from ..host import kernels as native_kernels
from ..host.observed import Observed
from . import overlapped_ops
from .deferred_gradients import WeightGradients
from .dropout import DropoutKey
from .heads import Angles
from .native_ops import NativeOps
from .packed_weights import WeightCache
from .recompute import backward, recompute
from .shared_attention import SharedCall, shared_attention
from .torch_ops import TorchOps

__all__ = ["BACKENDS", "FAMILIES", "DropoutKey", "Ops", "backward", "recompute"]

FAMILIES = ("gemm", "attention", "rowwise", "loss", "embedding")
BACKENDS = ("native", "torch")
MATMULS = (
    "linear_forward",
    "linear_data_gradient",
    "linear_weight_gradient",
    "pack_weight",
    "packed_weight_size",
)
Backend = NativeOps | TorchOps


@dataclass(frozen=True)
class Ops:
    """A backend for each family of operations.

    backends: a backend for each name in FAMILIES. kernels: the C++ library that the native backend, the optimizer and initial
    weights call; a profiler puts its own around it. weight_cache: packed weights that live from one optimizer step to the next,
    None where they are not kept. weight_gradients: through which a backward can be split.
    """

    backends: Mapping[str, Backend]
    kernels: Any
    weight_cache: WeightCache | None
    weight_gradients: WeightGradients

    @staticmethod
    def build(
        choice: str | Mapping[str, str] = "native",
        *,
        fp16_chunk: int = 0,
        bf16x3: bool = False,
        keep_packed_weights: bool = False,
        kernels: Any = native_kernels,
        few_rows: int = 0,
    ) -> Ops:
        """Ops on "native" or "torch" kernels, or with a backend for each family; families that are not named run on "native".

        fp16_chunk, few_rows: see `NativeOps`. bf16x3: all matmuls, whose operands must be FP32, multiply them as three BF16 parts.
        keep_packed_weights: see `WeightCache`. Raises ValueError for unknown families or
        backends.
        """
        names = dict.fromkeys(FAMILIES, "native") | (
            dict.fromkeys(FAMILIES, choice) if isinstance(choice, str) else dict(choice)
        )
        for family, name in names.items():
            if family not in FAMILIES or name not in BACKENDS:
                raise ValueError(
                    f"kernels {name} for {family}: pass {' or '.join(BACKENDS)}, for {', '.join(FAMILIES)}"
                )
        if bf16x3:
            kernels = Observed(
                kernels,
                MATMULS,
                lambda _, matmul, args, kwargs: matmul(*args, **kwargs, bf16x3=True),
            )
        cache = WeightCache(kernels) if keep_packed_weights else None
        gradients = WeightGradients()
        native = NativeOps(kernels, fp16_chunk, cache, gradients, few_rows)
        backends: dict[str, Backend] = {"native": native, "torch": TorchOps(kernels, gradients)}
        return Ops(
            MappingProxyType({family: backends[names[family]] for family in FAMILIES}),
            kernels,
            cache,
            gradients,
        )

    @property
    def choice(self) -> dict[str, str]:
        """Which backend runs each family: what a checkpoint records."""
        return {
            family: "native" if isinstance(backend, NativeOps) else "torch"
            for family, backend in self.backends.items()
        }

    def weights_changed(self, frozen: bool = False) -> None:
        """To be called after every change of a weight. frozen: those that are not trained have changed as well."""
        if self.weight_cache is not None:
            self.weight_cache.weights_changed(frozen)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, sequence: Comm | None = None
    ) -> Tensor:
        """y = x W^T + bias. x (..., in), weight (out, in), bias (out) or None -> (..., out).

        sequence: the t ranks that hold x (s / t, b, in) in parts of the sequence. They gather it to (s, b, in), once more in
        backward, because this rank's part is what is kept, and each gets its part of the sum of x's gradients.
        """
        return self.backends["gemm"].linear(x, weight, bias, sequence)

    def mlp(
        self,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool = True,
        sequence: Comm | None = None,
        activation: str = "gelu",
    ) -> Tensor:
        """f(x W1^T + bias1) W2^T, without the second bias. x (s, b, h), W1 (f, h), W2 (h, f) -> (s, b, h).

        activation: f, "gelu" (its tanh form), "gelu_exact" or "squared_relu".
        needs_values False: backward will follow, and nobody reads the result, whose values may be anything then, nor x again, whose
        memory backward may use. sequence: as in `linear`.
        """
        return self.backends["gemm"].mlp(
            x, weight1, bias1, weight2, needs_values, sequence, activation
        )

    def column_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: RowBlocks
    ) -> Tensor:
        """`linear` of what is gathered from x (s / t, b, in) block by block, overlapped with the matmul -> (s, b, out)."""
        return overlapped_ops.column_linear(self.backends["gemm"], x, weight, bias, blocks)

    def row_linear(self, x: Tensor, weight: Tensor, blocks: RowBlocks) -> Tensor:
        """This rank's part (s / t, b, out) of the sum over ranks of `linear` of x (s, b, in), block by block as the matmul runs."""
        return overlapped_ops.row_linear(self.backends["gemm"], x, weight, blocks)

    def mlp_between_parts(
        self,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool,
        blocks: RowBlocks,
        activation: str = "gelu",
    ) -> Tensor:
        """`mlp` from part to part (s / t, b, h) of the sequence, its collectives overlapped with the matmuls."""
        return overlapped_ops.mlp(
            self.backends["gemm"], x, weight1, bias1, weight2, needs_values, blocks, activation
        )

    def gated_mlp(
        self,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool = True,
        sequence: Comm | None = None,
        activation: str = "swiglu",
    ) -> Tensor:
        """(f(x W1[0]^T + b[0]) * (x W1[1]^T + b[1])) W2^T. x (s, b, h), W1 (2, f, h), b (2, f), W2 (h, f) -> (s, b, h).

        activation: "swiglu", f being silu, or "geglu", f being the GELU in its tanh form. needs_values, sequence: as in `mlp`.
        Source: Shazeer 2020, "GLU Variants Improve Transformer".
        """
        return self.backends["gemm"].gated_mlp(
            x, weight1, bias1, weight2, needs_values, sequence, activation
        )

    def gated_mlp_between_parts(
        self,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool,
        blocks: RowBlocks,
        activation: str = "swiglu",
    ) -> Tensor:
        """`gated_mlp` from part to part (s / t, b, h) of the sequence, as `mlp_between_parts`."""
        return overlapped_ops.gated_mlp(
            self.backends["gemm"], x, weight1, bias1, weight2, needs_values, blocks, activation
        )

    def attention(
        self,
        qkv: Tensor,
        head_size: int,
        p: float,
        key: DropoutKey,
        groups: int | None = None,
        window: int | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Causal self-attention of this rank's heads, dropout on probabilities. qkv (s, b, g (n/g + 2) d) -> (s, b, n d).

        The n/g queries of a group, its key and its value are next to each other in qkv, as in Megatron. groups: g, None for n.
        window: token i sees tokens j with i - window < j <= i, None for all j <= i. starts: int32 (b, s), before which a token sees
        none; they never fall within a sample.
        """
        return self.backends["attention"].attention(qkv, head_size, p, key, groups, window, starts)

    def shared_attention(self, qkv: Tensor, call: SharedCall, cp: Comm, way: str) -> Tensor:
        """`attention` of ranks that share the sequence and exchange its keys: qkv (r, b, g (n/g + 2) d) -> (r, b, n d)."""
        return shared_attention(self.backends["attention"], qkv, call, cp, way)

    def rotary(
        self,
        qkv: Tensor,
        angles: Angles | None,
        heads: int,
        groups: int,
        head_size: int,
        interleaved: bool,
        first_position: int = 0,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        epsilon: float = 1e-5,
        positions: Tensor | None = None,
    ) -> Tensor:
        """qkv (s, b, g (n/g + 2) d), its queries and keys normalised and turned by their positions -> the same shape.

        q_weight, k_weight (d): of the RMS norms over d with `epsilon` that come first, None for none. angles: cosines and sines
        (positions, rotated elements / 2) in FP32, or None; row first_position is that of the first token, or positions,
        int32 (s, b), are the rows of all tokens. interleaved: neighbours are turned together, else elements i and i + rotated / 2.
        """
        return self.backends["rowwise"].rotary(
            qkv,
            angles,
            heads,
            groups,
            head_size,
            interleaved,
            first_position,
            q_weight,
            k_weight,
            epsilon,
            positions,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in FP32. x (..., h), weight (h) -> (..., h)."""
        return self.backends["rowwise"].rms_norm(x, weight, epsilon)

    def bias_dropout_add_rms_norm(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        weight: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """(sum, rms_norm(sum)), both (s, b, h), sum being that of `bias_dropout_add`; weight (h)."""
        return self.backends["rowwise"].bias_dropout_add_rms_norm(
            x, bias, residual, p, key, weight, epsilon
        )

    def cached_attention(
        self, qkv: Tensor, keys: Tensor, values: Tensor, samples: Tensor, positions: Tensor
    ) -> Tensor:
        """Attention of one new token of each sample, whose key and value are kept. qkv (r, 1, g (n/g + 2) d) -> (r, 1, n d).

        keys, values (all samples, g, slots, d): of earlier positions, position p in slot p mod slots, so that no more than the
        last `slots` positions are attended to. samples, positions (r,): each row's place among all samples and in its own. Nothing
        for backward is kept.
        """
        return self.backends["attention"].cached_attention(qkv, keys, values, samples, positions)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        """Layer norm over the last dimension. x (..., h), weight and bias (h) -> (..., h)."""
        return self.backends["rowwise"].layer_norm(x, weight, bias, epsilon)

    def bias_dropout_add(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        needs_values: bool = True,
    ) -> Tensor:
        """residual + dropout(x + bias). x and residual (s, b, h), bias (h) or None -> (s, b, h). needs_values: as in `mlp`."""
        return self.backends["rowwise"].bias_dropout_add(x, bias, residual, p, key, needs_values)

    def bias_dropout_add_layer_norm(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        key: DropoutKey,
        weight: Tensor,
        norm_bias: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """(sum, layer_norm(sum)), both (s, b, h), sum being that of `bias_dropout_add`; weight and norm_bias (h)."""
        return self.backends["rowwise"].bias_dropout_add_layer_norm(
            x, bias, residual, p, key, weight, norm_bias, epsilon
        )

    def dropout(self, x: Tensor, p: float, key: DropoutKey) -> Tensor:
        """x (any shape) with elements zeroed with probability p, the others scaled by 1/(1-p)."""
        return self.backends["rowwise"].dropout(x, p, key)

    def embedding(self, tokens: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
        """Rows of the word table. tokens (s, b), weight (v, h) -> (s, b, h).

        The first row held here is `first_row`; rows that other ranks hold are zeros.
        """
        return self.backends["embedding"].embedding(tokens, weight, first_row)

    def add_position(self, x: Tensor, weight: Tensor, first: int = 0) -> Tensor:
        """x (s, b, h) + s rows of weight (positions, h) from row `first` on -> (s, b, h)."""
        return self.backends["embedding"].add_position(x, weight, first)

    def head_loss(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        tp: Comm,
        first_row: int,
        factor: float,
        rows_at_once: int | None = None,
        words: int | None = None,
        z_loss: float = 0.0,
        count: float | None = None,
        z_sum: Tensor | None = None,
    ) -> Tensor:
        """Sum of the cross-entropy of rows with a label >= 0, divided by `count`; count None: by the number of all rows.

        The logits are x W^T, the vocabulary is split over `tp`, and the softmax is in FP32. x (s, b, h), weight (v, h), labels
        (s, b) -> (). A row with a label of -1 adds nothing to the loss, and its gradient is exactly 0, whatever its logits are.
        words: only so many of the weight's first rows take part in the softmax, and the others get no gradient; None: all do.
        z_loss: a row's loss has z_loss (log sum exp)^2 added, as in PaLM (Chowdhery et al. 2022, section 5). z_sum: (), to which
        this part of the result is added, or None. `factor` must be the
        gradient that backward will bring (the loss is multiplied by it afterwards): native kernels accumulate weight gradients
        while they hold the logits, and where x needs a gradient, they leave it in x's memory.
        """
        return self.backends["loss"].head_loss(
            x, weight, labels, tp, first_row, factor, rows_at_once, words, z_loss, count, z_sum
        )
