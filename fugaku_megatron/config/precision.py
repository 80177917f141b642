"""Fields for number formats and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .fields import (
    cached_hash,
    course_optional,
    course_switch,
    free_option,
)
from .rules import CheckedFields


@cached_hash
@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(CheckedFields):
    """Number format for weights and activations; master weights and gradients are always FP32."""

    bf16: bool = course_switch("weights and activations in BF16, FP32 master weights")
    fp16: bool = course_switch("weights and activations in FP16, FP32 master weights, loss scaling")
    loss_scale: float | None = course_optional(
        "fixed loss scale for FP16 (default: dynamic)", needs="fp16"
    )
    initial_loss_scale: float = free_option(2.0**32, "initial dynamic loss scale", needs="fp16")
    min_loss_scale: float = free_option(1.0, "minimum of the dynamic loss scale", needs="fp16")
    loss_scale_window: int = free_option(
        1000, "iterations without overflow before the scale doubles", needs="fp16"
    )
    hysteresis: int = free_option(2, "overflows before the scale halves", needs="fp16")

    @staticmethod
    def of(name: str) -> PrecisionConfig:
        """Return "fp32", "bf16" or "fp16"."""
        return PrecisionConfig(bf16=name == "bf16", fp16=name == "fp16")

    @cached_property
    def name(self) -> str:
        if self.bf16:
            return "bf16"
        return "fp16" if self.fp16 else "fp32"
