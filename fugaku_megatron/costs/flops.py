"""FLOPs of an iteration: executed, per parameter, and unavoidable."""

from __future__ import annotations

from dataclasses import replace

from ..config.layer_kinds import UP_PROJECTIONS
from ..config.parallel import ParallelConfig
from ..config.run_config import RunConfig
from ..config.training import CORE_ATTN, MLA_UP_PROJ
from .attention import document_length, mean_visible_share
from .layers import linear_and_attention_flops, mean_layer_flops, norm_record
from .sizes import padded_vocab_size
from .stages import (
    layer_parameters,
    stage_records,
    virtual_stage_layers,
    virtual_stage_recompute_groups,
)


def _recompute_fraction(run: RunConfig) -> float:
    """Return the share of the layers that backward computes again."""
    if run.training.recompute_granularity != "full":
        return 0.0
    layers = 0
    for virtual_stage in range(run.placement.virtual_stages):
        reached = run.layers_without_backward - virtual_stage_layers(run, virtual_stage).start
        for group in virtual_stage_recompute_groups(run, virtual_stage):
            layers += max(0, group.stop - max(reached, group.start))
    return layers / len(run.model.all_layer_kinds)


def layer_flops(run: RunConfig) -> tuple[float, float]:
    """Return the mean layer's forward FLOPs per sample: (linear layers, attention over the full square)."""
    linear, attention = linear_and_attention_flops(run.on_one_rank)  # of a micro-batch
    samples = run.batch.micro_batch_size
    return linear / samples, attention / samples


def hardware_flops(
    run: RunConfig, global_batch_size: int, squares: int | None = None, padded: int = 0
) -> float:
    """Return the FLOPs per iteration over all ranks as the benchmark tables count them, recompute included.

    c B s l h^2 (1 + s/(6h) + v/(16 l h)) for GPT-2's block, c = 96 with full recompute, 72 without; selective recompute adds the
    attention's forward matmuls. Source: Narayanan et al. (2021), equation 3. For other blocks the forward matmuls replace
    24 s h^2 (1 + s/(6h)).

    squares: the batch's sum of (document length)^2; None: from `document_length`.
    padded: tokens that no expert computes.
    """
    model = run.model
    linear, attention = layer_flops(run)
    if padded:
        experts = mean_layer_flops(run.on_one_rank, lambda record: record.grouped)
        per_sample = experts / run.batch.micro_batch_size
        linear -= per_sample * padded / (global_batch_size * model.seq_length)
    if squares is not None:
        attention *= squares / (global_batch_size * model.seq_length * document_length(run))
    c = 72 + 24 * _recompute_fraction(run)
    logits = c / 32 * logits_flops(run)
    recomputed = attention if run.training.recomputes(CORE_ATTN) else 0.0
    if run.training.recomputes(MLA_UP_PROJ):
        projections = mean_layer_flops(run.on_one_rank, lambda r: r.name in UP_PROJECTIONS)
        recomputed += projections / run.batch.micro_batch_size
    below = run.layers_without_backward
    layers = len(model.all_layer_kinds) * (c / 24 * (linear + attention) + recomputed)
    layers -= below * (2 * (linear + attention) + recomputed)
    return global_batch_size * (layers + logits - frozen_flops(run))


def parameter_flops(run: RunConfig, global_batch_size: int, *, replicas: bool = False) -> float:
    """Return 6 (8 with recompute) FLOPs per layer parameter and token, as the A100 tables first counted; no embeddings.

    replicas: count replicated parameters TP times, as those tables did: 0.025 % more at h 13824 and TP 8.
    """
    counted = sum(layer_parameters(run.on_one_rank))
    if replicas:
        pp = run.pp
        parallel = ParallelConfig(tensor_model_parallel_size=run.tp)
        rank = sum(layer_parameters(replace(run, parallel=parallel)))
        counted = run.tp * (rank + pp * norm_record("final_layernorm", run).parameters)
    return (6 + 2 * _recompute_fraction(run)) * counted * run.model.seq_length * global_batch_size


def model_flops(run: RunConfig, global_batch_size: int) -> float:
    """Return the FLOPs that an iteration cannot avoid: no recompute, visible pairs only, logits 6 s h v per sample."""
    model = run.model
    linear, attention = layer_flops(run)
    layer = 3 * (linear + attention * mean_visible_share(model, document_length(run)))
    layers = (len(model.all_layer_kinds) - 2 / 3 * run.layers_without_backward) * layer
    return float(global_batch_size * (layers + 3 * logits_flops(run) - frozen_flops(run)))


def logits_flops(run: RunConfig) -> float:
    """Return the forward FLOPs per sample of the model's logits, and of its MTP modules' logits."""
    model = run.model
    heads = 1 + model.predictions
    return 2 * heads * model.seq_length * model.hidden_size * padded_vocab_size(model, run.tp)


def frozen_flops(run: RunConfig) -> float:
    """Return the weight-gradient FLOPs per sample, logits included, that backward skips in the layers that it reaches."""
    if not run.has_frozen_weights:
        return 0.0
    records = stage_records(run.on_one_rank, 0)
    skipped = sum(r.flops_forward for r in records if r.frozen and r.flops_backward)
    if run.freezing.freeze_all_layers:  # nor the gradient of the logits' input
        skipped += sum(r.flops_forward for r in records if r.is_head)
    return skipped / run.batch.micro_batch_size
