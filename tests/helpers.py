"""Small models and shortcuts that several tests use."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.plain_gpt import PlainGPT
from fugaku_megatron.arguments import make_run
from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.grid import Grid, Groups
from fugaku_megatron.config import ModelConfig, RunConfig
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.train import IterationResult, Trainer

SMALL = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 96,
    "make_vocab_size_divisible_by": 8, "mock_data": True, "micro_batch_size": 2, "global_batch_size": 16, "train_iters": 20,
    "lr": 1e-3, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}


def small_run(**changes: Any) -> RunConfig:
    """The small model, with values changed."""
    return make_run(None, {**SMALL, **changes})


def mock(run: RunConfig, seed: int = 7) -> MockDataset:
    """Random tokens for a whole run."""
    return MockDataset(run.model.vocab_size, run.model.seq_length, 4096, seed)


def make_trainer(world: Comm, run: RunConfig) -> Trainer:
    """A trainer on random tokens."""
    return Trainer(run, world, grid_groups(world, run), mock(run), mock(run, 8))


def grid_groups(world: Comm, run: RunConfig) -> Groups:
    """The groups of a run."""
    parallel = run.parallel
    return Grid(world.size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size).groups(world)


def train(world: Comm, run: RunConfig, iterations: int) -> list[IterationResult]:
    """The results of the first iterations."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, run)
    try:
        return [trainer.train_step() for _ in range(iterations)]
    finally:
        trainer.close()


def whole_tensors(trainer: Trainer, of: str) -> dict[str, torch.Tensor]:
    """Every parameter ("weight") or gradient ("grad") as a global tensor, put together over all ranks. Collective."""
    pieces = []
    for p in trainer.optimizer.flat.parameters:
        local = (p.main_grad if of == "grad" else p).detach().float().clone()
        pieces.append((p.global_name, p.global_shape, p.global_offset, local))
    whole: dict[str, torch.Tensor] = {}
    for name, shape, offset, piece in (x for rank in trainer.world.all_gather_object(pieces) for x in rank):
        target = whole.setdefault(name, torch.zeros(shape))
        target[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))] = piece
    return whole


def plain_loss(weights: dict[str, torch.Tensor], tokens: torch.Tensor, labels: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Mean cross entropy of the model in plain torch with named global weights, without dropout. tokens, labels (s, b) -> ()."""
    with torch.device("meta"):
        plain = PlainGPT(model, len(weights["embedding.word_embeddings.weight"]))
    return torch.func.functional_call(plain, weights, (tokens.t(), labels.t()))
