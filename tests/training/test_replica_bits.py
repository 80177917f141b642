"""Ranks with the same parameter have the same bits in the parameter, its master weights and its moments."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.nn.parameter import ParameterSpec
from fugaku_megatron.training.trainer import Trainer
from tests.checks.moments import (
    EIGHT,
    EP2,
    EXPERTS,
    GROUPED,
    LORA,
    PRECISE,
    SHARED,
    SIZES,
    SP,
    is_possible,
)
from tests.helpers import CP2, OVERLAP, PP2, TP2, TP2PP2, make_trainer, small_run
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

ITERATIONS = 12
UNTIED = {"untie_embeddings_and_output_weights": True}
MODELS = {
    "gpt": {},
    "untied": {**UNTIED, "decoupled_lr": 1e-3},
    "grouped": GROUPED,
    "experts": EXPERTS,
    "shared expert": SHARED,
    "untied experts": {**SHARED, **UNTIED},
    "lora": LORA,
    "lora of experts": {**SHARED, **LORA},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}
ZERO = {"zero_stage": 1}
EIGHT_SAMPLES = {"global_batch_size": 8}  # four data-parallel ranks with micro-batches of two
VIRTUAL = {**PP2, "num_virtual_stages_per_pipeline_rank": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
LAYOUTS = {
    "tp": (2, TP2),
    "tp 4": (4, {"tensor_model_parallel_size": 4}),
    "sp": (2, {**TP2, **SP}),
    "pp": (2, PP2),
    "virtual": (2, VIRTUAL),
    "zbv": (2, {**PP2, "pipeline_schedule": "zbv"}),
    "dp": (3, {"global_batch_size": 6}),
    "zero": (4, {**ZERO, **EIGHT_SAMPLES}),
    "zero 3": (3, {**ZERO, "global_batch_size": 6}),
    "cp zero": (4, {**CP2, **ZERO}),
    "tp zero": (4, {**TP2, **ZERO}),
    "tp pp": (4, TP2PP2),
    "sp pp zero": (8, {**TP2PP2, **SP, **OVERLAP, "ddp_bucket_size": 3000}),
    "tp virtual": (4, {**TP2, **VIRTUAL}),
    "tp cp": (4, {**TP2, **CP2}),
    "ep": (4, {**EP2, **EIGHT_SAMPLES}),
    "ep zero": (4, {**EP2, **ZERO, **EIGHT_SAMPLES}),
    "ep sp": (4, {**TP2, **SP, **EP2}),
    "ep etp 1 zero": (4, {**TP2, **SP, **EP2, **ETP1, **ZERO}),
    "ep pp zero": (8, {**EP2, **PP2, **ZERO, **EIGHT_SAMPLES}),
    "ep sp pp": (8, {**TP2PP2, **SP, **EP2}),
}
HALF = {**PRECISE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
BF16 = {"bf16": True}
LOW = {**PRECISE, **BF16, "main_params_dtype": "bf16"}
MUON = {"optimizer": "muon", "muon_extra_scale_factor": 0.2}
FORMATS = {
    "fp32": {},
    "fp16": {"fp16": True, "initial_loss_scale": 1024.0},
    "bf16 moments": HALF,
    "int8": EIGHT,
    "bf16 int8": {**BF16, **EIGHT},
    "fp16 int8": {"fp16": True, "initial_loss_scale": 1024.0, **EIGHT},
    "bf16 weights": LOW,
    "bf16 weights int8": {**LOW, **EIGHT},
    "bf16 weights bf16 moments": {**LOW, **HALF},
    "muon": MUON,
    "muon bf16": {**MUON, **BF16, **PRECISE, "exp_avg_dtype": "bf16"},
}


def settings(model: str, layout: str, optimizer_format: str) -> tuple[int, dict[str, Any]]:
    """Return a row's ranks and flags."""
    ranks, parallel = LAYOUTS[layout]
    return ranks, {**SIZES, **MODELS[model], **FORMATS[optimizer_format], **parallel}


QUICK = [
    ("gpt", "pp", "int8"),
    ("shared expert", "tp", "int8"),
    ("lora of experts", "ep sp", "bf16 int8"),
    ("grouped", "sp pp zero", "bf16 weights int8"),
    ("untied experts", "ep etp 1 zero", "bf16 weights bf16 moments"),
    ("dropout", "tp virtual", "muon bf16"),
]


def random_rows(count: int) -> list[tuple[str, str, str]]:
    """Return so many different rows that are possible; every model, layout and format occurs."""
    rng = random.Random(5)
    rows: list[tuple[str, str, str]] = []
    axes = [list(MODELS), list(LAYOUTS), list(FORMATS)]
    missing = [set(axis) for axis in axes]
    while len(rows) < count or any(missing):
        row = tuple(
            rng.choice(sorted(absent) if absent and rng.random() < 0.7 else axis)
            for axis, absent in zip(axes, missing, strict=True)
        )
        if row not in (*rows, *QUICK) and is_possible(*settings(*row)):
            rows.append(row)
            for absent, value in zip(missing, row, strict=True):
                absent.discard(value)
    return rows


ROWS = random_rows(40)


def stored_bits(
    trainer: Trainer,
) -> Iterator[tuple[str, ParameterSpec, torch.Tensor, torch.Tensor]]:
    """Yield (key, shape, element numbers in the global tensor, bits) for every tensor on this rank."""
    flat = trainer.optimizer.flat
    records = [
        (
            shard.alias or shard.key,
            shard.global_shape,
            shard.offset,
            shard.slice_shape,
            shard.flat_start,
            shard.tensor,
        )
        for shard in trainer.optimizer.checkpoint_shards()
    ]
    records += [
        (f"value/{p.spec.init_name}", p.spec.shape, p.spec.offset, tuple(p.shape), 0, p.data)
        for p in flat.parameters
    ]
    for key, shape, offset, slice_shape, first, tensor in records:
        whole = torch.arange(math.prod(shape)).view(shape)
        place = tuple(slice(o, o + n) for o, n in zip(offset, slice_shape, strict=True))
        numbers = whole[place].flatten()[first : first + tensor.numel()]
        bits = torch.int32 if tensor.element_size() == 4 else torch.int16
        yield key, shape, numbers, tensor.detach().flatten().view(bits).clone()


def differing(trainer: Trainer) -> list[str]:
    """Return keys with different bits on two ranks. Collective."""
    whole: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    found: dict[str, None] = {}
    for rank in trainer.world.all_gather_object([*stored_bits(trainer)]):
        for key, shape, numbers, bits in rank:
            there = whole.setdefault(key, torch.zeros(math.prod(shape), dtype=bits.dtype))
            seen = known.setdefault(key, torch.zeros(math.prod(shape), dtype=torch.bool))
            if (seen[numbers] & (there[numbers] != bits)).any():
                found[key] = None
            there[numbers] = bits
            seen[numbers] = True
    assert all(seen.all() for seen in known.values())
    return [*found]


def after_training(world: Comm, run: RunConfig, iterations: int) -> list[str]:
    """Return keys with different bits on two ranks after so many iterations."""
    with contextlib.closing(make_trainer(world, run)) as trainer:
        for _ in range(iterations):
            result = trainer.train_step()
        assert math.isfinite(result.loss)
        return differing(trainer)


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(row, id=", ".join(row)) for row in QUICK),
        *(pytest.param(row, id=", ".join(row), marks=pytest.mark.full) for row in ROWS),
    ],
)
def test_replicas_have_the_same_bits(row):
    ranks, changes = settings(*row)
    iterations = ITERATIONS if row in ROWS else ITERATIONS // 2
    for found in ThreadWorld(ranks).run(after_training, small_run(**changes), iterations):
        assert not found
