"""Repetition of an iteration whose loss or gradient norm is a spike (`--rerun-on-spike`)."""

from __future__ import annotations

import math
import platform
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agreement import first_rank
from ..training.trainer import Trainer
from .abft import cores

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
    """Fingerprints of what this rank computes in an iteration, a number for each key, taken by hooks on stage and buckets."""

    def __init__(self, trainer: Trainer) -> None:
        self._kept: dict[Key, int] = {}
        pp, placement = trainer.groups.pp, trainer.stage.placement
        for number, chunk in enumerate(trainer.stage.chunks):
            chunk.register_forward_hook(
                partial(self._forward, placement.virtual_stage(pp.rank, number))
            )
        trainer.optimizer.buckets.before_sum = self._weights

    def take(self) -> dict[Key, int]:
        """Return the fingerprints of the iteration so far, and start an empty set."""
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
        """Return the first difference among all ranks in words, with its rank; None if all fingerprints agree. Collective."""
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
