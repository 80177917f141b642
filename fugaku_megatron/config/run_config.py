"""What a run is: frozen dataclasses, one help text per field, checked as soon as they are built.

`arguments` makes Megatron-LM's flags out of these fields (num_layers -> --num-layers) and `recipes` returns filled-in ones.
Left out: anything that needs the world size (`layout.Layout`) or touches the disk.
Errors: ValueError naming the flag, the value and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .checks import (
    check,
    check_choices,
    check_numbers,
    check_positive,
    flag,
    hashed_once,
    is_unicode,
    opt,
    required,
)
from .groups import DataConfig, NumbersConfig, OptimizerConfig, ParallelConfig
from .lora import DROPOUT_COLUMNS, LoraConfig
from .model_config import ModelConfig
from .sample_rules import StepSizes

# What may differ between the ranks of a run: how a stage recomputes, places that each rank has for itself, and its threads.
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
OWN_OF_A_RANK = (
    *RECOMPUTE,
    "save_local",
    "log_file",
    "log_ranks",
    "tensorboard_dir",
    "wandb_save_dir",
    "profile_dir",
    "data_cache_path",
    "allocator",
    "thread_affinity",
    "cpu_frequency",
)


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
class PrecisionConfig:
    """Number format of weights and activations; master weights and gradients are always FP32."""

    bf16: bool = opt(False, "weights and activations in BF16, FP32 master weights")
    fp16: bool = opt(False, "weights and activations in FP16, FP32 master weights, loss scaling")
    loss_scale: float | None = opt(None, "fixed loss scale for FP16 (default: dynamic)", type=float)
    initial_loss_scale: float = opt(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = opt(1.0, "the dynamic loss scale stops falling here")
    loss_scale_window: int = opt(1000, "iterations without overflow before the scale doubles")
    hysteresis: int = opt(2, "overflows before the scale halves")

    def __post_init__(self) -> None:
        check_numbers(self)
        check(not (self.bf16 and self.fp16), "--bf16 and --fp16 exclude each other: pass one")
        check_positive(
            self,
            "loss_scale",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
        )
        check(
            self.min_loss_scale <= self.initial_loss_scale,
            f"--min-loss-scale {self.min_loss_scale} is above "
            f"--initial-loss-scale {self.initial_loss_scale}: lower it",
        )

    @property
    def name(self) -> str:
        """ "fp32", "bf16" or "fp16"."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


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


@hashed_once
@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Checkpoints and logs."""

    save: str | None = opt(None, "directory for checkpoints", type=str)
    load: str | None = opt(
        None, "directory to resume from (starts anew when it holds no checkpoint)", type=str
    )
    finetune: bool = opt(
        False,
        "start from the weights of --load alone: iteration 0, fresh optimizer, data from the start",
    )
    pretrained_checkpoint: str | None = opt(
        None,
        "while --load holds no checkpoint, start from the weights in this directory as "
        "--finetune does",
        type=str,
    )
    exit_on_missing_checkpoint: bool = opt(
        False,
        "end where --load holds no checkpoint, also where it is --save, which a first start fills",
    )
    use_checkpoint_args: bool = opt(
        False,
        "the model is that of the checkpoint in --load, whatever this command line says of it",
    )
    ckpt_step: int | None = opt(None, "load this iteration instead of the latest", type=int)
    save_interval: int | None = opt(
        None,
        "iterations between checkpoints (default: only at the end)",
        type=int,
        aliases=("--persistent-save-interval",),
    )
    save_retain_interval: int | None = opt(
        None,
        "keep checkpoints of iterations divisible by this, and the last one; others are "
        "removed after a save (default: all are kept)",
        type=int,
    )
    no_save_optim: bool = opt(
        False,
        "save the weights without the optimizer's state: such a checkpoint needs --no-load-optim or "
        "--finetune",
    )
    save_interval_in_mins: float | None = opt(
        None, "minutes between checkpoints, by the clock of rank 0", type=float
    )
    keep_last: int | None = opt(
        None,
        "checkpoints to keep in --save; older ones are removed after a save (default: all)",
        type=int,
    )
    save_local: str | None = opt(
        None,
        "directory on a disk of each node: checkpoints are written there first and copied to --save "
        "during the run; the newest whole one of either is loaded",
        type=str,
    )
    async_save: bool = opt(False, "copy a checkpoint to memory and write it while training goes on")
    log_interval: int = opt(100, "iterations between log lines")
    log_live: str = opt(
        "auto",
        "one live line with loss, tokens/s and time left instead of log lines; auto: on a terminal, also "
        "below mpiexec",
        choices=("auto", "on", "off"),
    )
    log_file: str | None = opt(
        None, "file that the run's log is added to, whether or not it is printed", type=str
    )
    log_ranks: str | None = opt(
        None,
        "file that gets, each log interval, where the time of every rank went, for "
        "fugaku-megatron log --ranks",
        type=str,
    )
    tensorboard_dir: str | None = opt(None, "directory for TensorBoard events", type=str)
    wandb_project: str | None = opt(
        None,
        "project of Weights & Biases that gets the figures of the log; without a network they "
        "are kept for `wandb sync`",
        type=str,
    )
    wandb_exp_name: str | None = opt(
        None, "name of the run there", type=str, aliases=("--wandb-name",)
    )
    wandb_entity: str | None = opt(None, "user or team there", type=str)
    wandb_save_dir: str | None = opt(
        None, "directory for its files (default: below --save, or here)", type=str
    )
    log_params_norm: bool = opt(False, "log the norm of the weights")
    log_num_zeros_in_grad: bool = opt(False, "log how many gradient elements are zero")
    profile: bool = opt(
        False,
        "time every operation of some iterations: a table in the log, a trace for Perfetto in --profile-dir",
    )
    profile_step_start: int = opt(3, "first profiled iteration of this start")
    profile_step_end: int = opt(5, "the iteration after the last profiled one")
    profile_ranks: tuple[int, ...] = opt(
        (0,),
        "ranks whose kernels and messages are profiled; of rank 0's pipeline the "
        "instructions are in any case",
        type=int,
        nargs="+",
    )
    profile_dir: str = opt(
        "profile", "directory for traces: trace.json holds those of all profiled ranks"
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(
            self,
            "ckpt_step",
            "save_interval",
            "save_interval_in_mins",
            "keep_last",
            "save_retain_interval",
            "log_interval",
            "profile_step_start",
        )
        for name in (
            "save",
            "load",
            "pretrained_checkpoint",
            "save_local",
            "tensorboard_dir",
            "profile_dir",
        ):
            check(
                getattr(self, name) != "",
                f"{flag(name)} is empty: pass a directory, or leave it out (is a variable unset?)",
            )
        for name in ("log_file", "log_ranks"):
            check(
                getattr(self, name) != "",
                f"{flag(name)} is empty: pass a file, or leave it out (is a variable unset?)",
            )
        check(
            self.tensorboard_dir is None or is_unicode(self.tensorboard_dir),
            f"--tensorboard-dir {self.tensorboard_dir}: "
            "TensorBoard takes no name that is not valid in this locale's encoding: pass another, or set LC_ALL=C.UTF-8",
        )
        check(
            not self.wandb_project or self.wandb_exp_name,
            f"--wandb-project {self.wandb_project} needs --wandb-exp-name, the "
            "name of the run: pass both",
        )
        check(
            self.ckpt_step is None or self.load is not None,
            f"--ckpt-step {self.ckpt_step} needs --load, the directory it is in",
        )
        check(
            not self.finetune or self.save is None or self.save != self.load,
            "--finetune starts at iteration 0, and would "
            f"replace the checkpoints of --load {self.load}, which is also --save: pass another --save, or leave --finetune out",
        )
        check(
            not (self.keep_last and self.save_retain_interval),
            "--keep-last and --save-retain-interval exclude each other: pass one",
        )
        check(
            not self.save_retain_interval
            or not self.save_interval
            or self.save_retain_interval % self.save_interval == 0,
            f"--save-retain-interval {self.save_retain_interval} is not a multiple of --save-interval {self.save_interval}: "
            "change one of them",
        )
        for name in ("exit_on_missing_checkpoint", "use_checkpoint_args"):
            check(
                not getattr(self, name) or self.load is not None,
                f"{flag(name)} needs --load, the directory of the checkpoint",
            )
        check(
            self.profile_step_end > self.profile_step_start,
            f"--profile-step-end {self.profile_step_end} is not above "
            f"--profile-step-start {self.profile_step_start}: raise it",
        )
        check(
            all(rank >= 0 for rank in self.profile_ranks),
            f"--profile-ranks {self.profile_ranks}: pass ranks from 0 on",
        )


FP16_CHUNK, MAX_FP16_CHUNK = (
    64,
    65536,
)  # 64: half the error of BF16 operands, at 1.7 times FP32's rate (docs/numerics.md)


@hashed_once
@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """How the machine is used."""

    kernels: str = opt(
        "auto",
        "native: the C++ kernels; torch: torch's own; auto: whichever is faster on this run's shapes",
        choices=("auto", "native", "torch"),
    )
    fp16_accumulation_chunk: int | None = opt(
        None,
        "with --fp16, sum this many terms of a linear layer in FP16 before adding in FP32: faster where the CPU has FP16 "
        "arithmetic (A64FX, SVE), less exact (default: sums in FP32)",
        type=int,
        switches={"--fp16-accumulation": FP16_CHUNK},
    )
    fp32_matmul: str = opt(
        "ieee",
        "ieee: FP32 matmuls on FP32 units; bf16x3: each operand as three BF16 numbers, multiplied by "
        "six BF16 matmuls, as exact as FP32, faster on AMX only",
        choices=("ieee", "bf16x3"),
    )
    cache_packed_weights: bool = opt(
        False,
        "keep weights packed for the matrix kernels from one optimizer step to the next: "
        "faster with several micro-batches per step, at two more copies of the weights",
    )
    allocator: str = opt(
        "tuned",
        "tuned: tensors in memory that stays with the process; stock: malloc as it is. A preloaded "
        "allocator (LD_PRELOAD) is used in either case",
        choices=("tuned", "stock"),
    )
    thread_affinity: str = opt(
        "auto",
        "pin: one core for each thread, in NUMA order; none: the system places threads; auto: "
        "pin on nodes of several NUMA domains",
        choices=("auto", "pin", "none"),
    )
    cpu_frequency: float | None = opt(
        None,
        "the clock in GHz that the run is meant for: set where the system lets us, and "
        "refused when the cores run at another",
        type=float,
    )
    hang_timeout_in_secs: float | None = opt(
        None,
        "a rank that does not move for so many seconds is named as stuck, and the job "
        "ends; 0: never (default: 10 times the slowest iteration, or EP times above EP 10, "
        "at least 60; 600 at the start and in a save)",
        type=float,
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_choices(self)
        check_positive(self, "cpu_frequency")
        timeout, chunk = self.hang_timeout_in_secs, self.fp16_accumulation_chunk
        check(
            timeout is None or timeout == 0 or timeout >= 1,
            f"--hang-timeout-in-secs is {timeout}: pass 1 or more, or 0",
        )
        check(
            chunk is None or 0 < chunk <= MAX_FP16_CHUNK,
            f"--fp16-accumulation-chunk is {chunk}: pass a number from 1 to {MAX_FP16_CHUNK}",
        )

    @property
    def splits_fp32(self) -> bool:
        """Whether FP32 operands of matmuls are multiplied as BF16 parts."""
        return self.fp32_matmul == "bf16x3"


@hashed_once
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, complete. Checks what spans two groups."""

    model: ModelConfig
    batch: BatchConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    output: OutputConfig = OutputConfig()
    system: SystemConfig = SystemConfig()
    numbers: NumbersConfig = NumbersConfig()
    lora: LoraConfig = LoraConfig()

    def __post_init__(self) -> None:
        samples, optimizer = self.training.train_samples is not None, self.optimizer
        check(
            not samples
            or not (
                optimizer.lr_decay_iters
                or optimizer.lr_warmup_iters
                or optimizer.lr_wsd_decay_iters
            ),
            "--train-samples goes with --lr-decay-samples and --lr-warmup-samples: leave out --lr- flags that count iterations",
        )
        check(
            samples
            or not (
                optimizer.lr_decay_samples
                or optimizer.lr_warmup_samples
                or optimizer.lr_wsd_decay_samples
            ),
            "--lr-decay-samples and --lr-warmup-samples go with --train-samples: pass it, or the -iters flags",
        )
        chunk, kernels = self.system.fp16_accumulation_chunk, self.system.kernels
        check(
            chunk is None or self.precision.fp16,
            f"--fp16-accumulation-chunk {chunk} is for --fp16, and this run is "
            f"{self.precision.name}: pass --fp16, or leave it out",
        )
        splits, precision, experts = (
            self.system.splits_fp32,
            self.precision.name,
            self.model.num_experts,
        )
        check(
            not splits or precision == "fp32",
            f"--fp32-matmul bf16x3 is for FP32, and this run is {precision}: leave it out",
        )
        check(
            not splits or experts is None,
            f"--fp32-matmul bf16x3 is not supported with --num-experts {experts}: leave it out",
        )
        native = "--fp32-matmul bf16x3" if splits else f"--fp16-accumulation-chunk {chunk}"
        check(
            (chunk is None and not splits) or kernels != "torch",
            f"{native} is for the C++ kernels, and --kernels is torch: "
            "pass native or auto, or leave it out",
        )
        self._check_divided_experts()
        fits = (
            self.precision.bf16 and optimizer.use_precision_aware_optimizer and not optimizer.muon
        )
        check(
            fits or optimizer.main_params_dtype == "fp32",
            "--main-params-dtype bf16 is for AdamW with --bf16 and "
            "--use-precision-aware-optimizer: pass them, or fp32",
        )
        layers, count = self.numbers.abft or (), self.model.num_layers
        beyond = next((layer for layer in layers if layer != "all" and int(layer) >= count), None)
        check(
            beyond is None,
            f"--abft {beyond}: the model has layers 0 to {count - 1}: pass some of them, or all",
        )
        check(
            not layers or (kernels != "torch" and chunk is None),
            "--abft is for the C++ kernels with sums in FP32: leave out "
            "--kernels torch and --fp16-accumulation-chunk, or leave --abft out",
        )
        self._check_lora()

    def _check_lora(self) -> None:
        output = self.output
        check(  # adapters of --load may have another model than the one that they name
            not (output.finetune and output.pretrained_checkpoint) or self.lora.on,
            "--finetune and --pretrained-checkpoint exclude each other: pass "
            "--finetune with --load for one start, or --pretrained-checkpoint for a run that "
            "goes on from its own --load",
        )
        self.lora.check_model(self.model)
        given = f"--lora-rank {self.lora.lora_rank}"
        check(
            not self.lora.on or not self.parallel.tp_comm_overlap,
            f"{given} is not supported with --tp-comm-overlap: leave one of them out",
        )
        check(
            not self.lora.on or not self.numbers.abft,
            f"{given} is not supported with --abft: leave one of them out",
        )
        check(
            not self.lora.on or not self.optimizer.muon,
            f"{given} is not supported with --optimizer {self.optimizer.optimizer}: pass adam",
        )
        tp = self.parallel.tensor_model_parallel_size
        whole = all(
            size // tp % DROPOUT_COLUMNS == 0
            for size in (self.model.context_width, self.model.ffn_hidden_size)
        )
        check(
            not self.lora.on or not self.lora.lora_dropout or whole,
            f"--lora-dropout {self.lora.lora_dropout} needs multiples "
            f"of {DROPOUT_COLUMNS} columns of attention and of the MLP on every tensor-parallel rank, which "
            f"--tensor-model-parallel-size {tp} does not leave: change one of them",
        )

    @property
    def masters(self) -> bool:
        """Whether a rank holds an FP32 copy of the weights that it updates."""
        return self.precision.name != "fp32" and self.optimizer.main_params_dtype == "fp32"

    def _check_divided_experts(self) -> None:
        parallel, divided = self.parallel, self.parallel.divides_experts
        check(
            self.model.num_experts or not divided,
            f"{parallel.dividing_flag} needs --num-experts: leave it out",
        )
        check(
            not divided or not self.optimizer.muon,
            f"{parallel.dividing_flag} is supported with AdamW, not with --optimizer "
            "muon: leave one of them out",
        )


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "precision": PrecisionConfig,
    "training": TrainingConfig,
    "data": DataConfig,
    "output": OutputConfig,
    "system": SystemConfig,
    "numbers": NumbersConfig,
    "lora": LoraConfig,
}


def saved_run(manifest: dict[str, Any], sizes: tuple[int, int] | None = None) -> RunConfig:
    """The run that wrote the checkpoint, one sample at a time. sizes: (tensor, pipeline) parallel; None: its own layout."""
    groups = {}
    for name, config in GROUPS.items():
        values = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in manifest["config"].get(name, {}).items()
        }
        if name == "batch":
            values = {"micro_batch_size": 1}
        if name == "model":  # a part of the loss in training alone
            values["use_z_loss"] = False
        if name == "training":  # numbers of layers to recompute belong to that layout
            values["recompute_part_layers"] = None
        if name == "parallel" and sizes:
            values = dict(
                zip(("tensor_model_parallel_size", "pipeline_model_parallel_size"), sizes)
            )
        if (
            name == "parallel"
        ):  # a prompt of any length is not cut into parts or sent to replicas; the weights are the same
            values |= {
                "sequence_parallel": False,
                "tp_comm_overlap": False,
                "expert_model_parallel_size": 1,
                "expert_tensor_parallel_size": None,
            }
        groups[name] = config(**values)
    return RunConfig(**groups)
