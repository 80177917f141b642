"""Kernels of the report: agreement with the reference, and rates."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fugaku_megatron.host import kernels
from fugaku_megatron.report import (
    context,
    findings,
    kernel_rates,
)
from tests.checks.reports import HEALTHY
from tests.file_damage import changed

pytestmark = pytest.mark.unit


def test_every_kernel_agrees_with_the_reference_by_any_number_of_threads():
    torch.set_num_threads(1)
    rows = kernel_rates.compared()
    assert all(row["good"] for row in rows) and len(rows) > 35
    assert {row["kernel"] for row in rows} >= {
        "linear_forward",
        "attention_backward",
        "adamw",
        "cross_entropy_backward",
    }
    torch.set_num_threads(2)
    assert [row["checksum"] for row in kernel_rates.compared()] == [row["checksum"] for row in rows]
    torch.set_num_threads(1)


def test_a_kernel_that_computes_something_else_is_found(monkeypatch):
    real = kernels.activate

    def wrong(x, bias, y):
        real(x, bias, y)
        if kernels.active() != "reference":
            y.view(-1)[7] += 0.01

    monkeypatch.setattr(kernels, "activate", wrong)
    rows = kernel_rates.compared()
    assert [row["kernel"] for row in rows if not row["good"]][0] == "activate"
    found = findings.findings(changed(HEALTHY, "kernels/checks", rows))
    assert (
        found[0]["severe"]
        and "activate" in found[0]["measured"]
        and "do not train" in found[0]["remedy"]
    )


def test_a_nan_is_a_difference():
    assert kernel_rates.difference([torch.tensor([float("nan")])], [torch.ones(1)]) == float("inf")
    assert kernel_rates.difference([torch.tensor([1.5, 4.0])], [torch.tensor([1.0, 4.0])]) == 0.125


def test_rates_are_bytes_over_time(monkeypatch):
    monkeypatch.setattr(
        kernel_rates,
        "best_seconds",
        lambda calls, rounds: [call() for call in calls] and 1e-3,
    )
    rows = kernel_rates.elementwise_rates(kernel_rates.Sizes(rows=64, cols=32), 0.01, 1)
    assert {row["kernel"] for row in rows} == set(kernel_rates.ELEMENTWISE)
    activate = next(row for row in rows if row["kernel"] == "activate")
    assert activate["gbs"] == pytest.approx(4 * (2 * 64 + 1) * 32 / 1e-3 / 1e9)
    assert activate["of_triad"] == pytest.approx(activate["gbs"] / 0.01)


def test_matmul_sizes_fit_into_the_time_by_the_clock(monkeypatch):
    """Time matmuls of a machine whose threads wait 10 ms at every call."""
    monkeypatch.setattr(kernel_rates, "matmul_seconds", lambda n: 0.01 + 2 * n**3 / 1e11)
    sizes = partial(kernel_rates.affordable_sizes, context.Scale())
    assert [len(sizes(seconds)) for seconds in (1e4, 400.0, 100.0)] == [5, 1, 0]
    assert len(sizes(100.0, least=2)) == 2
