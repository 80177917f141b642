"""Optimizer fields: AdamW, Muon, moment formats, learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from .decay_shapes import LEARNING_RATE, SHAPES, WEIGHT_DECAY, WSD
from .fields import (
    FRACTION,
    NOT_NEGATIVE,
    Requirement,
    RowNames,
    cached_hash,
    check,
    course_option,
    course_optional,
    course_switch,
    flag,
    free_option,
    free_switch,
)
from .rules import CheckedFields

MOMENT_BLOCK = 256  # elements that share a scale in int8
# Bytes per element of the supported moment formats.
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / MOMENT_BLOCK}
MOMENT_DTYPES = (*MOMENT_BYTES, "fp16", "fp8")  # formats of Megatron-LM
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class OptimizerPart:
    """An optimizer.

    elements: "module:function", `optim.optimizer.ElementUpdate` -> None, which updates FP32 elements in place; None: the AdamW kernel
    matrices: "module:class", which updates weight matrices from their first moment, as `optim.muon.Muon`; None: no class does
    states: moments of MOMENTS that each element has
    matmuls: "module:function", (run, stage) -> `costs.optimizer_states.Matmuls` of a step; None: the optimizer has none
    """

    elements: str | None = None
    matrices: str | None = None
    states: tuple[str, ...] = MOMENTS
    matmuls: str | None = None


_MUON = OptimizerPart(
    matrices="fugaku_megatron.optim.muon:Muon",
    matmuls="fugaku_megatron.costs.optimizer_states:muon_matmuls",
)
OPTIMIZERS = {"adam": OptimizerPart(), "muon": _MUON, "dist_muon": _MUON}
# Coefficients of the Newton-Schulz iteration -> number of steps with different coefficients.
MUON_COEFFICIENTS = {"quintic": 5, "simple": 1}

MUON = Requirement("--optimizer muon", lambda run: run.optimizer.muon)
muon_field = partial(course_option, needs=MUON)


@cached_hash
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CheckedFields):
    """AdamW or Muon, clipping, learning-rate and weight-decay schedule."""

    optimizer: str = course_option(
        "adam",
        "adam: AdamW for all weights; muon: orthogonal updates of matrices, and AdamW for embeddings, the "
        "logits' weight, biases and norms; dist_muon: the same with --use-distributed-optimizer",
        choices=RowNames(OPTIMIZERS),
    )
    muon_momentum: float = muon_field(0.9, "decay of Muon's momentum", range=FRACTION)
    muon_nesterov: bool = muon_field(
        False, "Nesterov momentum for Muon", aliases=("--muon-use-nesterov",)
    )
    muon_no_split_qkv: bool = muon_field(
        False,
        "treat a layer's queries, keys and values as one matrix for Muon",
    )
    muon_scale_mode: str = muon_field(
        "spectral",
        "factor of Muon's orthogonal update: spectral, the root of the longer side; "
        "unit_rms_norm, the root of rows / columns; shape_scaling, the same, but at least 1",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = muon_field(
        1.0,
        "additional factor; 0.2 with spectral makes updates as large as AdamW's",
    )
    muon_coefficient_type: str = muon_field(
        "quintic",
        "coefficients of the Newton-Schulz iteration",
        choices=tuple(MUON_COEFFICIENTS),
    )
    muon_num_ns_steps: int = muon_field(
        5,
        "steps of the Newton-Schulz iteration; with quintic at most 5, or a multiple of 5, because "
        "its coefficients repeat after five steps",
    )
    muon_tp_mode: str = muon_field(
        "duplicated",
        "duplicated: whole matrices, gathered from tensor-parallel ranks, so that the update "
        "does not depend on the layout; blockwise: each rank's shard is a matrix, Megatron-LM's default",
        choices=("duplicated", "blockwise"),
    )
    lr: float = course_option(1e-4, "peak learning rate", drops=("min_lr",))
    min_lr: float = course_option(
        0.0,
        "the learning rate never falls below this after warm-up",
        range=NOT_NEGATIVE,
    )
    decoupled_lr: float | None = course_optional(
        "peak learning rate of the word embedding and of the logits' weight (default: --lr)",
    )
    decoupled_min_lr: float | None = course_optional(
        "minimum of --decoupled-lr after warm-up (default: --min-lr)",
        range=NOT_NEGATIVE,
        needs="decoupled_lr",
    )
    lr_decay_style: str = course_option(
        "linear", "shape of the decay", choices=RowNames(SHAPES, flag=LEARNING_RATE)
    )
    lr_decay_iters: int | None = course_optional(
        "iterations until --min-lr (default: --train-iters)", follows="train_iters"
    )
    lr_decay_samples: int | None = course_optional(
        "samples until --min-lr (default: --train-samples)",
        maximum=2**40,
        follows="train_samples",
    )
    lr_warmup_iters: int = course_option(
        0,
        "iterations of linear warm-up",
        aliases=("--warmup-iters",),
        range=NOT_NEGATIVE,
        drops=(
            "lr_warmup_fraction",
            "lr_warmup_samples",
        ),
    )
    lr_warmup_samples: int = course_option(
        0,
        "samples of linear warm-up",
        maximum=2**40,
        range=NOT_NEGATIVE,
        drops=(
            "lr_warmup_fraction",
            "lr_warmup_iters",
        ),
    )
    lr_warmup_fraction: float | None = course_optional(
        "warm-up as a fraction of the decay length",
        range=None,
        drops=(
            "lr_warmup_iters",
            "lr_warmup_samples",
        ),
    )
    lr_decay_tokens: float | None = course_optional(
        "tokens until --min-lr (default: --train-tokens)",
        drops=(
            "lr_decay_iters",
            "lr_decay_samples",
        ),
    )
    lr_warmup_tokens: float = course_option(
        0.0,
        "tokens of linear warm-up",
        range=NOT_NEGATIVE,
        drops=(
            "lr_warmup_fraction",
            "lr_warmup_iters",
            "lr_warmup_samples",
        ),
    )
    lr_warmup_init: float = course_option(
        0.0, "learning rate at the start of warm-up", range=NOT_NEGATIVE
    )
    lr_wsd_decay_style: str = course_option(
        "exponential",
        "shape of the decay at the end of --lr-decay-style WSD",
        choices=RowNames(SHAPES, flag=WSD),
        needs="lr_decay_style=WSD",
    )
    lr_wsd_decay_iters: int | None = course_optional(
        "iterations of that decay", range=NOT_NEGATIVE, needs="lr_decay_style=WSD"
    )
    lr_wsd_decay_samples: int | None = course_optional(
        "samples of that decay",
        maximum=2**40,
        range=NOT_NEGATIVE,
        needs="lr_decay_style=WSD",
    )
    weight_decay: float = course_option(
        0.01, "decoupled weight decay, on matrices only", range=NOT_NEGATIVE
    )
    apply_wd_to_qk_layernorm: bool = course_switch(
        "weight decay on the norms of queries and keys too", needs="qk_layernorm"
    )
    start_weight_decay: float | None = course_optional(
        "weight decay at the start (default: --weight-decay)",
        range=NOT_NEGATIVE,
        follows="weight_decay",
    )
    end_weight_decay: float | None = course_optional(
        "weight decay at the end (default: --weight-decay)",
        range=NOT_NEGATIVE,
        follows="weight_decay",
    )
    weight_decay_incr_style: str = course_option(
        "constant",
        "path from --start-weight-decay to --end-weight-decay",
        choices=RowNames(SHAPES, flag=WEIGHT_DECAY),
    )
    clip_grad: float = course_option(
        1.0, "largest global gradient norm; 0: no clipping", range=NOT_NEGATIVE
    )
    adam_beta1: float = course_option(0.9, "decay of the first moment", range=FRACTION)
    adam_beta2: float = course_option(0.999, "decay of the second moment", range=FRACTION)
    adam_eps: float = course_option(1e-8, "added to the root of the second moment")
    use_precision_aware_optimizer: bool = free_switch(
        "store AdamW's moments in the formats of --exp-avg-dtype and --exp-avg-sq-dtype",
    )
    main_params_dtype: str = free_option(
        "fp32",
        "bf16: no FP32 master weights; AdamW updates in FP32 and rounds each weight to BF16 "
        "stochastically; with --bf16",
        choices=("fp32", "bf16"),
    )
    exp_avg_dtype: str = free_option(
        "fp32",
        "with --use-precision-aware-optimizer, storage format of the first moment: fp32, "
        "bf16, or int8 with a scale per block of at most 256, rounded to nearest; AdamW computes in FP32",
        choices=MOMENT_DTYPES,
    )
    exp_avg_sq_dtype: str = free_option(
        "fp32",
        "the same for the second moment, rounded stochastically, but equally in every layout",
        choices=MOMENT_DTYPES,
    )
    override_opt_param_scheduler: bool = free_switch(
        "on resuming, learning rate and weight decay follow this command line; also the "
        "default, with a note of differences from the checkpoint",
        aliases=("--override-opt_param-scheduler", "--override-lr-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = free_switch(
        "on resuming, learning rate and weight decay follow the checkpoint's "
        "schedule instead of this command line",
        aliases=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"),
    )
    no_load_lr_state: bool = free_switch(
        "on resuming, restart the schedules of learning rate and weight decay",
        needs="load",
    )
    no_load_optim: bool = free_switch(
        "on resuming, load only the weights: moments, loss scale and schedule restart",
        needs="load",
    )

    def _check(self) -> None:
        self._check_learning_rate()
        self._check_weight_decay()
        self._check_moments()
        self._check_coefficients()
        keeps = self.use_checkpoint_opt_param_scheduler
        check(
            not (self.override_opt_param_scheduler and keeps),
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other: pass one",
        )
        check(
            not (keeps and (self.no_load_lr_state or self.no_load_optim)),
            "--use-checkpoint-opt_param-scheduler goes with neither --no-load-lr-state nor "
            "--no-load-optim, which begin the schedule anew: leave it out",
        )

    def _check_learning_rate(self) -> None:
        minimum = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        lowest = max(self.lr_warmup_init, minimum)
        check(
            self.decoupled_lr is None or lowest <= self.decoupled_lr,
            f"--decoupled-lr {self.decoupled_lr} is below {lowest}, "
            "the larger of --lr-warmup-init and of --decoupled-min-lr, by default --min-lr: raise it, or lower that",
        )
        check(
            self.lr_warmup_fraction is None or 0 <= self.lr_warmup_fraction <= 1,
            f"--lr-warmup-fraction is {self.lr_warmup_fraction}: pass a number from 0 to 1",
        )
        check(
            not SHAPES[self.lr_decay_style].final_decay
            or self.lr_wsd_decay_iters is not None
            or self.lr_wsd_decay_samples is not None,
            f"--lr-decay-style {self.lr_decay_style} needs --lr-wsd-decay-iters or "
            "--lr-wsd-decay-samples, the length of its decay: pass one",
        )

    def _check_coefficients(self) -> None:
        count = MUON_COEFFICIENTS[self.muon_coefficient_type]
        steps = self.muon_num_ns_steps
        check(
            steps <= count or steps % count == 0,
            f"--muon-num-ns-steps {steps}: the {count} coefficients of --muon-coefficient-type "
            f"{self.muon_coefficient_type} would begin again and not end, which leaves singular values near 0.1 and not 1: "
            f"pass {steps // count * count} or {(steps // count + 1) * count}",
        )

    def _check_moments(self) -> None:
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            value = getattr(self, name)
            check(
                value in MOMENT_BYTES,
                f"{flag(name)} {value}: moments lie below the range of {value.upper()}, and the scale of "
                "each tensor that it needs is not supported: pass int8, bf16 or fp32",
            )
            check(
                value == "fp32" or self.use_precision_aware_optimizer,
                f"{flag(name)} {value} needs "
                "--use-precision-aware-optimizer, as in Megatron-LM: pass it, or fp32",
            )
            check(
                value == "fp32" or OPTIMIZERS[self.optimizer].elements is None,
                f"{flag(name)} {value} is supported with AdamW, not with --optimizer "
                f"{self.optimizer}: pass fp32",
            )
        check(
            (self.exp_avg_dtype == "int8") == (self.exp_avg_sq_dtype == "int8"),
            f"--exp-avg-dtype {self.exp_avg_dtype} and "
            f"--exp-avg-sq-dtype {self.exp_avg_sq_dtype}: int8 is supported for both moments together only: pass it twice",
        )
        check(
            self.exp_avg_dtype != "int8" or not self.muon,
            f"--exp-avg-dtype int8 is supported with AdamW, not with --optimizer "
            f"{self.optimizer}: pass bf16",
        )

    @cached_property
    def weight_decays(self) -> tuple[float, float]:
        """Weight decay at the start and at the end."""
        given = (self.start_weight_decay, self.end_weight_decay)
        start, end = (self.weight_decay if each is None else each for each in given)
        return start, end

    @cached_property
    def muon(self) -> bool:
        return OPTIMIZERS[self.optimizer].matrices is not None

    @cached_property
    def adamw(self) -> bool:
        return OPTIMIZERS[self.optimizer] == OptimizerPart()

    @cached_property
    def states(self) -> tuple[str, ...]:
        return OPTIMIZERS[self.optimizer].states

    def state_bytes(self, state: str) -> float:
        """Return the bytes of an element of one of MOMENTS; 0 if the optimizer has no such moment."""
        dtypes = dict(zip(MOMENTS, (self.exp_avg_dtype, self.exp_avg_sq_dtype), strict=True))
        return MOMENT_BYTES[dtypes[state]] if state in self.states else 0.0

    @cached_property
    def moment_bytes(self) -> float:
        return sum(map(self.state_bytes, MOMENTS))

    def _check_weight_decay(self) -> None:
        for name in ("start_weight_decay", "end_weight_decay"):
            value = getattr(self, name)
            check(
                value is None or SHAPES[self.weight_decay_incr_style].decays,
                f"{flag(name)} {value} has no effect with "
                f"--weight-decay-incr-style {self.weight_decay_incr_style}: pass linear or cosine, or only --weight-decay",
            )
        start, end = self.weight_decays
        check(
            start <= end,
            f"--end-weight-decay {end} is below --start-weight-decay {start}: the weight decay only grows, as in Megatron-LM; "
            "raise it",
        )
