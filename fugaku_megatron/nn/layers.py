"""Megatron's layers: column- and row-parallel linear, vocab-parallel embedding, learned positions, layer norm, RMS norm.

Parameters are born on the meta device with their place in the global tensor (`parameter.spec`);
`optim.flat.FlatParameters` gives them memory inside one flat buffer and fills them. Left out: what a transformer block is made
of (`blocks`), stages (`model`).
Legend: s sequence, b micro-batch, h hidden. With sequence parallelism s is this rank's part of the sequence wherever the last
dimension is whole, and the whole sequence where that is split over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm.autograd import (
    RowBlocks,
    copy_to_tensor_parallel,
    gather_sequence,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from ..comm.base import Comm
from ..comm.grid import ALONE
from ..config.lora import LoraConfig
from ..config.model import LAYER_NORM, NORMS
from ..config.parallel import A2A
from ..config.run_config import ModelConfig
from ..costs import activations
from .adapters import Adapter
from .forward_context import Pass
from .heads import Angles
from .ops import DropoutKey, Ops
from .parameter import make_parameter, spec_of
from .parameter_views import derived
from .positions import rotary_angles
from .sequence_ranks import own_runs, to_rank_order, to_sequence_order
from .sequence_ranks import positions as own_positions

# Dropout sites of a layer. A mask's stream is layer * len(SITES) + site; the embedding is layer 0 and layers count from 1.
SITES = ("residual_1", "residual_2", "attention", "embedding")


@dataclass(frozen=True)
class Context:
    """Settings and communicators with which every layer of a stage is built.

    sequence_parallel: shard the activations between tensor-parallel matmuls by sequence; no effect with one rank.
    tp_comm_overlap: send these shards while matmuls run.
    lora: if on, weights are frozen and adapters are trained.
    ep, etp: ranks with different experts, and ranks that share each expert (`grid.Groups`); None if experts are not divided.
    cp: ranks that share each sequence; s is then the length of this rank's shard.
    cp_comm_types: --cp-comm-type of each layer.
    """

    model: ModelConfig
    tp: Comm
    ops: Ops
    seed: int
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    lora: LoraConfig = LoraConfig()
    ep: Comm | None = None
    etp: Comm | None = None
    cp: Comm = ALONE
    cp_comm_types: tuple[str, ...] = ()

    def context_way(self, layer: int) -> str:
        """Return the --cp-comm-type of a layer; layers count from 1."""
        return self.cp_comm_types[layer - 1] if self.cp_comm_types else A2A

    @property
    def sequence(self) -> Comm | None:
        """Tensor-parallel ranks that shard the sequence; None without sequence parallelism."""
        return self.tp if self.sequence_parallel and self.tp.size > 1 else None

    @property
    def sequence_shares(self) -> int:
        """Number of ranks that shard the activations between matmuls by sequence."""
        return self.cp.size * (self.sequence.size if self.sequence else 1)

    def sum_over_sequence(self, x: Tensor) -> None:
        """Sum x (any shape), of this rank's activations between the matmuls, over all that are one sequence, in place."""
        for comm in (self.sequence, self.cp):
            if comm is not None:
                comm.all_reduce(x)

    def of_whole_sequence(
        self, of_rows: Callable[..., Tensor], *parts: Tensor, part: Comm | None
    ) -> Tensor:
        """This rank's rows of of_rows(whole, ...): parts (rows, ...) are those of all ranks then, in the order of the sequence.

        part: the tensor-parallel ranks where they have parts of it, else None. Nothing has a gradient.
        """
        cp, rows = self.cp, len(parts[0])
        gathered = [
            gather_sequence(gather_sequence(x.detach(), part), cp if cp.size > 1 else None)
            for x in parts
        ]
        if cp.size == 1:
            whole = of_rows(*gathered)
        else:
            whole = to_rank_order(
                of_rows(*(to_sequence_order(x, cp.size) for x in gathered)), cp.size
            )
        return whole.view(cp.size, -1, rows, *whole.shape[1:])[cp.rank, part.rank if part else 0]

    def own_rows(self, whole: Tensor | None, part: Comm | None) -> Tensor | None:
        """Return the rows (rows,) of this rank from one value for each token of the whole sequence (s, b); None for None.

        part: the tensor-parallel ranks where they have parts of the sequence, else None.
        """
        if whole is None:
            return None
        own = whole[own_positions(own_runs(len(whole) // self.cp.size, self.cp))]
        return (own if part is None else own.chunk(part.size)[part.rank]).flatten()

    @property
    def blocks(self) -> RowBlocks | None:
        """Blocks for --tp-comm-overlap; None without it."""
        if not self.tp_comm_overlap or self.sequence is None:
            return None
        return RowBlocks(self.tp, self.ops.kernels, activations.overlap_blocks(self.tp.size))

    def first_position(self, x: Tensor) -> int:
        """Return the first position of x (s, b, h), an activation between matmuls, in this rank's sequence."""
        return 0 if self.sequence is None else self.tp.rank * x.shape[0]

    def runs(self, x: Tensor) -> list[range]:
        """Return the one or two position segments of x (s, b, h), an activation between matmuls."""
        first, runs = self.first_position(x), []
        for run in own_runs(len(x) * (self.tp.size if self.sequence else 1), self.cp):
            runs.append(run[max(first, 0) : max(first + len(x), 0)])
            first -= len(run)
        return list(filter(None, runs))

    def parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        partition_dim: int | None = None,
        std: float | None = None,
        **more: Any,
    ) -> nn.Parameter:
        """`make_parameter` over the tensor-parallel ranks."""
        common = {"sequence_parallel": self.sequence is not None, "frozen": self.lora.on}
        return make_parameter(name, shape, self.tp, partition_dim, std, **{**common, **more})

    def adapter(
        self,
        name: str,
        inputs: int,
        outputs: tuple[int, ...],
        split: bool = False,
        experts: tuple[int, ...] = (),
    ) -> Adapter | None:
        """Build the adapter of the linear layer `name`, or return None without one. Arguments as of `Adapter`."""
        linear = name.rsplit(".", 1)[-1]
        parts = self.lora.parts(linear, self.model)
        return (
            Adapter(name, linear, parts, inputs, outputs, split, self, experts) if parts else None
        )

    def expert_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        partition_dim: int | None,
        std: float | None = None,
        **more: Any,
    ) -> nn.Parameter:
        """`make_parameter` of a matrix of each expert, (e, ...), over ranks that have different experts and that share each.

        Parameters replicated over `etp` get partial gradients, which are all-reduced there.
        """
        shared = self.etp or self.tp
        common = {"sequence_parallel": shared.size > 1, "frozen": self.lora.on}
        return make_parameter(
            name, shape, shared, partition_dim, std, experts=self.ep, **{**common, **more}
        )

    @cached_property
    def _tables(self) -> dict[int, Angles | None]:
        return {}

    def angles(self, length: int) -> Angles | None:
        """Return rotary angles for at least `length` positions, the same tensors for all layers; None without rotary positions."""
        rows = (
            max(length, self.model.seq_length) if self.model.rope_dynamic_factor is None else length
        )
        if rows not in self._tables:
            self._tables.clear()
            self._tables[rows] = rotary_angles(self.model, torch.arange(rows), rows)
        return self._tables[rows]

    def into_matmul(self, x: Tensor) -> Tensor:
        """Return the input of a column-parallel matmul. Its gradient is all-reduced here, or by the matmul that gathers x (s, b, h)."""
        return copy_to_tensor_parallel(x, self.tp) if self.sequence is None else x

    def out_of_matmul(self, partial: Tensor, needs_values: bool = True) -> Tensor:
        """Reduce partial (whole sequence, b, h) over ranks, or reduce-scatter it. needs_values: see `Pass`."""
        if self.sequence is not None:
            return reduce_scatter_to_sequence_parallel(partial, self.sequence, needs_values)
        return reduce_from_tensor_parallel(partial, self.tp) if needs_values else partial

    @property
    def output_std(self) -> float:
        """Megatron's scaled initialisation of matrices that write to the residual stream: std / sqrt(2 layers)."""
        return self.model.init_method_std / (2.0 * self.model.num_layers) ** 0.5


def multiplied(x: Tensor, factor: float) -> Tensor:
    """Return x times a constant of the model, or x if the constant is 1."""
    return x if factor == 1.0 else x * factor


def dropout_stream(layer: int, site: str) -> int:
    """Return the random stream of a dropout site."""
    return layer * len(SITES) + SITES.index(site)


def dropout_layer(stream: int) -> int:
    """Return the layer, from 1, of a random stream; 0: the embedding."""
    return stream // len(SITES)


def hidden_dropout_key(
    context: Context, layer: int, site: str, first_sample: int, x: Tensor
) -> DropoutKey:
    """Return the dropout key of x (s, b, h), an activation between matmuls."""
    return DropoutKey.of_runs(
        context.runs(x), context.seed, dropout_stream(layer, site), first_sample
    )


class ColumnParallelLinear(nn.Module):
    """Y = X W^T + bias with W's rows (outputs) split over tensor-parallel ranks: whole input, split output."""

    def __init__(
        self, name: str, inputs: int, outputs: int, context: Context, bias: bool = True
    ) -> None:
        super().__init__()
        self.context = context
        self.weight = context.parameter(
            f"{name}.weight", (outputs, inputs), 0, context.model.init_method_std
        )
        self.bias = context.parameter(f"{name}.bias", (outputs,), 0) if bias else None
        self.adapter = context.adapter(name, inputs, (outputs,))

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Return the layer's output. x (s, b, inputs) -> (s, b, outputs / tp)."""
        context = self.context
        if context.blocks is not None:
            return context.ops.column_linear(x, self.weight, self.bias, context.blocks)
        y = context.ops.linear(context.into_matmul(x), self.weight, self.bias, context.sequence)
        return y if self.adapter is None else self.adapter.column(x, y, forward_pass)


class GatedColumnParallelLinear(nn.Module):
    """The parameters of two column-parallel matmuls of one input, the gate's and that of what it multiplies, as one tensor.

    The outputs of both are split, so a rank has the gates of its own values at any tensor-parallel size.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, context: Context, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = context.parameter(
            f"{name}.weight", (2, outputs, inputs), 1, context.model.init_method_std
        )
        self.bias = context.parameter(f"{name}.bias", (2, outputs), 1) if bias else None
        self.adapter = context.adapter(name, inputs, (2, outputs))


class RowParallelLinear(nn.Module):
    """Y = X W^T with W's columns (inputs) split over tensor-parallel ranks: split input, whole output.

    The bias is added with the residual, so that the sum over ranks counts it once.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, context: Context, bias: bool = True
    ) -> None:
        super().__init__()
        self.context = context
        self.weight = context.parameter(f"{name}.weight", (outputs, inputs), 1, context.output_std)
        self.bias = context.parameter(f"{name}.bias", (outputs,)) if bias else None
        self.adapter = context.adapter(name, inputs, (outputs,), split=True)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Return the layer's output without the bias. x (s, b, inputs / tp) -> (s, b, outputs)."""
        context = self.context
        if context.blocks is not None:
            return context.ops.row_linear(x, self.weight, context.blocks)
        y = context.out_of_matmul(context.ops.linear(x, self.weight))
        return y if self.adapter is None else self.adapter.row(x, y, forward_pass)


class VocabParallelEmbedding(nn.Module):
    """Word embedding with the vocabulary split over tensor-parallel ranks."""

    def __init__(self, name: str, vocabulary: int, context: Context) -> None:
        super().__init__()
        self.context, model = context, context.model
        self.weight = context.parameter(
            f"{name}.weight", (vocabulary, model.hidden_size), 0, model.init_method_std
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens (whole sequence, b) -> (s, b, h)."""
        return self.context.out_of_matmul(
            self.context.ops.embedding(tokens, self.weight, spec_of(self.weight).offset[0])
        )


class PositionEmbedding(nn.Module):
    """Learned positions, from 0 on."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        self.context, model = context, context.model
        self.weight = context.parameter(
            f"{name}.weight",
            (model.max_position_embeddings, model.hidden_size),
            std=model.init_method_std,
        )

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x (s, b, h) -> x + its positions (s, b, h), which are `positions` (whole sequence, b) where these are passed.

        positions (rows,) are those of generation, which keeps nothing for a backward.
        """
        ops, first = self.context.ops, self.context.first_position(x)
        if self.context.cp.size > 1:
            rows = own_positions(self.context.runs(x))
            return x + ops.embedding(
                rows.unsqueeze(1) if positions is None else positions[rows].long(), self.weight
            )
        if positions is None:
            return ops.add_position(x, self.weight, first)
        if positions.dim() == 1:
            return ops.add_position(
                x, ops.embedding(positions.unsqueeze(1), self.weight).squeeze(1)
            )
        return x + ops.embedding(positions[first : first + len(x)].long(), self.weight)


class Norm(nn.Module):
    """A norm over the last dimension, replicated over tensor-parallel ranks. A subclass holds the parameters and `forward`."""

    weight: nn.Parameter

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        self.ops, self.epsilon, self.centered = (
            context.ops,
            context.model.layernorm_epsilon,
            context.model.apply_layernorm_1p,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (s, b, h)."""
        raise NotImplementedError

    def add_and_normalize(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, p: float, key: DropoutKey
    ) -> tuple[Tensor, Tensor]:
        """(sum, norm of the sum) with sum = residual + dropout(x + bias). x and residual (s, b, h), bias (h) -> two of (s, b, h).

        A norm with a fused kernel overrides this.
        """
        total = self.ops.bias_dropout_add(x, bias, residual, p, key)
        return total, self(total)

    def scale(self) -> Tensor:
        """Return the factors (h) of the norm."""
        return scale(self.weight, self.centered)


def scale(weight: Tensor, centered: bool) -> Tensor:
    """Return the factors (h) of a norm with this weight (h)."""
    return derived(weight, weight.detach() + 1.0) if centered else weight


class LayerNorm(Norm):
    """Layer norm with weight and bias."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        width = (context.model.hidden_size,)
        self.weight = context.parameter(f"{name}.weight", width, fill=1.0 - self.centered)
        self.bias = context.parameter(f"{name}.bias", width)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (s, b, h)."""
        return self.ops.layer_norm(x, self.scale(), self.bias, self.epsilon)

    def add_and_normalize(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, p: float, key: DropoutKey
    ) -> tuple[Tensor, Tensor]:
        """As `Norm.add_and_normalize`, in one pass over memory; two of (s, b, h)."""
        return self.ops.bias_dropout_add_layer_norm(
            x, bias, residual, p, key, self.scale(), self.bias, self.epsilon
        )


class RMSNorm(Norm):
    """RMS norm, with a weight and no bias."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.weight = context.parameter(
            f"{name}.weight", (context.model.hidden_size,), fill=1.0 - self.centered
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (s, b, h)."""
        return self.ops.rms_norm(x, self.scale(), self.epsilon)

    def add_and_normalize(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, p: float, key: DropoutKey
    ) -> tuple[Tensor, Tensor]:
        """As `Norm.add_and_normalize`, in one operation; two of (s, b, h)."""
        return self.ops.bias_dropout_add_rms_norm(
            x, bias, residual, p, key, self.scale(), self.epsilon
        )


class PlainLayerNorm(Norm):
    """Layer norm without weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (s, b, h)."""
        return F.layer_norm(x, x.shape[-1:], eps=self.epsilon)


class HeadNorm(nn.Module):
    """The norm of queries or of keys over a head's d elements, with the same weight, and in a LayerNorm bias, for all heads.

    Every tensor-parallel rank has it and computes its gradient from its own heads, with or without sequence parallelism. With
    --qk-layernorm-all-heads it is over the elements of all `heads`, with a weight for each.
    """

    def __init__(self, name: str, heads: int, context: Context) -> None:
        super().__init__()
        together = heads if context.model.qk_layernorm_all_heads else 1
        size = (together * context.model.kv_channels,)
        layer_norm = NORMS[context.model.normalization].kernel == LAYER_NORM
        self.centered = context.model.apply_layernorm_1p
        self.weight = context.parameter(
            f"{name}.weight", size, fill=1.0 - self.centered, sequence_parallel=True
        )
        self.bias = (
            context.parameter(f"{name}.bias", size, sequence_parallel=True) if layer_norm else None
        )

    def scale(self) -> Tensor:
        """Return the factors (d) of the norm."""
        return scale(self.weight, self.centered)
