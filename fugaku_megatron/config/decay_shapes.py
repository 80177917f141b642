"""Shapes of the learning rate and of the weight decay, as in Megatron-LM's optimizer_param_scheduler.py: a row each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

LEARNING_RATE = "lr_decay_style"
WSD = "lr_wsd_decay_style"
WEIGHT_DECAY = "weight_decay_incr_style"


class SchedulePoint(NamedTuple):
    """An iteration that starts at `samples`, and the numbers of its run: lengths in samples, learning rates."""

    samples: int
    warmup_samples: float
    decay_samples: float
    lr: float
    min_lr: float


class Shape(NamedTuple):
    """A shape of a decay.

    factor: fraction of the decay's length -> factor from 1, the peak, to 0, --min-lr
    rate: learning rate after the warm-up, for a shape without such a factor
    decays: False if the learning rate does not fall to --min-lr
    final_decay: True if the learning rate decays in the last part only, in the shape of --lr-wsd-decay-style
    flags: fields that accept the shape
    """

    factor: Callable[[float], float] = lambda fraction: 1.0
    rate: Callable[[SchedulePoint], float] | None = None
    decays: bool = True
    final_decay: bool = False
    flags: tuple[str, ...] = (LEARNING_RATE, WSD)


def _inverse_square_root(point: SchedulePoint) -> float:
    warmup = float(max(point.warmup_samples, 1))
    rate: float = point.lr * warmup**0.5 / float(max(point.samples, 1)) ** 0.5
    return max(point.min_lr, rate)


SHAPES = {
    "constant": Shape(
        rate=lambda point: point.lr,
        decays=False,
        flags=(LEARNING_RATE, WEIGHT_DECAY),
    ),
    "exponential": Shape(factor=lambda fraction: 2.0 * 0.5**fraction - 1.0, flags=(WSD,)),
    "linear": Shape(
        factor=lambda fraction: 1.0 - fraction, flags=(LEARNING_RATE, WSD, WEIGHT_DECAY)
    ),
    "cosine": Shape(
        factor=lambda fraction: 0.5 * (math.cos(math.pi * fraction) + 1.0),
        flags=(LEARNING_RATE, WSD, WEIGHT_DECAY),
    ),
    "minus_sqrt": Shape(factor=lambda fraction: 1.0 - math.sqrt(fraction), flags=(WSD,)),
    "inverse-square-root": Shape(rate=_inverse_square_root, flags=(LEARNING_RATE,)),
    "WSD": Shape(final_decay=True, flags=(LEARNING_RATE,)),
}
