"""Checkpoints of this program with random weights, conversions by the command, and their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.cli import program
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.convert.open_weights import open_weights
from tests.helpers import make_trainer, small_run

Tensors = dict[str, torch.Tensor]


def save_random(directory: Path, flags: dict[str, Any]) -> Path:
    """Save the small model with these flags and random weights; return the directory."""
    trainer = make_trainer(SoloComm(), small_run(**flags))
    for shard in trainer.optimizer.shards:
        shard.master.normal_(generator=torch.Generator().manual_seed(shard.start))
    trainer.save(str(directory))
    trainer.close()
    return directory


def convert(*words: object) -> int:
    return program.main(["convert", *map(str, words)])


def read(directory: Path) -> Tensors:
    weights = open_weights(str(directory))
    return {name: weights.read(name).clone() for name in weights.dtypes}


def check_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
