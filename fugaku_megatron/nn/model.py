"""One chunk of the GPT's layers: embedding (first chunk), transformer layers, final norm and tied head (last chunk).

Left out: parameter memory (`training.flat.FlatParameters`), the order of micro-batches (`schedule`).
Legend: s sequence (this rank's part of it with sequence parallelism), b micro-batch, h hidden, v vocabulary of this rank.
Test: pytest tests/test_model.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from ..comm.autograd import copy_to_tensor_parallel, gather_from_sequence_parallel
from ..comm.grid import Groups
from ..run import accounting, memory
from ..run.config import RunConfig
from .blocks import TransformerLayer, make_norm
from .layers import Context, PositionEmbedding, VocabParallelEmbedding, hidden_dropout_key
from .ops import Ops, recompute
from .passes import Pass

EMBEDDING = "embedding.word_embeddings"


class Stage(nn.Module):
    """This rank's part of the model. `run.model.vocab_size` must be known. ops: what runs its operations.

    Raises nothing of its own: `accounting.Layout` has checked that heads, layers and vocabulary divide.
    """

    def __init__(self, run: RunConfig, groups: Groups, ops: Ops) -> None:
        super().__init__()
        model, tp, pp = run.model, groups.tp, groups.pp
        self.run, self.tp, self.ops = run, tp, ops
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        vocabulary = accounting.padded_vocab_size(model, tp.size)
        self.context = context = Context(model, tp, ops, run.training.seed, run.parallel.sequence_parallel)
        world = tp.size * pp.size * groups.dp.size
        self.logits_rows = memory.logits_rows(run, accounting.Layout(world, tp.size, pp.size, groups.dp.size))
        if self.is_first:
            self.word_embeddings = VocabParallelEmbedding(EMBEDDING, vocabulary, context)
            self.position_embeddings = PositionEmbedding("embedding.position_embeddings", context)
        self.layers = nn.ModuleList(TransformerLayer(n + 1, context) for n in accounting.stage_layers(run, pp.rank))
        if self.is_last:
            self.final_layernorm = make_norm("decoder.final_layernorm", context)
        if self.is_last and not self.is_first:
            self.output_weight = context.parameter("output_layer.weight", (vocabulary, model.hidden_size), 0,
                                                   model.init_method_std, init_name=f"{EMBEDDING}.weight")

    @property
    def tied_weight(self) -> nn.Parameter:
        """The word embedding as this stage holds it (first and last stage only); (v, h)."""
        return self.word_embeddings.weight if self.is_first else self.output_weight

    def embed(self, tokens: Tensor, at: Pass) -> Tensor:
        """tokens (whole sequence, b) -> (s, b, h)."""
        x, context = self.position_embeddings(self.word_embeddings(tokens)), self.context
        p = context.model.hidden_dropout if at.training else 0.0
        return self.ops.dropout(x, p, hidden_dropout_key(context.seed, 0, "embedding", at.first_sample, context.first_position(x)))

    def run_layers(self, x: Tensor, at: Pass, first: int, last: int) -> Tensor:
        """Layers [first, last) of this stage. (s, b, h) -> (s, b, h). Only the last one may leave its values out."""
        inner = replace(at, needs_values=True)
        for layer in self.layers[first:last]:
            x = layer(x, at if layer is self.layers[last - 1] else inner)
        return x

    def decode(self, x: Tensor, at: Pass) -> Tensor:
        """All layers of this stage, recomputed in groups where asked. (s, b, h) -> (s, b, h)."""
        count, training = len(self.layers), self.run.training
        if at.recompute != "full":
            return self.run_layers(x, at, 0, count)
        for group in accounting.recompute_groups(count, training.recompute_method, training.recompute_num_layers):
            bounds = {"first": group.start, "last": group.stop}
            again = partial(self.run_layers, at=replace(at, needs_values=False), **bounds)
            x = recompute(partial(self.run_layers, at=at, **bounds), x, again=again)
        done = accounting.recomputed_layers(count, training.recompute_method, training.recompute_num_layers)
        return self.run_layers(x, at, done, count)

    def head_input(self, x: Tensor) -> Tensor:
        """What the tied head multiplies, the whole sequence. (s, b, h) -> (whole sequence, b, h)."""
        enter = copy_to_tensor_parallel if self.context.sequence is None else gather_from_sequence_parallel
        return enter(self.final_layernorm(x), self.tp)

    def logits(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> (whole sequence, b, v): this rank's columns of the logits."""
        return self.ops.linear(self.head_input(x), self.tied_weight)

    def forward(self, x: Tensor, labels: Tensor | None, at: Pass, factor: float = 1.0) -> Tensor:
        """Tokens (s, b) or the previous stage's (s, b, h) -> (s, b, h), or on the last stage the mean loss () times `factor`."""
        x = self.embed(x, at) if self.is_first else x
        x = self.decode(x, at)
        if not self.is_last:
            return x
        weight, first_row = self.tied_weight, self.tied_weight.spec.offset[0]
        return self.ops.head_loss(self.head_input(x), weight, labels, self.tp, first_row, factor, self.logits_rows) * factor
