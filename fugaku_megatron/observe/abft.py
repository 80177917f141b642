"""Checksums of matmuls (`--abft`): algorithm-based fault tolerance."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.agreement import first_rank
from ..comm.base import Comm
from ..host.observed import Observed
from ..host.placement import format_list
from ..optim.flat import FlatParameters

FORWARD, DATA, WEIGHT = MATMULS = (
    "linear_forward",
    "linear_data_gradient",
    "linear_weight_gradient",
)


GROUPED = tuple(f"grouped_{name}" for name in MATMULS)  # of experts


RESULT, INPUT, GRADIENT = ("result", "gradient of the input", "gradient of the weight")


# Which argument is the weight, or its gradient.
WEIGHTS = dict(zip((*MATMULS, *GROUPED), (1, 1, 2, 1, 1, 3), strict=True))


MUON = "a matrix of Muon"


REPEATED, RECENT = 3, 100  # wrong iterations of one rank, among so many, that end a run


DOUBT = 8.0


UNIT = 2.0**-24  # rounding of FP32, in which matmuls add up


TINY = 1e-18  # norms below it may be wrong: their squares underflow


ALL = "all"


@dataclass(frozen=True)
class Difference:
    """The row whose sum is off by most tolerances."""

    row: int
    sum: float
    checksum: float
    tolerance: float

    def __str__(self) -> str:
        return f"row {self.row} sums to {self.sum:.6g}, its checksum is {self.checksum:.6g}, tolerance {self.tolerance:.2g}"


def check_rows(sums: Tensor, checksums: Tensor, tolerance: Tensor) -> Difference | None:
    """The row whose sum (m) is beyond its tolerance (m) most; None where none is. A checksum that is not finite says nothing."""
    off = (
        ((sums - checksums).abs() / tolerance)
        .nan_to_num(nan=torch.inf)
        .where(checksums.isfinite(), torch.zeros(()))
    )
    row = int(off.argmax())
    return (
        Difference(row, float(sums[row]), float(checksums[row]), float(tolerance[row]))
        if off[row] > 1
        else None
    )


class Right(NamedTuple):
    """R of a matmul L R^T, or of each row's matmul if these differ: norms of R and of the sum of
    its rows, () or (m,).
    """

    norm: Tensor
    sum_norm: Tensor


def tolerances(
    terms: int | Tensor,
    left: Tensor,
    right: Right,
    stored: Tensor,
    sums: Tensor,
    columns: int,
    rounding: float,
) -> Tensor:
    """Return the tolerance (m) of each row sum of P, whose elements are inner products of `terms` terms.

    terms: a number, or (m,)
    left: (m), norms of the rows of L
    stored: (m), norms of the rows of P, each of `columns` elements
    sums: (m), row sums of P
    rounding: unit roundoff of P's type
    """
    scale = right.norm + right.sum_norm + TINY
    cascade = columns.bit_length() ** 0.5
    stored = stored.where(stored.isfinite(), torch.zeros(()))  # a wrong element may be that large
    added = (stored + sums.abs()).where(sums.isfinite(), torch.zeros(()))
    products = UNIT * (terms**0.5 + cascade) * scale * (left + TINY)
    return DOUBT * (
        products + UNIT * cascade * torch.minimum(added, stored * columns**0.5) + rounding * stored
    )


def compare(
    left: Tensor, right: Tensor, result: Tensor, bias: Tensor | None = None
) -> Difference | None:
    """Return the row of result (m, n) that differs most from left (m, k) right^T + bias (n), right (n, k); None if none does."""
    left, right = left.float(), right.float()
    sums, total = result.sum(1, dtype=torch.float32), right.sum(0)
    tolerance = tolerances(
        left.shape[1],
        _norm(left, 1),
        Right(_norm(right), _norm(total)),
        _norm(result, 1),
        sums,
        result.shape[1],
        torch.finfo(result.dtype).eps / 2,
    )
    return check_rows(
        sums, left @ total if bias is None else left @ total + bias.float().sum(), tolerance
    )


def compare_grouped(
    left: Tensor, right: Tensor, counts: Tensor, result: Tensor
) -> Difference | None:
    """Compare result (m, n) with left (m, k) times the transposed matrix of each row's group.

    Return the worst wrong row, or None.

    right (groups, n, k). counts (groups,): rows of each group, which follow one another.
    """
    if not len(left):
        return None
    group = _group_of_rows(counts)
    left, right = left.float(), right.float()
    sums = result.sum(1, dtype=torch.float32)
    totals = right.sum(1)  # (groups, k)
    tolerance = tolerances(
        left.shape[1],
        _norm(left, 1),
        Right(_norm(right.flatten(1), 1)[group], _norm(totals, 1)[group]),
        _norm(result, 1),
        sums,
        result.shape[1],
        torch.finfo(result.dtype).eps / 2,
    )
    return check_rows(sums, (left * totals[group]).sum(1), tolerance)


def _group_of_rows(counts: Tensor) -> Tensor:
    """Return the group of each row, (m,)."""
    return torch.arange(len(counts)).repeat_interleave(counts)


def cores() -> str:
    """Name the cores that this rank computes on: the present one of a single thread, or all that
    its threads may use.
    """
    try:
        if torch.get_num_threads() == 1:
            after_name = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()
            return f"core {after_name[36]}"
        allowed = set()
        for task in os.listdir("/proc/self/task"):
            allowed |= os.sched_getaffinity(int(task))
        return f"cores {format_list(allowed)}"
    except OSError:
        return f"cores {format_list(os.sched_getaffinity(0))}"


def _norm(x: Tensor, dim: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, dim=dim, dtype=torch.float32)


class Checksums:
    """Checks the matmuls of this rank's chosen layers. layers: their numbers, from 0 as in names, or ALL for every matmul."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._prefixes = (
            None if ALL in layers else tuple(f"decoder.layers.{layer}." for layer in layers)
        )
        self._flat: FlatParameters | None = None
        self._found: str | None = None
        self._stayed = False  # whether what was found is still in a result
        self._reports = 0
        self._wrong: dict[int, list[int]] = {}  # by rank, the numbers of reports
        self.persistent: str | None = None  # says which rank computes wrong results again and again
        self.stayed_since: int | None = None  # reports since the first wrong result that stayed

    def observe(self, library: Any) -> Any:
        """The kernels, their matmuls checked."""
        return Observed(library, tuple(WEIGHTS), self._matmul)

    def watch(self, flat: FlatParameters) -> None:
        """Tell which memory belongs to which weight: call it before the first matmul."""
        self._flat = flat

    def report(self, world: Comm) -> str | None:
        """Return the finding of the first rank with one since the last report, or None. Collective."""
        own, self._found = self._found, None
        rank = first_rank(world, None if own is None else (0,), 1)
        self._reports += 1
        if self.stayed_since is not None:
            self.stayed_since += 1
        if rank is None:
            return None
        stayed = int(world.all_reduce(torch.tensor(int(self._stayed)), "max"))
        self._stayed = False
        if stayed and self.stayed_since is None:
            self.stayed_since = 0
        place = f"rank {world.rank} (node {platform.node()}, {cores()})"
        place, text = world.broadcast_object((place, f"{place}, {own}"), root=rank)
        self._count(rank, place)
        return text

    def _count(self, rank: int, place: str) -> None:
        """Note that a rank's result was wrong in this iteration."""
        recent = [n for n in self._wrong.get(rank, []) if n > self._reports - RECENT]
        self._wrong[rank] = recent = [*recent, self._reports]
        if len(recent) >= REPEATED:
            over = self._reports - recent[0] + 1
            self.persistent = (
                f"{place} computed wrong matmuls in {len(recent)} of the last {over} iterations"
            )

    def _name(self, tensor: Tensor) -> str | None:
        """Return the name of the checked weight whose values or gradient `tensor` is, or None."""
        if self._flat is None:
            return None
        parameter = self._flat.owner(tensor)
        if parameter is None:  # of the optimizer: all others are parameters
            return MUON if self._prefixes is None else None
        if not parameter.spec.decayed:
            return None
        name = parameter.spec.name
        return name if self._prefixes is None or name.startswith(self._prefixes) else None

    def _matmul(self, kernel: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        name = self._name(args[WEIGHTS[kernel]])
        if name is None:
            return function(*args, **kwargs)
        return getattr(self, "_" + kernel)(name, lambda: function(*args, **kwargs), *args)

    def _linear_forward(
        self,
        name: str,
        call: Callable[[], None],
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        pre: Tensor | None = None,
        *_: Any,
    ) -> None:
        call()
        result = pre if activation else out  # what comes before the activation, if it is kept
        if result is not None:
            self._again(RESULT, name, call, lambda: compare(x, weight, result, bias))

    def _linear_data_gradient(
        self,
        name: str,
        call: Callable[[], None],
        dy: Tensor,
        weight: Tensor,
        dx: Tensor,
        activation_input: Tensor | None = None,
        *_: Any,
    ) -> None:
        call()
        if activation_input is None:
            self._again(INPUT, name, call, lambda: compare(dy, weight.t(), dx))

    def _linear_weight_gradient(
        self, name: str, call: Callable[[], None], dy: Tensor, x: Tensor, grad: Tensor, *_: Any
    ) -> None:
        before, stored = grad.sum(1), _norm(grad, 1)
        call()
        after, dy, total = grad.sum(1), dy.float(), x.float().sum(1)
        tolerance = tolerances(
            len(x),
            dy.square().sum(0).sqrt(),
            Right(_norm(x), _norm(total)),
            stored + _norm(grad, 1),
            before.abs() + after.abs(),
            grad.shape[1],
            UNIT,
        )
        found = check_rows(after - before, total @ dy, tolerance)
        if found:
            self._keep_gradient(name, str(found))

    def _grouped_linear_forward(
        self,
        name: str,
        call: Callable[[], None],
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        out: Tensor,
        *_: Any,
    ) -> None:
        call()
        self._again(RESULT, name, call, lambda: compare_grouped(x, weight, counts, out))

    def _grouped_linear_data_gradient(
        self,
        name: str,
        call: Callable[[], None],
        dy: Tensor,
        weight: Tensor,
        counts: Tensor,
        dx: Tensor,
        *_: Any,
    ) -> None:
        call()
        matrices = weight.transpose(1, 2)
        self._again(INPUT, name, call, lambda: compare_grouped(dy, matrices, counts, dx))

    def _grouped_linear_weight_gradient(
        self,
        name: str,
        call: Callable[[], None],
        dy: Tensor,
        x: Tensor,
        counts: Tensor,
        grad: Tensor,
        *_: Any,
    ) -> None:
        before, stored = grad.sum(2), _norm(grad, 2)  # (groups, out)
        call()
        after, dy, x = grad.sum(2), dy.float(), x.float()
        group = _group_of_rows(counts)

        def by_group(rows: Tensor) -> Tensor:
            """Add up the rows (m, ...) of each group."""
            return rows.new_zeros(len(counts), *rows.shape[1:]).index_add_(0, group, rows)

        total = x.sum(1)
        norms = by_group(x.square().sum(1)).sqrt(), by_group(total.square()).sqrt()
        rows = grad.shape[1]  # of a group's gradient
        tolerance = tolerances(
            counts.float().repeat_interleave(rows),
            by_group(dy.square()).sqrt().flatten(),
            Right(*(norm.repeat_interleave(rows) for norm in norms)),
            (stored + _norm(grad, 2)).flatten(),
            (before.abs() + after.abs()).flatten(),
            grad.shape[2],
            UNIT,
        )
        checksums = by_group(dy * total[:, None])
        if found := check_rows((after - before).flatten(), checksums.flatten(), tolerance):
            expert, row = divmod(found.row, rows)
            self._keep_gradient(name, f"expert {expert} of this rank, {replace(found, row=row)}")

    def _keep_gradient(self, name: str, found: str) -> None:
        """Keep the finding of a sum that cannot be computed again."""
        self._stayed = True
        self._keep(f"{GRADIENT} of {name}: {found}; it is part of the gradient now")

    def _again(
        self,
        what: str,
        name: str,
        call: Callable[[], None],
        check: Callable[[], Difference | None],
    ) -> None:
        """Compute the matmul once more where the check fails. The second result stays."""
        if found := check():
            call()
            wrong = check() is not None
            self._stayed |= wrong
            verdict = "wrong" if wrong else "correct"
            self._keep(f"{what} of {name}: {found}; computed again it is {verdict}")

    def _keep(self, text: str) -> None:
        self._found = self._found or text
