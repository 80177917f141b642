"""Faults of a machine that raise no error: --abft and --rerun-on-spike.

Left out: comparing replicas (`replicas`).

--abft checks matmuls of chosen layers by checksums while they are computed (algorithm-based fault tolerance). The rows of P = L
R^T add up to L times the sum of R's rows: one matrix-vector product and some passes over memory check a whole matmul, so that a
wrong element is found whatever made it wrong (Huang and Abraham 1984, "Algorithm-Based Fault Tolerance for Matrix Operations",
IEEE Trans. Comput. C-33). P is the result of a linear layer, the gradient of its input, or what a backward adds to that of its
weight.

Tolerance. With rounding errors as independent random numbers of mean zero, an inner product of k terms is wrong by at most
DOUBT sqrt(k) u |l| |r| but for a probability of 2 exp(-DOUBT^2 / 2), 3e-14 (Higham and Mary 2019, "A New Approach to Probabilistic
Rounding Error Analysis", SIAM J. Sci. Comput. 41, theorem 3.1; Cauchy-Schwarz for |l|^T |r|). Errors of a row's elements add up as
independent ones do, to DOUBT sqrt(k) u |l| |R|_F; the checksum's own is DOUBT sqrt(k) u |l| |sum of R's rows|, and storing P adds
DOUBT u' |row|, u' being the rounding of its type. Sums of n elements, which torch forms in a cascade, are the same with
sqrt(log2 n) for sqrt(k). An error below that is not seen. The grouped matmuls of experts are
checked row by row with the sums of each row's matrix, and those of Muon with `all`. Left out:
matmuls whose result an activation's derivative multiplies (the gradient of an MLP's inner tensor),
attention, and torch's matmuls (routers).

--rerun-on-spike repeats an iteration from the same state before its update: is it the machine or the batch? Weights have not
changed, dropout masks and samples are functions of the position in the data, and sums have a fixed order: a sound machine makes
the same bits again. Every iteration keeps fingerprints of what this rank has computed: of each chunk's output and its input's
gradient, micro-batch by micro-batch, and of its own weight gradients before their sums. Where those of a repetition differ, the
first difference (along the samples, then forward and backward through the parts of the model, weight gradients last) names the
rank. Megatron-LM's rerun state machine does as much with results that it is given to validate.
Where a repetition has the same bits, other data-parallel ranks compute the samples: a core that
makes the same mistake twice is found so, but not with one of them.
"""

from __future__ import annotations

import math
import os
import platform
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.agreement import first_rank
from ..comm.base import Comm
from ..host.observed import Observed
from ..host.placement import format_list
from .flat import FlatParameters
from .train import Trainer

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
    """Of the sums (m) of the rows of P, whose elements are inner products of `terms` terms, (m).

    terms: one number, or (m,). left (m): norms of L's rows. stored (m): norms of P's rows of so
    many columns. rounding: of P's type.
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
    """Whether result (m, n) is left (m, k) right^T, right (n, k), + bias (n): the row that is not, most of all, or None."""
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
        """What was found since the last report, on the first rank that found something; None where none did. Collective."""
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
        """Of the checked weight whose values or gradients are an argument of a matmul."""
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


NORMAL_MAD = 1.4826  # standard deviations in the median absolute deviation of a normal distribution
WINDOW, ENOUGH = 50, 20  # losses that are looked back on, and how many there must be
SMALLEST = 0.01  # of the median: a rise below it is not a spike, however quiet the losses were


class Spikes:
    """The losses of the last iterations. A spike lies above their median by more than `deviations` standard deviations.

    The deviation is estimated from the median absolute deviation, which a few spikes do not change (Iglewicz and Hoaglin 1993, "How
    to Detect and Handle Outliers"; they use 3.5, for data without a trend).
    """

    def __init__(self, deviations: float) -> None:
        self.deviations = deviations
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._before = False  # whether the last one was a spike

    def find(self, loss: float) -> str | None:
        """Why the next loss is a spike; None where it is not, or follows one, so that a new level is told once."""
        middle, limit = self._limit()
        spike, before = not math.isfinite(loss) or loss > limit, self._before
        self._before = spike
        if math.isfinite(loss):
            self._losses.append(loss)
        if not spike or before:
            return None
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return (
            f"the loss {loss:.4f} is above {limit:.4f}, the limit over the median {middle:.4f} of the last "
            f"{min(len(self._losses) - 1, WINDOW)}"
        )

    def _limit(self) -> tuple[float, float]:
        """Median of the losses, and the largest loss that is not a spike."""
        if len(self._losses) < ENOUGH:
            return math.nan, math.inf
        middle = median(self._losses)
        deviation = NORMAL_MAD * median(abs(loss - middle) for loss in self._losses)
        return middle, middle + max(self.deviations * deviation, SMALLEST * abs(middle))


OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
PLACES = (
    "the output of part {}",
    "the gradient of part {}'s input",
    "the weight gradients",
)  # `parts`: 0 is the first
LARGEST_PART = 2**30
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
Key = tuple[int, int, int]  # first sample, kind, part of the model in the order of the pass


def bit_sum(x: Tensor) -> int:
    """The elements of x (any shape) as whole numbers, added up modulo 2^64: one flipped bit always changes it."""
    flat = x.detach().reshape(-1)
    whole = all(n * x.element_size() % 8 == 0 for n in (flat.numel(), flat.storage_offset()))
    return int(
        flat.view(torch.int64 if whole else INTEGERS[x.element_size()]).sum()
    )  # torch converts smaller ones


class Fingerprints:
    """What this rank computes in an iteration, as a number for each key. Hooks on the trainer's stage and buckets keep them."""

    def __init__(self, trainer: Trainer) -> None:
        self._kept: dict[Key, int] = {}
        pp, placement = trainer.groups.pp, trainer.stage.placement
        for number, chunk in enumerate(trainer.stage.chunks):
            chunk.register_forward_hook(partial(self._forward, placement.part(pp.rank, number)))
        trainer.optimizer.buckets.before_sum = self._weights

    def take(self) -> dict[Key, int]:
        """Those of the iteration so far; the next ones begin anew."""
        kept, self._kept = self._kept, {}
        return kept

    def _forward(self, part: int, chunk: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():
            x, first = args[0], args[2].first_sample
            self._kept[first, OUTPUT, part] = bit_sum(output)
            if x.requires_grad:
                x.register_hook(partial(self._backward, (first, INPUT_GRADIENT, -part)))

    def _backward(self, key: Key, grad: Tensor) -> None:
        self._kept[key] = bit_sum(grad)

    def _weights(self, bucket: int, grads: Tensor) -> None:
        self._kept[2**61, WEIGHT_GRADIENT, bucket + 1] = bit_sum(grads)  # after all samples


def first_difference(one: dict[Key, int], other: dict[Key, int]) -> Key | None:
    """The first key whose numbers differ."""
    return min(
        (key for key in one.keys() | other.keys() if one.get(key) != other.get(key)), default=None
    )


def _what(key: Key) -> str:
    sample, kind, part = key
    return PLACES[kind].format(
        abs(part)
    ) + f" of the micro-batch that begins with sample {sample}" * (kind != WEIGHT_GRADIENT)


class Rerun:
    """Looks at the loss before every update, and repeats an iteration that looks wrong. say(iteration, line): into the log."""

    def __init__(self, trainer: Trainer, say: Callable[[int, str], None]) -> None:
        self.trainer, self.say = trainer, say
        self.spikes = Spikes(trainer.run.numbers.loss_spike_deviations)
        self.fingerprints = Fingerprints(trainer)

    def before_update(self, consumed: int, loss: float) -> float:
        """The loss of the gradients that the update shall use: those of the iteration, or of its repetition. Collective."""
        trainer, first = self.trainer, self.fingerprints.take()
        norm, scaler = trainer.optimizer.grad_norm(), trainer.optimizer.scaler
        reason = self.spikes.find(loss)
        if not math.isfinite(norm) and not scaler.falling:
            reason = reason or f"the norm of the gradients is {norm}"
        if reason is None:
            return loss
        again = trainer.repeat(consumed, scaler.scale)
        place = self._first_difference(first, self.fingerprints.take())
        sums = [
            bit_sum(torch.tensor(value, dtype=torch.float64))
            for value in (loss, norm, again, trainer.optimizer.grad_norm())
        ]
        if place is None and sums[:2] != sums[2:]:
            place = "the sums over ranks"
        if place is None:
            again, verdict = self._same_bits(consumed, first, again)
        else:
            verdict = (
                "it has other bits: the cause is a machine, not the batch. "
                f"The first difference is in {place}. The run uses the repetition, with loss {again:.4f}"
            )
        iteration = trainer.progress.iteration + 1
        self.say(
            iteration, f"iteration {iteration}: {reason}. Repeated from the same state {verdict}"
        )
        return again

    def _first_difference(self, first: dict[Key, int], again: dict[Key, int]) -> str | None:
        """What differs first on all ranks, and where; None where all fingerprints are the same. Collective."""
        world, tp = self.trainer.world, self.trainer.groups.tp.size
        key = first_difference(first, again)
        rank = first_rank(world, key and (key[0], key[1], key[2] + LARGEST_PART), 3)
        if rank is None:
            return None
        who = (
            f"rank {rank}"
            if tp == 1
            else f"ranks {rank // tp * tp} to {rank // tp * tp + tp - 1}, which share their layers"
        )
        text = (
            f"{_what(key)}, on {who} (node {platform.node()})" if key and rank == world.rank else ""
        )
        return world.broadcast_object(text, root=rank)

    def _same_bits(self, consumed: int, first: dict[Key, int], again: float) -> tuple[float, str]:
        """Find out if a core repeats its mistake; (loss of the gradients that the update shall use,
        verdict). Collective.
        """
        trainer = self.trainer
        samples = trainer.skips.samples(consumed, trainer.batch_size(consumed))
        skip = (
            f"--skip-samples {samples[0]}:{samples[-1] + 1} leaves it out of a run that continues "
            "from an earlier checkpoint"
        )
        why = self._why_not_elsewhere()
        if why:
            return again, (
                "it has the same bits: the cause is the batch, or a core that repeats its mistake "
                f"({why}). {skip}"
            )
        scale = trainer.optimizer.scaler.scale
        elsewhere = trainer.repeat(consumed, scale, shift=1)
        computed = [first, self._of_own_samples(first, 1)]
        key = first_difference(*computed)
        world = trainer.world
        if first_rank(world, None if key is None else (0,), 1) is None:
            again = trainer.repeat(consumed, scale)  # the bits of sums that an undisturbed run has
            self.fingerprints.take()
            return again, (
                "it has the same bits, when other ranks compute the samples as well: the cause is "
                "the batch, "
                f"not a machine. {skip}"
            )
        if trainer.groups.data_size > 2:
            elsewhere = trainer.repeat(consumed, scale, shift=2)
            computed.append(self._of_own_samples(first, 2))
        place = self._repeated_mistake(key, computed)
        return elsewhere, (
            "it has the same bits, but other bits when other ranks compute the samples: the cause "
            "is a core that repeats its "
            f"mistake, not the batch. The first difference is in {place}. The run uses what the "
            "other ranks computed, with loss "
            f"{elsewhere:.4f}"
        )

    def _why_not_elsewhere(self) -> str:
        """Say why no other rank can compute a rank's samples with the same bits; "" if one can."""
        if self.trainer.groups.data_size == 1:
            return "data-parallel size 1 has no other rank that could compute it"
        if self.trainer.run.model.num_experts:
            return "the results of experts depend on the ranks that send them tokens"
        return ""

    def _of_own_samples(self, own: dict[Key, int], shift: int) -> dict[Key, int]:
        """Fingerprints of this rank's samples, which the rank `shift` places before it has just
        computed. Collective.
        """
        groups, keys = self.trainer.groups, sorted(own)
        taken = self.fingerprints.take()
        values = torch.tensor([taken[key] for key in sorted(taken)], dtype=torch.int64)
        everyone = groups.dp.all_gather(
            torch.empty(groups.dp.size, len(keys), dtype=torch.int64), values
        )
        row = (groups.dp.rank - shift * groups.cp.size) % groups.dp.size
        return dict(zip(keys, everyone[row].tolist(), strict=True))

    def _repeated_mistake(self, key: Key | None, computed: list[dict[Key, int]]) -> str:
        """Name the rank whose results others do not confirm. computed: by this rank, and by the
        ranks before it. Collective.
        """
        trainer = self.trainer
        world, dp = trainer.world, trainer.groups.dp
        rank = first_rank(world, key and (key[0], key[1], key[2] + LARGEST_PART), 3)
        assert rank is not None, "a difference was found"
        places = dp.all_gather_object(f"rank {world.rank} (node {platform.node()}, {cores()})")
        text = ""
        if key and rank == world.rank:
            own, other = (
                places[(dp.rank - shift * trainer.groups.cp.size) % dp.size] for shift in (0, 1)
            )
            values = [each[key] for each in computed]
            who = f"{own} or {other}"
            if len(values) == 3 and values[2] == values[1]:
                who = own
            elif len(values) == 3 and values[2] == values[0]:
                who = other
            text = f"{_what(key)}, on {who}"
        return world.broadcast_object(text, root=rank)
