"""Matmuls of a model's linear layers: forward, data gradient and weight gradient against torch and OpenBLAS.

Shapes are as in costs/layers.py: M tokens of a micro-batch, N output and K input features on one tensor-parallel
rank; a weight is (N, K). Weights are packed once, outside the timing, as the trainer packs them once per step; the weight gradient
packs both operands inside it. torch runs with its MKL at full width and, with --mkl both, as shipped; in FP32 numpy's OpenBLAS is
compared as well, with kernels of the CPU's full width. With --dtype int8 operands and results are BF16, the baseline is this
program's BF16 matmul, and quantization is timed as packing is; torch's own INT8 (torch_int8.py) is compared as well. Left out: bias
and GELU, so that all sides do exactly the matmul.

    python -m benchmarks gemm --recipe 124m --micro-batch-size 4
    python -m benchmarks gemm --recipe 124m --micro-batch-size 4 --fp32-matmul bf16x3      FP32 units, then bf16x3
    python -m benchmarks gemm --recipe 30b --tensor-model-parallel-size 4
    python -m benchmarks gemm --recipe 124m --micro-batch-size 4 --dtype int8              against BF16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.costs.layers import head_records, layer_records
from fugaku_megatron.host import kernels

from . import driver, openblas, preloads, shapes, torch_int8
from .driver import DTYPES, INT8, Call, Case, relative_error

SAMPLE_ROWS = 16
TORCH_HERE = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model's shapes; both widths of torch's MKL by default."""
    driver.add_arguments(parser, (*DTYPES, INT8))
    parser.set_defaults(mkl=preloads.BOTH)
    parser.add_argument(
        "--fp32-matmul",
        default="ieee",
        choices=("ieee", "bf16x3"),
        help="bf16x3: each row is followed by one of FP32 operands in three BF16 parts",
    )


def matmul_shapes(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Return (M, N, K) of every linear layer and the logits, each once."""
    run = shapes.run_of(options)
    records = [*layer_records(run), *head_records(run, tied=True)]
    return list(dict.fromkeys(r.gemm for r in records if r.gemm and r.name != "attention"))


def pack(weight: torch.Tensor, transposed: bool, parts: dict[str, bool]) -> torch.Tensor:
    """Pack the weight for the target in use. parts: arguments of its matmul."""
    packed = torch.empty(
        kernels.packed_weight_size(*weight.shape, weight.dtype, transposed, **parts),
        dtype=torch.uint8,
    )
    kernels.pack_weight(weight, packed, transposed, **parts)
    return packed


def sampled_error(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference from left @ right in double on some rows, relative to the largest value there."""
    picked = torch.linspace(0, out.shape[0] - 1, min(SAMPLE_ROWS, out.shape[0])).long()
    return relative_error(out[picked], left[picked].double() @ right.double())


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield three matmuls of each layer. ValueError for bf16x3 of other operands or on a target that cannot."""
    splits = options.fp32_matmul == "bf16x3"
    check(
        not splits or options.dtype == "fp32",
        f"--fp32-matmul bf16x3 is for FP32, and --dtype is {options.dtype}: leave it out",
    )
    check(
        not splits or kernels.has_bf16_arithmetic(),
        f"--fp32-matmul bf16x3: target {kernels.active()} has no BF16 arithmetic: leave it out",
    )
    every = [{}, {"bf16x3": True}] if splits else [{"int8": True} if options.dtype == INT8 else {}]
    for m, n, k in matmul_shapes(options):
        for parts in every:
            yield from layer_cases((m, n, k), DTYPES.get(options.dtype, torch.bfloat16), parts)


@dataclass(frozen=True)
class Operands:
    """Operands of one layer's three matmuls: x (m, k), weight (n, k) and the output's gradient (m, n)."""

    x: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def random(cls, shape: tuple[int, int, int], dtype: torch.dtype) -> Operands:
        m, n, k = shape
        torch.manual_seed(0)
        return cls(*(torch.randn(sizes).to(dtype) for sizes in ((m, k), (n, k), (m, n))))

    def calls(self, parts: dict[str, bool]) -> tuple[Call, Call, Call]:
        """Return forward, data gradient and weight gradient, the last argument of each the result. parts: how they multiply."""
        out = torch.empty_like(self.grad)
        dx = torch.empty_like(self.x)
        main = torch.zeros(self.weight.shape)
        return (
            Call(
                "linear_forward",
                self.x,
                self.weight,
                out,
                packed=pack(self.weight, False, parts),
                **parts,
            ),
            Call(
                "linear_data_gradient",
                self.grad,
                self.weight,
                dx,
                packed=pack(self.weight, True, parts),
                **parts,
            ),
            Call("linear_weight_gradient", self.grad, self.x, main, **parts),
        )

    def factors(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Return the two matrices that each of the three multiplies."""
        return (self.x, self.weight.T), (self.grad, self.weight), (self.grad.T, self.x)

    def torch_runs(self) -> tuple[Callable[[], object], ...]:
        """Return the same in torch, which writes into its own memory, as the kernels do."""
        out = torch.empty_like(self.grad)
        dx = torch.empty_like(self.x)
        return (
            lambda: torch.mm(self.x, self.weight.T, out=out),
            lambda: torch.mm(self.grad, self.weight, out=dx),
            torch_weight_gradient(self.grad, self.x),
        )


def layer_cases(
    shape: tuple[int, int, int], dtype: torch.dtype, parts: dict[str, bool]
) -> Iterator[Case]:
    """Yield forward, data gradient, weight gradient of one layer."""
    operands = Operands.random(shape, dtype)
    calls = operands.calls(parts)
    int8 = "int8" in parts
    baselines = [call.run for call in operands.calls({})] if int8 else list(operands.torch_runs())
    names = ("forward", "data_grad", "weight_grad")
    for name, call, baseline, (left, right) in zip(
        names, calls, baselines, operands.factors(), strict=True
    ):
        result = call.args[2]
        added = name == "weight_grad"
        yield Case(
            op=f"{name} bf16x3" if "bf16x3" in parts else name,
            calls=(call,),
            baseline="our BF16" if int8 else driver.TORCH,
            baseline_run=baseline,
            error=partial(sampled_error, result, left, right),
            rivals=rivals(left, right, torch.zeros(result.shape), added, parts),
            shape=shape,
        )


def rivals(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool, parts: dict[str, bool]
) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return other libraries' matmuls of left (m, k) and right (k, n), which write into out (m, n) or add to it."""
    if "int8" in parts:
        return {
            name: partial(prepare, left, right, out, is_weight=not add)
            for name, prepare in torch_int8.RIVALS.items()
        }
    if left.dtype == torch.float32:
        return {driver.OPENBLAS: lambda: partial(openblas.sgemm, left, right, out, add)}
    return {}


def torch_weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> Callable[[], None]:
    """Return a function that adds grad^T x to a float32 gradient. grad (m, n), x (m, k)."""
    main = torch.zeros(grad.shape[1], x.shape[1])
    half = torch.empty(grad.shape[1], x.shape[1], dtype=x.dtype)

    def run() -> None:
        if x.dtype == torch.float32:
            torch.addmm(main, grad.T, x, out=main)
        else:
            main.add_(torch.mm(grad.T, x, out=half))

    return run


measure, text = driver.family(cases)
