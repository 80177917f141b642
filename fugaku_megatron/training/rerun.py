"""--rerun-on-spike: is it the machine or the batch? The iteration is repeated from the same state before its update.

Weights have not changed, dropout masks and samples are functions of the position in the data, and sums have a fixed order: a sound
machine makes the same bits again. Every iteration keeps fingerprints of what this rank has computed: of each chunk's output and its
input's gradient, micro-batch by micro-batch, and of its own weight gradients before their sums. Where those of a repetition differ,
the first difference (along the samples, then forward and backward through the parts of the model, weight gradients last) names the
rank. Megatron-LM's rerun state machine does as much with results that it is given to validate.

Left out: a machine that makes the same mistake twice (`checksums.differing_replica`, other nodes).
"""

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
from .train import Trainer

NORMAL_MAD = 1.4826  # standard deviations in the median absolute deviation of a normal distribution
WINDOW, ENOUGH = 50, 20  # losses that are looked back on, and how many there must be
SMALLEST = 0.01  # of the median: a rise below it is no spike, however quiet the losses were


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
        return (f"the loss {loss:.4f} is above {limit:.4f}, the limit over the median {middle:.4f} of the last "
                f"{min(len(self._losses) - 1, WINDOW)}")

    def _limit(self) -> tuple[float, float]:
        """Median of the losses, and the largest loss that is no spike."""
        if len(self._losses) < ENOUGH:
            return math.nan, math.inf
        middle = median(self._losses)
        deviation = NORMAL_MAD * median(abs(loss - middle) for loss in self._losses)
        return middle, middle + max(self.deviations * deviation, SMALLEST * abs(middle))


OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
TEXTS = ("the output of part {}", "the gradient of part {}'s input", "the weight gradients")  # `parts`: 0 is the first
LARGEST_PART = 2**30
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
Key = tuple[int, int, int]  # first sample, kind, part of the model in the order of the pass


def bit_sum(x: Tensor) -> int:
    """The elements of x (any shape) as whole numbers, added up modulo 2^64: one flipped bit always changes it."""
    flat = x.detach().reshape(-1)
    whole = all(n * x.element_size() % 8 == 0 for n in (flat.numel(), flat.storage_offset()))
    return int(flat.view(torch.int64 if whole else INTEGERS[x.element_size()]).sum())  # torch converts smaller ones


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
        self._kept[2**61, WEIGHT_GRADIENT, bucket + 1] = bit_sum(grads)  # behind all samples


def first_difference(one: dict[Key, int], other: dict[Key, int]) -> Key | None:
    """The first key whose numbers differ."""
    return min((key for key in one.keys() | other.keys() if one.get(key) != other.get(key)), default=None)


def _what(key: Key) -> str:
    sample, kind, part = key
    return TEXTS[kind].format(abs(part)) + f" of the micro-batch that begins with sample {sample}" * (kind != WEIGHT_GRADIENT)


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
        sums = [bit_sum(torch.tensor(value, dtype=torch.float64)) for value in (loss, norm, again, trainer.optimizer.grad_norm())]
        if place is None and sums[:2] != sums[2:]:
            place = "the sums over ranks"
        verdict = self._bad_batch(consumed) if place is None else (
            "it has other bits: the cause is a machine, not the batch. "
            f"The first difference is in {place}. The run uses the repetition, with loss {again:.4f}")
        iteration = trainer.progress.iteration + 1
        self.say(iteration, f"iteration {iteration}: {reason}. Repeated from the same state {verdict}")
        return again

    def _first_difference(self, first: dict[Key, int], again: dict[Key, int]) -> str | None:
        """What differs first on all ranks, and where; None where all fingerprints are the same. Collective."""
        world, tp = self.trainer.world, self.trainer.groups.tp.size
        key = first_difference(first, again)
        rank = first_rank(world, key and (key[0], key[1], key[2] + LARGEST_PART), 3)
        if rank is None:
            return None
        who = f"rank {rank}" if tp == 1 else f"ranks {rank // tp * tp} to {rank // tp * tp + tp - 1}, which share their layers"
        text = f"{_what(key)}, on {who} (node {platform.node()})" if key and rank == world.rank else ""
        return world.broadcast_object(text, root=rank)

    def _bad_batch(self, consumed: int) -> str:
        trainer = self.trainer
        samples = trainer.skips.samples(consumed, trainer.batch_size(consumed))
        return ("it has the same bits: the cause is the batch, not a machine. "
                f"--skip-samples {samples[0]}:{samples[-1] + 1} leaves it out of a run that continues from an earlier checkpoint")
