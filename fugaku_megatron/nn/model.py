"""A rank's stage of the GPT.

s sequence (this rank's shard with sequence parallelism), b micro-batch, h hidden, v vocabulary of this rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.grid import Groups
from ..config.freezing import HEAD
from ..config.run_config import RunConfig
from ..costs import memory
from ..costs.sizes import padded_vocab_size
from ..costs.stages import trains_below, virtual_stage_layers, virtual_stage_recompute_groups
from .backward import attach_loss
from .blocks import TransformerLayer, make_norm
from .forward_context import Pass
from .layers import (
    Context,
    Layer,
    PositionEmbedding,
    VocabParallelEmbedding,
    hidden_dropout,
    multiplied,
)
from .ops import Ops, recompute
from .ops.loss import HeadLoss, soft_capped
from .parameter import ModelParameter
from .prediction import PredictionModule

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"  # global name of the tied weight
OUTPUT = "output_layer.weight"  # global name of the tied copy, or of an untied head
PREDICTION_EMBEDDINGS = f"mtp.{WORD_EMBEDDINGS}"  # global name of the copy next to an untied head
VOCABULARY = (
    WORD_EMBEDDINGS,
    OUTPUT,
    PREDICTION_EMBEDDINGS,
)  # padded to a number of rows that depends on the layout


class Stage(nn.Module):
    """This rank's model chunks, in model order. The config's `vocab_size` must be known."""

    def __init__(self, run: RunConfig, groups: Groups, ops: Ops) -> None:
        super().__init__()
        self.placement = run.placement
        self.ops = ops
        self.tied = run.model.tied and not run.freezes_embedding
        self.freezes_embedding = run.freezes_embedding
        self.predicts = run.model.predictions > 0
        context = Context(run, groups, ops)
        rows = memory.logits_rows(run)
        self.chunks: Any = nn.ModuleList(
            Chunk(run, virtual_stage, context, rows)
            for virtual_stage in self.placement.virtual_stages_of[groups.pp.rank]
        )
        first = self.first
        last = self.last
        if first and last and run.model.tied:
            last.output_weight = first.embedding.word_embeddings.weight
        if last and self.predicts:
            self._share_embedding(first, last)

    def _share_embedding(self, first: Chunk | None, last: Chunk) -> None:
        """Set the embedding that MTP modules read: the first stage's, the tied head, or a copy."""
        if first:
            last.embedding = first.embedding
        elif self.tied:
            last.embedding.word_embeddings.weight = last.output_weight
        else:
            weight = last.embedding.word_embeddings.weight
            weight.spec = replace(weight.spec, name=PREDICTION_EMBEDDINGS, counted=False)

    @property
    def first(self) -> Chunk | None:
        return next((chunk for chunk in self.chunks if chunk.is_first), None)

    @property
    def last(self) -> Chunk | None:
        return next((chunk for chunk in self.chunks if chunk.is_last), None)

    @property
    def tied_copy(self) -> ModelParameter | None:
        """Trained word embedding (v, h) that another stage also has, or None.

        A stage with MTP modules reads it too.
        """
        first = self.first
        last = self.last
        shared = self.tied or self.predicts
        if (first and last) or not shared or self.freezes_embedding:
            return None
        end = first or (last if self.predicts else None)
        if end:
            return end.embedding.word_embeddings.weight
        return last.output_weight if last else None

    @property
    def layers(self) -> list[TransformerLayer]:
        """Layers of the stage, and then the layers of its MTP modules."""
        return [layer for chunk in self.chunks for layer in chunk.all_layers]


class Embedding(Layer):
    """Word embeddings, learned positions and dropout."""

    def __init__(self, vocabulary: int, context: Context) -> None:
        super().__init__(context)
        self.word_embeddings = VocabParallelEmbedding(
            "embedding.word_embeddings", vocabulary, context
        )
        learned = context.model.learned_positions
        self.position_embeddings = (
            PositionEmbedding("embedding.position_embeddings", context) if learned else None
        )

    def forward(self, tokens: Tensor, forward_pass: Pass, layer: int = 0) -> Tensor:
        """Embed tokens (rows, b) -> (s, b, h). layer: of the dropout mask"""
        rows = forward_pass.rows
        context = self.context
        positions = forward_pass.documents.positions if rows is None else rows.positions
        x = multiplied(self.word_embeddings(tokens), context.model.embedding_multiplier)
        x = self.position_embeddings(x, positions) if self.position_embeddings else x
        return context.ops.dropout(x, hidden_dropout(context, layer, "embedding", x, forward_pass))


class Chunk(Layer):
    """Consecutive layers, with the embeddings in the first virtual stage and the head in the last.

    predictions: MTP modules, in the last virtual stage.
    z_losses: --use-z-loss share of each micro-batch's loss (), by first sample.
    prediction_losses: losses (modules,) of each micro-batch's MTP modules, by first sample.
    A tied head on the embedding's stage has the embedding's weight as `output_weight`.
    needs_input_gradient, needs_gradient: backward reaches the chunk's input, and its output.
    frozen_layers: layers at the beginning without a trained parameter.
    """

    def __init__(
        self,
        run: RunConfig,
        virtual_stage: int,
        context: Context,
        logits_rows: int,
    ) -> None:
        super().__init__(context)
        model = run.model
        self.is_first = virtual_stage == 0
        self.is_last = virtual_stage == run.placement.virtual_stages - 1
        self.logits_rows = logits_rows
        self.recompute_groups = virtual_stage_recompute_groups(run, virtual_stage)
        self.trains_head = not (run.lora.on or run.freezing.has(HEAD))
        self.needs_input_gradient = trains_below(run, virtual_stage)
        self.needs_gradient = self.is_last or trains_below(run, virtual_stage + 1)
        self.z_losses: dict[int, Tensor] = {}
        self.prediction_losses: dict[int, Tensor] = {}
        self.prediction_factor = model.mtp_loss_scaling_factor / max(1, model.predictions)
        vocabulary = padded_vocab_size(model, context.tp.size)
        if self.is_first or (self.is_last and model.predictions):
            self.embedding = Embedding(vocabulary, context)
        own = virtual_stage_layers(run, virtual_stage)
        self.frozen_layers = min(max(0, run.frozen_layers - own.start), len(own))
        self.layers = nn.ModuleList(
            TransformerLayer(n + 1, context) for n in own if n < model.num_layers
        )
        self.predictions = nn.ModuleList(
            PredictionModule(n + 1 - model.num_layers, context)
            for n in own
            if n >= model.num_layers
        )
        if self.is_last:
            self.final_layernorm = make_norm("decoder.final_layernorm", context)
            self.output_weight = context.parameter(
                OUTPUT,
                (vocabulary, model.hidden_size),
                0,
                model.init_method_std,
                init_name=WORD_EMBEDDINGS if model.tied else None,
            )

    @property
    def all_layers(self) -> list[TransformerLayer]:
        modules: Any = self.predictions
        return [*self.layers, *(module.transformer_layer for module in modules)]

    @property
    def unpadded_rows(self) -> int | None:
        """Rows of the head weight that are tokens; None if padding is not masked."""
        model = self.model
        weight = self.output_weight
        if not model.masks_padding:
            return None
        assert model.vocab_size is not None
        return min(max(0, model.vocab_size - weight.spec.offset[0]), len(weight))

    def run_layers(self, x: Tensor, forward_pass: Pass, first: int, last: int) -> Tensor:
        """Run layers [first, last). Only the last layer may leave its values unset."""
        inner = replace(forward_pass, needs_values=True)
        for layer in self.layers[first:last]:
            x = layer(x, forward_pass if layer is self.layers[last - 1] else inner)
        return x

    def recomputed(self, forward_pass: Pass) -> tuple[list[range], bool]:
        """Return the groups of layers that backward recomputes, and True if it recomputes MTP modules."""
        if forward_pass.recompute != "full":
            return [], False
        layers = len(self.layers)
        groups = [group for group in self.recompute_groups if group.stop <= layers]
        return groups, len(groups) < len(self.recompute_groups)

    def decode(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Run all layers, (s, b, h) -> (s, b, h); with full recompute the first groups run again in backward."""
        groups = self.recomputed(forward_pass)[0]
        first = 0
        if not x.requires_grad and torch.is_grad_enabled():
            first = self.frozen_layers
            x = self.run_layers(x, replace(forward_pass, needs_values=True), 0, first)
            # Adapters need no gradient of the first layer's input, except for a recompute.
            if first < len(self.layers) and (groups or not self.context.run.lora.on):
                x = x.detach().requires_grad_()
        for group in groups:
            if group.stop <= first:
                continue
            bounds: dict[str, Any] = {"first": max(first, group.start), "last": group.stop}
            again = partial(
                self.run_layers, forward_pass=replace(forward_pass, needs_values=False), **bounds
            )
            x = recompute(
                partial(self.run_layers, forward_pass=forward_pass, **bounds), x, again=again
            )
        return self.run_layers(x, forward_pass, max(first, sum(map(len, groups))), len(self.layers))

    def head_input(self, normed: Tensor) -> Tensor:
        """Return the head's input (whole sequence, b, h)."""
        whole = self.context.whole_sequence(normed)
        return multiplied(whole, 1.0 / self.model.logits_scaling)

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's logits (whole sequence, b, v)."""
        normed = self.final_layernorm(x)
        logits = self.ops.for_head().linear(self.head_input(normed), self.output_weight)
        return soft_capped(logits, self.model.final_logit_softcapping)

    def forward(
        self, x: Tensor, labels: Tensor | None, forward_pass: Pass, factor: float = 1.0
    ) -> Tensor:
        """Run the chunk on tokens (s, b) or activations (s, b, h) -> (s, b, h), or the loss () in the last chunk.

        factor: gradient of the loss in backward. In training the loss includes the z-loss, recorded in `z_losses`.
        """
        x = self.embedding(x, forward_pass) if self.is_first else x
        x = self.decode(x, forward_pass)
        if not self.is_last:
            return x
        if self.trains_head and not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        assert labels is not None
        normed = self.final_layernorm(x)
        z_loss = self.model.z_loss if forward_pass.training else 0.0
        call = self._head_loss(factor)._replace(z_loss=z_loss, divisor=forward_pass.count)
        if z_loss:
            z_sum = self.z_losses[forward_pass.first_sample] = torch.zeros(())
            call = call._replace(z_sum=z_sum)
        # The loss overwrites its input, which the first MTP module reads.
        read = normed.clone() if forward_pass.predictions else normed
        loss = self.ops.head_loss(self.head_input(read), self.output_weight, labels, call)
        return self._with_predictions(loss, normed, forward_pass, factor)

    def _head_loss(self, factor: float) -> HeadLoss:
        return HeadLoss(
            self.context.tp,
            self.output_weight.spec.offset[0],
            factor,
            rows_at_once=self.logits_rows,
            unpadded_rows=self.unpadded_rows,
            softcap=self.model.final_logit_softcapping,
        )

    def _with_predictions(
        self, loss: Tensor, x: Tensor, forward_pass: Pass, factor: float
    ) -> Tensor:
        """Attach the losses of the MTP modules to the backward of the loss, and record them.

        x: normed hidden state (s, b, h)
        factor: of the loss
        """
        predictions = forward_pass.predictions
        if not predictions:
            return loss
        factor *= self.prediction_factor
        again = self.recomputed(forward_pass)[1]
        losses: list[Tensor] = []
        for module, (tokens, labels, divisor) in zip(self.predictions, predictions, strict=True):
            inputs = (x, tokens, self.embedding, forward_pass)
            x = recompute(module, *inputs) if again else module(*inputs)
            read = x if len(losses) == len(predictions) - 1 else x.clone()
            call = self._head_loss(factor)._replace(divisor=divisor)
            predicted = self.ops.head_loss(self.head_input(read), self.output_weight, labels, call)
            losses.append(predicted.detach())
            loss = attach_loss(loss, predicted, factor)
        self.prediction_losses[forward_pass.first_sample] = torch.stack(losses)
        return loss
