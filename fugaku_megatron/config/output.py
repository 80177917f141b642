"""Output fields: checkpoints, logs, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    BY_RANK,
    cached_hash,
    check,
    free_option,
    free_optional,
    free_switch,
    is_unicode,
)
from .rules import CheckedFields
from .span_groups import span_groups

# Replacements of flags in a program with a Trainer.
_SAVE = "call Trainer.save in the loop over steps"
_PRINT = "print the fields of Step in the loop over steps"
_WANDB = "pass it to wandb.init"
_PROFILES = "only the command profiles"
_COPIES = "only the command copies its state to other nodes"

LOG_INTERVALS = (1, 2, 5, 10, 20, 50, 100)  # 100 is Megatron-LM's default
LOG_LINES = 20


def default_log_interval(iterations: int) -> int:
    """Return the longest interval with LOG_LINES lines, for a run of so many iterations."""
    return max((n for n in LOG_INTERVALS if n * LOG_LINES <= iterations), default=1)


@cached_hash
@dataclass(frozen=True, kw_only=True)
class OutputConfig(CheckedFields):
    """Checkpoints and logs."""

    save: str | None = free_optional(
        "directory for checkpoints",
        path="directory",
        library="pass the directory to Trainer.save",
        script="SAVE",
    )
    load: str | None = free_optional(
        "directory to resume from; without a checkpoint in it the run starts anew",
        path="directory",
        script="SAVE",
    )
    finetune: bool = free_switch(
        "load only the weights of --load: iteration 0, new optimizer state, data from the start",
        needs="load",
    )
    pretrained_checkpoint: str | None = free_optional(
        "if --load has no checkpoint, start from the weights in this directory as with --finetune",
        path="directory",
    )
    exit_on_missing_checkpoint: bool = free_switch(
        "exit if --load has no checkpoint, even if it is also --save, which a first start fills",
    )
    use_checkpoint_args: bool = free_switch(
        "use the model of the checkpoint in --load instead of this command line's"
    )
    ignore_saved_arguments: tuple[str, ...] | None = free_optional(
        "arguments in a checkpoint of a fork of Megatron-LM that do not change the model",
    )
    ckpt_step: int | None = free_optional("load this iteration instead of the latest")
    save_interval: int | None = free_optional(
        "iterations between checkpoints (default: only at the end)",
        aliases=("--persistent-save-interval",),
        needs="save",
        library=_SAVE,
    )
    save_hf_interval: int | None = free_optional(
        "iterations between folders of the model for Hugging Face in SAVE_hf, next to --save; each is written from a "
        "checkpoint of its iteration, while training continues",
        needs="save",
        library="call Trainer.save in the loop over steps, and fm.load(...).save_hf",
    )
    save_retain_interval: int | None = free_optional(
        "keep checkpoints of iterations divisible by this, and the last one; others are "
        "removed after a save (default: all are kept)",
        needs="save",
    )
    no_save_optim: bool = free_switch(
        "save the weights without optimizer state: loading the checkpoint needs --no-load-optim or "
        "--finetune",
        needs="save",
    )
    save_interval_in_mins: float | None = free_optional(
        "minutes between checkpoints, by the clock of rank 0",
        needs="save",
        library=_SAVE,
    )
    keep_last: int | None = free_optional(
        "checkpoints to keep in --save; older ones are removed after a save (default: all)",
        needs="save",
    )
    save_local: str | None = free_optional(
        "directory on a local disk of each node: checkpoints are written there first and copied to --save "
        "during the run; the newest complete checkpoint of both is loaded",
        path="directory",
        needs="save",
        differs=BY_RANK,
    )
    save_memory: int | None = free_optional(
        "iterations between copies of the training state in the memory of other nodes, from which a run continues after a "
        "lost node; they end with the job, and so need --save as well",
        needs="save",
        library=_COPIES,
    )
    save_memory_group: int = free_option(
        2,
        "nodes that protect each other's copies: one of them may be lost. Parity takes 1/(nodes - 1) of the state, with 2 a "
        "second copy",
        needs="save_memory",
        library=_COPIES,
    )
    async_save: bool = free_switch(
        "copy a checkpoint to memory and write it during training", needs="save"
    )
    log_interval: int | None = free_optional(
        "iterations between log lines (default: the longest of 1, 2, 5, 10, 20, 50 and 100 with 20 lines or more in the "
        "whole run)",
        library=_PRINT,
    )
    log_live: str = free_option(
        "auto",
        "one live line with loss, tokens/s and time left instead of log lines; auto: on a terminal, also "
        "below mpiexec",
        choices=("auto", "on", "off"),
        library=_PRINT,
    )
    log_file: str | None = free_optional(
        "file to which the run's log is appended, whether or not it is printed",
        path="file",
        differs=BY_RANK,
        library=_PRINT,
    )
    log_ranks: str | None = free_optional(
        "file for the time breakdown of every rank in each log interval, for "
        "fugaku-megatron log --ranks",
        path="file",
        differs=BY_RANK,
        library="only the command watches the time of every rank",
    )
    tensorboard_dir: str | None = free_optional(
        "directory for TensorBoard events",
        path="directory",
        differs=BY_RANK,
        library="write the fields of Step with torch.utils.tensorboard",
    )
    wandb_project: str | None = free_optional(
        "project of Weights & Biases for the metrics of the log; without a network they "
        "are stored for `wandb sync`",
        library="pass the fields of Step to wandb.log",
    )
    wandb_exp_name: str | None = free_optional(
        "name of the run in Weights & Biases",
        aliases=("--wandb-name",),
        needs="wandb_project",
        library=_WANDB,
    )
    wandb_entity: str | None = free_optional(
        "user or team in Weights & Biases", needs="wandb_project", library=_WANDB
    )
    wandb_save_dir: str | None = free_optional(
        "directory for files of Weights & Biases (default: below --save, or here)",
        differs=BY_RANK,
        library=_WANDB,
    )
    otel_enabled: bool = free_switch(
        "export the figures of the log and spans of the run by OTLP from rank 0, with Megatron-LM's names; "
        "OTEL_EXPORTER_OTLP_ENDPOINT is the collector's address",
        library="export the fields of Step with opentelemetry",
    )
    otel_service_name: str | None = free_optional(
        "service.name of the export (default: OTEL_SERVICE_NAME, or megatron-lm)",
        needs="otel_enabled",
        library="pass it to opentelemetry's Resource",
    )
    otel_span_groups: str = free_option(
        "default",
        "groups of spans to export, separated by commas: default, per_step, all, or names of groups",
        needs="otel_enabled",
        library="only the command has spans",
    )
    log_params_norm: bool = free_switch("log the norm of the weights")
    log_num_zeros_in_grad: bool = free_switch("log the number of zero gradient elements")
    profile: bool = free_switch(
        "time every operation in some iterations: a table in the log, a trace for Perfetto in --profile-dir",
        library=_PROFILES,
    )
    profile_step_start: int = free_option(
        3,
        "first profiled iteration after this start",
        needs="profile",
        library=_PROFILES,
    )
    profile_step_end: int = free_option(
        5,
        "the iteration after the last profiled one",
        range=None,
        needs="profile",
        library=_PROFILES,
    )
    profile_ranks: tuple[int, ...] = free_option(
        (0,),
        "ranks whose kernels and messages are profiled; the instructions of rank 0's pipeline "
        "always are",
        needs="profile",
        library=_PROFILES,
    )
    profile_dir: str = free_option(
        "profile",
        "directory for traces: trace.json contains all profiled ranks",
        path="directory",
        needs="profile",
        differs=BY_RANK,
        library=_PROFILES,
    )

    def _check(self) -> None:
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
            self.save_memory_group >= 2,
            f"--save-memory-group {self.save_memory_group}: pass 2 or more nodes",
        )
        check(
            all(rank >= 0 for rank in self.profile_ranks),
            f"--profile-ranks {self.profile_ranks}: pass ranks from 0 on",
        )
