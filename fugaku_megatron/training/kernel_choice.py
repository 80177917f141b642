"""Which backend runs each family of operations in this run: --kernels, the checkpoint's choice, or a measurement.

Left out: the measurement itself (`nn.autotune`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..comm.base import Comm
from ..host import kernels
from ..nn import autotune
from ..nn.ops import FAMILIES, Ops
from ..run.config import RunConfig
from ..run.layout import Layout
from .optim import PARAMETER_DTYPES


@dataclass(frozen=True)
class Choice:
    """A backend for each family of operations, and what the log says of it."""

    backends: dict[str, str]
    lines: list[str]


def build_ops(run: RunConfig, backends: Mapping[str, str], library: Any = kernels) -> Ops:
    """The run's operations on these backends. library: the C++ kernels, or what a profiler put around them."""
    return Ops.build(backends, fp16_chunk=run.system.fp16_accumulation_chunk or 0,
                     keep_packed_weights=run.system.cache_packed_weights, kernels=library)


def choose_kernels(run: RunConfig, layout: Layout, world: Comm, saved: dict[str, str] | None = None) -> Choice:
    """The backend of every family, the same on all ranks, with the log's lines. Collective.

    A resumed run keeps the automatic choice that it was `saved` with: other kernels have other last bits.
    """
    choice = _with_fp16_accumulation(run, _backends(run, layout, world, saved))
    if not run.numbers.abft:
        return choice
    line = f"kernels: gemm native, its products checked by checksums in layers {' '.join(run.numbers.abft)}"
    return Choice({**choice.backends, "gemm": "native"}, [*choice.lines, line])


def _backends(run: RunConfig, layout: Layout, world: Comm, saved: dict[str, str] | None) -> Choice:
    requested = run.system.kernels
    if requested == "auto" and saved:
        return Choice(saved, [f"kernels: as saved, {', '.join(f'{family} {name}' for family, name in saved.items())}"])
    if requested != "auto":
        return Choice(dict.fromkeys(FAMILIES, requested), [f"kernels: {requested} (instruction set {kernels.active()})"])
    timings = autotune.measure(run, layout.tp, PARAMETER_DTYPES[run.precision.name])
    return Choice(world.broadcast_object({t.family: t.faster for t in timings}),
                  [f"kernels: auto, forward and backward on this run's shapes, rank 0 (instruction set {kernels.active()})",
                   *autotune.table(timings)])


def _with_fp16_accumulation(run: RunConfig, choice: Choice) -> Choice:
    """The choice with products on the C++ kernels where linear layers sum in FP16: only they can."""
    chunk = run.system.fp16_accumulation_chunk
    if not chunk:
        return choice
    line = f"kernels: gemm native, sums of {chunk} products in FP16, their sums in FP32"
    return Choice({**choice.backends, "gemm": "native"}, [*choice.lines, line])
