"""Dynamic loss scale for FP16."""

from __future__ import annotations

from ..config.precision import PrecisionConfig


class LossScaler:
    """Static or dynamic loss scale (Megatron's DynamicGradScaler): halved after `hysteresis` overflows, doubled after a window."""

    def __init__(self, precision: PrecisionConfig) -> None:
        self.precision = precision
        self.dynamic = precision.fp16 and precision.loss_scale is None
        default = precision.initial_loss_scale if precision.fp16 else 1.0
        self.scale = precision.loss_scale or default
        self.good_steps = 0
        self.hysteresis = precision.hysteresis

    @property
    def falling(self) -> bool:
        """True while the scale can still fall, so an overflow is expected."""
        return self.dynamic and self.scale > self.precision.min_loss_scale

    def update(self, overflow: bool) -> None:
        """Halve the scale after `hysteresis` overflows, or double it after a window without overflow."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale / 2, self.precision.min_loss_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.precision.loss_scale_window:
            self.good_steps = 0
            self.hysteresis = self.precision.hysteresis
            self.scale *= 2

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "hysteresis": self.hysteresis}

    def load(self, state: dict[str, float]) -> None:
        if self.dynamic:
            self.scale = state["scale"]
            self.good_steps = int(state["good_steps"])
            self.hysteresis = int(state["hysteresis"])
