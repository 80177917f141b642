"""Tokens through all stages of a loaded model."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.passes import Pass
from .loading import LoadedModel


@torch.no_grad()
def through_stages(loaded: LoadedModel, tokens: Tensor, at: Pass) -> Tensor | None:
    """What the last layer makes of tokens (s, b), (s, b, h), on the ranks of the last stage; None elsewhere.

    Collective over the pipeline.
    """
    stage, pp, x = loaded.stage, loaded.groups.pp, tokens
    for number, chunk in enumerate(stage.chunks):
        previous, following = (stage.placement.neighbour(pp.rank, number, step) for step in (-1, 1))  # (stage, chunk) or None
        if previous and previous[0] != pp.rank:
            x = pp.recv(torch.empty(*tokens.shape, loaded.run.model.hidden_size, dtype=loaded.dtype), previous[0])
        x = chunk.decode(chunk.embedding(x, at) if chunk.is_first else x, at)
        if following and following[0] != pp.rank:
            pp.send(x.contiguous(), following[0])
    return x if stage.last else None
