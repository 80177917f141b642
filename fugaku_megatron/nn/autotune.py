"""--kernels auto: times native against torch kernels once, on this run's own shapes, and takes the faster of each family.

Every rank times alone at start-up, rank 0's choice holds for all. Left out: threads and instruction sets (`host.kernels`).
Legend: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.solo import SoloComm
from ..config.run_config import ModelConfig, RunConfig
from ..costs import accounting
from .ops import BACKENDS, DropoutKey, Ops

REPEATS = 3
MARGIN = 1.1
LAYER_TOKENS = 4096  # rows that are timed at most


@dataclass(frozen=True)
class Timing:
    """Seconds of forward and backward of one family."""

    family: str
    native: float
    torch: float

    @property
    def faster(self) -> str:
        """torch only where it is clearly faster, so that noise does not change a run's last bits."""
        return "native" if self.native <= MARGIN * self.torch else "torch"


def _weight(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(shape).mul_(0.02).to(dtype))
    weight.main_grad = torch.zeros(shape)  # type: ignore[attr-defined]  # see shared.gradient_of
    return weight


def cases(run: RunConfig, tp: int, dtype: torch.dtype) -> dict[str, Callable[[Ops], Tensor]]:
    """One call per family on this run's shapes; each returns a scalar () to differentiate."""
    model = run.model
    s, h, b = model.seq_length, model.hidden_size, max(1, min(run.batch.micro_batch_size, LAYER_TOKENS // model.seq_length))
    x = torch.randn(s, b, h).to(dtype).requires_grad_()
    residual = x.detach()[: s // accounting.sequence_parts(run, tp)].requires_grad_()
    qkv = torch.randn(s, b, model.qkv_width // tp).to(dtype).requires_grad_()
    rows = min(accounting.padded_vocab_size(model, tp) // tp, 2048)
    table, tokens = _weight(rows, h, dtype=dtype), torch.randint(0, rows, (s, b))
    scores = DropoutKey(1, 1, 0, sample_dim=0)
    return {
        "gemm": _mlp(model, x, tp),
        "attention": lambda ops: ops.attention(qkv, model.kv_channels, model.attention_dropout, scores, model.query_groups // tp,
                                               model.window).sum(),
        "rowwise": _add_and_normalize(model, residual),
        "loss": lambda ops: ops.head_loss(x, table, tokens, SoloComm(), 0, 1.0, z_loss=model.z_loss),
        "embedding": lambda ops: ops.embedding(tokens, table).sum(),
    }


def _mlp(model: ModelConfig, x: Tensor, tp: int) -> Callable[[Ops], Tensor]:
    """The model's MLP of x (s, b, h)."""
    f, h, dtype, gates = model.ffn_hidden_size // tp, model.hidden_size, x.dtype, [2] * model.gated
    fc1, bias, fc2 = _weight(*gates, f, h, dtype=dtype), _weight(*gates, f, dtype=dtype), _weight(h, f, dtype=dtype)
    if model.gated:
        return lambda ops: ops.gated_mlp(x, fc1, bias, fc2, activation=model.activation).sum()
    return lambda ops: ops.mlp(x, fc1, bias, fc2, activation=model.activation).sum()


def _add_and_normalize(model: ModelConfig, x: Tensor) -> Callable[[Ops], Tensor]:
    """The model's norm of x + dropout(x + bias), x (s, b, h)."""
    add, norm, norm_bias = (_weight(model.hidden_size, dtype=x.dtype) for _ in range(3))
    more = (model.hidden_dropout, DropoutKey(1, 0, 0, sample_dim=1), norm)
    if model.normalization.endswith("RMSNorm"):
        return lambda ops: ops.bias_dropout_add_rms_norm(x, add, x, *more, model.layernorm_epsilon)[1].sum()
    return lambda ops: ops.bias_dropout_add_layer_norm(x, add, x, *more, norm_bias, model.layernorm_epsilon)[1].sum()


def _seconds(case: Callable[[Ops], Tensor], ops: Ops) -> float:
    seconds = []
    for _ in range(REPEATS + 1):  # the first warms up
        started = time.perf_counter()
        case(ops).backward()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def measure(run: RunConfig, tp: int, dtype: torch.dtype) -> list[Timing]:
    """Time every family on both backends, in turn."""
    backends = {name: Ops.build(name) for name in BACKENDS}
    return [Timing(family, **{name: _seconds(case, ops) for name, ops in backends.items()})
            for family, case in cases(run, tp, dtype).items()]


def table(timings: list[Timing]) -> list[str]:
    """The log's lines."""
    head = f"  {'kernels':<10} {'native ms':>10} {'torch ms':>10}  used"
    return [head, *(f"  {t.family:<10} {t.native * 1e3:>10.2f} {t.torch * 1e3:>10.2f}  {t.faster}" for t in timings)]
