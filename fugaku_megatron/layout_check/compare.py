"""Comparison of the ranks' tensors with a reference, and tolerances from the rounding errors of the run's number formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..config.run_config import RunConfig
from ..nn.model import OUTPUT, WORD_EMBEDDINGS
from .points import CHECKPOINT, FORWARD, GATHERED, KINDS, LOCAL, UPDATE, USED, Point, neighbour
from .recorder import Piece

# Largest relative error of one rounding.
ROUNDOFFS = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12, "int8": 2.0**-8}
FACTOR = 32.0  # of the tolerance over the error of random roundings
OF_WEIGHTS = 8.0  # of their tolerance, because an update divides by the root of a second moment
OF_UPDATES = 4.0  # roundings of an update, the difference of two rounded weights, in both runs
WEIGHTS = (USED, UPDATE, GATHERED, CHECKPOINT)
REROUTED = 4.0  # of the tolerance, for tokens that a rounding error sends to another expert

Reference = Mapping[Point, Tensor]


@dataclass(frozen=True)
class Tolerance:
    """Largest error of a tensor that rounding explains, relative to the tensor's largest element.

    FP32 sums of K products round K times, at random: the error is u sqrt(K). Rounded operands make a random error u in each
    product, whose sum has the error u. Each of L layers adds its error to the residual stream, forward and backward. The
    result is FACTOR (u_sum sqrt(K) + u_operand) sqrt(L).

    by_norm: compare Euclidean norms instead of single elements, because a rounding error may route a token to another expert
    """

    value: float
    by_norm: bool

    @staticmethod
    def of(run: RunConfig) -> Tolerance:
        model = run.model
        names = [run.precision.name, *_stored_formats(run)]
        if run.system.int8 or run.lora.base_in_int8:
            names.append("int8")
        operand = max(ROUNDOFFS[name] for name in names)
        terms = max(model.hidden_size, model.seq_length, *model.mlp_widths)
        rounding = ROUNDOFFS["fp32"] * math.sqrt(terms) + operand
        value = FACTOR * rounding * math.sqrt(model.num_layers)
        if model.num_experts and operand > ROUNDOFFS["fp32"]:
            return Tolerance(REROUTED * value, by_norm=True)
        return Tolerance(value, by_norm=False)

    def of_kind(self, kind: str) -> float:
        return self.value * OF_WEIGHTS if kind in WEIGHTS else self.value

    def of_update(self, update: Tensor, weight: Tensor) -> float:
        """Return the tolerance of an update, whose weight was rounded before and after it."""
        allowed = self.of_kind(UPDATE)
        largest = float(update.abs().max())
        if largest:
            rounding = OF_UPDATES * ROUNDOFFS["fp32"]
            allowed += rounding * (float(weight.abs().max()) + largest) / largest
        return allowed

    def error(self, found: Tensor, expected: Tensor, whole: Tensor) -> float:
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


def _stored_formats(run: RunConfig) -> list[str]:
    optimizer = run.optimizer
    names = [optimizer.main_params_dtype, optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype]
    if run.parallel.grad_reduce_in_bf16:
        names.append("bf16")
    return names


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from the reference, on these ranks.

    between: see `Piece`
    before: the tensor that it is computed from, in words
    """

    point: Point
    ranks: tuple[int, ...]
    error: float
    tolerance: float
    between: str | None
    before: str = ""

    def line(self) -> str:
        ranks = "rank" if len(self.ranks) == 1 else "ranks"
        return (
            f"first difference: {self.point}, on {ranks} {' '.join(map(str, self.ranks))}: error {self.error:.2g}, "
            f"tolerance {self.tolerance:.2g}; between {self.before}, which agrees, and this tensor: "
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

    missing: tensors without a counterpart in the reference
    covered: elements of the reference that a rank has, by tensor
    outputs: names of the modules whose outputs were compared
    """

    tolerance: Tolerance
    kinds: dict[str, Largest] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    missing: set[Point] = field(default_factory=set)
    covered: dict[Point, Tensor] = field(default_factory=dict)
    ranks: int = 0
    outputs: set[str] = field(default_factory=set)

    @property
    def first(self) -> Difference | None:
        """First difference in the order of execution, with all ranks that have it."""
        if not self.differences:
            return None
        first = min(self.differences, key=lambda each: (each.point.order, each.ranks))
        same = [each for each in self.differences if each.point == first.point]
        ranks = tuple(sorted({rank for each in same for rank in each.ranks}))
        before = neighbour(first.point, self.outputs)
        return replace(first, ranks=ranks, error=max(each.error for each in same), before=before)

    def add(self, ranks: Sequence[Iterable[Piece]], reference: Reference) -> None:
        self.ranks = max(self.ranks, len(ranks))
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
            if found is None or not bool(found.all()):
                ranks = tuple(range(self.ranks))
                allowed = self.tolerance.of_kind(point.kind)
                self.differences.append(
                    Difference(
                        point,
                        ranks,
                        math.inf,
                        allowed,
                        f"no rank has all of its {whole.numel()} elements",
                    )
                )

    def _compare(self, ranks: tuple[int, ...], piece: Piece, reference: Reference) -> None:
        whole = _counterpart(piece.point, reference)
        if whole is None:
            self.missing.add(piece.point)
            return
        error = math.inf
        if tuple(whole.shape) == tuple(piece.shape):
            error = self.tolerance.error(piece.values, whole[piece.index], whole)
            if piece.point in reference:
                covered = self.covered.setdefault(
                    piece.point, torch.zeros(piece.shape, dtype=torch.bool)
                )
                covered[piece.index] = True
        allowed = self._allowed(piece.point, whole, reference)
        largest = self.kinds.setdefault(piece.point.kind, Largest())
        largest.tensors.add(piece.point)
        if error / allowed >= largest.error / largest.allowed:
            largest.error = error
            largest.allowed = allowed
            largest.name = str(piece.point)
        if error > allowed:
            self.differences.append(Difference(piece.point, ranks, error, allowed, piece.between))

    def _allowed(self, point: Point, whole: Tensor, reference: Reference) -> float:
        if point.kind == UPDATE:
            weight = _counterpart(point._replace(kind=USED), reference)
            if weight is not None:
                return self.tolerance.of_update(whole, weight)
        return self.tolerance.of_kind(point.kind)

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
    if found is None and point.name.endswith(OUTPUT):
        found = reference.get(point._replace(name=point.name.replace(OUTPUT, WORD_EMBEDDINGS)))
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
