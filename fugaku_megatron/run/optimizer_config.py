"""AdamW and its schedules: a group of `config`'s fields. Test: pytest tests/test_config.py"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check, check_choices, check_fraction, check_numbers, check_positive, flag, opt


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, clipping, learning-rate and weight-decay schedule."""

    lr: float = opt(1e-4, "peak learning rate")
    min_lr: float = opt(0.0, "the learning rate never falls below this after warm-up")
    lr_decay_style: str = opt("linear", "shape of the decay", choices=("constant", "linear", "cosine"))
    lr_decay_iters: int | None = opt(None, "iterations until --min-lr (default: --train-iters)", type=int)
    lr_decay_samples: int | None = opt(None, "samples until --min-lr (default: --train-samples)", type=int, maximum=2**40)
    lr_warmup_iters: int = opt(0, "iterations of linear warm-up", aliases=("--warmup-iters",))
    lr_warmup_samples: int = opt(0, "samples of linear warm-up", maximum=2**40)
    lr_warmup_fraction: float | None = opt(None, "warm-up as a fraction of the decay length", type=float)
    weight_decay: float = opt(0.01, "decoupled weight decay, on matrices only")
    start_weight_decay: float | None = opt(None, "weight decay at the start (default: --weight-decay)", type=float)
    end_weight_decay: float | None = opt(None, "weight decay at the end (default: --weight-decay)", type=float)
    weight_decay_incr_style: str = opt("constant", "path between the two", choices=("constant", "linear", "cosine"))
    clip_grad: float = opt(1.0, "largest global gradient norm; 0: no clipping")
    adam_beta1: float = opt(0.9, "decay of the first moment")
    adam_beta2: float = opt(0.999, "decay of the second moment")
    adam_eps: float = opt(1e-8, "added to the root of the second moment")
    override_opt_param_scheduler: bool = opt(False, "on resuming, learning rate and weight decay follow this command line; the "
                                             "default, too, which notes what differs from the checkpoint",
                                             aliases=("--override-opt_param-scheduler",))
    use_checkpoint_opt_param_scheduler: bool = opt(False, "on resuming, learning rate and weight decay follow the checkpoint's "
                                                   "schedule, whatever this command line says",
                                                   aliases=("--use-checkpoint-opt_param-scheduler",))

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(self, "lr", "lr_decay_iters", "lr_decay_samples", "adam_eps")
        check_fraction(self, "adam_beta1", "adam_beta2")
        for name in ("min_lr", "weight_decay", "clip_grad", "lr_warmup_iters", "lr_warmup_samples"):
            check(getattr(self, name) >= 0, f"{flag(name)} is {getattr(self, name)}: give 0 or more")
        check(self.min_lr <= self.lr, f"--min-lr {self.min_lr} is above --lr {self.lr}: lower it")
        check_choices(self)
        for name in ("start_weight_decay", "end_weight_decay"):
            value = getattr(self, name)
            check(value is None or value >= 0, f"{flag(name)} is {value}: give 0 or more")
            check(value is None or self.weight_decay_incr_style != "constant", f"{flag(name)} {value} has no effect with "
                  "--weight-decay-incr-style constant: give linear or cosine, or only --weight-decay")
        check(not (self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler),
              "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other: give one")
        warmups = [f for f in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction") if getattr(self, f)]
        check(len(warmups) <= 1, f"{' and '.join(map(flag, warmups))} exclude each other: give one")
        check(self.lr_warmup_fraction is None or 0 <= self.lr_warmup_fraction <= 1,
              f"--lr-warmup-fraction is {self.lr_warmup_fraction}: give a number from 0 to 1")
