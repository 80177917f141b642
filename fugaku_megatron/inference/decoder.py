"""Logits of the next token, for samples that grow: this rank's stage with the keys and values of what came before.

Prompts of any lengths go through the model side by side, without padding; then every sample adds one token at a time. Where one
rank has the whole model and samples are few, such a step repeats the recorded kernel calls of an earlier one. Left out: the choice
of tokens (`sampling`), and when a sample is finished (`generation`).
Legend: v vocabulary, h hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..comm.autograd import gather_from_tensor_parallel
from ..nn.cache import LayerCache, Rows
from ..nn.passes import Pass
from ..nn.replay import RecordedStep, RecordingKernels
from ..run import activations
from .loading import FEW_ROWS, LoadedModel
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
        alone = loaded.groups.tp.size == loaded.groups.pp.size == 1
        self._recorder = loaded.stage.ops.kernels if alone and isinstance(loaded.stage.ops.kernels, RecordingKernels) else None
        self._recorded: dict[int, RecordedStep] = {}  # by the number of samples

    @torch.no_grad()
    def logits(self, new: Mapping[int, Sequence[int]]) -> Tensor | None:
        """FP32 logits (samples, v) after the tokens that `new` adds to each of its samples: the prompt, or one token.

        On the ranks of the last stage, until the next call; None elsewhere.
        """
        results = [self._forward(part) for part in _parts(new)]
        return results[0] if results[0] is None or len(results) == 1 else torch.cat(results)

    def _forward(self, new: dict[int, Sequence[int]]) -> Tensor | None:
        lengths = [len(tokens) for tokens in new.values()]
        rows = Rows.of(self.loaded.run.model, self.cache, list(new), [self.lengths[sample] for sample in new], lengths)
        for sample, length in zip(new, lengths, strict=True):
            self.lengths[sample] += length
        tokens = torch.tensor([token for tokens in new.values() for token in tokens]).unsqueeze(1)  # (r, 1)
        repeats = self._recorder is not None and rows.one_each and len(tokens) <= FEW_ROWS
        logits = (self._repeated if repeats else self._computed)(tokens, rows)
        if logits is None:
            return None
        return gather_from_tensor_parallel(logits, self.loaded.groups.tp)[:, 0, : self.loaded.run.model.vocab_size].float()

    def _computed(self, tokens: Tensor, rows: Rows) -> Tensor | None:
        """This rank's columns of the logits (samples, 1, v) after tokens (r, 1); None on ranks of other stages."""
        x = through_stages(self.loaded, tokens, Pass(first_sample=0, training=False, rows=rows))
        return None if x is None else self.loaded.stage.last.logits(x if rows.one_each else x[rows.last]).contiguous()

    def _repeated(self, tokens: Tensor, rows: Rows) -> Tensor:
        """What `_computed` gives for one token (r, 1) of each sample, from recorded calls; the first time they are recorded."""
        inputs, known = (tokens, *rows.tensors), self._recorded.get(len(tokens))
        if known:
            return known(inputs)
        step = self._recorded[len(tokens)] = self._recorder.record(lambda: self._computed(tokens, rows), inputs)
        return step.result


def _parts(new: Mapping[int, Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
    """`new` cut so that a part has at most PREFILL_ROWS tokens, or one sample."""
    part: dict[int, Sequence[int]] = {}
    for sample, tokens in new.items():
        if part and sum(map(len, part.values())) + len(tokens) > PREFILL_ROWS:
            yield part
            part = {}
        part[sample] = tokens
    yield part
