"""A module of multi-token prediction (MTP), named as in Megatron-core's multi_token_prediction.py.

DeepSeek-V3's report (arXiv:2412.19437, section 2.2, equations 21 to 23) has the formulas. As in Megatron-core, the hidden
state that the first module reads has passed the norm before the head. s is a shard with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.layer_kinds import EH_PROJ
from .blocks import TransformerLayer, make_norm
from .forward_context import Pass
from .layers import ColumnParallelLinear, Context, Layer

# (tokens (rows, b), forward pass, layer of the dropout mask) -> (s, b, h)
Embed = Callable[[Tensor, Pass, int], Tensor]


class PredictionModule(Layer):
    """A layer on the projected concatenation of an embedding and the hidden state before.

    depth: of the module, from 1
    """

    def __init__(self, depth: int, context: Context) -> None:
        super().__init__(context)
        name = f"mtp.layers.{depth - 1}"
        h = context.model.hidden_size
        self.enorm = make_norm(f"{name}.enorm", context)
        self.hnorm = make_norm(f"{name}.hnorm", context)
        self.eh_proj = ColumnParallelLinear(f"{name}.{EH_PROJ}", 2 * h, (h,), context, bias=False)
        self.transformer_layer = TransformerLayer(
            context.model.num_layers + depth, context, name=f"{name}.transformer_layer"
        )
        self.final_layernorm = make_norm(f"{name}.final_layernorm", context)

    def forward(self, x: Tensor, tokens: Tensor, embed: Embed, forward_pass: Pass) -> Tensor:
        """Return the module's normed output from x, both (s, b, h). tokens: (rows, b)"""
        # The norm of x runs first: backward then reaches x last, after the gradients of the module's parameters.
        hidden = self.hnorm(x)
        embedded = self.enorm(embed(tokens, forward_pass, self.transformer_layer.layer))
        columns = self.eh_proj(torch.cat((embedded, hidden), dim=-1), forward_pass)
        inner = replace(forward_pass, needs_values=True)
        out: Tensor = self.final_layernorm(self.transformer_layer(self._whole(columns), inner))
        return out

    def _whole(self, columns: Tensor) -> Tensor:
        """Return (s, b, h) from this rank's columns (whole sequence, b, h / tp)."""
        tp = self.context.tp
        if tp.size == 1:
            return columns
        width = columns.shape[-1]
        return self.context.out_of_matmul(
            F.pad(columns, (tp.rank * width, (tp.size - 1 - tp.rank) * width))
        )
