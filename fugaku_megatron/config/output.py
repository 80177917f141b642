"""Fields of what a run writes: checkpoints, logs, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    check,
    check_numbers,
    check_positive,
    flag,
    hashed_once,
    is_unicode,
    opt,
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
