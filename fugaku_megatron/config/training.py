"""Training fields: batch sizes, length, recompute."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline.schedule_names import AUTO
from .fields import (
    BATCHES,
    BY_STAGE,
    FREE,
    LENGTH,
    NOT_NEGATIVE,
    Requirement,
    cached_hash,
    check,
    course_option,
    free_option,
    free_optional,
    free_switch,
    optional,
    required,
)
from .rules import CheckedFields
from .sample_rules import StepSizes

RECOMPUTE = "recompute"  # topic

SELECTIVE = "selective"
# Values of --recompute-modules that have an effect, and Megatron-LM's others.
CORE_ATTN = "core_attn"
MLA_UP_PROJ = "mla_up_proj"
OTHER_MODULES = ("layernorm", "mlp", "moe", "moe_act", "shared_experts")
MEMORY_CHOICE = Requirement(
    "--recompute-auto or --pipeline-schedule auto",
    lambda run: run.training.recompute_auto or run.parallel.pipeline_schedule == AUTO,
)


@cached_hash
@dataclass(frozen=True, kw_only=True)
class BatchConfig(CheckedFields):
    """Samples per micro-batch and per iteration, and the growth of the batch size."""

    micro_batch_size: int = required(
        "samples per rank and forward pass", aliases=("--batch-size",), maximum=2**16, meaning=FREE
    )
    global_batch_size: int | None = optional(
        "samples per iteration (default: micro-batch x data-parallel size)",
        maximum=2**24,
        meaning=BATCHES,
    )
    rampup_batch_size: tuple[int, ...] | None = optional(
        "start size, increment, and length of the ramp in samples", nargs=3, meaning=BATCHES
    )
    step_batch_size_schedule: str | None = optional(
        "batch sizes in steps, instead of --rampup-batch-size: TOKENS:SIZE ..., such "
        "as '0:768 250B:1536'; the last size is --global-batch-size",
        meaning=BATCHES,
        drops=("global_batch_size",),
    )

    def _check(self) -> None:
        check(
            self.rampup_batch_size is None or len(self.rampup_batch_size) == 3,
            f"--rampup-batch-size {self.rampup_batch_size}: pass three numbers, start, increment and samples",
        )
        check(
            self.rampup_batch_size is None or self.global_batch_size is not None,
            "--rampup-batch-size needs --global-batch-size, the size to grow to",
        )
        if self.step_batch_size_schedule is not None:
            last = StepSizes.parse(self.step_batch_size_schedule).global_batch_size
            check(
                self.global_batch_size in (None, last),
                f"--global-batch-size {self.global_batch_size} is not the "
                f"last size of --step-batch-size-schedule, {last}: leave it out",
            )
            object.__setattr__(self, "global_batch_size", last)


@cached_hash
@dataclass(frozen=True, kw_only=True)
class TrainingConfig(CheckedFields):
    """Length of the run, evaluation, recompute and seed."""

    train_iters: int | None = optional(
        "iterations to train",
        range=NOT_NEGATIVE,
        meaning=LENGTH,
        drops=(
            "train_samples",
            "lr_decay_samples",
            "lr_warmup_samples",
        ),
    )
    train_samples: int | None = optional(
        "samples to train (instead of --train-iters)",
        maximum=2**40,
        meaning=LENGTH,
        drops=(
            "train_iters",
            "lr_decay_iters",
            "lr_warmup_iters",
        ),
    )
    train_tokens: float | None = optional(
        "tokens to train: the run ends with the iteration that reaches them, or earlier by "
        "--train-iters or --train-samples",
        meaning=LENGTH,
        drops=(
            "train_iters",
            "lr_decay_iters",
            "lr_warmup_iters",
        ),
    )
    exit_interval: int | None = free_optional("save and exit after an iteration divisible by this")
    exit_duration_in_mins: float | None = free_optional(
        "save and exit after this many minutes", script="MARGIN"
    )
    eval_interval: int = free_option(1000, "iterations between evaluations on the validation split")
    eval_iters: int = free_option(100, "batches per evaluation; 0: none", range=NOT_NEGATIVE)
    eval_global_batch_size: int | None = free_optional(
        "samples per evaluation batch (default: --global-batch-size)", maximum=2**24
    )
    eval_micro_batch_size: int | None = free_optional(
        "samples per rank and forward pass in evaluations (default: --micro-batch-size)",
        maximum=2**16,
    )
    full_validation: bool = free_switch(
        "evaluate on the whole validation data once, regardless of --eval-iters; samples "
        "that do not fill the last batch are excluded",
    )
    multiple_validation_sets: bool = free_switch(
        "with --full-validation, each prefix of the validation data is a separate set "
        "with its own log line",
        library="evaluate returns one loss: make a Trainer for each set",
    )
    start_eval_at_iter: int | None = free_optional(
        "no evaluation before this iteration", range=None
    )
    skip_train: bool = free_switch(
        "do not train, only evaluate on the validation data",
        library="call Trainer.evaluate without steps",
    )
    seed: int = course_option(
        1234,
        "seed of initial weights, dropout and data order",
        maximum=2**32 - 1,
        range=None,
    )
    recompute_granularity: str | None = free_optional(
        "recompute in backward: whole layers (full) or attention only (selective)",
        choices=("full", SELECTIVE),
        switches={"--checkpoint-activations": "full", "--recompute-activations": SELECTIVE},
        topic=RECOMPUTE,
        differs=BY_STAGE,
    )
    recompute_modules: tuple[str, ...] = free_option(
        (CORE_ATTN,),
        "what selective recompute repeats: core_attn, attention between its projections; mla_up_proj, queries, keys and values of "
        "--multi-latent-attention; Megatron-LM's other modules are not repeated",
        topic=RECOMPUTE,
        needs="recompute_granularity=selective",
        differs=BY_STAGE,
    )
    recompute_method: str = free_option(
        "uniform",
        "full recompute of all layers in groups (uniform) or of the first ones (block)",
        choices=("uniform", "block"),
        topic=RECOMPUTE,
        needs="recompute_granularity=full",
        differs=BY_STAGE,
    )
    recompute_num_layers: int = free_option(
        1,
        "uniform: layers per group; block: recomputed layers per model chunk",
        aliases=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"),
        topic=RECOMPUTE,
        needs="recompute_granularity=full",
        differs=BY_STAGE,
    )
    recompute_part_layers: tuple[int, ...] | None = free_optional(
        "recomputed layers of each model chunk, in the model's order", topic=RECOMPUTE
    )
    recompute_auto: bool = free_switch(
        "recompute as few layers of each stage and chunk as fit into memory",
    )
    memory_per_rank: int | None = free_optional(
        "MiB per rank for choices that depend on memory (default: the rank's share of 90 % of "
        "the node's memory; in a dry run 90 % of this node's memory)",
        needs=MEMORY_CHOICE,
    )
    use_flush_denormal: bool = free_option(
        True,
        "flush denormals to zero in every thread (on by default)",
        library="pass it to init, where its name is flush_denormals",
    )

    def _derive(self) -> None:
        """Read --recompute-modules, which Megatron-LM's test configs spell as a list in brackets."""
        words = " ".join(self.recompute_modules).strip("[]").replace(",", " ").split()
        object.__setattr__(self, "recompute_modules", tuple(words))

    def _check(self) -> None:
        # The range of numpy's generator.
        check(0 <= self.seed < 2**32, f"--seed is {self.seed}: pass a number from 0 to {2**32 - 1}")
        check(
            self.train_iters is None or self.train_samples is None,
            "--train-iters and --train-samples exclude each other: pass one",
        )
        self._check_recompute()

    def recomputes(self, module: str) -> bool:
        """Return True if selective recompute repeats a module."""
        return self.recompute_granularity == SELECTIVE and module in self.recompute_modules

    def _check_recompute(self) -> None:
        known = (CORE_ATTN, MLA_UP_PROJ, *OTHER_MODULES)
        wrong = [name for name in self.recompute_modules if name not in known]
        check(not wrong, f"--recompute-modules {' '.join(wrong)}: pass {', '.join(known)}")
        kind = self.recompute_granularity
        numbers = self.recompute_part_layers
        shown = f"--recompute-part-layers {' '.join(map(str, numbers or ()))}"
        check(numbers is None or min(numbers) >= 0, f"{shown}: pass 0 or more layers for each part")
        check(
            numbers is None or kind == "full",
            f"{shown} needs --recompute-granularity full, and it is {kind}: pass it",
        )
        check(
            numbers is None or self.recompute_method == "uniform",
            f"{shown} and --recompute-method block exclude each other: pass one",
        )
        check(
            not self.recompute_auto or kind is None,
            f"--recompute-auto and --recompute-granularity {kind} exclude each other: pass one",
        )
