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
from ..config.run_config import RunConfig
from ..costs import memory
from ..costs.sizes import padded_vocab_size
from ..costs.stages import virtual_stage_layers, virtual_stage_recompute_groups
from .blocks import TransformerLayer, make_norm
from .forward_context import Pass
from .layers import Context, PositionEmbedding, VocabParallelEmbedding, hidden_dropout, multiplied
from .ops import Ops, recompute
from .ops.loss import HeadLoss, soft_capped
from .parameter import ModelParameter

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"  # global name of the tied weight
OUTPUT = "output_layer.weight"  # global name of the tied copy, or of an untied head
VOCABULARY = (WORD_EMBEDDINGS, OUTPUT)  # padded to a number of rows that depends on the layout


class Stage(nn.Module):
    """This rank's model chunks, in model order. The config's `vocab_size` must be known."""

    def __init__(self, run: RunConfig, groups: Groups, ops: Ops) -> None:
        super().__init__()
        tp = groups.tp
        self.placement = run.placement
        self.ops = ops
        self.tied = run.model.tied and not run.lora.on
        parallel = run.parallel
        context = Context(
            run.model,
            tp,
            ops=ops,
            seed=run.training.seed,
            sequence_parallel=parallel.sequence_parallel,
            tp_comm_overlap=parallel.tp_comm_overlap,
            lora=run.lora,
            ep=groups.ep if parallel.divides_experts else None,
            etp=groups.etp if parallel.divides_experts else None,
            cp=groups.cp,
            cp_comm_types=run.cp_comm_types if groups.cp.size > 1 else (),
            decays_qk_layernorm=run.optimizer.apply_wd_to_qk_layernorm,
        )
        rows = memory.logits_rows(run)
        self.chunks: Any = nn.ModuleList(
            Chunk(run, virtual_stage, context, rows)
            for virtual_stage in self.placement.virtual_stages_of[groups.pp.rank]
        )
        first = self.first
        last = self.last
        if first and last and run.model.tied:
            last.output_weight = first.embedding.word_embeddings.weight

    @property
    def first(self) -> Chunk | None:
        return next((chunk for chunk in self.chunks if chunk.is_first), None)

    @property
    def last(self) -> Chunk | None:
        return next((chunk for chunk in self.chunks if chunk.is_last), None)

    @property
    def tied_copy(self) -> ModelParameter | None:
        """Trained word embedding (v, h) that another stage also has, or None."""
        first = self.first
        last = self.last
        if (first and last) or not self.tied:
            return None
        if first:
            return first.embedding.word_embeddings.weight
        return last.output_weight if last else None

    @property
    def layers(self) -> list[TransformerLayer]:
        return [layer for chunk in self.chunks for layer in chunk.layers]


class Embedding(nn.Module):
    """Word embeddings, learned positions and dropout."""

    def __init__(self, vocabulary: int, context: Context) -> None:
        super().__init__()
        self.context = context
        self.word_embeddings = VocabParallelEmbedding(
            "embedding.word_embeddings", vocabulary, context
        )
        learned = context.model.learned_positions
        self.position_embeddings = (
            PositionEmbedding("embedding.position_embeddings", context) if learned else None
        )

    def forward(self, tokens: Tensor, forward_pass: Pass) -> Tensor:
        rows = forward_pass.rows
        context = self.context
        positions = forward_pass.documents.positions if rows is None else rows.positions
        x = multiplied(self.word_embeddings(tokens), context.model.embedding_multiplier)
        x = self.position_embeddings(x, positions) if self.position_embeddings else x
        return context.ops.dropout(x, hidden_dropout(context, 0, "embedding", x, forward_pass))


class Chunk(nn.Module):
    """Consecutive layers, with the embeddings in the first virtual stage and the head in the last.

    z_losses: --use-z-loss share of each micro-batch's loss (), by first sample.
    A tied head on the embedding's stage has the embedding's weight as `output_weight`.
    """

    def __init__(
        self,
        run: RunConfig,
        virtual_stage: int,
        context: Context,
        logits_rows: int,
    ) -> None:
        super().__init__()
        model = run.model
        self.tp = context.tp
        self.ops = context.ops
        self.context = context
        self.is_first = virtual_stage == 0
        self.is_last = virtual_stage == run.placement.virtual_stages - 1
        self.logits_rows = logits_rows
        self.recompute_groups = virtual_stage_recompute_groups(run, virtual_stage)
        self.z_losses: dict[int, Tensor] = {}
        vocabulary = padded_vocab_size(model, context.tp.size)
        if self.is_first:
            self.embedding = Embedding(vocabulary, context)
        self.layers = nn.ModuleList(
            TransformerLayer(n + 1, context) for n in virtual_stage_layers(run, virtual_stage)
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
    def unpadded_rows(self) -> int | None:
        """Rows of the head weight that are tokens; None if padding is not masked."""
        model = self.context.model
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

    def decode(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Run all layers, (s, b, h) -> (s, b, h); with full recompute the first groups run again in backward."""
        groups = self.recompute_groups if forward_pass.recompute == "full" else []
        if groups and not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # with frozen embeddings the graph begins here
        for group in groups:
            bounds: dict[str, Any] = {"first": group.start, "last": group.stop}
            again = partial(
                self.run_layers, forward_pass=replace(forward_pass, needs_values=False), **bounds
            )
            x = recompute(
                partial(self.run_layers, forward_pass=forward_pass, **bounds), x, again=again
            )
        return self.run_layers(x, forward_pass, sum(map(len, groups)), len(self.layers))

    def head_input(self, x: Tensor) -> Tensor:
        """Return the head's input (whole sequence, b, h)."""
        whole = self.context.whole_sequence(self.final_layernorm(x))
        return multiplied(whole, 1.0 / self.context.model.logits_scaling)

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's logits (whole sequence, b, v)."""
        logits = self.ops.for_head().linear(self.head_input(x), self.output_weight)
        return soft_capped(logits, self.context.model.final_logit_softcapping)

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
        assert labels is not None
        weight = self.output_weight
        z_loss = self.context.model.z_loss if forward_pass.training else 0.0
        z_sum = None
        if z_loss:
            z_sum = self.z_losses[forward_pass.first_sample] = torch.zeros(())
        return self.ops.head_loss(
            self.head_input(x),
            weight,
            labels,
            HeadLoss(
                self.tp,
                weight.spec.offset[0],
                factor,
                rows_at_once=self.logits_rows,
                unpadded_rows=self.unpadded_rows,
                z_loss=z_loss,
                divisor=forward_pass.count,
                z_sum=z_sum,
                softcap=self.context.model.final_logit_softcapping,
            ),
        )
