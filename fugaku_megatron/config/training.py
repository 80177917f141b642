"""Fields of the training loop: batch sizes, length, recompute."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    check,
    check_choices,
    check_numbers,
    check_positive,
    hashed_once,
    opt,
    required,
)
from .sample_rules import StepSizes

# What may differ between the ranks of a run: how a stage recomputes, places that each rank has for itself, and its threads.
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@hashed_once
@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Samples per micro-batch, per iteration, and how the latter grows at the start."""

    micro_batch_size: int = required(
        "samples per rank and forward pass", aliases=("--batch-size",), maximum=2**16
    )
    global_batch_size: int | None = opt(
        None,
        "samples per iteration (default: micro-batch x data-parallel size)",
        type=int,
        maximum=2**24,
    )
    rampup_batch_size: tuple[int, ...] | None = opt(
        None, "start size, increment, samples over which to ramp up", type=int, nargs=3
    )
    step_batch_size_schedule: str | None = opt(
        None,
        "batch sizes in steps, instead of --rampup-batch-size: TOKENS:SIZE ..., such "
        "as '0:768 250B:1536'; the last one is --global-batch-size",
        type=str,
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(self, "micro_batch_size", "global_batch_size")
        check(
            self.rampup_batch_size is None or len(self.rampup_batch_size) == 3,
            f"--rampup-batch-size {self.rampup_batch_size}: pass three numbers, start, increment and samples",
        )
        check(
            self.rampup_batch_size is None or self.global_batch_size is not None,
            "--rampup-batch-size needs --global-batch-size, the size to grow to",
        )
        if self.step_batch_size_schedule is not None:
            self._check_steps(StepSizes.parse(self.step_batch_size_schedule))

    def _check_steps(self, steps: StepSizes) -> None:
        check(
            self.rampup_batch_size is None,
            "--step-batch-size-schedule and --rampup-batch-size exclude each other: pass one",
        )
        check(
            self.global_batch_size in (None, steps.global_batch_size),
            f"--global-batch-size {self.global_batch_size} is not the "
            f"last size of --step-batch-size-schedule, {steps.global_batch_size}: leave it out",
        )
        object.__setattr__(self, "global_batch_size", steps.global_batch_size)


@hashed_once
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the run, evaluation, recompute and seed."""

    train_iters: int | None = opt(None, "iterations to train", type=int)
    train_samples: int | None = opt(
        None, "samples to train (instead of --train-iters)", type=int, maximum=2**40
    )
    train_tokens: float | None = opt(
        None,
        "tokens to train: the run ends with the iteration that reaches them, or before with "
        "--train-iters or --train-samples",
        type=float,
    )
    exit_interval: int | None = opt(
        None, "save and leave after an iteration divisible by this", type=int
    )
    exit_duration_in_mins: float | None = opt(
        None, "save and leave after this many minutes", type=float
    )
    eval_interval: int = opt(1000, "iterations between evaluations on the validation split")
    eval_iters: int = opt(100, "batches per evaluation; 0: none")
    eval_global_batch_size: int | None = opt(
        None,
        "samples of a batch of an evaluation (default: --global-batch-size)",
        type=int,
        maximum=2**24,
    )
    eval_micro_batch_size: int | None = opt(
        None,
        "samples per rank and forward pass of an evaluation (default: --micro-batch-size)",
        type=int,
        maximum=2**16,
    )
    full_validation: bool = opt(
        False,
        "each evaluation takes the whole validation data once, whatever --eval-iters says; samples "
        "that do not fill the last batch are left out",
    )
    multiple_validation_sets: bool = opt(
        False,
        "with --full-validation, each prefix of the validation data is a set of its own, "
        "with a line of its own",
    )
    start_eval_at_iter: int | None = opt(
        None, "the first evaluation is not before this iteration", type=int
    )
    skip_train: bool = opt(False, "train nothing: only evaluate on the validation data")
    seed: int = opt(1234, "seed of initial weights, dropout and data order", maximum=2**32 - 1)
    recompute_granularity: str | None = opt(
        None,
        "recompute in backward: whole layers (full) or attention only (selective)",
        type=str,
        choices=("full", "selective"),
        switches={"--checkpoint-activations": "full", "--recompute-activations": "selective"},
    )
    recompute_method: str = opt(
        "uniform",
        "full recompute of all layers in groups (uniform) or of the first ones (block)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int = opt(
        1,
        "uniform: layers per group; block: layers per chunk that are recomputed",
        aliases=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"),
    )
    recompute_part_layers: tuple[int, ...] | None = opt(
        None,
        "layers of each part of the model that are recomputed; a part is a chunk of a pipeline stage, in the model's order",
        type=int,
        nargs="+",
    )
    recompute_auto: bool = opt(
        False, "recompute as few layers of each stage and chunk as fit into memory"
    )
    memory_per_rank: int | None = opt(
        None,
        "MiB that a rank may use, for what is chosen by memory (default: its share of nine "
        "tenths of the node's memory; in a dry run of this node's, for one rank)",
        type=int,
    )
    use_flush_denormal: bool = opt(True, "flush denormals to zero in every thread (on by default)")

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(
            self,
            "train_samples",
            "train_tokens",
            "exit_interval",
            "exit_duration_in_mins",
            "eval_interval",
            "eval_global_batch_size",
            "eval_micro_batch_size",
            "recompute_num_layers",
            "memory_per_rank",
        )
        check(
            0 <= self.seed < 2**32, f"--seed is {self.seed}: pass a number from 0 to {2**32 - 1}"
        )  # what numpy's generator takes
        check(
            self.train_iters is None or self.train_iters >= 0,
            f"--train-iters is {self.train_iters}: pass 0 or more",
        )
        check(self.eval_iters >= 0, f"--eval-iters is {self.eval_iters}: pass 0 or more")
        check(
            self.train_iters is None or self.train_samples is None,
            "--train-iters and --train-samples exclude each other: pass one",
        )
        check(
            not self.multiple_validation_sets or self.full_validation,
            "--multiple-validation-sets needs --full-validation, as in Megatron-LM: pass both",
        )
        check_choices(self)
        self._check_recompute()

    def _check_recompute(self) -> None:
        kind, numbers = self.recompute_granularity, self.recompute_part_layers
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
