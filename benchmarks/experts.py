"""Matmuls of a layer's experts in one call: forward, data gradient and weight gradient against the dense rate and against torch.

Each row is one comparison, in turn: with our dense matmul of as many FLOPs, whose ratio is the part of the dense rate that the
grouped call has, with torch's matmul for each expert, and with torch._grouped_mm where it exists and takes the case. All experts
have --rows rows, or one of them has half of all rows. Weights are packed inside the timing.

    python -m benchmarks experts --recipe qwen3-30b-a3b --dtype bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fugaku_megatron.config.checks import check
from fugaku_megatron.nn.torch_blocks import parts

from . import driver, shapes
from .driver import DTYPES, Call, Case
from .gemm import sampled_error

TORCH_HERE = True
LOADS = ("even", "skewed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model's experts, how many of them, and rows of each."""
    driver.add_arguments(parser)
    parser.set_defaults(recipe="qwen3-30b-a3b")
    parser.add_argument("--experts", type=int, default=32, help="experts (default: %(default)s, whose gradients fit into memory)")
    parser.add_argument("--rows", type=int, default=64, help="mean rows of an expert (default: %(default)s)")
    parser.add_argument("--load", default="both", choices=(*LOADS, "both"), help="even, or half of all rows for one expert")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One of a layer's two matmuls for all experts. x (n, k), grad (n, o), weight (e, o, k), counts of n rows by expert."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    counts: tuple[int, ...]

    @staticmethod
    def of(n: int, k: int, o: int, counts: tuple[int, ...], dtype: torch.dtype) -> Work:
        """Of random tensors."""
        torch.manual_seed(0)
        x, grad, weight = (torch.randn(shape).to(dtype) for shape in ((n, k), (n, o), (len(counts), o, k)))
        return Work(x=x, grad=grad, weight=weight, counts=counts)

    def each(self, one: Callable[[int, slice], object]) -> Callable[[], None]:
        """What calls one(expert, its rows) of all experts."""
        def run() -> None:
            for expert, rows in parts(self.counts):
                one(expert, rows)

        return run

    def in_torch(self, op: str, out: Tensor) -> Callable[[], None]:
        """torch's matmul for each expert, into memory that it already has."""
        x, grad, weight = self.x, self.grad, self.weight
        if op == "forward":
            return self.each(lambda e, rows: torch.mm(x[rows], weight[e].T, out=out[rows]))
        if op == "data_grad":
            return self.each(lambda e, rows: torch.mm(grad[rows], weight[e], out=out[rows]))
        if x.dtype == torch.float32:
            return self.each(lambda e, rows: torch.addmm(out[e], grad[rows].T, x[rows], out=out[e]))
        return self.each(lambda e, rows: out[e].add_(grad[rows].T @ x[rows]))

    def in_grouped_mm(self, op: str, out: Tensor) -> Callable[[], object] | None:
        """torch._grouped_mm; None where it is missing, or does not take the case."""
        ends = torch.tensor(self.counts).cumsum(0).int()
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: torch._grouped_mm(self.x, self.weight.transpose(1, 2), offs=ends),
            "data_grad": lambda: torch._grouped_mm(self.grad, self.weight, offs=ends),
            "weight_grad": lambda: out.add_(torch._grouped_mm(self.grad.T, self.x, offs=ends))}
        try:
            calls[op]()
        except (AttributeError, RuntimeError):
            return None
        return calls[op]

    def dense(self, op: str, out: Tensor) -> Call:
        """One matmul of as many FLOPs with one weight, or gradient."""
        operands = {"forward": (self.x, self.weight[0], out), "data_grad": (self.grad, self.weight[0], out),
                    "weight_grad": (self.grad, self.x, out[0] if op == "weight_grad" else out)}[op]
        return Call({"forward": "linear_forward", "data_grad": "linear_data_gradient", "weight_grad": "linear_weight_gradient"}[op],
                    *operands)

    def grouped(self, op: str, out: Tensor) -> Call:
        """The call that is measured."""
        counts = torch.tensor(self.counts)
        if op == "weight_grad":
            return Call("grouped_linear_weight_gradient", self.grad, self.x, counts, out)
        if op == "forward":
            return Call("grouped_linear_forward", self.x, self.weight, counts, out)
        return Call("grouped_linear_data_gradient", self.grad, self.weight, counts, out)

    def out(self, op: str) -> Tensor:
        """Memory for the result of `op`: (n, o), (n, k), or zeros (e, o, k) in FP32."""
        if op == "weight_grad":
            return torch.zeros(self.weight.shape)
        return torch.empty_like(self.grad if op == "forward" else self.x)

    def error(self, op: str, out: Tensor) -> float:
        """`sampled_error` of the last expert."""
        expert, rows = list(parts(self.counts))[-1]
        x, grad, weight = self.x[rows], self.grad[rows], self.weight[expert]
        if op == "weight_grad":
            return sampled_error(out[expert], grad.T, x)
        return sampled_error(out[rows], *((x, weight.T) if op == "forward" else (grad, weight)))


def counts_of(options: argparse.Namespace, load: str) -> tuple[int, ...]:
    """Rows of each expert."""
    e, total = options.experts, options.experts * options.rows
    if load == "even" or e == 1:
        return (options.rows,) * e
    others = [(total - total // 2) * (i + 1) // (e - 1) - (total - total // 2) * i // (e - 1) for i in range(e - 1)]
    return (*others[: e // 2], total // 2, *others[e // 2 :])


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Three matmuls of both linear layers of the experts, each against all opponents. ValueError for a model without experts."""
    model = shapes.run_of(options).model
    check(model.num_experts is not None, f"--recipe {options.recipe} has no experts: pass one that has, such as qwen3-30b-a3b")
    check(options.experts > 0 and options.rows > 0, f"--experts {options.experts} and --rows {options.rows}: pass 1 or more")
    h, f = model.hidden_size, model.moe_ffn_hidden_size or 0
    for load in LOADS if options.load == "both" else (options.load,):
        for k, o in ((h, 2 * f), (f, h)):
            work = Work.of(options.experts * options.rows, k, o, counts_of(options, load), DTYPES[options.dtype])
            for op in ("forward", "data_grad", "weight_grad"):
                yield from op_cases(work, op, load)


def op_cases(work: Work, op: str, load: str) -> Iterator[Case]:
    """One matmul against dense, torch, and torch._grouped_mm."""
    out, theirs = work.out(op), work.out(op)
    opponents = {"dense": work.dense(op, theirs).run, "torch": work.in_torch(op, theirs),
                 "_grouped_mm": work.in_grouped_mm(op, theirs)}
    for name, run in opponents.items():
        if run is not None:
            out.zero_()
            yield Case(op=op if load == "even" else f"{op}_skewed", calls=(work.grouped(op, out),), baseline_run=run, baseline=name,
                       error=lambda: work.error(op, out), details={"load": load},
                       shape=(len(work.x), *work.weight.shape[1:], len(work.counts)))


measure, text = driver.family(cases)
