"""Learning rate and weight decay over a run. Test: pytest tests/test_optim.py"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..run.config import OptimizerConfig, RunConfig


def _ramp(style: str, fraction: float) -> float:
    """1 at fraction 0, 0 at fraction 1."""
    return {"constant": 1.0, "linear": 1.0 - fraction, "cosine": 0.5 * (math.cos(math.pi * fraction) + 1.0)}[style]


@dataclass(frozen=True)
class ParamSchedule:
    """Learning rate and weight decay as functions of the samples consumed (Megatron's OptimizerParamScheduler)."""

    config: OptimizerConfig
    warmup_samples: int
    decay_samples: int
    total_samples: int

    @staticmethod
    def from_run(run: RunConfig, global_batch_size: int) -> ParamSchedule:
        """From the -iters or -samples flags; iterations count as full global batches, as in Megatron."""
        o, t = run.optimizer, run.training
        total = t.train_samples if t.train_samples is not None else (t.train_iters or 0) * global_batch_size
        decay = o.lr_decay_samples or (o.lr_decay_iters * global_batch_size if o.lr_decay_iters else total)
        warmup = o.lr_warmup_samples or o.lr_warmup_iters * global_batch_size
        if o.lr_warmup_fraction is not None:
            warmup = int(o.lr_warmup_fraction * decay)
        return ParamSchedule(o, warmup, decay, total)

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return asdict(self)

    @staticmethod
    def from_state(state: dict[str, Any]) -> ParamSchedule:
        """Back from the checkpoint."""
        return ParamSchedule(**{**state, "config": OptimizerConfig(**state["config"])})

    def learning_rate(self, samples: int) -> float:
        """Rate of the iteration that starts when `samples` have been consumed (0 in the first iteration of a warm-up)."""
        o = self.config
        if self.warmup_samples and samples <= self.warmup_samples:
            return o.lr * samples / self.warmup_samples
        if o.lr_decay_style == "constant":
            return o.lr
        if samples > self.decay_samples:
            return o.min_lr
        fraction = (samples - self.warmup_samples) / max(1, self.decay_samples - self.warmup_samples)
        return o.min_lr + (o.lr - o.min_lr) * _ramp(o.lr_decay_style, fraction)

    def weight_decay(self, samples: int) -> float:
        """Weight decay of the same iteration."""
        o = self.config
        start = o.weight_decay if o.start_weight_decay is None else o.start_weight_decay
        end = o.weight_decay if o.end_weight_decay is None else o.end_weight_decay
        if o.weight_decay_incr_style == "constant":
            return end
        return end - (end - start) * _ramp(o.weight_decay_incr_style, min(1.0, samples / max(1, self.total_samples)))
