"""--abft: products of chosen layers are checked by checksums while they are computed (algorithm-based fault tolerance).

The rows of P = L R^T add up to L times the sum of R's rows: one matrix-vector product and some passes over memory check a whole
product, so that a wrong element is found whatever made it wrong (Huang and Abraham 1984, "Algorithm-Based Fault Tolerance for
Matrix Operations", IEEE Trans. Comput. C-33). P is the result of a linear layer, the gradient of its input, or what a backward adds
to that of its weight.

Tolerance. With rounding errors as independent random numbers of mean zero, an inner product of k terms is wrong by at most
DOUBT sqrt(k) u |l| |r| but for a probability of 2 exp(-DOUBT^2 / 2), 3e-14 (Higham and Mary 2019, "A New Approach to Probabilistic
Rounding Error Analysis", SIAM J. Sci. Comput. 41, theorem 3.1; Cauchy-Schwarz for |l|^T |r|). Errors of a row's elements add up as
independent ones do, to DOUBT sqrt(k) u |l| |R|_F; the checksum's own is DOUBT sqrt(k) u |l| |sum of R's rows|, and storing P adds
DOUBT u' |row|, u' being the rounding of its type. Sums of n elements, which torch forms in a cascade, are the same with
sqrt(log2 n) for sqrt(k). An error below that is not seen.

Left out: products whose result the GELU's derivative multiplies (the gradient of an MLP's inner tensor), attention, which is no
product of the layers, and torch's products.

`differing_replica` compares the weights of data-parallel replicas by a hash.
"""

from __future__ import annotations

import platform
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tensor_files import as_bytes
from ..comm.agreement import first_rank
from ..comm.base import Comm
from ..host.observed import Observed
from .flat import FlatParameters
from .train import Trainer

FORWARD, DATA, WEIGHT = PRODUCTS = ("linear_forward", "linear_data_gradient", "linear_weight_gradient")
TEXTS = {FORWARD: "result", DATA: "gradient of the input", WEIGHT: "gradient of the weight"}
DOUBT = 8.0
UNIT = 2.0**-24  # rounding of FP32, in which products are summed
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
    off = ((sums - checksums).abs() / tolerance).nan_to_num(nan=torch.inf).where(checksums.isfinite(), torch.zeros(()))
    row = int(off.argmax())
    return Difference(row, float(sums[row]), float(checksums[row]), float(tolerance[row])) if off[row] > 1 else None


def tolerances(terms: int, left: Tensor, right: float, total: Tensor, stored: Tensor, sums: Tensor, columns: int,
               rounding: float) -> Tensor:
    """Of the sums (m) of the rows of a product with inner products of `terms`, (m).

    left (m): norms of L's rows. right: norm of R. total: the sum of R's rows. stored (m): norms of P's rows of so many columns.
    rounding: of P's type.
    """
    scale = right + float(_norm(total)) + TINY
    cascade = columns.bit_length() ** 0.5
    stored = stored.where(stored.isfinite(), torch.zeros(()))  # a wrong element may be that large
    added = (stored + sums.abs()).where(sums.isfinite(), torch.zeros(()))
    products = UNIT * (terms**0.5 + cascade) * scale * (left + TINY)
    return DOUBT * (products + UNIT * cascade * torch.minimum(added, stored * columns**0.5) + rounding * stored)


def compare(left: Tensor, right: Tensor, result: Tensor, bias: Tensor | None = None) -> Difference | None:
    """Whether result (m, n) is left (m, k) right^T, right (n, k), + bias (n): the row that is not, most of all, or None."""
    left, right = left.float(), right.float()
    sums, total = result.sum(1, dtype=torch.float32), right.sum(0)
    tolerance = tolerances(left.shape[1], _norm(left, 1), float(_norm(right)), total, _norm(result, 1), sums, result.shape[1],
                           torch.finfo(result.dtype).eps / 2)
    return check_rows(sums, left @ total if bias is None else left @ total + bias.float().sum(), tolerance)


def _norm(x: Tensor, dim: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, dim=dim, dtype=torch.float32)


class Checksums:
    """Checks the products of this rank's chosen layers. layers: their numbers, from 0 as in names, or ALL for every product."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._prefixes = None if ALL in layers else tuple(f"decoder.layers.{layer}." for layer in layers)
        self._flat: FlatParameters | None = None
        self._found: str | None = None

    def observe(self, library: Any) -> Any:
        """The kernels, their products checked."""
        return Observed(library, PRODUCTS, self._product)

    def watch(self, flat: FlatParameters) -> None:
        """Tell which memory belongs to which weight: call it before the first product."""
        self._flat = flat

    def report(self, world: Comm) -> str | None:
        """What was found since the last report, on the first rank that found something; None where none did. Collective."""
        own, self._found = self._found, None
        rank = first_rank(world, None if own is None else (0,), 1)
        return None if rank is None else world.broadcast_object(f"rank {world.rank} (node {platform.node()}), {own}", root=rank)

    def _name(self, tensor: Tensor) -> str | None:
        """Of the checked weight whose values or gradients a product is given."""
        parameter = self._flat.owner(tensor) if self._flat else None
        if parameter is None or not parameter.spec.decayed:
            return None
        name = parameter.spec.name
        return name if self._prefixes is None or name.startswith(self._prefixes) else None

    def _product(self, kernel: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        name = self._name(args[2 if kernel == WEIGHT else 1])
        if name is None:
            return function(*args, **kwargs)
        return getattr(self, "_" + kernel)(name, lambda: function(*args, **kwargs), *args)

    def _linear_forward(self, name: str, call: Callable[[], None], x: Tensor, weight: Tensor, out: Tensor,
                        bias: Tensor | None = None, gelu: bool = False, pre: Tensor | None = None, *_: Any) -> None:
        call()
        result = pre if gelu else out  # what comes before the GELU, if it is kept
        if result is not None:
            self._again(FORWARD, name, call, lambda: compare(x, weight, result, bias))

    def _linear_data_gradient(self, name: str, call: Callable[[], None], dy: Tensor, weight: Tensor, dx: Tensor,
                              gelu_input: Tensor | None = None, *_: Any) -> None:
        call()
        if gelu_input is None:
            self._again(DATA, name, call, lambda: compare(dy, weight.t(), dx))

    def _linear_weight_gradient(self, name: str, call: Callable[[], None], dy: Tensor, x: Tensor, grad: Tensor, *_: Any) -> None:
        before, stored = grad.sum(1), _norm(grad, 1)
        call()
        after, dy, total = grad.sum(1), dy.float(), x.float().sum(1)
        tolerance = tolerances(len(x), dy.square().sum(0).sqrt(), float(_norm(x)), total, stored + _norm(grad, 1),
                               before.abs() + after.abs(), grad.shape[1], UNIT)
        found = check_rows(after - before, total @ dy, tolerance)
        if found:
            self._keep(f"{TEXTS[WEIGHT]} of {name}: {found}; it is part of the gradient now")

    def _again(self, kernel: str, name: str, call: Callable[[], None], check: Callable[[], Difference | None]) -> None:
        """Where the check fails, compute the product once more: the second result stays."""
        if found := check():
            call()
            self._keep(f"{TEXTS[kernel]} of {name}: {found}; computed again it is {'wrong' if check() else 'correct'}")

    def _keep(self, text: str) -> None:
        self._found = self._found or text


def parameter_hashes(trainer: Trainer) -> Tensor:
    """(parameters,) int64: the CRC-32 of each parameter's bytes, in the order of the flat buffer."""
    parameters = trainer.optimizer.flat.parameters
    return torch.tensor([zlib.crc32(as_bytes(p.detach())) for p in parameters])


def differing_replica(trainer: Trainer) -> str | None:
    """Which rank's weights differ from those of its replicas, as text for the log; None where none does. Collective.

    With --overlap-param-gather it waits for the gathers under way.
    """
    trainer.optimizer.buckets.await_weights()
    own, dp, world = parameter_hashes(trainer), trainer.groups.dp, trainer.world
    differs = dp.all_reduce(own.clone(), "min") != dp.all_reduce(own.clone(), "max")
    if not bool(world.all_reduce(differs.any())):
        return None
    text = _describe(trainer, own, differs) if differs.any() else ""
    rank = first_rank(world, (world.rank,) if text else None, 1)
    assert rank is not None, "of replicas that differ at least one says so"
    return world.broadcast_object(text, root=rank)


def _describe(trainer: Trainer, own: Tensor, differs: Tensor) -> str:
    """What this rank says of itself: nothing where most replicas agree with it. Collective over the replicas, which all call."""
    dp, index = trainer.groups.dp, int(differs.nonzero()[0])
    hashes = dp.all_gather(torch.empty(dp.size, dtype=torch.int64), own[index : index + 1])
    places = dp.all_gather_object(f"rank {trainer.world.rank} (node {platform.node()}, replica {dp.rank})")
    name = trainer.optimizer.flat.parameters[index].spec.name
    (common, count), *others = Counter(hashes.tolist()).most_common()
    if others and others[0][1] == count:
        return f"{', '.join(places)} hold different bits in {name}, and most of them do not agree on any"
    return "" if int(own[index]) == common else f"{places[dp.rank]} holds other bits in {name} than {count} of {dp.size} replicas"
