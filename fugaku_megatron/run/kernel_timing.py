"""Seconds of each operation family's kernels on a run's shapes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.base import SoloComm
from ..config.model import ModelConfig
from ..config.rows import ACTIVATIONS
from ..config.run_config import RunConfig
from ..costs.sizes import vocabulary_rows
from ..host.timing import timings
from ..nn.attention.heads import Heads
from ..nn.dropout_key import Dropout
from ..nn.ops import BACKENDS, DropoutKey, Ops
from ..nn.ops.activation import Activation
from ..nn.ops.loss import HeadLoss
from ..nn.ops.mlp import MLPWeights
from ..nn.ops.norm import NormArguments
from ..nn.parameter import PARAMETER_DTYPES
from ..text.table import Column, text_table

REPEATS = 3
MARGIN = 1.1  # by which torch must be faster, so that noise does not change a run's last bits
# Rows that are timed at most, because longer attention takes as long as iterations.
LAYER_TOKENS = 4096


class Timing(NamedTuple):
    """Forward and backward seconds."""

    family: str
    native: float
    torch: float

    @property
    def faster(self) -> str:
        """Faster backend: torch only beyond the margin."""
        return "native" if self.native <= MARGIN * self.torch else "torch"


COLUMNS: tuple[Column, ...] = (
    ("kernels", "<10", lambda timing: timing.family),
    ("native ms", ">10.2f", lambda timing: timing.native * 1e3),
    ("torch ms", ">10.2f", lambda timing: timing.torch * 1e3),
    ("used", "<6", lambda timing: timing.faster),
)


def _weight(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(shape).mul_(0.02).to(dtype))
    weight.main_grad = torch.zeros(shape)  # type: ignore[attr-defined]  # see nn.parameter.gradient_of
    return weight


def kernel_cases(run: RunConfig) -> dict[str, Callable[[Ops], Tensor]]:
    """Return a call per family; each returns a scalar () to differentiate."""
    model = run.model
    tp = run.tp
    dtype = PARAMETER_DTYPES[run.precision.name]
    s = min(model.seq_length, LAYER_TOKENS)
    h = model.hidden_size
    b = min(run.batch.micro_batch_size, LAYER_TOKENS // s)
    x = torch.randn(s, b, h).to(dtype).requires_grad_()
    residual = x.detach()[: s // run.sequence_shards].requires_grad_()
    rows = min(vocabulary_rows(run), 2048)
    table = _weight(rows, h, dtype=dtype)
    tokens = torch.randint(0, rows, (s, b))
    scores = DropoutKey(1, 1, 0, sample_dim=0)
    heads = Heads.of(model, tp)
    qkv = torch.randn(s, b, heads.qkv_width).to(dtype).requires_grad_()
    head = HeadLoss(SoloComm(), 0, 1.0, z_loss=model.z_loss)
    return {
        "gemm": _mlp(model, x, tp),
        "attention": lambda ops: ops.attention(
            qkv, heads, Dropout(model.attention_dropout, scores), model.window
        ).sum(),
        "rowwise": _add_and_normalize(model, residual),
        "loss": lambda ops: ops.head_loss(x, table, tokens, head),
        "embedding": lambda ops: ops.embedding(tokens, table).sum(),
    }


def _mlp(model: ModelConfig, x: Tensor, tp: int) -> Callable[[Ops], Tensor]:
    f = model.ffn_hidden_size // tp
    h = model.hidden_size
    gates = (2,) if model.gated else ()
    fc1 = _weight(*gates, f, h, dtype=x.dtype)
    bias = _weight(*gates, f, dtype=x.dtype)
    fc2 = _weight(h, f, dtype=x.dtype)
    row = ACTIVATIONS[model.activation]
    activation = Activation.of(model, tuple(_weight(1, dtype=x.dtype) for _ in row.parameters))
    weights = MLPWeights(fc1, bias, fc2, activation)
    return lambda ops: ops.mlp(x, weights).sum()


def _add_and_normalize(model: ModelConfig, x: Tensor) -> Callable[[Ops], Tensor]:
    add, norm, norm_bias = (_weight(model.hidden_size, dtype=x.dtype) for _ in range(3))
    dropped = Dropout(model.hidden_dropout, DropoutKey(1, 0, 0, sample_dim=1))
    is_rms = model.norm.kernel is not None and not model.norm.kernel.bias
    call = NormArguments(norm, None if is_rms else norm_bias, model.layernorm_epsilon)
    return lambda ops: ops.bias_dropout_add_norm(x, add, x, dropped, call)[1].sum()


def _seconds(case: Callable[[Ops], Tensor], ops: Ops) -> float:
    return statistics.median(timings([lambda: torch.autograd.backward(case(ops))], REPEATS))


def measure_kernels(run: RunConfig) -> list[Timing]:
    backends = {name: Ops.build(name) for name in BACKENDS}
    return [
        Timing(family, **{name: _seconds(case, ops) for name, ops in backends.items()})
        for family, case in kernel_cases(run).items()
    ]


def kernel_table(chosen: list[Timing]) -> list[str]:
    return [f"  {row}" for row in text_table(COLUMNS, chosen)]
