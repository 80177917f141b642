"""Matmul checksums (`--abft`): algorithm-based fault tolerance."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.agreement import first_rank
from ...comm.base import Comm
from ...host.observed import Arguments, Keywords, Observed
from ...optim.flat import FlatParameters
from .fingerprints import cores

RESULT = "result"
INPUT = "gradient of the input"
GRADIENT = "gradient of the weight"
MUON = "a matrix of Muon"
REPEATED = 3  # wrong iterations of one rank, among RECENT, that end a run
RECENT = 100
DOUBT = 8.0
UNIT = 2.0**-24  # unit roundoff of FP32, in which matmuls accumulate
TINY = 1e-18  # smaller norms may be wrong, because their squares underflow
ALL = "all"


@dataclass(frozen=True)
class Difference:
    """Row whose sum exceeds its tolerance most."""

    row: int
    sum: float
    checksum: float
    tolerance: float

    def __str__(self) -> str:
        return f"row {self.row} sums to {self.sum:.6g}, its checksum is {self.checksum:.6g}, tolerance {self.tolerance:.2g}"


def check_rows(sums: Tensor, checksums: Tensor, tolerance: Tensor) -> Difference | None:
    """Return the worst of m rows. A nonfinite checksum proves nothing."""
    excess = ((sums - checksums).abs() / tolerance).nan_to_num(nan=torch.inf)
    excess = excess.where(checksums.isfinite(), torch.zeros(()))
    row = int(excess.argmax())
    if excess[row] <= 1:
        return None
    return Difference(row, float(sums[row]), float(checksums[row]), float(tolerance[row]))


class Right(NamedTuple):
    """Norms of R and its row sum in a matmul L R^T: (), or (m,) if each row has an own R."""

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
    """Return the tolerances (m,) of the row sums in P = L R^T.

    terms: per inner product, also (m,)
    left: (m,), L's row norms
    stored: (m,), P's row norms
    sums: (m,), P's row sums
    rounding: unit roundoff of P's dtype
    """
    scale = right.norm + right.sum_norm + TINY
    cascade = columns.bit_length() ** 0.5
    stored = stored.where(stored.isfinite(), torch.zeros(()))  # a wrong element may be that large
    added = (stored + sums.abs()).where(sums.isfinite(), torch.zeros(()))
    products = UNIT * (terms**0.5 + cascade) * scale * (left + TINY)
    additions = UNIT * cascade * torch.minimum(added, stored * columns**0.5)
    total: Tensor = DOUBT * (products + additions + rounding * stored)
    return total


def compare(
    left: Tensor,
    right: Tensor,
    result: Tensor,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
) -> Difference | None:
    """Return the worst wrong row of result (m, n) = left (m, k) right^T + bias (n,).

    right: (n, k), or (groups, n, k) with counts
    counts: (groups,), consecutive rows of each group
    """
    if not len(left):
        return None
    left = left.float()
    right = right.float()
    total = right.sum(-2)  # (k,) or (groups, k)
    norms = Right(_norm(right.flatten(-2)), _norm(total))
    if counts is None:
        checksums = left @ total
    else:
        group = _group_of_rows(counts)
        norms = Right(norms.norm[group], norms.sum_norm[group])
        checksums = (left * total[group]).sum(1)
    if bias is not None:
        checksums = checksums + bias.float().sum()
    sums = result.sum(1, dtype=torch.float32)
    tolerance = tolerances(
        left.shape[1],
        _norm(left),
        norms,
        stored=_norm(result),
        sums=sums,
        columns=result.shape[1],
        rounding=torch.finfo(result.dtype).eps / 2,
    )
    return check_rows(sums, checksums, tolerance)


def _group_of_rows(counts: Tensor) -> Tensor:
    return torch.arange(len(counts)).repeat_interleave(counts)


def _norm(x: Tensor) -> Tensor:
    """Return the norms of the last dimension."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return norm


class Finding(NamedTuple):
    """A wrong matmul. tensor: RESULT, INPUT or GRADIENT. stays: the wrong values stay in use."""

    tensor: str
    text: str
    stays: bool


Call = Callable[[], object]  # runs the kernel


def _recheck(tensor: str, call: Call, check: Callable[[], Difference | None]) -> Finding | None:
    """Run a matmul, and once more if its check fails."""
    call()
    found = check()
    if found is None:
        return None
    call()
    wrong = check() is not None
    verdict = "wrong" if wrong else "correct"
    return Finding(tensor, f"{found}; computed again it is {verdict}", wrong)


def _forward(
    call: Call,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    pre_activation: Tensor | None = None,
    *_: Any,
) -> Finding | None:
    result = pre_activation if activation else out
    if result is None:
        call()
        return None
    return _recheck(RESULT, call, lambda: compare(x, weight, result, bias))


def _data_gradient(
    call: Call,
    dy: Tensor,
    weight: Tensor,
    dx: Tensor,
    activation_input: Tensor | None = None,
    *_: Any,
) -> Finding | None:
    if activation_input is not None:
        call()
        return None
    return _recheck(INPUT, call, lambda: compare(dy, weight.t(), dx))


def _grouped_forward(
    call: Call, x: Tensor, weight: Tensor, counts: Tensor, out: Tensor, *_: Any
) -> Finding | None:
    return _recheck(RESULT, call, lambda: compare(x, weight, out, counts=counts))


def _grouped_data_gradient(
    call: Call, dy: Tensor, weight: Tensor, counts: Tensor, dx: Tensor, *_: Any
) -> Finding | None:
    matrices = weight.transpose(1, 2)
    return _recheck(INPUT, call, lambda: compare(dy, matrices, dx, counts=counts))


def _weight_gradient(
    call: Call, dy: Tensor, x: Tensor, grad: Tensor, counts: Tensor | None = None
) -> Finding | None:
    """Check the rows that a call adds to grad (n, k), or (groups, n, k) with the rows of each group."""
    before = grad.sum(-1)
    stored = _norm(grad)
    call()
    after = grad.sum(-1)
    stored += _norm(grad)
    dy = dy.float()
    x = x.float()
    total = x.sum(1)
    rows = grad.shape[-2]  # of a group
    if counts is None:
        terms: int | Tensor = len(x)
        norm = dy.square().sum(0).sqrt()
        right = Right(_norm(x.flatten()), _norm(total))
        checksums = total @ dy
    else:
        by_group = partial(_sum_groups, counts)
        terms = counts.float().repeat_interleave(rows)
        norm = by_group(dy.square()).sqrt().flatten()
        squares = (x.square().sum(1), total.square())
        right = Right(*(by_group(each).sqrt().repeat_interleave(rows) for each in squares))
        checksums = by_group(dy * total[:, None]).flatten()
    tolerance = tolerances(
        terms,
        norm,
        right,
        stored=stored.flatten(),
        sums=(before.abs() + after.abs()).flatten(),
        columns=grad.shape[-1],
        rounding=UNIT,
    )
    found = check_rows((after - before).flatten(), checksums, tolerance)
    if found is None:
        return None
    text = str(found)
    if counts is not None:
        expert, row = divmod(found.row, rows)
        text = f"expert {expert} of this rank, {replace(found, row=row)}"
    return Finding(GRADIENT, f"{text}; it is part of the gradient now", stays=True)


def _sum_groups(counts: Tensor, rows: Tensor) -> Tensor:
    sums = rows.new_zeros(len(counts), *rows.shape[1:])
    return sums.index_add_(0, _group_of_rows(counts), rows)


class Matmul(NamedTuple):
    """A checked kernel.

    weight: argument index of the weight or its gradient
    """

    weight: int
    check: Callable[..., Finding | None]


KERNELS = {
    "linear_forward": Matmul(1, _forward),
    "linear_data_gradient": Matmul(1, _data_gradient),
    "linear_weight_gradient": Matmul(
        2, lambda call, dy, x, grad, *_: _weight_gradient(call, dy, x, grad)
    ),
    "grouped_linear_forward": Matmul(1, _grouped_forward),
    "grouped_linear_data_gradient": Matmul(1, _grouped_data_gradient),
    "grouped_linear_weight_gradient": Matmul(
        3, lambda call, dy, x, counts, grad, *_: _weight_gradient(call, dy, x, grad, counts)
    ),
}


class Checksums:
    """Checks on this rank's matmuls.

    layers: from 0 as in names, or ALL
    persistent: describes a rank with repeated wrong results
    stayed_since: reports since the first wrong result that stayed
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self._prefixes: tuple[str, ...] | None = None  # of checked weights; None: all
        if ALL not in layers:
            self._prefixes = tuple(f"decoder.layers.{layer}." for layer in layers)
        self._flat: FlatParameters | None = None
        self._found: str | None = None
        self._stays = False  # a wrong result is still in use
        self._reports = 0
        self._wrong: dict[int, list[int]] = {}  # rank -> numbers of reports
        self.persistent: str | None = None
        self.stayed_since: int | None = None

    def observe(self, library: Any) -> Any:
        return Observed(library, tuple(KERNELS), self._matmul)

    def watch(self, flat: FlatParameters) -> None:
        """Set the parameters that name the matmuls' weights, before the first matmul."""
        self._flat = flat

    def report(self, world: Comm) -> str | None:
        """Return the first rank's finding since the last report. Collective."""
        own = self._found
        self._found = None
        rank = first_rank(world, None if own is None else (0,), 1)
        self._reports += 1
        if self.stayed_since is not None:
            self.stayed_since += 1
        if rank is None:
            return None
        stays = int(world.all_reduce(torch.tensor(int(self._stays)), "max"))
        self._stays = False
        if stays and self.stayed_since is None:
            self.stayed_since = 0
        place = f"rank {world.rank} (node {platform.node()}, {cores()})"
        text: str
        place, text = world.broadcast_object((place, f"{place}, {own}"), root=rank)
        self._count(rank, place)
        return text

    def _count(self, rank: int, place: str) -> None:
        recent = [n for n in self._wrong.get(rank, []) if n > self._reports - RECENT]
        recent.append(self._reports)
        self._wrong[rank] = recent
        if len(recent) >= REPEATED:
            iterations = self._reports - recent[0] + 1
            self.persistent = f"{place} computed wrong matmuls in {len(recent)} of the last {iterations} iterations"

    def _name(self, tensor: Tensor) -> str | None:
        if self._flat is None:
            return None
        parameter = self._flat.owner(tensor)
        if parameter is None:  # of the optimizer: all others are parameters
            return MUON if self._prefixes is None else None
        if not parameter.spec.decayed:
            return None
        name: str = parameter.spec.name
        return name if self._prefixes is None or name.startswith(self._prefixes) else None

    def _matmul(
        self, kernel: str, function: Callable[..., Any], args: Arguments, kwargs: Keywords
    ) -> Any:
        matmul = KERNELS[kernel]
        name = self._name(args[matmul.weight])
        if name is None:
            return function(*args, **kwargs)
        found = matmul.check(partial(function, *args, **kwargs), *args)
        if found is not None:
            self._stays |= found.stays
            self._found = self._found or f"{found.tensor} of {name}: {found.text}"
        return None
