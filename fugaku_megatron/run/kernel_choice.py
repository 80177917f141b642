"""Kernels for each operation family, chosen by measurement if asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..comm.base import Comm
from ..config.run_config import RunConfig
from ..costs.plan import Plan
from ..host import kernels
from ..nn.ops import FAMILIES, Int8, Ops
from .kernel_timing import kernel_table, measure_kernels


class Choice(NamedTuple):
    """Backend of each operation family, and the log's lines about the choice."""

    backends: dict[str, str]
    lines: list[str]


def build_ops(run: RunConfig, backends: Mapping[str, str], library: Any = kernels) -> Ops:
    """library: the C++ kernels, or a profiler around them"""
    system = run.system
    int8 = None
    if system.int8:
        int8 = Int8(system.int8_wgrad, system.int8_head, system.int8_stochastic_rounding)
    return Ops.build(
        backends,
        fp16_sum_length=system.fp16_accumulation_chunk or 0,
        bf16x3=system.splits_fp32,
        int8=int8,
        keep_packed_weights=system.cache_packed_weights,
        kernels=library,
    )


def choose_kernels(plan: Plan, world: Comm, saved: dict[str, str] | None = None) -> Choice:
    """Choose every family's backend, the same on all ranks. Collective.

    saved: the checkpoint's choice, which an automatic choice keeps: other kernels have other last bits.
    """
    choice = _choose_backends(plan, world, saved)
    if plan.config.model.attn_logit_softcapping is not None:
        line = "kernels: attention torch, which soft-caps the scores"
        choice = Choice({**choice.backends, "attention": "torch"}, [*choice.lines, line])
    reasons = [*_native_matmuls(plan.config)]
    if not reasons:
        return choice
    lines = [f"kernels: gemm native, {reason}" for reason in reasons]
    return Choice({**choice.backends, "gemm": "native"}, choice.lines + lines)


def _native_matmuls(run: RunConfig) -> Iterator[str]:
    if run.system.splits_fp32:
        yield (
            "each FP32 operand as three BF16 numbers, six BF16 matmuls added up in FP32 "
            "(faster than FP32 units on AMX only)"
        )
    elif run.system.int8:
        yield f"{run.system.int8_matmuls} in INT8"
    elif length := run.system.fp16_accumulation_chunk:
        yield f"partial sums of {length} terms in FP16, added up in FP32"
    if run.lora.base_in_int8:
        yield "frozen weights of linear layers stored in INT8"


def _choose_backends(plan: Plan, world: Comm, saved: dict[str, str] | None) -> Choice:
    run = plan.config
    requested = run.system.kernels
    if requested == "auto" and saved:
        names = ", ".join(f"{family} {name}" for family, name in saved.items())
        return Choice(saved, [f"kernels: as saved, {names}"])
    if requested != "auto":
        line = f"kernels: {requested} (instruction set {kernels.instruction_set()})"
        return Choice(dict.fromkeys(FAMILIES, requested), [line])
    measured = measure_kernels(run)
    title = f"kernels: auto, forward and backward on this run's shapes, rank 0 (instruction set {kernels.instruction_set()})"
    backends = world.broadcast_object({t.family: t.faster for t in measured})
    return Choice(backends, [title, *kernel_table(measured)])
