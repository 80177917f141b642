"""AdamW's moments in 8 bits: codes, blocks that no layout changes, memory, and losses next to those with moments in FP32."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.optim.flat import Place
from fugaku_megatron.optim.int8 import Blocks, EightBitMoment, blocks_of_shard, cut_blocks
from fugaku_megatron.training.trainer import Trainer
from tests.checks.allocations import plan_memory, state_bytes
from tests.checks.moments import EIGHT, EP2, EXPERTS, GROUPED, LORA, SHARED, is_possible
from tests.checks.moments import SIZES as HALF_SIZES
from tests.checks.training import trained
from tests.helpers import (
    OVERLAP,
    TP2PP2,
    lay_out,
    make_trainer,
    parse_layout,
    run_layout,
    small_run,
)
from tests.llama_models import DELTA_NETS, FAMILIES
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

SIZES = {**HALF_SIZES, "global_batch_size": 8}
INT8 = {"int8": True, "int8_wgrad": True}  # matmuls

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
    squares = values.square()
    mean = torch.zeros(1000)
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


MODELS = {
    "gpt": {},
    "grouped": GROUPED,
    "experts": SHARED,
    "lora": LORA,
    "lora of experts": {**SHARED, **LORA},
    "gated delta nets": DELTA_NETS,
}
LAYOUTS = (
    "tp4",
    "tp2 pp2 dp2 overlap ddp_bucket_size=3000",
    "dp3 zero global_batch_size=12",
    "tp2 dp2 ep2 sequence zero",
    "tp2 dp2 ep2 etp1 sequence zero",
)


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
    """From a checkpoint with FP32 moments, as earlier versions with other blocks wrote, too."""
    changes = {**SIZES, **MODELS[model]}
    trained(SoloComm(), small_run(**changes), None, tmp_path, 2)
    expected = loaded_moments(SoloComm(), small_run(**changes, **EIGHT), str(tmp_path))
    assert all(moment.any() for key, moment in expected.items() if "expert_bias" not in key)
    for layout in LAYOUTS:
        ranks, flags = parse_layout(layout)
        if not is_possible(ranks, {**changes, **flags}):
            continue
        found = run_layout(layout, loaded_moments, {**changes, **EIGHT}, str(tmp_path))[0]
        for key, moment in expected.items():
            assert torch.equal(found[key], moment), (key, layout)


@pytest.mark.parametrize("model", ["gpt", "experts", "gated delta nets"])
def test_shards_of_zero_have_the_bits_of_replicas(model):
    """Blocks that the boundaries of shards cut have one scale.

    Gradients are not clipped, because shards add the squares of the norm in another order.
    """
    changes = {**SIZES, **MODELS[model], **EIGHT, "global_batch_size": 12, "clip_grad": 0.0}
    replicas = ThreadWorld(3).run(trained, small_run(**changes), None, None, 4)[0]
    shards = ThreadWorld(3).run(trained, small_run(**changes, zero_stage=1), None, None, 4)[0]
    assert shards[0] == replicas[0]
    assert all(torch.equal(weight, shards[1][name]) for name, weight in replicas[1].items())


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


def test_random_rounding_of_matmuls_has_the_same_bits_again():
    changes = {**SIZES, **INT8, "bf16": True, "lr_decay_style": "constant"}
    nearest, _ = trained(SoloComm(), small_run(**changes), iterations=6)
    random = small_run(**changes, int8_stochastic_rounding=True)
    losses, weights = trained(SoloComm(), random, iterations=6)
    again, others = trained(SoloComm(), random, iterations=6)
    assert again == losses != nearest and losses == pytest.approx(nearest, rel=2e-3)
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def validated(trainer: Trainer) -> float:
    """Return the loss for one validation batch."""
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
    [(EXPERTS, "tp2"), ({}, "pp2"), ({**SHARED, **LORA}, "tp2")],
    ids=["experts", "tied", "lora"],
)
def test_a_checkpoint_has_the_validation_loss_of_its_run(model, layout, tmp_path):
    """In the same layout to the last bit, and on one rank up to the order of sums."""
    flags = {**SIZES, **model, **EIGHT}
    directory = str(tmp_path)
    (loss,) = set(run_layout(layout, trained_and_validated, flags, directory))
    assert set(run_layout(layout, loaded_and_validated, flags, directory)) == {loss}
    (alone,) = run_layout("", loaded_and_validated, flags, directory)
    assert alone == pytest.approx(loss, rel=1e-6)


def held_bytes(ranks: int, run: RunConfig, rank: int) -> int:
    """Return the bytes in a rank's moments and master weights."""
    optimizer = make_trainer(SoloComm(rank, ranks), run).optimizer
    assert not any(part.exp_avg.numel() or part.exp_avg_sq.numel() for part in optimizer.shards)
    return state_bytes(optimizer)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("", {}),
        ("tp2 pp2 dp2 bf16", {}),
        ("tp2", SHARED),
        ("tp2 dp2 ep2 etp1 sequence", SHARED),
        ("tp2", {**SHARED, **LORA}),
        *(("tp2", family) for family in (*FAMILIES.values(), DELTA_NETS)),
    ],
)
def test_memory_is_what_the_formula_says(layout, model):
    run, ranks = lay_out(layout, {**EIGHT, **model})
    layout = Layout.from_run(run, ranks)
    for stage in range(layout.pp):
        planned = plan_memory(run, ranks, stage).optimizer
        assert held_bytes(ranks, run, stage * layout.tp) == planned


@pytest.mark.parametrize("changes", [{}, SHARED, {**EP2, **SHARED}, LORA])
def test_memory_of_shards_is_at_most_what_the_formula_says(changes):
    """ZeRO-1 shards have different numbers of blocks. The formula is for the shortest blocks."""
    run = small_run(**{**EIGHT, **changes, "zero_stage": 1})
    planned = plan_memory(run, 8).optimizer
    held = max(held_bytes(8, run, rank) for rank in range(8))
    assert held <= planned <= 1.4 * held


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
