"""Dynamic loss scale of FP16."""

from __future__ import annotations

from ..config.precision import PrecisionConfig


class LossScaler:
    """Static or dynamic loss scale (Megatron's DynamicGradScaler): halve after `hysteresis` overflows, double after a window."""

    def __init__(self, precision: PrecisionConfig) -> None:
        self.precision = precision
        self.dynamic = precision.fp16 and precision.loss_scale is None
        self.scale = precision.loss_scale or (
            precision.initial_loss_scale if precision.fp16 else 1.0
        )
        self.good_steps, self.hysteresis = 0, precision.hysteresis

    @property
    def falling(self) -> bool:
        """Whether an overflow is expected, because the scale can still fall."""
        return self.dynamic and self.scale > self.precision.min_loss_scale

    def update(self, overflow: bool) -> None:
        """Tell whether the gradients of this step had an Inf or NaN."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps, self.hysteresis = 0, self.hysteresis - 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale / 2, self.precision.min_loss_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.precision.loss_scale_window:
            self.good_steps, self.hysteresis = 0, self.precision.hysteresis
            self.scale *= 2

    def state(self) -> dict[str, float]:
        """For the checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "hysteresis": self.hysteresis}

    def load(self, state: dict[str, float]) -> None:
        """Back from the checkpoint."""
        if self.dynamic:
            self.scale, self.good_steps, self.hysteresis = (
                state["scale"],
                int(state["good_steps"]),
                int(state["hysteresis"]),
            )
