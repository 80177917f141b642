"""Faults for tests, in this repository and outside: flipped bits in files, tensors, weights and matmuls of a run.

Cases outside the repository import from this module alone, whose names and parameters stay when other modules move:

    from tests.fault_injection import after_iteration, flip_weight, run
    with after_iteration(5, lambda trainer: flip_weight(trainer, "decoder.layers.1.mlp.linear_fc2.weight"), rank=1):
        code = run("train", *flags)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.cli import program
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import Observed
from fugaku_megatron.training.trainer import Trainer
from tests.matmuls import MATMULS

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes of an element
Change = Callable[[Trainer], Any]


def run(*words: str) -> int:
    """Run a fugaku-megatron command in this process and return its exit code."""
    return program.main(words)


def flip_file_bit(path: Path, position: int = -1, bit: int = 0) -> None:
    """Change one bit of the byte at `position`."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def flip_bit(tensor: torch.Tensor, element: int = 0, bit: int = 0) -> None:
    """Change one bit of an element of a contiguous tensor."""
    tensor.detach().view(-1).view(WORDS[tensor.element_size()])[element] ^= 1 << bit


def flip_weight(trainer: Trainer, name: str, element: int = 0, bit: int = 20) -> None:
    """Change one bit of this rank's shard of a weight, by Megatron-core's name; without effect on ranks without it."""
    for parameter in trainer.stage.parameters():
        if parameter.spec.name == name:
            flip_bit(parameter, element, bit)


def change_after(trainer: Trainer, iteration: int, change: Change, rank: int = -1) -> None:
    """Call change(trainer) after an iteration if the trainer is the one of `rank`; -1: the last rank."""
    trainer.train_step = partial(_step, trainer.train_step, trainer, iteration, change, rank)


@contextlib.contextmanager
def after_iteration(iteration: int, change: Change, rank: int = -1) -> Iterator[None]:
    """Call change(trainer) after an iteration of a run in the block, in the process of `rank`; -1: of the last rank."""
    step = Trainer.train_step

    def train_step(trainer: Trainer) -> Any:
        return _step(partial(step, trainer), trainer, iteration, change, rank)

    Trainer.train_step = train_step
    try:
        yield
    finally:
        Trainer.train_step = step


def _step(
    step: Callable[[], Any], trainer: Trainer, iteration: int, change: Change, rank: int
) -> Any:
    result = step()
    world = trainer.world
    if trainer.progress.iteration == iteration and world.rank == rank % world.size:
        change(trainer)
    return result


def matmul_result(kernel: str, args: Sequence[Any]) -> torch.Tensor:
    return args[3 if kernel.startswith("grouped_") else 2]


def flipped_kernels(kernel: str, call: int, bit: int = 29, repeated: bool = False) -> Any:
    """Return the kernels' library with one bit of a matmul's result flipped.

    kernel: one of MATMULS
    call: number of the wrong call, from 0; with `repeated` the next call is wrong, too
    bit: of the result's element [1, 2]
    """
    calls = 0

    def observe(name, function, args, kwargs):
        nonlocal calls
        function(*args, **kwargs)
        if calls in (call, call + repeated):
            result = matmul_result(name, args)
            if name == "linear_forward" and len(args) > 5 and args[5] is not None:
                result = args[5]  # what comes before a GELU
            flip_bit(result.data, result.shape[-1] + 2, bit)
        calls += 1

    assert kernel in MATMULS, f"{kernel} is none of {', '.join(MATMULS)}"
    return Observed(kernels, (kernel,), observe)


@contextlib.contextmanager
def wrong_matmul(kernel: str, call: int, bit: int = 29, repeated: bool = False) -> Iterator[None]:
    """Flip one bit of a matmul's result in a run in the block, in this process; arguments as for `flipped_kernels`."""
    right = getattr(kernels, kernel)
    wrong = getattr(flipped_kernels(kernel, call, bit, repeated), kernel)
    setattr(kernels, kernel, wrong)
    try:
        yield
    finally:
        setattr(kernels, kernel, right)
