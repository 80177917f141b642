"""Layers that --freeze and --freeze-first-layers leave out of training, and layers that backward does not reach."""

from __future__ import annotations

from collections.abc import Iterable

from ..config.freezing import EMBEDDING
from ..config.run_config import RunConfig


def frozen_layers(run: RunConfig) -> int:
    """Return the number of layers at the model's beginning without a trained parameter."""
    return run.freezing.first_layers(run.model)


def layers_without_backward(run: RunConfig) -> int:
    """Return the number of layers at the model's beginning with nothing trained in or below them."""
    return frozen_layers(run) if run.freezing.has(EMBEDDING) else 0


def without_first(values: Iterable[int], layers: int) -> tuple[int, ...]:
    """Return values of each layer, with zeros for the first `layers`."""
    return tuple(0 if layer < layers else value for layer, value in enumerate(values))
