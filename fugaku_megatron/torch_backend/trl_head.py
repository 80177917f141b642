"""The output layer of trl's trainers: the log-probabilities of labels that SFT, DPO and KTO ask for."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from .linear_loss import Call, Head, row_losses
from .served import compute_dtype, is_served

MODULE = "trl.trainer.utils"
# What trl's function takes since 1.16, after autograd's context.
PARAMETERS = (
    "hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs"
).split()


def is_known(function: Any) -> bool:
    """Return whether trl's autograd function has the parameters that ours has."""
    _, *names = inspect.signature(function.forward).parameters
    return names == PARAMETERS


class LogProbFunction:
    """Stands for trl's autograd function, which is called for what ours does not compute."""

    def __init__(self, original: Any) -> None:
        self.original = original

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *options: Any
    ) -> Any:
        """Return log-probabilities, entropies, log-sums of squares, mean logits and first maxima; None if not asked for."""
        temperature, _, softcap, logit_scale, names = options
        others = {"log_sum_sq_probs", "mean_logits"} & set(names)
        if softcap is not None or others or not is_served(hidden):
            return self.original.apply(hidden, weight, bias, labels, *options)
        scale = logit_scale / temperature
        head = Head(weight, None if bias is None else bias * scale)
        call = Call(scale, compute_dtype(hidden), tuple(names))
        logs, entropy, is_top1 = row_losses(hidden, head, labels, call)
        return logs, entropy, None, None, is_top1


def leaves_out_rows(original: Any, device: torch.device) -> bool:
    """Answer trl's question if Triton is there: then trl leaves out rows without a label."""
    return True
