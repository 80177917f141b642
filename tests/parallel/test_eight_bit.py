"""AdamW's moments in 8 bits: codes, blocks that no layout changes, memory, and losses next to those with moments in FP32."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import pytest
import torch

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs import int8_moments as costs
from fugaku_megatron.costs import memory, run_schedule
from fugaku_megatron.optim.flat import Place
from fugaku_megatron.optim.int8 import Blocks, EightBitMoment, blocks_of_shard, cut_blocks
from fugaku_megatron.training.trainer import Trainer
from tests.checks.moments import EIGHT, EP2, EXPERTS, GROUPED, LORA, SHARED, SP, is_possible
from tests.checks.moments import SIZES as HALF_SIZES
from tests.checks.training import trained
from tests.helpers import OVERLAP, PP2, TP2, TP2PP2, make_trainer, small_run
from tests.llama_models import FAMILIES
from tests.threads import ThreadWorld

SIZES = {**HALF_SIZES, "global_batch_size": 8}

PLACE = Place(stream=9, offset=0, first=0, columns=1000, row=1000)


def test_codes_of_eight_bits():
    """Codes hold values of very different size in blocks, the last one short, the second all zeros."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator) * 10 ** -(
        4 * torch.rand(1000, generator=generator)
    )
    values[256:512] = 0.0
    scale = torch.cat([part.abs().max().expand(len(part)) for part in values.split(256)])
    chunk = [Blocks(start=0, segments=1, length=1000, block=256, first_scale=0, place=PLACE)]
    first = EightBitMoment(1000, 4, signed=True)
    first.write(chunk, values)
    got = first.read(chunk)
    step = (
        2 * (values.abs() / scale.clamp(min=1e-30)).sqrt() / 127 + 127**-2.0
    )  # between neighbours
    assert ((got - values).abs() <= 0.51 * step * scale).all() and not got[256:512].any()
    squares, mean = values.square(), torch.zeros(1000)
    second = EightBitMoment(1000, 4, signed=False)
    for number in range(400):
        second.write(chunk, squares, at_random=(5, number))
        mean += second.read(chunk) / 400
    low = ((squares / scale.square().clamp(min=1e-30)) ** 0.25 * 255).floor()
    step = ((low + 1) ** 4 - low**4) / 255**4 * scale.square()
    assert ((mean - squares).abs() <= 0.11 * step + 1e-6 * squares)[low > 0].all(), (
        "4 standard deviations of a mean of 400"
    )
    assert (second.read(chunk)[squares > 0] > 0).all(), "what divides is never 0"
    for moment, given in ((first, got), (second, second.read(chunk))):
        before = moment.codes.clone()
        moment.write(chunk, given)
        assert torch.equal(moment.codes, before), "what a checkpoint holds gives the same codes"


def test_a_segment_with_a_short_last_block():
    """Three segments of 9 elements in blocks of 4: each block has the scale of its largest element."""
    values = torch.arange(1.0, 28.0)
    chunk = [Blocks(start=0, segments=3, length=9, block=4, first_scale=0, place=PLACE)]
    moment = EightBitMoment(27, chunk[0].scales, signed=True)
    moment.write(chunk, values)
    assert moment.scales.tolist() == [4, 8, 9, 13, 17, 18, 22, 26, 27]
    assert torch.allclose(moment.read(chunk), values, rtol=0.02)


MODELS = {
    "gpt": {},
    "grouped": GROUPED,
    "experts": SHARED,
    "lora": LORA,
    "lora of experts": {**SHARED, **LORA},
}
LAYOUTS = [
    (4, {"tensor_model_parallel_size": 4}),
    (8, {**TP2PP2, **OVERLAP, "ddp_bucket_size": 3000}),
    (3, {"zero_stage": 1, "global_batch_size": 12}),
    (4, {**TP2, **SP, **EP2, "zero_stage": 1}),
    (4, {**TP2, **SP, **EP2, "expert_tensor_parallel_size": 1, "zero_stage": 1}),
]


def loaded_moments(world: Comm, run: RunConfig, directory: str) -> dict[str, torch.Tensor]:
    """Return the moments of 8 bits, whole, after loading a checkpoint."""
    with contextlib.closing(make_trainer(world, run)) as trainer:
        trainer.load(directory)
        whole: dict[str, torch.Tensor] = {}
        records = [
            (s.key, s.global_shape, s.offset, s.slice_shape, s.flat_start, s.tensor.clone())
            for s in trainer.optimizer.checkpoint_shards()
            if s.key.startswith("exp_avg")
        ]
        for rank in world.all_gather_object(records):
            for key, shape, offset, slice_shape, first, tensor in rank:
                numbers = torch.arange(math.prod(shape)).view(shape)
                own = numbers[tuple(slice(o, o + n) for o, n in zip(offset, slice_shape))]
                target = whole.setdefault(key, torch.zeros(math.prod(shape)))
                target[own.flatten()[first : first + tensor.numel()]] = tensor
        return whole


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_rounds_loaded_moments_to_the_same_bits(model, tmp_path):
    """From a checkpoint of FP32 moments, also one of an earlier version of the program with other blocks."""
    changes = {**SIZES, **MODELS[model]}
    trained(SoloComm(), small_run(**changes), None, tmp_path, 2)
    expected = loaded_moments(SoloComm(), small_run(**changes, **EIGHT), str(tmp_path))
    assert all(moment.any() for key, moment in expected.items() if "expert_bias" not in key)
    for ranks, layout in LAYOUTS:
        if not is_possible(ranks, {**changes, **layout}):
            continue
        run = small_run(**{**changes, **EIGHT, **layout})
        found = ThreadWorld(ranks).run(loaded_moments, run, str(tmp_path))[0]
        for key, moment in expected.items():
            assert torch.equal(found[key], moment), (key, layout)


def losses(world: Comm, run: RunConfig, iterations: int) -> list[float]:
    """Return the losses of the first iterations."""
    return trained(world, run, iterations=iterations)[0]


@functools.cache
def losses_of_one_rank(*changes: tuple[str, Any]) -> list[float]:
    """Return ten losses of one rank."""
    return losses(SoloComm(), small_run(**dict(changes)), 10)


@pytest.mark.parametrize("model", ["gpt", "experts"])
def test_shards_of_zero_have_the_bits_of_replicas(model):
    """Blocks that the boundaries of shards cut have one scale."""
    changes = {**SIZES, **MODELS[model], **EIGHT, "global_batch_size": 12}
    replicas = ThreadWorld(3).run(trained, small_run(**changes), None, None, 4)[0]
    shards = ThreadWorld(3).run(trained, small_run(**changes, zero_stage=1), None, None, 4)[0]
    assert shards[0] == replicas[0]
    assert all(torch.equal(weight, shards[1][name]) for name, weight in replicas[1].items())


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {}),
        (2, {"zero_stage": 1}),
        (2, TP2),
        (2, PP2),
        (8, {**TP2PP2, "zero_stage": 1}),
    ],
    ids=["dp", "zero", "tp", "pp", "all"],
)
def test_losses_are_those_of_one_rank(ranks, layout):
    """Layouts add gradients in another order, so that a few of the roundings differ."""
    changes = {**SIZES, **EIGHT, "lr_decay_style": "constant"}
    alone = losses_of_one_rank(*changes.items())
    for own in ThreadWorld(ranks).run(losses, small_run(**changes, **layout), 10):
        assert own[:5] == pytest.approx(alone[:5], rel=2e-6)
        assert own == pytest.approx(alone, rel=1e-4)


def test_losses_stay_with_those_of_fp32(tmp_path):
    common = {"lr_decay_style": "constant", "train_iters": 60, "global_batch_size": 4}
    run = small_run(**EIGHT, **common)
    plain, _ = trained(SoloComm(), small_run(**common), iterations=60)
    losses, weights = trained(SoloComm(), run, None, tmp_path, 60, saved_at=30)
    assert losses != plain and losses == pytest.approx(plain, rel=0.005)
    again, resumed = trained(SoloComm(), run, tmp_path, None, 30)
    assert again == losses[30:] and all(
        torch.equal(w, resumed[name]) for name, w in weights.items()
    )
    split = small_run(**EIGHT, **common, **TP2PP2, zero_stage=1)
    for others, _ in ThreadWorld(8).run(trained, split, tmp_path, None, 4):
        assert others == pytest.approx(losses[30:34], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(4, {**TP2, "zero_stage": 1}), (4, {**EP2, "zero_stage": 1})]
)
def test_a_split_run_resumes_with_the_same_bits(ranks, layout, tmp_path):
    run = small_run(**{**SIZES, **EXPERTS, **EIGHT, "bf16": True, **layout})
    straight = ThreadWorld(ranks).run(trained, run, None, tmp_path, 6, 3)[0]
    again = ThreadWorld(ranks).run(trained, run, tmp_path, None, 3)[0]
    assert again[0] == straight[0][3:]
    assert all(torch.equal(w, again[1][name]) for name, w in straight[1].items())


def validated(trainer: Trainer) -> float:
    """Return the loss of one batch of validation samples."""
    return trainer.evaluate(trainer.valid, 0, 1)


def trained_and_validated(world: Comm, run: RunConfig, directory: str) -> float:
    """Return the validation loss after training, and save the run."""
    with contextlib.closing(make_trainer(world, run)) as trainer:
        for _ in range(4):
            trainer.train_step()
        trainer.save(directory)
        return validated(trainer)


def loaded_and_validated(world: Comm, run: RunConfig, directory: str) -> float:
    """Return the validation loss of a saved run."""
    with contextlib.closing(make_trainer(world, run)) as trainer:
        trainer.load(directory)
        return validated(trainer)


@pytest.mark.parametrize(
    ("model", "layout"),
    [(EXPERTS, TP2), ({}, PP2), ({**SHARED, **LORA}, TP2)],
    ids=["experts", "tied", "lora"],
)
def test_a_checkpoint_has_the_validation_loss_of_its_run(model, layout, tmp_path):
    """In the same layout to the last bit, and on one rank up to the order of sums."""
    changes = {**SIZES, **model, **EIGHT}
    run = small_run(**changes, **layout)
    (loss,) = set(ThreadWorld(2).run(trained_and_validated, run, str(tmp_path)))
    assert set(ThreadWorld(2).run(loaded_and_validated, run, str(tmp_path))) == {loss}
    alone = loaded_and_validated(SoloComm(), small_run(**changes), str(tmp_path))
    assert alone == pytest.approx(loss, rel=1e-6)


def held_bytes(ranks: int, run: RunConfig, rank: int) -> int:
    """Return the bytes of the moments and the master weights of a rank."""
    parts = make_trainer(SoloComm(rank, ranks), run).optimizer.shards
    assert not any(part.exp_avg.numel() or part.exp_avg_sq.numel() for part in parts)
    masters = sum(part.master.nbytes for part in parts if part.model_weights is not None)
    return masters + sum(moment.nbytes for part in parts for moment in part.eight_bit)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        (8, {"bf16": True, **TP2PP2}),
        (2, {**SHARED, **TP2}),
        (4, {**SHARED, **TP2, **SP, **EP2, "expert_tensor_parallel_size": 1}),
        (2, {**SHARED, **LORA, **TP2}),
        *((2, {**family, **TP2}) for family in FAMILIES.values()),
    ],
)
def test_memory_is_what_the_formula_says(ranks, changes):
    run = small_run(**{**EIGHT, **changes})
    layout, lists = Layout.from_run(run, ranks), run_schedule.build_schedule(run, 2)
    for stage in range(layout.pp):
        planned = memory.stage_memory(run, layout, stage, lists.in_flight(stage)).optimizer
        assert held_bytes(ranks, run, stage * layout.tp) == planned


@pytest.mark.parametrize("changes", [{}, SHARED, {**EP2, **SHARED}, LORA])
def test_memory_of_shards_is_at_most_what_the_formula_says(changes):
    """Shards of ZeRO-1 have different numbers of blocks; the formula is for the shortest blocks, which are short in a small model."""
    run = small_run(**{**EIGHT, **changes, "zero_stage": 1})
    layout, lists = Layout.from_run(run, 8), run_schedule.build_schedule(run, 2)
    planned = memory.stage_memory(run, layout, 0, lists.in_flight(0)).optimizer
    held = max(held_bytes(8, run, rank) for rank in range(8))
    assert held <= planned <= 1.4 * held


@pytest.mark.parametrize("changes", [{}, {"zero_stage": 1}])
def test_moments_take_little_more_than_two_bytes(changes):
    run = make_run("1.3b", {**EIGHT, **changes, "tensor_model_parallel_size": 4})
    layout = Layout.from_run(run, 64)
    elements = sum(memory.updated_elements(run, layout, 0))
    assert 2.03 < memory.moment_bytes(run, layout, 0)[0] / elements < 2.07


def test_blocks_are_of_one_parameter_and_not_cut_within_a_shard():
    run = small_run(**{**SIZES, **SHARED, **EIGHT, **OVERLAP, "ddp_bucket_size": 3000})
    for rank in range(4):
        optimizer = make_trainer(SoloComm(rank, 4), run).optimizer
        flat = optimizer.flat
        for bucket, part in zip(flat.buckets, optimizer.shards, strict=True):
            cut = cut_blocks(flat, run.model, bucket, 4)
            shard = (part.start, part.start + len(part.master))
            blocks = blocks_of_shard(flat, run.model, shard, cut)
            covered = torch.zeros(len(part.master), dtype=torch.int32)
            for each in blocks:
                covered[each.start : each.end] += 1
                assert each.block <= 256 and (each.shared is None or each.length <= each.block)
            inside = [(r.start, r.end) for r in part.ranges]
            assert sum(covered) == sum(end - start for start, end in inside)
            assert covered.max() <= 1


@pytest.mark.parametrize(
    ("length", "block", "count"),
    [(1, 1, 1), (256, 256, 1), (257, 129, 2), (344, 172, 2), (1 << 20, 256, 4096), (1000, 250, 4)],
)
def test_lengths_of_blocks(length, block, count):
    assert (costs.block_length(length), costs.segment_blocks(length)) == (block, count)
