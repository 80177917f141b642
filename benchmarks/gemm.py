"""Matmuls of a model's linear layers: forward, data gradient and weight gradient against torch and OpenBLAS.

Shapes are as in costs/accounting.py: M tokens of a micro-batch, N output and K input features on one tensor-parallel
rank; a weight is (N, K). Weights are packed once, outside the timing, as the trainer packs them once per step; the weight gradient
packs both operands inside it. torch runs with its MKL at full width and, with --mkl both, as shipped; in FP32 numpy's OpenBLAS is
compared as well, with kernels of the CPU's full width. Left out: bias and GELU, so that all sides do exactly the matmul.

    python -m benchmarks gemm --recipe 124m --micro-batch-size 4
    python -m benchmarks gemm --recipe 124m --micro-batch-size 4 --fp32-matmul bf16x3      FP32 units, then bf16x3
    python -m benchmarks gemm --recipe 30b --tensor-model-parallel-size 4
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.costs import accounting
from fugaku_megatron.host import kernels

from . import driver, openblas, preloads, shapes
from .driver import DTYPES, Call, Case, relative_error

SAMPLE_ROWS = 16
TORCH_HERE = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model's shapes; both widths of torch's MKL by default."""
    driver.add_arguments(parser)
    parser.set_defaults(mkl=preloads.BOTH)
    parser.add_argument(
        "--fp32-matmul",
        default="ieee",
        choices=("ieee", "bf16x3"),
        help="bf16x3: each row is followed by one of FP32 operands in three BF16 parts",
    )


def matmul_shapes(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """(M, N, K) of every linear layer and the logits, each once."""
    run = shapes.run_of(options)
    tp = options.tensor_model_parallel_size
    records = [*accounting.layer_records(run, tp), *accounting.head_records(run, tp, tied=True)]
    return list(dict.fromkeys(r.gemm for r in records if r.gemm and r.name != "attention"))


def pack(weight: torch.Tensor, transposed: bool, parts: dict[str, bool]) -> torch.Tensor:
    """The weight packed for the target in use. parts: arguments of its matmul."""
    packed = torch.empty(
        kernels.packed_weight_size(*weight.shape, weight.dtype, transposed, **parts),
        dtype=torch.uint8,
    )
    kernels.pack_weight(weight, packed, transposed, **parts)
    return packed


def sampled_error(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference from left @ right in double on some rows, relative to the largest value there."""
    picked = torch.linspace(0, out.shape[0] - 1, min(SAMPLE_ROWS, out.shape[0])).long()
    return relative_error(out[picked], left[picked].double() @ right.double())


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Three matmuls of each layer. Raises ValueError for bf16x3 of other operands or on a target that cannot."""
    splits = options.fp32_matmul == "bf16x3"
    check(
        not splits or options.dtype == "fp32",
        f"--fp32-matmul bf16x3 is for FP32, and --dtype is {options.dtype}: leave it out",
    )
    check(
        not splits or kernels.has_bf16_arithmetic(),
        f"--fp32-matmul bf16x3: target {kernels.active()} has no BF16 arithmetic: leave it out",
    )
    for m, n, k in matmul_shapes(options):
        for bf16x3 in (False, True) if splits else (False,):
            yield from layer_cases(m, n, k, DTYPES[options.dtype], bf16x3)


def layer_cases(m: int, n: int, k: int, dtype: torch.dtype, bf16x3: bool = False) -> Iterator[Case]:
    """Forward, data gradient, weight gradient of one layer; torch writes into memory it already holds, as the kernels do."""
    name = " bf16x3" if bf16x3 else ""
    parts = {"bf16x3": True} if bf16x3 else {}
    torch.manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, dtype=torch.float32).to(dtype) for shape in ((m, k), (n, k), (m, n))
    )
    out = torch.empty(m, n, dtype=dtype)
    torch_out = torch.empty(m, n, dtype=dtype)
    in_openblas = openblas_matmul if dtype == torch.float32 else lambda *_: None
    forward = Call("linear_forward", x, weight, out, packed=pack(weight, False, parts), **parts)
    yield Case(
        op="forward" + name,
        calls=(forward,),
        baseline_run=lambda: torch.mm(x, weight.T, out=torch_out),
        error=lambda: sampled_error(out, x, weight.T),
        openblas_run=in_openblas(x, weight.T, torch_out),
        shape=(m, n, k),
    )
    dx = torch.empty(m, k, dtype=dtype)
    torch_dx = torch.empty(m, k, dtype=dtype)
    backward = Call(
        "linear_data_gradient", grad, weight, dx, packed=pack(weight, True, parts), **parts
    )
    yield Case(
        op="data_grad" + name,
        calls=(backward,),
        baseline_run=lambda: torch.mm(grad, weight, out=torch_dx),
        error=lambda: sampled_error(dx, grad, weight),
        openblas_run=in_openblas(grad, weight, torch_dx),
        shape=(m, n, k),
    )
    main = torch.zeros(n, k)
    yield Case(
        op="weight_grad" + name,
        calls=(Call("linear_weight_gradient", grad, x, main, **parts),),
        baseline_run=torch_weight_gradient(grad, x),
        error=lambda: sampled_error(main, grad.T, x),
        openblas_run=in_openblas(grad.T, x, torch.zeros(n, k), True),
        shape=(m, n, k),
    )


def openblas_matmul(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool = False
) -> Callable[[], None]:
    """Return a function that writes the matmul of left (m, k) and right (k, n) into out (m, n), or adds it."""
    return lambda: openblas.sgemm(left, right, out, add)


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
