"""Attention sinks: a score of each head without a key, in the denominator of every softmax (--softmax-type).

Attention's backward needs no change: it reads the output and the log of the sums, which contain the sink.
n heads, s queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..parameter import gradient_of, is_frozen


class Sinks(NamedTuple):
    """Sinks of the heads in a call.

    values: (n,) in FP32.
    parameter: (heads of this tensor-parallel rank,); None: the sinks are not trained.
    heads: the call's heads in the parameter.
    """

    values: Tensor
    parameter: Tensor | None = None
    heads: slice = slice(None)

    @staticmethod
    def of(parameter: Tensor, heads: slice) -> Sinks:
        return Sinks(parameter.detach()[heads].float(), parameter, heads)

    def backward(self, out: Tensor, lse: Tensor, dout: Tensor) -> None:
        """Add the gradient of a call: -sum of softmax(sink) (dout . out) over the queries.

        out, dout: (s, b, n d); lse: (b, n, s)
        """
        if self.parameter is None or is_frozen(self.parameter):
            return
        delta = (dout.float() * out.float()).unflatten(2, (len(self.values), -1)).sum(-1)
        probabilities = torch.exp(self.values.unsqueeze(1) - lse)
        gradient = -(probabilities * delta.permute(1, 2, 0)).sum((0, 2))
        gradient_of(self.parameter)[self.heads].add_(gradient)
