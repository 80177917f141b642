"""Logits of the next token, for samples that grow: this rank's stage with the keys and values of what came before.

Prompts of any lengths go through the model side by side, without padding; then every sample adds one token at a time. Left out: the
choice of tokens (`sampling`), and when a sample is finished (`generation`).
Legend: v vocabulary, h hidden. Test: pytest tests/test_generate.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..comm.autograd import gather_from_tensor_parallel
from ..nn.cache import LayerCache, Rows
from ..nn.passes import Pass
from ..run import activations
from .loading import LoadedModel

PREFILL_ROWS = 4096  # tokens of prompts that go through the model at once, unless one prompt has more


class Decoder:
    """positions: of each sample, at most. All ranks of the model's groups call `logits` with the same tokens."""

    def __init__(self, loaded: LoadedModel, positions: Sequence[int]) -> None:
        model = loaded.run.model
        self.loaded, self.lengths = loaded, [0] * len(positions)
        slots = activations.cache_slots(model, max(positions))
        groups = model.query_groups // loaded.groups.tp.size
        self.cache = {layer.layer: LayerCache.empty(len(positions), groups, slots, model.kv_channels, loaded.dtype)
                      for layer in loaded.stage.layers}

    @torch.no_grad()
    def logits(self, new: Mapping[int, Sequence[int]]) -> Tensor | None:
        """FP32 logits (samples, v) after the tokens that `new` adds to each of its samples: the prompt, or one token.

        On the ranks of the last stage; None elsewhere.
        """
        results = [self._forward(part) for part in _parts(new)]
        return None if results[0] is None else torch.cat(results)

    def _forward(self, new: dict[int, Sequence[int]]) -> Tensor | None:
        lengths = [len(tokens) for tokens in new.values()]
        rows = Rows.of(self.cache, list(new), [self.lengths[sample] for sample in new], lengths)
        for sample, length in zip(new, lengths, strict=True):
            self.lengths[sample] += length
        tokens = torch.tensor([token for tokens in new.values() for token in tokens]).unsqueeze(1)  # (r, 1)
        logits = self._through_stages(tokens, Pass(first_sample=0, training=False, rows=rows))
        if logits is None:
            return None
        return gather_from_tensor_parallel(logits, self.loaded.groups.tp)[:, 0, : self.loaded.run.model.vocab_size].float()

    def _through_stages(self, x: Tensor, at: Pass) -> Tensor | None:
        """tokens (r, 1) -> this rank's columns of logits (samples, 1, v) on the last stage; None elsewhere."""
        stage, pp, rows = self.loaded.stage, self.loaded.groups.pp, len(x)
        logits = None
        for number, chunk in enumerate(stage.chunks):
            previous, following = (stage.placement.neighbour(pp.rank, number, step) for step in (-1, 1))  # (stage, chunk) or None
            if previous and previous[0] != pp.rank:
                x = pp.recv(torch.empty(rows, 1, self.loaded.run.model.hidden_size, dtype=self.loaded.dtype), previous[0])
            x = chunk.decode(chunk.embedding(x, at) if chunk.is_first else x, at)
            if following is None:
                logits = chunk.logits(x if at.rows.one_each else x[at.rows.last]).contiguous()
            elif following[0] != pp.rank:
                pp.send(x.contiguous(), following[0])
        return logits


def _parts(new: Mapping[int, Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
    """`new` cut so that a part has at most PREFILL_ROWS tokens, or one sample."""
    part: dict[int, Sequence[int]] = {}
    for sample, tokens in new.items():
        if part and sum(map(len, part.values())) + len(tokens) > PREFILL_ROWS:
            yield part
            part = {}
        part[sample] = tokens
    yield part
