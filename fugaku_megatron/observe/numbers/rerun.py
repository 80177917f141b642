"""Repetition of an iteration with a spike in loss or gradient norm (`--rerun-on-spike`)."""

from __future__ import annotations

import math
import platform
from collections import deque
from statistics import median

import torch

from ...comm.agreement import first_rank, first_text
from ...optim.bits import bit_sum
from ...training.trainer import Trainer
from ..observer import Say
from .fingerprints import (
    KEY_LENGTH,
    Fingerprints,
    Key,
    Sums,
    contradicted,
    cores,
    first_difference,
    neighbour_distance,
    of_own_samples,
    search_key,
)

NORMAL_MAD = 1.4826  # standard deviations per median absolute deviation of a normal distribution
WINDOW = 50  # last losses
ENOUGH = 20  # losses before the first spike
SMALLEST = 0.01  # of the median: a smaller rise is not a spike, however quiet the losses were


class Spikes:
    """Last losses. A spike exceeds their median by more than `deviations` standard deviations.

    The median absolute deviation estimates them, robust to few spikes. Source: Iglewicz and Hoaglin 1993, "How to Detect and Handle
    Outliers", with 3.5 for data without a trend.
    """

    def __init__(self, deviations: float) -> None:
        self.deviations = deviations
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._in_spike = False

    def find(self, loss: float) -> str | None:
        """Add a loss, and return a message if a spike begins, else None."""
        middle, limit = self._limit()
        before = self._in_spike
        self._in_spike = not math.isfinite(loss) or loss > limit
        if math.isfinite(loss):
            self._losses.append(loss)
        if not self._in_spike or before:
            return None
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return (
            f"the loss {loss:.4f} is above {limit:.4f}, the limit over the median {middle:.4f} of the last "
            f"{min(len(self._losses) - 1, WINDOW)}"
        )

    def _limit(self) -> tuple[float, float]:
        if len(self._losses) < ENOUGH:
            return math.nan, math.inf
        middle = median(self._losses)
        deviation = NORMAL_MAD * median(abs(loss - middle) for loss in self._losses)
        return middle, middle + max(self.deviations * deviation, SMALLEST * abs(middle))


class Rerun:
    """Check of the loss before every update; repeats spikes."""

    def __init__(self, trainer: Trainer, fingerprints: Fingerprints, say: Say) -> None:
        self.trainer = trainer
        self.say = say
        self.spikes = Spikes(trainer.run.numbers.loss_spike_deviations)
        self.fingerprints = fingerprints
        self.distance = neighbour_distance(trainer.run, trainer.groups)
        fingerprints.active = True

    def before_update(self, consumed: int, loss: float) -> float:
        """Return the iteration's loss, or the repetition's if its gradients are used. Collective."""
        trainer = self.trainer
        optimizer = trainer.optimizer
        first = self.fingerprints.take()
        norm = optimizer.grad_norm()
        reason = self.spikes.find(loss)
        if reason is None and not math.isfinite(norm) and not optimizer.scaler.falling:
            reason = f"the norm of the gradients is {norm}"
        if reason is None:
            return loss
        again = trainer.repeat(consumed, optimizer.scaler.scale)
        place = self._first_difference(first, self.fingerprints.take())
        again_norm = optimizer.grad_norm()
        if place is None and (_bits(loss), _bits(norm)) != (_bits(again), _bits(again_norm)):
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

    def _first_difference(self, first: Sums, again: Sums) -> str | None:
        """Describe the first difference of all ranks. Collective."""
        world = self.trainer.world
        tp = self.trainer.groups.tp.size
        key = first_difference(first, again)

        def text() -> str:
            assert key is not None
            ranks = f"rank {world.rank}"
            if tp > 1:
                begin = world.rank // tp * tp
                ranks = f"ranks {begin} to {begin + tp - 1}, which share their layers"
            return f"{self.fingerprints.describe(key)}, on {ranks} (node {platform.node()})"

        return first_text(world, search_key(key, first), KEY_LENGTH, text)

    def _same_bits(self, consumed: int, first: Sums, again: float) -> tuple[float, str]:
        """Find out if a core repeats its mistake; return (loss to use, verdict). Collective."""
        trainer = self.trainer
        samples = trainer.plan.skips.samples(consumed, trainer.plan.batch_sizes(consumed))
        skip = (
            f"--skip-samples {samples[0]}:{samples[-1] + 1} leaves it out of a run that continues "
            "from an earlier checkpoint"
        )
        why = ""  # no other rank can compute the samples with the same bits
        if trainer.groups.data_size == 1:
            why = "data-parallel size 1 has no other rank that could compute it"
        elif self.distance == 0:
            why = "all data-parallel ranks have different experts"
        if why:
            return again, (
                "it has the same bits: the cause is the batch, or a core that repeats its mistake "
                f"({why}). {skip}"
            )
        scale = trainer.optimizer.scaler.scale
        distance = self.distance
        elsewhere = trainer.repeat(consumed, scale, shift=distance)
        groups = trainer.groups
        computed = [first, of_own_samples(groups, first, self.fingerprints.take(), distance)]
        key = first_difference(first, computed[1])
        if first_rank(trainer.world, None if key is None else (0,), 1) is None:
            again = trainer.repeat(consumed, scale)  # the bits of sums that an undisturbed run has
            self.fingerprints.take()
            return again, (
                "it has the same bits, when other ranks compute the samples as well: the cause is "
                f"the batch, not a machine. {skip}"
            )
        if groups.data_size > 2 * distance:
            elsewhere = trainer.repeat(consumed, scale, shift=2 * distance)
            again_elsewhere = self.fingerprints.take()
            computed.append(of_own_samples(groups, first, again_elsewhere, 2 * distance))
        place = self._repeated_mistake(key, computed)
        return elsewhere, (
            "it has the same bits, but other bits when other ranks compute the samples: the cause "
            f"is a core that repeats its mistake, not the batch. The first difference is in {place}. "
            f"The run uses what the other ranks computed, with loss {elsewhere:.4f}"
        )

    def _repeated_mistake(self, key: Key | None, computed: list[Sums]) -> str:
        """Describe the rank that no other rank confirms. Collective.

        computed: fingerprints by this rank, and by the ranks one and two distances before it
        """
        trainer = self.trainer
        world = trainer.world
        dp = trainer.groups.dp
        places = dp.all_gather_object(f"rank {world.rank} (node {platform.node()}, {cores()})")

        def text() -> str:
            assert key is not None
            own = places[dp.rank]
            other = places[(dp.rank - self.distance * trainer.groups.cp.size) % dp.size]
            values = [each[key] for each in computed]
            wrong = contradicted(values)
            suspect = f"{own} or {other}" if wrong is None else (own, other)[wrong]
            return f"{self.fingerprints.describe(key)}, on {suspect}"

        found = first_text(world, search_key(key, computed[0]), KEY_LENGTH, text)
        assert found is not None, "a difference was found"
        return found


def _bits(value: float) -> int:
    return bit_sum(torch.tensor(value, dtype=torch.float64))
