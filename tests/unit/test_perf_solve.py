"""The fit: it finds what made the data, keeps priors where data are silent, respects bounds and bears outliers."""

from __future__ import annotations

import numpy as np
import pytest

from fugaku_megatron.perf.software import Prior
from fugaku_megatron.reproduction.fit import solve

X = np.linspace(1, 10, 20)


def prior(name: str, value: float, spread: float = 1.0, bounds: tuple[float, float] = (1e-3, 1e3)) -> Prior:
    return Prior(name=name, unit="", meaning="", prior=value, spread=spread, bounds=bounds, source="")


def line(values):
    return values["a"] + values["b"] * X


def test_it_finds_what_made_the_data():
    solution = solve(line, 3.0 + 0.5 * X, [prior("a", 1.0), prior("b", 1.0)], 0.01)
    assert solution.values == {"a": pytest.approx(3.0, rel=0.02), "b": pytest.approx(0.5, rel=0.02)}
    assert np.abs(solution.residuals).max() < 0.01


def test_a_silent_parameter_stays_at_its_prior():
    solution = solve(lambda v: [v["a"]] * 3, [2.0, 2.0, 2.0], [prior("a", 1.0), prior("b", 7.0, 0.5)], 0.01)
    assert solution.values["b"] == pytest.approx(7.0)
    assert solution.covariance[1, 1] == pytest.approx(0.25, rel=0.01)


def test_bounds_hold():
    assert solve(line, 3.0 + 0.5 * X, [prior("a", 1.0, bounds=(0.5, 2.0)), prior("b", 1.0)], 0.01).values["a"] == pytest.approx(2.0)


def test_one_outlier_does_not_lead():
    data = 3.0 + 0.5 * X
    data[5] *= 3
    assert solve(line, data, [prior("a", 1.0), prior("b", 1.0)], 0.02).values["a"] == pytest.approx(3.0, rel=0.05)


def test_the_start_does_not_matter():
    priors = [prior("a", 1.0), prior("b", 1.0)]
    near, far = (solve(line, 3.0 + 0.5 * X, priors, 0.05, {"a": a, "b": 0.2}).values for a in (3.0, 50.0))
    assert near["a"] == pytest.approx(far["a"], rel=1e-2)
