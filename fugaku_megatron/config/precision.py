"""Fields of the number formats and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import (
    check,
    check_numbers,
    check_positive,
    hashed_once,
    opt,
)


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
