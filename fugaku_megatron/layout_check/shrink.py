"""Small copies of a run: its layout, schedule and features with a few narrow layers, and the same model on one rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

from ..config.fields import FieldValues, check, flag
from ..config.freezing import FreezingConfig
from ..config.layer_kinds import MARKED, layer_symbols, marked_layers
from ..config.layout import Layout
from ..config.model import ModelConfig
from ..config.output import OutputConfig
from ..config.parallel import ParallelConfig
from ..config.precision import PrecisionConfig
from ..config.run_config import RunConfig
from ..config.training import BatchConfig
from ..costs.buckets import bucket_units
from ..costs.plan import Plan
from ..costs.sizes import padded_vocab_size
from ..costs.stages import TIED

OVERFLOWS = 2  # iteration that uses the weights which the first one has updated and gathered, and whose update is skipped
SAVED = 3  # iteration that is saved
ITERATIONS = 4  # the last one uses the loaded checkpoint
WIDTH = 64  # of the residual stream
VOCABULARY = 90  # tokens, less than its padded rows
LENGTH = 32  # tokens of a sample, at least
SAMPLES = 2  # of a micro-batch, at most
REPLICAS = 2  # data-parallel ranks, at most, unless experts need more
LEARNING_RATE = 1e-2
# The update is then a smooth function of the gradient: with 1e-8 it is the gradient's sign, also of rounding errors.
ADAM_EPS = 1e-3
LOSS_SCALE = 1024.0
# Factors of small terms, if the run has them: with a run's usual factors, rounding hides a mistake in such a term.
BALANCING = 1.0
Z_LOSS = 0.1
PREDICTING = 1.0
WEIGHT_DECAY = 1.0
CLIP_GRAD = 0.1  # less than the norm of the gradients
EVEN = "even"  # split of the layers over the stages
HEAD_SIZES = (8, 16, 32, 64)
MLP_WIDTHS = (16, 32, 64, 128, 256)  # of a tensor-parallel rank
EXPERTS = (2, 4, 8, 16)  # of an expert-parallel rank
CHOICES = 2  # experts for each that a token has, at least


class _Width(NamedTuple):
    """Sizes of a narrow layer. divisor: of heads and of query groups"""

    mlp: int
    head: int
    divisor: int
    experts: int | None


def shrink(plan: Plan) -> Plan:
    """Return the run with a few narrow layers and short samples, in the layout of at most a few data-parallel ranks.

    Raise ValueError for a run whose layers cannot be made narrow.
    """
    return next(small_runs(plan))


def small_runs(plan: Plan) -> Iterator[Plan]:
    """Yield small runs of equally many ranks, from narrow to wide ones. Errors: as of `shrink`"""
    run = plan.config
    layout = plan.layout
    dp = _data_parallel_size(layout)
    samples = min(run.batch.micro_batch_size, SAMPLES)
    batch = BatchConfig(
        micro_batch_size=samples,
        global_batch_size=samples * min(layout.microbatches(run), 2 * layout.pp) * dp,
    )
    world_size = dp * layout.tp * layout.pp * layout.cp
    comm_types = run.cp_comm_types if layout.cp > 1 else None
    kept = _kept_layers(run, layout, comm_types)
    kept_comm_types = None if comm_types is None else tuple(comm_types[layer] for layer in kept)
    refused: ValueError | None = None
    found = False
    for width in _widths(run, layout):
        try:
            model = _model(run, layout, kept, width=width)
            small = replace(
                run,
                model=model,
                batch=batch,
                parallel=_parallel(run, layout, len(kept), comm_types=kept_comm_types),
                training=_training(run, layout, len(kept)),
                optimizer=_optimizer(run),
                precision=_precision(run),
                freezing=_freezing(run, kept),
                output=OutputConfig(),
                data=replace(run.data, skip_samples=None),
                numbers=replace(run.numbers, check_weight_hash_across_dp_replicas_interval=0),
            )
            fitting = Plan.of(small, world_size)
        except ValueError as error:
            refused = error
            continue
        found = True
        yield fitting
    check(found, f"--check-layout finds no narrow layers that fit the layout: {refused}")


def fewest_ranks(run: RunConfig, layout: Layout) -> int:
    """Return the fewest ranks on which a check has all of a run's communication, and the run's batch fits."""
    replica = layout.tp * layout.pp * layout.cp
    for ranks in range(_data_parallel_size(layout) * replica, layout.world_size, replica):
        with contextlib.suppress(ValueError):
            return Layout.from_run(run, ranks).world_size
    return layout.world_size


def _data_parallel_size(layout: Layout) -> int:
    """Return the fewest data-parallel ranks that have the run's communication."""
    experts = layout.ep * (layout.etp or layout.tp)
    dp = min(layout.dp, REPLICAS)
    while dp * layout.cp * layout.tp % experts:
        dp += 1
    return dp


def _kept_layers(run: RunConfig, layout: Layout, comm_types: Sequence[str] | None) -> list[int]:
    """Return the layers that stay: each kind of layer, and equally many for each virtual stage."""
    model = run.model
    kinds = [
        (kind, comm_types and comm_types[layer], layer < run.frozen_layers)
        for layer, kind in enumerate(model.layer_kinds)
    ]
    firsts = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    stages = layout.pp * run.placement.model_chunks
    each = max(-(-len(firsts) // stages), 2 if stages == 1 else 1)
    if run.training.recompute_granularity == "full":
        each = max(each, min(run.training.recompute_num_layers, 2))
    count = min(stages * each, model.num_layers)
    others = [layer for layer in range(model.num_layers) if layer not in firsts]
    return sorted([*firsts, *others][: count // stages * stages])


def _freezing(run: RunConfig, kept: list[int]) -> FreezingConfig:
    """Return the freezing of the kept layers."""
    if not run.freezing.freeze_first_layers:
        return run.freezing
    first = sum(layer < run.frozen_layers for layer in kept)
    return replace(run.freezing, freeze_first_layers=first)


def _widths(run: RunConfig, layout: Layout) -> Iterator[_Width]:
    """Yield widths from narrow ones to the run's own."""
    model = run.model
    groups = model.query_groups
    divisors = [n for n in range(groups, 0, -1) if groups % n == 0]
    heads = sorted({min(size, model.kv_channels) for size in (*HEAD_SIZES, model.kv_channels)})
    widths = [width * layout.tp for width in MLP_WIDTHS]
    experts: list[int | None] = [None]
    if model.num_experts:
        # With no more experts than each token has, the load is even and no mistake of the router shows.
        sizes = [number * layout.ep for number in EXPERTS]
        least = CHOICES * model.moe_router_topk
        few = [size for size in sizes if least <= size < model.num_experts]
        experts = [*few, model.num_experts]
    for mlp, head, number, divisor in product(widths, heads, experts, divisors):
        yield _Width(mlp, head, divisor, number)


def _model(run: RunConfig, layout: Layout, kept: list[int], width: _Width) -> ModelConfig:
    model = run.model
    h = min(model.hidden_size, WIDTH)
    unit = 2 * layout.cp * (layout.tp if run.parallel.sequence_parallel else 1)
    length = min(model.seq_length, -(-LENGTH // unit) * unit)
    changes: FieldValues = {}
    if model.group_query_attention:
        changes["num_query_groups"] = model.query_groups // width.divisor
    if model.num_experts:
        changes |= _expert_changes(model, width)
    if model.multi_latent_attention:
        changes |= _latent_changes(model, width)
    if model.layer_types is not None:
        symbols = layer_symbols(model.layer_types, model.num_layers)
        changes["layer_types"] = ",".join(symbols[layer] for layer in kept)
    if model.predictions:
        changes["mtp_num_layers"] = min(model.predictions, len(kept))
        changes["mtp_loss_scaling_factor"] = PREDICTING
    if model.use_z_loss:
        changes["z_loss_strength"] = Z_LOSS
    if model.window is not None:
        left = max(1, min(model.window - 1, (model.window - 1) * length // model.seq_length))
        changes["window_size"] = f"{left},0"
    for name in MARKED:
        text = getattr(model, name)
        if text not in (None, "1"):  # "1" marks all layers of any model, or none
            marks = marked_layers(name, text, model.num_layers)
            changes[name] = str([int(marks[layer]) for layer in kept])
    small = replace(
        model,
        num_layers=len(kept),
        hidden_size=h,
        num_attention_heads=model.num_attention_heads // width.divisor,
        kv_channels=width.head,
        ffn_hidden_size=width.mlp,
        seq_length=length,
        max_position_embeddings=length,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=8,
        padded_vocab_size=None,
        # Products of weights and activations then have the run's size.
        init_method_std=model.init_method_std * math.sqrt(model.hidden_size / h),
        **changes,
    )
    padded = padded_vocab_size(small, layout.tp)
    return replace(small, padded_vocab_size=padded)


def _expert_changes(model: ModelConfig, width: _Width) -> FieldValues:
    changes: FieldValues = {
        "num_experts": width.experts,
        "moe_ffn_hidden_size": width.mlp,
        "moe_aux_loss_coeff": tuple(
            BALANCING if factor else 0.0 for factor in model.moe_aux_loss_coeff
        ),
    }
    if model.moe_z_loss_coeff:
        changes["moe_z_loss_coeff"] = Z_LOSS
    if model.moe_shared_expert_intermediate_size:
        changes["moe_shared_expert_intermediate_size"] = width.mlp
    return changes


def _latent_changes(model: ModelConfig, width: _Width) -> FieldValues:
    changes: FieldValues = {"kv_lora_rank": min(model.kv_lora_rank, WIDTH)}
    for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        changes[name] = min(getattr(model, name), width.head)
    if model.q_lora_rank is not None:
        changes["q_lora_rank"] = min(model.q_lora_rank, WIDTH)
    return changes


def _parallel(
    run: RunConfig, layout: Layout, layers: int, comm_types: tuple[str, ...] | None
) -> ParallelConfig:
    parallel = run.parallel
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is not None:
        per_chunk = layers // (layout.pp * run.placement.model_chunks)
    return replace(
        parallel,
        **_defaults(
            parallel,
            "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
            "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        ),
        pipeline_split=EVEN,
        num_layers_per_virtual_pipeline_stage=per_chunk,
        cp_comm_type=comm_types,
        ddp_bucket_size=1 if _has_buckets(run, layout) else None,
    )


def _has_buckets(run: RunConfig, layout: Layout) -> bool:
    """Return True if a stage reduces its gradients in several buckets, apart from a tied copy's."""
    if run.parallel.overlap_grad_reduce:
        return True
    stages = [bucket_units(run, layout, stage) for stage in range(layout.pp)]
    return any(sum(TIED not in bucket for bucket in buckets) > 1 for buckets in stages)


def _defaults(config: Any, names: str) -> FieldValues:
    """Return the defaults of fields of a class in config. names: separated by spaces"""
    return {name: getattr(type(config), name) for name in names.split()}


def _training(run: RunConfig, layout: Layout, layers: int) -> Any:
    training = run.training
    each = layers // (layout.pp * run.placement.model_chunks)
    numbers = training.recompute_part_layers
    return replace(
        training,
        **_defaults(
            training,
            "train_samples train_tokens eval_global_batch_size eval_micro_batch_size full_validation "
            "multiple_validation_sets recompute_auto",
        ),
        train_iters=ITERATIONS,
        eval_iters=0,
        recompute_num_layers=min(training.recompute_num_layers, each),
        recompute_part_layers=numbers and tuple(min(number, each) for number in numbers),
    )


def _precision(run: RunConfig) -> PrecisionConfig:
    """Return the run's format, with a loss scale at which no gradient overflows, and which the first overflow halves."""
    if run.precision.fp16:
        return PrecisionConfig(fp16=True, initial_loss_scale=LOSS_SCALE, hysteresis=1)
    return PrecisionConfig.of(run.precision.name)


def _optimizer(run: RunConfig) -> Any:
    optimizer = run.optimizer
    return replace(
        optimizer,
        **_defaults(
            optimizer,
            "decoupled_min_lr lr_decay_iters lr_decay_samples lr_decay_tokens lr_warmup_iters "
            "lr_warmup_samples lr_warmup_fraction lr_warmup_tokens lr_warmup_init lr_wsd_decay_iters "
            "lr_wsd_decay_samples start_weight_decay end_weight_decay weight_decay_incr_style "
            "use_checkpoint_opt_param_scheduler no_load_optim no_load_lr_state",
        ),
        lr=LEARNING_RATE,
        min_lr=LEARNING_RATE,
        decoupled_lr=None if optimizer.decoupled_lr is None else 2 * LEARNING_RATE,
        lr_decay_style="constant",
        weight_decay=WEIGHT_DECAY if optimizer.weight_decay else 0.0,
        clip_grad=CLIP_GRAD if optimizer.clip_grad else 0.0,
        adam_eps=ADAM_EPS,
    )


def formats(run: RunConfig) -> list[RunConfig]:
    """Return the run in FP32, in FP32 with its 8-bit moments, and in its own formats, each once."""
    exact = in_fp32(run)
    runs = [exact]
    if run.optimizer.exp_avg_dtype == "int8":
        moments = replace(
            exact.optimizer,
            exp_avg_dtype=run.optimizer.exp_avg_dtype,
            exp_avg_sq_dtype=run.optimizer.exp_avg_sq_dtype,
        )
        runs.append(replace(exact, optimizer=moments))
    return list(dict.fromkeys([*runs, run]))


def left_out(run: RunConfig, small: RunConfig) -> list[str]:
    """Return the flags of layout and checks that the run passes and the small run does not."""
    pairs = ((run.parallel, small.parallel), (run.numbers, small.numbers))
    return [
        flag(f.name)
        for given, kept in pairs
        for f in fields(kept)
        if getattr(kept, f.name) in (f.default, EVEN)
        and getattr(given, f.name) not in (f.default, getattr(kept, f.name))
    ]


def in_fp32(run: RunConfig) -> RunConfig:
    """Return the run with every number in FP32, whose rounding errors hide no mistake of a layout."""
    return replace(
        run,
        precision=PrecisionConfig(),
        parallel=replace(run.parallel, grad_reduce_in_bf16=False),
        optimizer=replace(
            run.optimizer,
            **_defaults(run.optimizer, "main_params_dtype exp_avg_dtype exp_avg_sq_dtype"),
        ),
        system=replace(
            run.system,
            **_defaults(
                run.system,
                "fp16_accumulation_chunk fp32_matmul int8 int8_wgrad int8_head int8_stochastic_rounding",
            ),
        ),
        lora=replace(run.lora, lora_base_format=None),
    )


def on_one_rank(run: RunConfig) -> RunConfig:
    """Return the run without any parallelism, recompute or overlap."""
    return replace(
        run,
        parallel=ParallelConfig(),
        training=replace(
            run.training,
            **_defaults(
                run.training,
                "recompute_granularity recompute_method recompute_num_layers recompute_part_layers",
            ),
        ),
    )


def with_other_kernels(run: RunConfig) -> RunConfig:
    """Return the run on torch's kernels, so that a mistake of the native ones differs; the same run if torch has not all of them."""
    if run.precision.name != "fp32":
        return run
    with contextlib.suppress(ValueError):
        return replace(run, system=replace(run.system, kernels="torch", cache_packed_weights=False))
    return run
