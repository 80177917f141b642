"""Training in a layout, to compare with training on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.data.chat.chat_dataset import ChatDataset
from fugaku_megatron.data.chat.chat_files import ChatFiles
from fugaku_megatron.data.dataset import Dataset, DatasetConfig
from fugaku_megatron.data.marks import mark
from fugaku_megatron.optim.optimizer import Optimizer, StepResult
from tests.checks.documents import EOD, Texts
from tests.helpers import assert_near, make_trainer, mock, small_run, whole_tensors
from tests.threads import ThreadWorld

# Gradients of layouts differ by 1e-6 of the largest element.
GRADIENT_NOISE = 1e-6
DISTURBED_RUNS = 4
SPREAD_FACTOR = 2.0
# The gradients of a delta net's decays are small differences of long FP32 sums.
DECAYS = ("dt_bias", "A_log")
DECAY_TOLERANCE = 1e-4

Gradients = dict[str, torch.Tensor]  # by parameter name

Data = Callable[[RunConfig], tuple[Dataset, Dataset]]  # of training and of validation


def random_tokens(run: RunConfig) -> tuple[Dataset, Dataset]:
    return mock(run), mock(run, 8)


def texts(run: RunConfig) -> tuple[Dataset, Dataset]:
    """Return samples with several documents, marked if the run needs marks."""
    model = run.model
    data = [Texts(model.vocab_size, model.seq_length, 4096, seed) for seed in (7, 8)]
    if run.data.marked:
        data = [mark(each, EOD, run.data.eod_mask_loss) for each in data]
    return data[0], data[1]


def chats_of(files: ChatFiles) -> Data:
    """Return data with packed chats."""

    def data(run: RunConfig) -> tuple[Dataset, Dataset]:
        config = DatasetConfig(run.model.seq_length, 3)
        dataset = ChatDataset(files, "train", range(len(files)), 64, config)
        return dataset, dataset

    return data


class Trained(NamedTuple):
    """A run's figures, equal on every rank.

    losses: iterations, and the evaluation after the last iteration
    norms: gradient norms
    counts: counted labels, squared document lengths, expert tokens and other losses
    gradients: after the first iteration
    weights: after the last iteration
    """

    losses: list[float]
    norms: list[float]
    counts: list[float]
    gradients: Gradients
    weights: dict[str, torch.Tensor]

    @property
    def figures(self) -> list[float]:
        return [*self.losses, *self.norms, *self.counts]


def disturb(optimizer: Optimizer, noise: torch.Generator) -> None:
    """Add u times the largest element of its tensor to every gradient but zeros, |u| <= GRADIENT_NOISE, on one rank."""
    step = optimizer.step

    def disturb_and_step(*args, **kwargs) -> StepResult:
        for parameter in optimizer.flat.parameters:
            gradient = parameter.main_grad
            uniform = torch.empty_like(gradient).uniform_(-1, 1, generator=noise)
            uniform *= gradient != 0
            gradient.add_(uniform, alpha=GRADIENT_NOISE * gradient.abs().max().item())
        return step(*args, **kwargs)

    optimizer.step = disturb_and_step


def train(
    world: Comm,
    run: RunConfig,
    data: Data = random_tokens,
    iterations: int = 2,
    noise: torch.Generator | None = None,
) -> Trained:
    """Train and evaluate. Frozen weights must not change.

    noise: random numbers for `disturb`; None: leave the gradients as they are
    """
    trained = Trained([], [], [], {}, {})
    with contextlib.closing(make_trainer(world, run, data=data(run))) as trainer:
        if noise is not None:
            disturb(trainer.optimizer, noise)
        frozen_memory = trainer.optimizer.flat.frozen_memory
        frozen = [memory.values.clone() for memory in frozen_memory]
        for iteration in range(iterations):
            result = trainer.train_step()
            trained.losses.append(result.loss)
            trained.norms.append(result.grad_norm)
            if result.work is not None:
                trained.counts.append(result.work.counted)
                if not run.data.sft:  # the padding of chats depends on the length of samples
                    trained.counts.append(result.work.squares)
            trained.counts.extend(result.predictions)
            if result.z_loss is not None:
                trained.counts.append(result.z_loss)
            if result.experts is not None:
                trained.counts.extend(result.experts.flatten().tolist())
            if iteration == 0:
                trained.gradients.update(whole_tensors(trainer, "grad"))
        trained.losses.append(trainer.evaluate(trainer.valid, 0, 1))
        assert all(map(torch.equal, frozen, (memory.values for memory in frozen_memory)))
    trained.weights.update(whole_tensors(trainer, "weight"))
    return trained


def rounding_spread(run: RunConfig, expected: Trained, data: Data, iterations: int) -> list[float]:
    """Return how far rounding moves each figure of `expected`, a run on one rank.

    An update that divides by a small moment, or whose moment has a code that rounds to the other neighbour, amplifies
    the rounding of a gradient. The result is SPREAD_FACTOR times the largest difference of DISTURBED_RUNS runs whose
    gradients differ by rounding.
    """
    spread = [0.0] * len(expected.figures)
    for seed in range(DISTURBED_RUNS):
        noise = torch.Generator().manual_seed(seed)
        figures = train(SoloComm(), run, data, iterations, noise).figures
        for index, (figure, of_expected) in enumerate(zip(figures, expected.figures, strict=True)):
            spread[index] = max(spread[index], abs(figure - of_expected))
    return [SPREAD_FACTOR * each for each in spread]


def assert_as_on_one_rank(
    found: Trained,
    expected: Trained,
    *,
    run: RunConfig,
    data: Data = random_tokens,
    iterations: int = 2,
    tolerance: float,
) -> None:
    """Compare the figures of a layout with those of `run` on one rank.

    tolerance: relative; a figure beyond it may differ as far as rounding moves it, which takes DISTURBED_RUNS runs
    """
    if found.figures == pytest.approx(expected.figures, rel=tolerance, abs=1e-8):
        return
    spread = rounding_spread(run, expected, data, iterations)
    assert found.figures == [
        pytest.approx(figure, rel=tolerance, abs=max(1e-8, of_figure))
        for figure, of_figure in zip(expected.figures, spread, strict=True)
    ]


def assert_gradients_as_on_one_rank(
    found: Gradients, expected: Gradients, tolerance: float
) -> None:
    """Compare gradients by name. A difference is relative to the expected tensor's largest value."""
    for name, gradient in expected.items():
        allowed = DECAY_TOLERANCE if name.endswith(DECAYS) else tolerance
        assert_near(found, {name: gradient}, allowed)


def train_together(
    ranks: int, flags: dict[str, Any], data: Data = random_tokens, iterations: int = 2
) -> Trained:
    """Train on all ranks, compare their figures, and return the first rank's result."""
    run = small_run(**flags)
    first, *others = ThreadWorld(ranks).run(train, run, data, iterations)
    assert all(other.figures == first.figures for other in others)
    return first
