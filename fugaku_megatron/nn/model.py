"""One pipeline stage of the GPT: embedding (first stage), transformer layers, final layer norm and tied head (last stage).

Left out: parameter memory (`optim.FlatParameters`), the order of micro-batches (`schedule`).
Legend: s sequence, b micro-batch, h hidden, v vocabulary of this rank. Test: pytest tests/test_model.py
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..comm.autograd import copy_to_tensor_parallel
from ..comm.grid import Groups
from ..run import accounting, memory
from ..run.config import RunConfig
from . import ops
from .layers import LayerNorm, PositionEmbedding, TransformerLayer, VocabParallelEmbedding, hidden_place, make_parameter

EMBEDDING = "embedding.word_embeddings"


class Stage(nn.Module):
    """This rank's part of the model. `run.model.vocab_size` must be known.

    Raises nothing of its own: `accounting.Layout` has checked that heads, layers and vocabulary divide.
    """

    def __init__(self, run: RunConfig, groups: Groups) -> None:
        super().__init__()
        model, tp, pp = run.model, groups.tp, groups.pp
        self.run, self.tp, self.seed = run, tp, run.training.seed
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        self.recompute = run.training.recompute_granularity
        vocabulary = accounting.padded_vocab_size(model, tp.size)
        world = tp.size * pp.size * groups.dp.size
        self.logits_rows = memory.logits_rows(run, accounting.Layout(world, tp.size, pp.size, groups.dp.size))
        if self.is_first:
            self.word_embeddings = VocabParallelEmbedding(EMBEDDING, vocabulary, model.hidden_size, tp, model.init_method_std)
            self.position_embeddings = PositionEmbedding("embedding.position_embeddings", model.max_position_embeddings,
                                                         model.hidden_size, tp, model.init_method_std)
        self.layers = nn.ModuleList(TransformerLayer(n + 1, model, tp, self.seed)
                                    for n in accounting.stage_layers(run, pp.rank))
        if self.is_last:
            self.final_layernorm = LayerNorm("decoder.final_layernorm", model.hidden_size, model.layernorm_epsilon, tp)
        if self.is_last and not self.is_first:
            self.output_weight = make_parameter("output_layer.weight", (vocabulary, model.hidden_size), tp, 0,
                                                model.init_method_std, init_name=f"{EMBEDDING}.weight")

    @property
    def tied_weight(self) -> nn.Parameter:
        """The word embedding as this stage holds it (first and last stage only); (v, h)."""
        return self.word_embeddings.weight if self.is_first else self.output_weight

    def embed(self, tokens: Tensor, first_sample: int) -> Tensor:
        """tokens (s, b) -> (s, b, h)."""
        x = self.position_embeddings(self.word_embeddings(tokens))
        p = self.run.model.hidden_dropout if self.training else 0.0
        return ops.dropout(x, p, hidden_place(self.seed, 0, "embedding", first_sample))

    def run_layers(self, x: Tensor, first_sample: int, first: int, last: int, graph_only: bool = False) -> Tensor:
        """Layers [first, last) of this stage. (s, b, h) -> (s, b, h). graph_only: the last one's values may be anything."""
        for layer in self.layers[first:last]:
            ends = graph_only and layer is self.layers[last - 1]
            x = layer(x, first_sample, self.recompute == "selective" and self.training, ends)
        return x

    def decode(self, x: Tensor, first_sample: int) -> Tensor:
        """All layers of this stage, recomputed in groups where asked. (s, b, h) -> (s, b, h)."""
        count = len(self.layers)
        if self.recompute != "full" or not self.training:
            return self.run_layers(x, first_sample, 0, count)
        training = self.run.training
        again = partial(self.run_layers, graph_only=True)
        for group in accounting.recompute_groups(count, training.recompute_method, training.recompute_num_layers):
            x = ops.recompute(self.run_layers, x, first_sample, group.start, group.stop, again=again)
        done = accounting.recomputed_layers(count, training.recompute_method, training.recompute_num_layers)
        return self.run_layers(x, first_sample, done, count)

    def head_input(self, x: Tensor) -> Tensor:
        """What the tied head multiplies. (s, b, h) -> (s, b, h)."""
        return copy_to_tensor_parallel(self.final_layernorm(x), self.tp)

    def logits(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> (s, b, v): this rank's columns of the logits."""
        return ops.linear(self.head_input(x), self.tied_weight)

    def forward(self, x: Tensor, labels: Tensor | None, first_sample: int, factor: float = 1.0) -> Tensor:
        """Tokens (s, b) or the previous stage's (s, b, h) -> (s, b, h), or on the last stage the mean loss () times `factor`."""
        x = self.embed(x, first_sample) if self.is_first else x
        x = self.decode(x, first_sample)
        if not self.is_last:
            return x
        first_row = self.tied_weight.global_offset[0]
        return ops.head_loss(self.head_input(x), self.tied_weight, labels, self.tp, first_row, factor, self.logits_rows) * factor
