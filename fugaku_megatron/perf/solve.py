"""Least squares with priors on the logarithms of positive parameters: Gauss-Newton with Levenberg's damping and Huber's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .parameters import Prior

CHANGE = 1e-4  # change of a parameter's logarithm in finite differences
HUBER = 1.5  # residuals beyond this many standard deviations count linearly
FLOOR = 1e-6  # lower bound of parameters whose own bound is 0, which has no logarithm

ITERATIONS = 40
ENOUGH = 1e-3  # the iteration ends when chi square, to which a row adds about 1, falls by less

Values = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Values at the optimum, and the covariance of their logarithms in the priors' order."""

    values: Values
    covariance: np.ndarray
    residuals: np.ndarray  # logarithms of predicted / observed


def solve(predict: Callable[[Values], Sequence[float]], observed: Sequence[float], priors: Sequence[Prior], noise: float,
          start: Values | None = None) -> Solution:
    """The most probable values, if rows have independent errors with standard deviation `noise` in the logarithm.

    start: values to begin with (default: the priors').
    """
    target = np.log(np.asarray(observed, float))
    low = np.log([max(p.bounds[0], FLOOR) for p in priors])
    high = np.log([p.bounds[1] for p in priors])
    centre, spread = np.log([p.prior for p in priors]), np.array([p.spread for p in priors])

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.log(np.asarray(predict(_values(priors, x)), float)) - target

    def cost(r: np.ndarray, x: np.ndarray) -> float:
        z = np.abs(r / noise)
        return float(np.where(z < HUBER, z**2, 2 * HUBER * z - HUBER**2).sum() + (((x - centre) / spread) ** 2).sum())

    x, damping = np.log([start[p.name] for p in priors]) if start else centre.copy(), 1e-2
    r = residuals(x)
    for _ in range(ITERATIONS):
        jacobian = _jacobian(residuals, x, r, high)
        weight = np.minimum(1, HUBER * noise / np.maximum(np.abs(r), 1e-12)) / noise**2
        normal = jacobian.T @ (weight[:, None] * jacobian) + np.diag(spread**-2.0)
        gradient = jacobian.T @ (weight * r) + (x - centre) / spread**2
        held = ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))  # at a bound and pushed against it
        damped = (normal + damping * np.diag(np.diag(normal)))[np.ix_(~held, ~held)]
        trial = x.copy()
        trial[~held] = np.clip(x[~held] - np.linalg.solve(damped, gradient[~held]), low[~held], high[~held])
        trial_r = residuals(trial)
        gain = cost(r, x) - cost(trial_r, trial)
        damping = damping / 5 if gain > 0 else damping * 5
        if gain > 0:
            x, r = trial, trial_r
        if 0 <= gain < ENOUGH or damping > 1e6:
            break
    return Solution(values=_values(priors, x), covariance=np.linalg.inv(normal), residuals=r)


def _values(priors: Sequence[Prior], x: np.ndarray) -> Values:
    return {p.name: float(np.exp(v)) for p, v in zip(priors, x)}


def _jacobian(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray, r: np.ndarray, high: np.ndarray) -> np.ndarray:
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        step = CHANGE if x[i] + CHANGE <= high[i] else -CHANGE
        moved[i] += step
        columns.append((residuals(moved) - r) / step)
    return np.stack(columns, axis=1)
