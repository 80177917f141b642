"""Checkpoints of this program with random weights, conversions by the command, and their tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.cli import program
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.convert.open_weights import open_weights
from tests.helpers import make_trainer, small_run

Tensors = dict[str, torch.Tensor]
BLOCK: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 60,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "ffn_hidden_size": 48,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}


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


def to_megatron(ours: Path, folder: Path, flags: str = "") -> Path:
    """Convert a checkpoint to Megatron-LM's; return the new directory in a folder."""
    theirs = folder / "theirs"
    assert convert("--load", ours, "--to-megatron", theirs, *flags.split()) == 0
    return theirs


def refused(capsys, *words: object) -> str:
    """Return the one line of a refused conversion."""
    capsys.readouterr()
    assert convert(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def change_arguments(common: Path, **changes: Any) -> None:
    """Change the saved arguments in a file of Megatron-LM."""
    contents = torch.load(common, weights_only=False)
    for name, value in changes.items():
        setattr(contents["args"], name, value)
    torch.save(contents, common)


class Attack:
    """Object whose unpickling makes the file `attacked`."""

    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def read(directory: Path) -> Tensors:
    weights = open_weights(str(directory))
    return {name: weights.read(name).clone() for name in weights.dtypes}


def check_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
