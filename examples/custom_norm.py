"""Add a norm to the block, by one class and one row of NORMS.

python examples/custom_norm.py
mpiexec -n 2 python examples/custom_norm.py
"""

from torch import Tensor

import fugaku_megatron as fm
from fugaku_megatron.comm.autograd import apply_saving
from fugaku_megatron.config.rows import NORMS, NormPart
from fugaku_megatron.nn.layers import Context, Norm
from fugaku_megatron.nn.parameter import accumulate


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight. The gradient of a parameter is added up in FP32, by `accumulate`."""

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        accumulate(weight, (dy * x).sum((0, 1)))
        return dy * weight

    return apply_saving(lambda: (x * weight, (x,)), backward, x, weight)


class TanhNorm(Norm):
    """One class: weight tanh(x / 2), after dynamic tanh (Zhu et al. 2025)."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.weight = context.parameter(f"{name}.weight", (context.model.hidden_size,), fill=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return scaled((x / 2).tanh(), self.weight)


NORMS["TanhNorm"] = NormPart(
    layer=f"{__name__}:TanhNorm", vectors=1, statistics=0
)  # parameters of h elements; see NormPart

config = fm.Config(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=32,
    vocab_size=256,
    micro_batch_size=4,
    lr=3e-3,
    normalization="TanhNorm",
)
documents = [list(("abcdefgh" * copies).encode()) for copies in range(10, 50)]
losses = [step.loss for step in fm.Trainer(config, documents).steps(30)]
fm.on_first_rank(lambda: print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"))
assert losses[-1] < losses[0] / 2
