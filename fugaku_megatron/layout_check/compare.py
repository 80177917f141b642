"""Comparison of the ranks' tensors with a reference, and tolerances from the rounding errors of the run's number formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..config.optimizer import MOMENTS
from ..config.run_config import RunConfig
from ..nn.model import OUTPUT, PREDICTION_EMBEDDINGS, WORD_EMBEDDINGS
from .points import (
    CHECKPOINT,
    FORWARD,
    GATHERED,
    KINDS,
    LOADED,
    LOCAL,
    MOMENT,
    SCALE,
    STATE,
    UPDATE,
    USED,
    Point,
    neighbour,
)
from .recorder import Piece

# Largest relative error of one rounding.
ROUNDOFFS = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12, "int8": 2.0**-8}
FACTOR = 32.0  # of the tolerance over the error of random roundings
OF_WEIGHTS = 8.0  # of their tolerance, because an update divides by the root of a second moment
OF_SQUARES = 2.0  # of the tolerance, because a square's relative error is twice its root's
OF_UPDATES = 4.0  # roundings of an update, the difference of two rounded weights, in both runs
WEIGHTS = (USED, UPDATE, GATHERED, CHECKPOINT, LOADED)
REROUTED = 4.0  # of the tolerance, for tokens that a rounding error sends to another expert

Reference = Mapping[Point, Tensor]


@dataclass(frozen=True)
class Tolerance:
    """Largest error of a tensor that rounding explains, relative to the tensor's largest element.

    FP32 sums of K products round K times, at random: the error is u sqrt(K). Rounded operands make a random error u in each
    product, whose sum has the error u. Each of L layers adds its error to the residual stream, forward and backward. The
    result is FACTOR (u_sum sqrt(K) + u_operand) sqrt(L).

    by_norm: compare Euclidean norms instead of single elements, because a rounding error may route a token to another expert
    computed: the tolerance if the optimizer stored its state in FP32
    """

    value: float
    by_norm: bool
    computed: float

    @staticmethod
    def of(run: RunConfig) -> Tolerance:
        """Derive the tolerance from the run's number formats, sizes and experts."""
        model = run.model
        names = [run.precision.name]
        if run.system.int8 or run.lora.base_in_int8:
            names.append("int8")
        if run.parallel.grad_reduce_in_bf16:
            names.append("bf16")
        optimizer = run.optimizer
        stored = [optimizer.main_params_dtype, optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype]
        computed = _value(run, names)
        value = _value(run, [*names, *stored])
        by_norm = bool(model.num_experts) and {*names, *stored} != {"fp32"}
        if by_norm:
            value *= REROUTED
            computed *= REROUTED
        return Tolerance(value, by_norm, computed)

    def of_kind(self, kind: str) -> float:
        return self.value * OF_WEIGHTS if kind in WEIGHTS else self.value

    def of_point(self, point: Point) -> float:
        """Return the tolerance of a tensor. The first scales of moments have the tolerance of gradients."""
        if point.kind == STATE:
            return ROUNDOFFS["fp32"]
        allowed = self.of_kind(point.kind)
        if point.kind == SCALE and point.iteration == 1:
            allowed = self.computed
        if point.kind in (SCALE, MOMENT) and point.name.startswith(MOMENTS[1]):
            allowed *= OF_SQUARES
        return allowed

    def of_update(self, update: Tensor, weight: Tensor) -> float:
        """Return the tolerance of an update, whose weight was rounded before and after it."""
        allowed = self.of_kind(UPDATE)
        largest = float(update.abs().max())
        if largest:
            rounding = OF_UPDATES * ROUNDOFFS["fp32"]
            allowed += rounding * (float(weight.abs().max()) + largest) / largest
        return allowed

    def error(self, found: Tensor, expected: Tensor, whole: Tensor) -> float:
        """Return the error of a piece relative to the tensor `whole`; infinite unless finite."""
        difference = (found - expected).double()
        if not bool(torch.isfinite(difference).all()):
            return math.inf
        if self.by_norm:
            largest = float(whole.double().square().mean().sqrt())
            error = float(difference.square().mean().sqrt()) if difference.numel() else 0.0
        else:
            largest = float(whole.abs().max())
            error = float(difference.abs().max()) if difference.numel() else 0.0
        if error == 0.0:
            return 0.0
        return error / largest if largest else math.inf


def _value(run: RunConfig, formats: Iterable[str]) -> float:
    model = run.model
    terms = max(model.hidden_size, model.seq_length, *model.mlp_widths)
    if model.has_delta_nets:  # the gradient of a head's decay sums over positions and the state
        state = model.linear_key_head_dim * model.linear_value_head_dim
        terms = max(terms, model.seq_length * state)
    rounding = ROUNDOFFS["fp32"] * math.sqrt(terms) + max(ROUNDOFFS[name] for name in formats)
    return FACTOR * rounding * math.sqrt(model.num_layers)


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from the reference.

    ranks: with wrong values; (): none
    found: difference in words, if it is not an error of values
    absent: elements on no rank, in words
    between: see `Piece`
    before: the tensor that it is computed from, in words
    """

    point: Point
    ranks: tuple[int, ...]
    error: float
    tolerance: float
    found: str = ""
    absent: str = ""
    between: str | None = None
    before: str = ""

    def line(self) -> str:
        """Return the difference in words, with the communication since the tensor before."""
        text = f"no rank: {self.absent}"
        if self.ranks:
            word = "rank" if len(self.ranks) == 1 else "ranks"
            error = f"error {self.error:.2g}, tolerance {self.tolerance:.2g}"
            text = f"{word} {' '.join(map(str, self.ranks))}: {self.found or error}"
            if self.absent:
                text += f", and {self.absent} are on no rank"
        return (
            f"first difference: {self.point}, on {text}; between {self.before}, which agrees, and this tensor: "
            f"{self.between or 'no communication'}"
        )


@dataclass
class Largest:
    """Number of tensors of one kind, and the one with the largest share of its tolerance."""

    tensors: set[Point] = field(default_factory=set)
    error: float = 0.0
    allowed: float = math.inf
    name: str = ""


@dataclass
class Comparison:
    """Errors of all tensors by kind.

    covered: elements of the reference that a rank has, by tensor
    outputs: names of the modules whose outputs were compared
    """

    tolerance: Tolerance
    kinds: dict[str, Largest] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    covered: dict[Point, Tensor] = field(default_factory=dict)
    outputs: set[str] = field(default_factory=set)

    @property
    def first(self) -> Difference | None:
        """First difference in the order of execution, with all ranks that have it."""
        if not self.differences:
            return None
        # Wrong values say more than elements on no rank.
        first = min(
            self.differences, key=lambda each: (each.point.order, not each.ranks, each.ranks)
        )
        same = [each for each in self.differences if each.point == first.point]
        ranks = tuple(sorted({rank for each in same for rank in each.ranks}))
        return replace(
            first,
            ranks=ranks,
            error=max(each.error for each in same),
            absent="".join(each.absent for each in same),
            before=neighbour(first.point, self.outputs),
        )

    def add(self, ranks: Sequence[Iterable[Piece]], reference: Reference) -> None:
        self.outputs |= {point.name for point in reference if point.kind == FORWARD}
        for rank, pieces in enumerate(ranks):
            for piece in pieces:
                if piece.point.kind != LOCAL:
                    self._compare((rank,), piece, reference)
        for members, piece in _summed(ranks):
            self._compare(members, piece, reference)

    def check_complete(self, reference: Reference) -> None:
        """Add a difference for every tensor of the reference that the ranks do not have as a whole."""
        for point, whole in reference.items():
            found = self.covered.get(point)
            covered = 0 if found is None else int(found.sum())
            if covered < whole.numel():
                words = f"{whole.numel() - covered} of its {whole.numel()} elements"
                self.differences.append(Difference(point, (), 0.0, 0.0, absent=words))

    def _compare(self, ranks: tuple[int, ...], piece: Piece, reference: Reference) -> None:
        whole = _counterpart(piece.point, reference)
        if whole is None:
            return
        error = math.inf
        words = f"shape {(*piece.shape,)} in place of {(*whole.shape,)}"
        if tuple(whole.shape) == tuple(piece.shape):
            words = ""
            error = self.tolerance.error(piece.values, whole[piece.index], whole)
            if piece.point in reference:
                covered = self.covered.setdefault(
                    piece.point, torch.zeros(piece.shape, dtype=torch.bool)
                )
                covered[piece.index] = True
        allowed = self.tolerance.of_point(piece.point)
        weight = _counterpart(piece.point._replace(kind=USED), reference)
        if piece.point.kind == UPDATE and weight is not None:
            allowed = self.tolerance.of_update(whole, weight)
        largest = self.kinds.setdefault(piece.point.kind, Largest())
        largest.tensors.add(piece.point)
        if error / allowed >= largest.error / largest.allowed:
            largest.error = error
            largest.allowed = allowed
            largest.name = str(piece.point)
        if error > allowed:
            self.differences.append(
                Difference(piece.point, ranks, error, allowed, words, between=piece.between)
            )

    def rows(self) -> list[str]:
        """Return the table's lines, one for each kind of tensors."""
        lines = []
        for kind in KINDS:
            if kind in self.kinds:
                largest = self.kinds[kind]
                lines.append(
                    f"  {kind:<30} {len(largest.tensors):>7}  {largest.error:>8.1e}  {largest.allowed:>8.1e}  "
                    f"{largest.name}"
                )
        return lines


def _counterpart(point: Point, reference: Reference) -> Tensor | None:
    """Return the reference's tensor; a tied copy has the word embedding's."""
    if point.kind == LOCAL:
        point = point.reduced
    found = reference.get(point)
    for copy in (OUTPUT, PREDICTION_EMBEDDINGS):
        if found is None and point.name.endswith(copy):
            found = reference.get(point._replace(name=point.name.replace(copy, WORD_EMBEDDINGS)))
    return found


def _summed(ranks: Sequence[Iterable[Piece]]) -> Iterable[tuple[tuple[int, ...], Piece]]:
    """Yield the sums over all ranks of the gradients before their sums, with the ranks."""
    sums: dict[tuple[Point, str, int], tuple[list[int], Piece]] = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            if piece.point.kind != LOCAL:
                continue
            key = (piece.point, str(piece.index), piece.copy)
            if key in sums:
                members, total = sums[key]
                members.append(rank)
                total.values.add_(piece.values)
            else:
                sums[key] = ([rank], replace(piece, values=piece.values.clone()))
    for members, total in sums.values():
        yield tuple(members), total
