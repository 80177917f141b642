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
from .stages import through_stages

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
        rows = Rows.of(self.loaded.run.model, self.cache, list(new), [self.lengths[sample] for sample in new], lengths)
        for sample, length in zip(new, lengths, strict=True):
            self.lengths[sample] += length
        tokens = torch.tensor([token for tokens in new.values() for token in tokens]).unsqueeze(1)  # (r, 1)
        x = through_stages(self.loaded, tokens, Pass(first_sample=0, training=False, rows=rows))
        if x is None:
            return None
        logits = self.loaded.stage.last.logits(x if rows.one_each else x[rows.last]).contiguous()
        return gather_from_tensor_parallel(logits, self.loaded.groups.tp)[:, 0, : self.loaded.run.model.vocab_size].float()


def _parts(new: Mapping[int, Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
    """`new` cut so that a part has at most PREFILL_ROWS tokens, or one sample."""
    part: dict[int, Sequence[int]] = {}
    for sample, tokens in new.items():
        if part and sum(map(len, part.values())) + len(tokens) > PREFILL_ROWS:
            yield part
            part = {}
        part[sample] = tokens
    yield part
