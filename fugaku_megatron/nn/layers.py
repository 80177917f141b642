"""Parallel layers: column- and row-parallel linear, vocab-parallel embedding, learned positions, norms.

Parameters start on the meta device (`parameter.spec`); `optim.flat.FlatParameters` allocates and fills them.
With sequence parallelism s is this rank's shard if the last dimension is whole, otherwise the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm.autograd import (
    RowBlocks,
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    gather_sequence,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from ..comm.base import Comm
from ..comm.grid import Groups
from ..config.model import ModelConfig
from ..config.run_config import RunConfig
from ..config.training import SELECTIVE
from ..costs.records import overlap_blocks
from .adapters import INPUTS, OUTPUTS, Adapter
from .attention.context_parallel import own_segments, to_rank_order, to_sequence_order
from .attention.context_parallel import positions as own_positions
from .attention.heads import Angles
from .attention.rotary_angles import rotary_angles
from .dropout_key import Dropout
from .forward_context import Pass
from .ops import DropoutKey, Ops, recompute
from .ops.norm import NormArguments, torch_layer_norm
from .parameter import ModelParameter, ParameterSpec, derived

# Dropout sites of a layer. A mask's stream is layer * len(SITES) + site; the embedding is layer 0 and layers count from 1.
SITES = ("residual_1", "residual_2", "attention", "embedding")

MakeParameter = Callable[..., ModelParameter]  # as `Context.parameter`


@dataclass(frozen=True)
class Context:
    """Run, communicators and operations with which every layer of a stage is built.

    Ranks in `groups.cp` share each sequence; s is then this rank's length.
    """

    run: RunConfig
    groups: Groups
    ops: Ops

    @property
    def model(self) -> ModelConfig:
        return self.run.model

    @property
    def tp(self) -> Comm:
        return self.groups.tp

    @property
    def cp(self) -> Comm:
        return self.groups.cp

    @property
    def seed(self) -> int:
        return self.run.training.seed

    @property
    def expert_groups(self) -> tuple[Comm, Comm] | None:
        """Ranks with different experts, and ranks that share each expert; None if experts are not divided."""
        return (self.groups.ep, self.groups.etp) if self.run.parallel.divides_experts else None

    def recomputes(self, module: str, x: Tensor, forward_pass: Pass) -> bool:
        """Return True if backward repeats a module with input x. Below the lowest adapter there is no backward."""
        selective = forward_pass.recompute == SELECTIVE
        return selective and module in self.run.training.recompute_modules and x.requires_grad

    def recomputed(
        self, module: str, function: Callable[..., Tensor], x: Tensor, forward_pass: Pass
    ) -> Tensor:
        """Return function(x, forward_pass), which selective recompute of the module repeats in backward."""
        if self.recomputes(module, x, forward_pass):
            return recompute(function, x, forward_pass)
        return function(x, forward_pass)

    @property
    def sequence(self) -> Comm | None:
        """Tensor-parallel ranks that shard the sequence, or None."""
        return self.tp if self.run.parallel.sequence_parallel and self.tp.size > 1 else None

    @property
    def sequence_shares(self) -> int:
        return self.cp.size * (self.sequence.size if self.sequence else 1)

    def sum_over_sequence(self, x: Tensor) -> None:
        """Sum x in place over ranks that share a sequence."""
        for comm in (self.sequence, self.cp):
            if comm is not None:
                comm.all_reduce(x)

    def of_whole_sequence(
        self, function: Callable[..., Tensor], *shards: Tensor, sequence: Comm | None
    ) -> Tensor:
        """Return this rank's rows of function(*whole), without gradients.

        shards: (rows, ...), gathered over all ranks in sequence order.
        """
        cp = self.cp
        rows = len(shards[0])
        gathered = [gather_sequence(x.detach(), sequence) for x in shards]
        if cp.size == 1:
            whole = function(*gathered)
        else:
            ordered = [to_sequence_order(gather_sequence(x, cp), cp.size) for x in gathered]
            whole = to_rank_order(function(*ordered), cp.size)
        shard = sequence.rank if sequence else 0
        return whole.view(cp.size, -1, rows, *whole.shape[1:])[cp.rank, shard]

    def own_rows(self, whole: Tensor | None, sequence: Comm | None) -> Tensor | None:
        """Return this rank's values (rows,) of a value per token (s, b)."""
        if whole is None:
            return None
        own = whole[own_positions(own_segments(len(whole) // self.cp.size, self.cp))]
        if sequence is not None:
            own = own.chunk(sequence.size)[sequence.rank]
        return own.flatten()

    @property
    def blocks(self) -> RowBlocks | None:
        if not self.run.parallel.tp_comm_overlap or self.sequence is None:
            return None
        return RowBlocks(self.tp, self.ops.kernels, overlap_blocks(self.tp.size))

    def first_position(self, x: Tensor) -> int:
        return 0 if self.sequence is None else self.tp.rank * x.shape[0]

    def segments(self, x: Tensor) -> list[range]:
        """Return the position segments of x (s, b, h)."""
        first = self.first_position(x)
        segments = []
        for segment in own_segments(len(x) * (self.tp.size if self.sequence else 1), self.cp):
            segments.append(segment[max(first, 0) : max(first + len(x), 0)])
            first -= len(segment)
        return list(filter(None, segments))

    def parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        partition_dim: int | None = None,
        std: float | None = None,
        *,
        fill: float = 0.0,
        init_name: str | None = None,
        experts: bool = False,
        **traits: bool,
    ) -> ModelParameter:
        """Make this rank's slice of a tensor with global `shape` on the meta device, with its `spec`.

        partition_dim, std, fill, init_name: see `ParameterSpec`; init_name: None: the parameter's name
        experts: (e, ...) of every expert. Partial gradients of a parameter replicated over `etp` are all-reduced there.
        traits: fields of the spec, if not as in the run's layers: sequence_parallel, decays, balances, quantized
        """
        tp = self.tp
        ep = None
        if experts and self.expert_groups is not None:
            ep, tp = self.expert_groups
        shards_rows = tp.size > 1 if experts else self.sequence is not None
        local = list(shape)
        offset = [0] * len(shape)
        if partition_dim is not None:
            assert shape[partition_dim] % tp.size == 0, (name, shape, tp)
            local[partition_dim] //= tp.size
            offset[partition_dim] = tp.rank * local[partition_dim]
        if ep is not None:
            assert shape[0] % ep.size == 0, (name, shape, ep)
            local[0] //= ep.size
            offset[0] = ep.rank * local[0]
        # The first tensor-parallel rank saves replicas. Norms count a replica once, and a tied copy not at all.
        owned = partition_dim is not None or tp.rank == 0
        parameter = ModelParameter(torch.empty(local, device="meta"))
        parameter.spec = ParameterSpec(
            name=name,
            shape=tuple(shape),
            offset=tuple(offset),
            partition_dim=partition_dim,
            init_std=std,
            init_fill=fill,
            log_range=None,
            init_name=init_name or name,
            owned=owned,
            counted=owned and init_name is None and not traits.get("balances"),
            expert=ep is not None,
            **{
                "sequence_parallel": shards_rows and partition_dim is None,
                "frozen": self.run.lora.on
                or self.run.freezing.holds(init_name or name, self.model),
                **traits,
            },
        )
        return parameter

    @cached_property
    def _tables(self) -> dict[int, dict[str, Angles]]:
        return {}

    def angles(self, length: int, rope: str) -> Angles:
        """Return rotary angles for at least `length` positions, shared by all layers. rope: as in `LayerKind`"""
        rows = length if self.model.rope_follows_length else max(length, self.model.seq_length)
        if rows not in self._tables:
            self._tables.clear()
            self._tables[rows] = {
                name: rotary_angles(model, torch.arange(rows), rows)
                for name, model in self.model.ropes.items()
            }
        return self._tables[rows][rope]

    def whole_sequence(self, x: Tensor) -> Tensor:
        """Return x (s, b, ...) of the whole sequence, whose gradients are summed over tensor-parallel ranks."""
        if self.sequence is None:
            return copy_to_tensor_parallel(x, self.tp)
        return gather_from_sequence_parallel(x, self.tp)

    def into_matmul(self, x: Tensor) -> Tensor:
        """Prepare a column-parallel matmul's input; with sequence parallelism the matmul gathers it itself."""
        return copy_to_tensor_parallel(x, self.tp) if self.sequence is None else x

    def out_of_matmul(self, partial: Tensor, needs_values: bool = True) -> Tensor:
        """All-reduce or reduce-scatter partial (whole sequence, b, h)."""
        if self.sequence is not None:
            return reduce_scatter_to_sequence_parallel(partial, self.sequence, needs_values)
        return reduce_from_tensor_parallel(partial, self.tp) if needs_values else partial


def multiplied(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def dropout_stream(layer: int, site: str) -> int:
    return layer * len(SITES) + SITES.index(site)


def dropout_layer(stream: int) -> int:
    """Return the layer, from 1, of a random stream; 0: the embedding."""
    return stream // len(SITES)


def hidden_dropout(
    context: Context, layer: int, site: str, x: Tensor, forward_pass: Pass
) -> Dropout:
    stream = dropout_stream(layer, site)
    key = DropoutKey.of_segments(
        context.segments(x), context.seed, stream, forward_pass.first_sample
    )
    return Dropout(context.model.hidden_dropout if forward_pass.training else 0.0, key)


class Layer(nn.Module):
    """Module with the context of its stage."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.model = context.model
        self.ops = context.ops


class LinearLayer(Layer):
    """Weight (*experts, *outputs, inputs), bias (*experts, *outputs) and adapter of a linear layer.

    outputs: (outputs,), or (2, f) for gate and value of an MLP, which are both sharded.
    divided: OUTPUTS, INPUTS, or None if every tensor-parallel rank has the weight.
    experts: (e,) if each expert has a matrix.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: tuple[int, ...],
        divided: str | None,
        context: Context,
        bias: bool,
        experts: tuple[int, ...] = (),
    ) -> None:
        super().__init__(context)
        model = context.model
        rows = (*experts, *outputs)
        dims = {OUTPUTS: len(rows) - 1, INPUTS: len(rows), None: None}
        std = model.init_method_std
        # Smaller where it writes to the residual stream, as in Megatron-LM.
        if divided == INPUTS:
            std = float(std / model.residual_parts**0.5)
        make = partial(context.parameter, experts=bool(experts))
        self.weight = make(
            f"{name}.weight",
            (*rows, inputs),
            dims[divided],
            std,
            quantized=context.run.lora.base_in_int8,
        )
        self.bias = None
        if bias:
            self.bias = make(f"{name}.bias", rows, dims[divided] if divided == OUTPUTS else None)
        self.adapter: Adapter | None = None
        if parts := context.run.lora.parts(name.rsplit(".", 1)[-1], model):
            self.adapter = Adapter(name, parts, inputs, outputs, divided, context, experts)


class ColumnParallelLinear(LinearLayer):
    """Y = X W^T + bias with W's rows sharded over tensor-parallel ranks: whole input, sharded output."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: tuple[int, ...],
        context: Context,
        bias: bool = True,
    ) -> None:
        super().__init__(name, inputs, outputs, OUTPUTS, context, bias)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Apply the layer, (s, b, inputs) -> (s, b, outputs / tp)."""
        context = self.context
        if context.blocks is not None:
            return context.ops.column_linear(x, self.weight, self.bias, context.blocks)
        y = context.ops.linear(context.into_matmul(x), self.weight, self.bias, context.sequence)
        return y if self.adapter is None else self.adapter.add(x, y, forward_pass)


class RowParallelLinear(LinearLayer):
    """Y = X W^T with W's columns sharded over tensor-parallel ranks: sharded input, whole output. The bias is added with the residual."""

    def __init__(
        self, name: str, inputs: int, outputs: int, context: Context, bias: bool = True
    ) -> None:
        super().__init__(name, inputs, (outputs,), INPUTS, context, bias)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Apply the layer without the bias, (s, b, inputs / tp) -> (s, b, outputs)."""
        context = self.context
        if context.blocks is not None:
            return context.ops.row_linear(x, self.weight, context.blocks)
        y = context.out_of_matmul(context.ops.linear(x, self.weight))
        return y if self.adapter is None else self.adapter.add(x, y, forward_pass)


class ReplicatedLinear(LinearLayer):
    """Y = X W^T with W on every tensor-parallel rank, for this rank's rows of X."""

    def __init__(self, name: str, inputs: int, outputs: int, context: Context) -> None:
        super().__init__(name, inputs, (outputs,), None, context, bias=False)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Apply the layer, (s, b, inputs) -> (s, b, outputs)."""
        y = self.ops.linear(x, self.weight)
        return y if self.adapter is None else self.adapter.add(x, y, forward_pass)


class VocabParallelEmbedding(Layer):
    """Word embeddings (vocabulary, h), rows sharded over tensor-parallel ranks."""

    def __init__(self, name: str, vocabulary: int, context: Context) -> None:
        super().__init__(context)
        model = context.model
        self.weight = context.parameter(
            f"{name}.weight", (vocabulary, model.hidden_size), 0, model.init_method_std
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.context.out_of_matmul(
            self.ops.embedding(tokens, self.weight, self.weight.spec.offset[0])
        )


class PositionEmbedding(Layer):
    """Learned position embeddings (positions, h), replicated over tensor-parallel ranks."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(context)
        model = context.model
        self.weight = context.parameter(
            f"{name}.weight",
            (model.max_position_embeddings, model.hidden_size),
            std=model.init_method_std,
        )

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Add position embeddings to x (s, b, h).

        positions: (whole sequence, b), or (rows,) in generation; None: 0, 1, ...
        """
        ops = self.ops
        if positions is None and self.context.cp.size == 1:
            return ops.add_position(x, self.weight, self.context.first_position(x))
        if positions is not None and positions.dim() == 1:
            return ops.add_position(
                x, ops.embedding(positions.unsqueeze(1), self.weight).squeeze(1)
            )
        rows = own_positions(self.context.segments(x))
        places = rows.unsqueeze(1) if positions is None else positions[rows].long()
        return x + ops.embedding(places, self.weight)


class Norm(Layer):
    """A norm over the last dimension, replicated over tensor-parallel ranks."""

    weight: nn.Parameter

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(context)
        self.epsilon = self.model.layernorm_epsilon
        self.centered = self.model.apply_layernorm_1p

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def add_and_normalize(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, dropped: Dropout
    ) -> tuple[Tensor, Tensor]:
        """Return (sum, norm of the sum) with sum = residual + dropout(x + bias), both (s, b, h). bias (h)."""
        total = self.ops.bias_dropout_add(x, bias, residual, dropped)
        return total, self(total)

    def scale(self) -> Tensor:
        """Return the norm's factors (h) from its weight."""
        weight = self.weight
        return derived(weight, weight.detach() + 1.0) if self.centered else weight


class WeightedNorm(Norm):
    """Norm with a learned scale (h), stored minus 1 if centered, and perhaps a bias (h).

    width: h; None: the hidden size
    make: builds a parameter (default: `Context.parameter`)
    """

    has_bias = False

    def __init__(
        self,
        name: str,
        context: Context,
        width: int | None = None,
        make: MakeParameter | None = None,
    ) -> None:
        super().__init__(name, context)
        size = (width or context.model.hidden_size,)
        make = make or context.parameter
        self.weight = make(f"{name}.weight", size, fill=1.0 - self.centered)
        self.bias = make(f"{name}.bias", size) if self.has_bias else None


class KernelNorm(WeightedNorm):
    """Norm that the C++ kernels fuse with the residual sum."""

    @property
    def arguments(self) -> NormArguments:
        return NormArguments(self.scale(), self.bias, self.epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.arguments)

    def add_and_normalize(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, dropped: Dropout
    ) -> tuple[Tensor, Tensor]:
        return self.ops.bias_dropout_add_norm(x, bias, residual, dropped, self.arguments)


class LayerNorm(KernelNorm):
    """Layer norm with scale and bias (h)."""

    has_bias = True


class RMSNorm(KernelNorm):
    """RMS norm with scale (h)."""


class PlainLayerNorm(Norm):
    """Layer norm without parameters, by torch."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.epsilon)


class LayerNormWithoutBias(WeightedNorm):
    """Layer norm with scale (h) and no bias, by torch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch_layer_norm(x, self.scale(), None, self.epsilon)


def inner_norm(
    name: str, context: Context, width: int, make: MakeParameter | None = None
) -> KernelNorm:
    """Build an attention's norm of queries, keys or latents. Arguments as in `WeightedNorm`."""
    kernel = context.model.norm.kernel
    layer = LayerNorm if kernel is not None and kernel.bias else RMSNorm
    return layer(name, context, width, make)
