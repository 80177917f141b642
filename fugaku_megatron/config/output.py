"""Output fields: checkpoints, logs, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    BY_RANK,
    FREE,
    cached_hash,
    check,
    check_fields,
    is_unicode,
    option,
    optional,
    switch,
)
from .rules import check_rules
from .span_groups import span_groups

# Replacements of flags in a program with a Trainer.
_SAVE = "call Trainer.save in the loop over steps"
_PRINT = "print the fields of Step in the loop over steps"
_WANDB = "pass it to wandb.init"
_PROFILES = "only the command profiles"

LOG_INTERVALS = (1, 2, 5, 10, 20, 50, 100)  # 100 is Megatron-LM's default
LOG_LINES = 20


def default_log_interval(iterations: int) -> int:
    """Return the longest interval with LOG_LINES lines, for a run of so many iterations."""
    return max((n for n in LOG_INTERVALS if n * LOG_LINES <= iterations), default=1)


@cached_hash
@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Checkpoints and logs."""

    save: str | None = optional(
        "directory for checkpoints",
        path="directory",
        meaning=FREE,
        library="pass the directory to Trainer.save",
        script="SAVE",
    )
    load: str | None = optional(
        "directory to resume from; without a checkpoint in it the run starts anew",
        path="directory",
        meaning=FREE,
        script="SAVE",
    )
    finetune: bool = switch(
        "load only the weights of --load: iteration 0, new optimizer state, data from the start",
        meaning=FREE,
        needs="load",
    )
    pretrained_checkpoint: str | None = optional(
        "if --load has no checkpoint, start from the weights in this directory as with --finetune",
        path="directory",
        meaning=FREE,
    )
    exit_on_missing_checkpoint: bool = switch(
        "exit if --load has no checkpoint, even if it is also --save, which a first start fills",
        meaning=FREE,
    )
    use_checkpoint_args: bool = switch(
        "use the model of the checkpoint in --load instead of this command line's", meaning=FREE
    )
    ignore_saved_arguments: tuple[str, ...] | None = optional(
        "arguments in a checkpoint of a fork of Megatron-LM that do not change the model",
        meaning=FREE,
    )
    ckpt_step: int | None = optional("load this iteration instead of the latest", meaning=FREE)
    save_interval: int | None = optional(
        "iterations between checkpoints (default: only at the end)",
        aliases=("--persistent-save-interval",),
        meaning=FREE,
        needs="save",
        library=_SAVE,
    )
    save_retain_interval: int | None = optional(
        "keep checkpoints of iterations divisible by this, and the last one; others are "
        "removed after a save (default: all are kept)",
        meaning=FREE,
        needs="save",
    )
    no_save_optim: bool = switch(
        "save the weights without optimizer state: loading the checkpoint needs --no-load-optim or "
        "--finetune",
        meaning=FREE,
        needs="save",
    )
    save_interval_in_mins: float | None = optional(
        "minutes between checkpoints, by the clock of rank 0",
        meaning=FREE,
        needs="save",
        library=_SAVE,
    )
    keep_last: int | None = optional(
        "checkpoints to keep in --save; older ones are removed after a save (default: all)",
        meaning=FREE,
        needs="save",
    )
    save_local: str | None = optional(
        "directory on a local disk of each node: checkpoints are written there first and copied to --save "
        "during the run; the newest complete checkpoint of both is loaded",
        path="directory",
        meaning=FREE,
        needs="save",
        differs=BY_RANK,
    )
    async_save: bool = switch(
        "copy a checkpoint to memory and write it during training", meaning=FREE, needs="save"
    )
    log_interval: int | None = optional(
        "iterations between log lines (default: the longest of 1, 2, 5, 10, 20, 50 and 100 with 20 lines or more in the "
        "whole run)",
        meaning=FREE,
        library=_PRINT,
    )
    log_live: str = option(
        "auto",
        "one live line with loss, tokens/s and time left instead of log lines; auto: on a terminal, also "
        "below mpiexec",
        choices=("auto", "on", "off"),
        meaning=FREE,
        library=_PRINT,
    )
    log_file: str | None = optional(
        "file to which the run's log is appended, whether or not it is printed",
        path="file",
        meaning=FREE,
        differs=BY_RANK,
        library=_PRINT,
    )
    log_ranks: str | None = optional(
        "file for the time breakdown of every rank in each log interval, for "
        "fugaku-megatron log --ranks",
        path="file",
        meaning=FREE,
        differs=BY_RANK,
        library="only the command watches the time of every rank",
    )
    tensorboard_dir: str | None = optional(
        "directory for TensorBoard events",
        path="directory",
        meaning=FREE,
        differs=BY_RANK,
        library="write the fields of Step with torch.utils.tensorboard",
    )
    wandb_project: str | None = optional(
        "project of Weights & Biases for the metrics of the log; without a network they "
        "are stored for `wandb sync`",
        meaning=FREE,
        library="pass the fields of Step to wandb.log",
    )
    wandb_exp_name: str | None = optional(
        "name of the run in Weights & Biases",
        aliases=("--wandb-name",),
        meaning=FREE,
        needs="wandb_project",
        library=_WANDB,
    )
    wandb_entity: str | None = optional(
        "user or team in Weights & Biases", meaning=FREE, needs="wandb_project", library=_WANDB
    )
    wandb_save_dir: str | None = optional(
        "directory for files of Weights & Biases (default: below --save, or here)",
        meaning=FREE,
        differs=BY_RANK,
        library=_WANDB,
    )
    otel_enabled: bool = switch(
        "export the figures of the log and spans of the run by OTLP from rank 0, with Megatron-LM's names; "
        "OTEL_EXPORTER_OTLP_ENDPOINT is the collector's address",
        meaning=FREE,
        library="export the fields of Step with opentelemetry",
    )
    otel_service_name: str | None = optional(
        "service.name of the export (default: OTEL_SERVICE_NAME, or megatron-lm)",
        meaning=FREE,
        needs="otel_enabled",
        library="pass it to opentelemetry's Resource",
    )
    otel_span_groups: str = option(
        "default",
        "groups of spans to export, separated by commas: default, per_step, all, or names of groups",
        meaning=FREE,
        needs="otel_enabled",
        library="only the command has spans",
    )
    log_params_norm: bool = switch("log the norm of the weights", meaning=FREE)
    log_num_zeros_in_grad: bool = switch("log the number of zero gradient elements", meaning=FREE)
    profile: bool = switch(
        "time every operation in some iterations: a table in the log, a trace for Perfetto in --profile-dir",
        meaning=FREE,
        library=_PROFILES,
    )
    profile_step_start: int = option(
        3,
        "first profiled iteration after this start",
        meaning=FREE,
        needs="profile",
        library=_PROFILES,
    )
    profile_step_end: int = option(
        5,
        "the iteration after the last profiled one",
        range=None,
        meaning=FREE,
        needs="profile",
        library=_PROFILES,
    )
    profile_ranks: tuple[int, ...] = option(
        (0,),
        "ranks whose kernels and messages are profiled; the instructions of rank 0's pipeline "
        "always are",
        meaning=FREE,
        needs="profile",
        library=_PROFILES,
    )
    profile_dir: str = option(
        "profile",
        "directory for traces: trace.json contains all profiled ranks",
        path="directory",
        meaning=FREE,
        needs="profile",
        differs=BY_RANK,
        library=_PROFILES,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_rules(self, "output")
        span_groups(self.otel_span_groups)
        check(
            self.tensorboard_dir is None or is_unicode(self.tensorboard_dir),
            f"--tensorboard-dir {self.tensorboard_dir}: "
            "TensorBoard takes no name that is not valid in this locale's encoding: pass another, or set LC_ALL=C.UTF-8",
        )
        check(
            not self.finetune or self.save is None or self.save != self.load,
            "--finetune starts at iteration 0, and would "
            f"replace the checkpoints of --load {self.load}, which is also --save: pass another --save, or leave --finetune out",
        )
        check(
            not self.save_retain_interval
            or not self.save_interval
            or self.save_retain_interval % self.save_interval == 0,
            f"--save-retain-interval {self.save_retain_interval} is not a multiple of --save-interval {self.save_interval}: "
            "change one of them",
        )
        check(
            all(rank >= 0 for rank in self.profile_ranks),
            f"--profile-ranks {self.profile_ranks}: pass ranks from 0 on",
        )
