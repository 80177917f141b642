"""Measures the rounding error of FP16 and BF16 matmuls, with sums in FP32 and in FP16, and of --fp32-matmul bf16x3.

    python -m tools.gemm_error                 (some seconds; the tables of docs/numerics.md)
    python -m tools.gemm_error --rows 16 --depth 256 --chunks 16 64
    .arm/python -m tools.gemm_error            the same on an emulated A64FX (make arm-ext)

It multiplies random matrices like the matrices of training with the kernels (the running target if it sums in FP16, else the portable one,
which has the same bits), and compares with FP64 on the same rounded operands. The error is the root mean square of the difference
over the root mean square of the exact result. A second table compares bf16x3 with FP32 units, on every target here that
multiplies BF16, emulated tiles among them. Left out: what it does to a loss.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from fugaku_megatron.cli import program
from fugaku_megatron.config.fields import check
from fugaku_megatron.config.system import MAX_FP16_SUM_LENGTH
from fugaku_megatron.host import kernels
from fugaku_megatron.text.table import pipe_table

CHUNKS = (16, 32, 64, 128, 256)
DEPTHS = (768, 3072, 7168, 28672)  # of sums in layers of 124M and 30B
FP32_CASES = 3  # the first of CASES: what follows are scales of FP16's gradients


@dataclass(frozen=True, kw_only=True)
class Case:
    """One matmul: (rows, depth) of standard deviation `left` times (depth, rows) of `right`; `outliers`: one column of 256 of the
    left factor is that much larger, as activations of trained models have."""

    name: str
    left: float
    right: float
    outliers: float = 1.0
    mean: float = 0.0  # of the left factor, in standard deviations

    def operands(self, rows: int, depth: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        left = torch.randn(rows, depth, generator=generator) + self.mean
        left[:, ::256] *= self.outliers
        return left * self.left, torch.randn(depth, rows, generator=generator) * self.right


CASES = (
    Case(name="forward: activations 1, weights 0.02", left=1.0, right=0.02),
    Case(name="the same, activations of mean 1", left=1.0, right=0.02, mean=1.0),
    Case(name="the same, outliers of 50", left=1.0, right=0.02, outliers=50.0),
    Case(name="data gradient: 1e-2 scaled, weights 0.02", left=1e-2, right=0.02),
    Case(name="data gradient: 1e-4, scale too low", left=1e-4, right=0.02),
    Case(name="weight gradient: 1e-2 scaled, activations 1", left=1e-2, right=1.0),
    Case(name="weight gradient: 1e3, scale too high", left=1e3, right=30.0),
)


def error(out: Tensor, exact: Tensor) -> float:
    """Return the difference's root mean square over the exact values' root mean square; inf or nan if a sum is not finite."""
    return float((out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def matmul(a: Tensor, b: Tensor, chunk: int = 0, bf16x3: bool = False) -> Tensor:
    """Return a b as (m, n) float32."""
    out = torch.empty(a.shape[0], b.shape[1])
    kernels.gemm(a, b, out, fp16_chunk=chunk, bf16x3=bf16x3)
    return out


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of one case: rounding the operands, rounding the result, FP32 sums, FP16 sums by chunk; chunks whose sums are not finite."""

    case: Case
    bf16_operands: float
    fp16_operands: float
    fp16_result: float
    fp32_sums: float
    chunks: dict[int, float]
    overflows: set[int]


def measure(case: Case, rows: int, depth: int, chunks: tuple[int, ...]) -> Errors:
    """Multiply one case in every format and return the errors."""
    left, right = case.operands(rows, depth)
    true = left.double() @ right.double()
    a = left.half()
    b = right.half()
    exact = a.double() @ b.double()
    outputs = {chunk: matmul(a, b, chunk) for chunk in chunks}
    in_bf16 = left.bfloat16().double() @ right.bfloat16().double()
    return Errors(
        case=case,
        bf16_operands=error(in_bf16, true),
        fp16_operands=error(exact, true),
        fp16_result=error(exact.half(), exact),
        fp32_sums=error(matmul(a, b), exact),
        chunks={chunk: error(out, exact) for chunk, out in outputs.items()},
        overflows={chunk for chunk, out in outputs.items() if not bool(out.isfinite().all())},
    )


def cell(errors: Errors, chunk: int) -> str:
    return "overflow" if chunk in errors.overflows else f"{errors.chunks[chunk]:.1e}"


def table(cases: list[Errors], chunks: tuple[int, ...]) -> list[str]:
    """Return the table of all cases."""
    head = [
        "matmul",
        "BF16 operands",
        "FP16 operands",
        "FP16 result",
        "FP32 sums",
        *(f"chunk {chunk}" for chunk in chunks),
    ]
    lines = [head]
    for e in cases:
        fixed = [
            f"{value:.1e}"
            for value in (e.bf16_operands, e.fp16_operands, e.fp16_result, e.fp32_sums)
        ]
        lines.append([e.case.name, *fixed, *(cell(e, chunk) for chunk in chunks)])
    return pipe_table(lines)


def split_errors(case: Case, rows: int, depth: int) -> list[float]:
    """Return the errors of FP32 units and of bf16x3 on the target in use."""
    left, right = case.operands(rows, depth)
    exact = left.double() @ right.double()
    return [error(matmul(left, right, bf16x3=parts), exact) for parts in (False, True)]


def split_table(rows: int, depths: tuple[int, ...]) -> list[str]:
    """Return the errors of FP32 units and bf16x3 on every target that has BF16 arithmetic."""
    lines = [["matmul", "terms"]]
    cases = [(case, depth) for case in CASES[:FP32_CASES] for depth in depths]
    lines += [[case.name, str(depth)] for case, depth in cases]
    for name in kernels.runnable_targets(emulated=True):
        with kernels.target(name):
            if kernels.has_bf16_arithmetic():
                lines[0] += [f"FP32 units, {name}", f"bf16x3, {name}"]
                for line, (case, depth) in zip(lines[1:], cases, strict=True):
                    line += [f"{value:.1e}" for value in split_errors(case, rows, depth)]
    return pipe_table(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=64, help="rows and columns of the result")
    parser.add_argument("--depth", type=int, default=4096, help="terms of a sum, K")
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=CHUNKS, help="terms summed in FP16"
    )


def main(options: argparse.Namespace) -> int:
    """Measure and print. ValueError, one line, for a user's mistake."""
    chunks = tuple(options.chunks)
    check(
        min(options.rows, options.depth, *chunks) > 0,
        "--rows, --depth and --chunks: pass numbers above 0",
    )
    check(
        max(chunks) <= MAX_FP16_SUM_LENGTH,
        f"--chunks {max(chunks)}: pass numbers from 1 to {MAX_FP16_SUM_LENGTH}",
    )
    name = kernels.active() if kernels.has_fp16_arithmetic() else "portable"
    kernels.flush_denormals(True)  # as a run does
    with kernels.target(name):
        print(
            f"measured: error relative to FP64, {options.rows} x {options.rows} sums of {options.depth} terms, target {name}"
        )
        for line in table(
            [measure(case, options.rows, options.depth, chunks) for case in CASES], chunks
        ):
            print(line)
    print("\nmeasured: error of FP32 operands relative to FP64")
    for line in split_table(options.rows, DEPTHS):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(program.start("gemm_error", sys.modules[__name__], sys.argv[1:]))
