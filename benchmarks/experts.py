"""A layer's experts: matmuls in one call against the dense rate and against torch, routing, order and gates against torch.

Each row of a matmul is one comparison, in turn: with our dense matmul of as many FLOPs, whose ratio is the part of the dense rate
that the grouped call has, with torch's matmul for each expert, and with torch._grouped_mm where it exists and takes the case. All
experts have --rows rows, or one of them has half of all rows. Weights are packed inside the timing. The last rows are the choice of
a token's experts, pairs in the order of the experts, rows there and back, and the gate times the scores.

    python -m benchmarks experts --recipe qwen3-30b-a3b --dtype bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.config.fields import check
from fugaku_megatron.config.run_config import ModelConfig
from fugaku_megatron.nn.ops.experts import kind_of_scores
from fugaku_megatron.nn.parameter import row_groups

from . import driver, shapes
from .driver import DTYPES, Call, Case
from .gemm import sampled_error
from .rowwise import compare, random

TORCH_HERE = True
LOADS = ("even", "skewed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, the number of experts and the rows of each."""
    driver.add_arguments(parser)
    parser.set_defaults(recipe="qwen3-30b-a3b")
    parser.add_argument(
        "--experts",
        type=int,
        default=32,
        help="experts (default: %(default)s, whose gradients fit into memory)",
    )
    parser.add_argument(
        "--rows", type=int, default=64, help="mean rows of an expert (default: %(default)s)"
    )
    parser.add_argument(
        "--load",
        default="both",
        choices=(*LOADS, "both"),
        help="even, or half of all rows for one expert",
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """One of a layer's two matmuls for all experts. x (n, k), grad (n, o), weight (e, o, k), counts of n rows by expert."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    counts: tuple[int, ...]

    @staticmethod
    def of(n: int, k: int, o: int, counts: tuple[int, ...], dtype: torch.dtype) -> Work:
        """Return work with random tensors."""
        torch.manual_seed(0)
        x, grad, weight = (
            torch.randn(shape).to(dtype) for shape in ((n, k), (n, o), (len(counts), o, k))
        )
        return Work(x=x, grad=grad, weight=weight, counts=counts)

    def each(self, one: Callable[[int, slice], object]) -> Callable[[], None]:
        """Return a function that calls one(expert, its rows) for all experts."""

        def run() -> None:
            for expert, rows in row_groups(self.counts):
                one(expert, rows)

        return run

    def in_torch(self, op: str, out: Tensor) -> Callable[[], None]:
        """Return torch's matmul for each expert, into memory that it already has."""
        x = self.x
        grad = self.grad
        weight = self.weight
        if op == "forward":
            return self.each(lambda e, rows: torch.mm(x[rows], weight[e].T, out=out[rows]))
        if op == "data_grad":
            return self.each(lambda e, rows: torch.mm(grad[rows], weight[e], out=out[rows]))
        if x.dtype == torch.float32:
            return self.each(lambda e, rows: torch.addmm(out[e], grad[rows].T, x[rows], out=out[e]))
        return self.each(lambda e, rows: out[e].add_(grad[rows].T @ x[rows]))

    def in_grouped_mm(self, op: str, out: Tensor) -> Callable[[], object] | None:
        """Return torch._grouped_mm; None where it is missing, or does not take the case."""
        ends = torch.tensor(self.counts).cumsum(0).int()
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: torch._grouped_mm(self.x, self.weight.transpose(1, 2), offs=ends),
            "data_grad": lambda: torch._grouped_mm(self.grad, self.weight, offs=ends),
            "weight_grad": lambda: out.add_(torch._grouped_mm(self.grad.T, self.x, offs=ends)),
        }
        try:
            calls[op]()
        except (AttributeError, RuntimeError):
            return None
        return calls[op]

    def dense(self, op: str, out: Tensor) -> Call:
        """Return one matmul of as many FLOPs with one weight, or gradient."""
        operands = {
            "forward": (self.x, self.weight[0], out),
            "data_grad": (self.grad, self.weight[0], out),
            "weight_grad": (self.grad, self.x, out[0] if op == "weight_grad" else out),
        }[op]
        return Call(
            {
                "forward": "linear_forward",
                "data_grad": "linear_data_gradient",
                "weight_grad": "linear_weight_gradient",
            }[op],
            *operands,
        )

    def grouped(self, op: str, out: Tensor) -> Call:
        """Return the call that is measured."""
        counts = torch.tensor(self.counts)
        if op == "weight_grad":
            return Call("grouped_linear_weight_gradient", self.grad, self.x, counts, out)
        if op == "forward":
            return Call("grouped_linear_forward", self.x, self.weight, counts, out)
        return Call("grouped_linear_data_gradient", self.grad, self.weight, counts, out)

    def out(self, op: str) -> Tensor:
        """Make memory for the result of `op`: (n, o), (n, k), or zeros (e, o, k) in FP32."""
        if op == "weight_grad":
            return torch.zeros(self.weight.shape)
        return torch.empty_like(self.grad if op == "forward" else self.x)

    def error(self, op: str, out: Tensor) -> float:
        """Return `sampled_error` of the last expert."""
        expert, rows = list(row_groups(self.counts))[-1]
        x = self.x[rows]
        grad = self.grad[rows]
        weight = self.weight[expert]
        if op == "weight_grad":
            return sampled_error(out[expert], grad.T, x)
        return sampled_error(out[rows], *((x, weight.T) if op == "forward" else (grad, weight)))


def counts_of(options: argparse.Namespace, load: str) -> tuple[int, ...]:
    """Return the rows of each expert."""
    e = options.experts
    total = options.experts * options.rows
    if load == "even" or e == 1:
        return tuple(repeat(options.rows, e))
    others = [
        (total - total // 2) * (i + 1) // (e - 1) - (total - total // 2) * i // (e - 1)
        for i in range(e - 1)
    ]
    return (*others[: e // 2], total // 2, *others[e // 2 :])


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield three matmuls of both linear layers of the experts, each against all opponents, then what is around them.

    ValueError for a model without experts.
    """
    model = shapes.run_of(options).model
    check(
        model.num_experts is not None,
        f"--recipe {options.recipe} has no experts: pass one that has, such as qwen3-30b-a3b",
    )
    check(
        options.experts > 0 and options.rows > 0,
        f"--experts {options.experts} and --rows {options.rows}: pass 1 or more",
    )
    h = model.hidden_size
    f = model.moe_ffn_hidden_size or 0
    for load in LOADS if options.load == "both" else (options.load,):
        for k, o in ((h, 2 * f), (f, h)):
            work = Work.of(
                options.experts * options.rows,
                k,
                o,
                counts_of(options, load),
                DTYPES[options.dtype],
            )
            for op in ("forward", "data_grad", "weight_grad"):
                yield from op_cases(work, op, load)
    k = min(model.moe_router_topk, options.experts)
    yield routing(options.experts * options.rows // k, options.experts, k, model)
    yield from order(
        options.experts * options.rows // k, options.experts, k, h, DTYPES[options.dtype]
    )
    yield scaled_gate(options.experts * options.rows, f, DTYPES[options.dtype])


def op_cases(work: Work, op: str, load: str) -> Iterator[Case]:
    """Yield one matmul against dense, torch, and torch._grouped_mm."""
    out = work.out(op)
    theirs = work.out(op)
    opponents = {
        "dense": work.dense(op, theirs).run,
        "torch": work.in_torch(op, theirs),
        "_grouped_mm": work.in_grouped_mm(op, theirs),
    }
    for name, run in opponents.items():
        if run is not None:
            out.zero_()
            yield Case(
                op=op if load == "even" else f"{op}_skewed",
                calls=(work.grouped(op, out),),
                baseline_run=run,
                baseline=name,
                error=lambda: work.error(op, out),
                details={"load": load},
                shape=(len(work.x), *work.weight.shape[1:], len(work.counts)),
            )


def routing(rows: int, e: int, k: int, model: ModelConfig) -> Case:
    """Return the case of experts and scores of random logits (rows, e), without bias and groups, and the gradient of the logits."""
    kind = kind_of_scores(model)
    logits = torch.randn(rows, e)
    dscores = torch.randn(rows, k)
    scores = torch.empty(rows, k)
    chosen = torch.empty(rows, k, dtype=torch.int64)
    dlogits = torch.empty(rows, e)

    def eager(logits: Tensor) -> Tensor:
        if kind == "softmax_of_chosen":
            return torch.softmax(logits.topk(k).values, -1)
        own = (
            (torch.sigmoid(logits) if kind == "sigmoid" else torch.softmax(logits, -1))
            .topk(k)
            .values
        )
        return own / own.sum(-1, keepdim=True) if kind == "sigmoid" and k > 1 else own

    calls = (
        Call("route", logits, None, scores, chosen, kind),
        Call(
            "route_backward",
            dscores,
            scores if kind == "softmax_of_chosen" else logits,
            chosen,
            dlogits,
            kind,
        ),
    )
    return compare(
        "route", (rows, e, k), calls, (dlogits,), eager, (logits,), (dscores,), dtype="fp32"
    )


def order(rows: int, e: int, k: int, h: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the order of pairs of random experts, rows (rows, h) in this order, and the sum of each token's."""
    chosen = torch.randint(e, (rows, k))
    (x,) = random(dtype, 1, rows, h)
    counts = torch.empty(e, dtype=torch.int64)
    pairs = torch.empty(rows * k, dtype=torch.int64)
    places = torch.empty_like(chosen)
    numbers = chosen.flatten()
    there = x.new_empty(rows * k, h)
    back = torch.empty_like(x)

    def eager() -> Tensor:
        torch.bincount(numbers, minlength=e)
        sorted_numbers = numbers.argsort(stable=True)
        return torch.empty_like(numbers).scatter_(0, sorted_numbers, torch.arange(rows * k))

    yield Case(
        op="sort_pairs",
        shape=(rows, k, e),
        calls=(Call("sort_pairs", chosen, counts, pairs, places),),
        baseline_run=eager,
        error=lambda: float((places.flatten() - eager()).abs().max()),
        details={"dtype": "int64"},
    )
    Call("sort_pairs", chosen, counts, pairs, places).run()
    yield Case(
        op="permute",
        shape=(rows * k, h),
        calls=(Call("permute", x, pairs, there, k),),
        baseline_run=lambda: x[pairs // k],
        error=lambda: float((there - x[pairs // k]).abs().max()),
    )
    Call("permute", x, pairs, there, k).run()
    yield Case(
        op="unpermute",
        shape=(rows * k, h),
        calls=(Call("unpermute", there, places, back),),
        baseline_run=lambda: F.embedding_bag(places, there, mode="sum"),
        error=lambda: driver.relative_error(back, there.double()[places].sum(1)),
    )


def scaled_gate(rows: int, f: int, dtype: torch.dtype) -> Case:
    """Return the case of silu(gate) up times a factor of each row, and all gradients; gate and up (rows, f)."""
    x = torch.randn(rows, 2, f).to(dtype)
    (dy,) = random(dtype, 1, rows, f)
    factors = torch.rand(rows)
    dfactors = torch.empty(rows)
    y = torch.empty_like(dy)
    dx = torch.empty_like(x)
    calls = (
        Call("scaled_gate", x, factors, y),
        Call("scaled_gate_backward", dy, x, factors, dx, dfactors, y),
    )
    return compare(
        "scaled_gate",
        (rows, f),
        calls,
        (*dx.unbind(1), dfactors),
        lambda gate, up, factors: (F.silu(gate) * up * factors.unsqueeze(1)).to(gate.dtype),
        (*x.unbind(1), factors),
        (dy,),
    )


measure, text = driver.family(cases)
