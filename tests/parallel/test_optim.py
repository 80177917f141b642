"""AdamW, clipping, norms, loss scaling, ZeRO-1, flat buffers and schedules, each against plain torch or Megatron's rules."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.run_config import PrecisionConfig
from fugaku_megatron.costs.accounting import FLAT_ALIGNMENT
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.host import kernels
from fugaku_megatron.training.flat import initial_values
from fugaku_megatron.training.optim import LossScaler
from fugaku_megatron.training.param_schedule import ParamSchedule
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, make_trainer, master_weights, plain_loss, small_run, train, whole_tensors
from tests.threads import ThreadWorld

TP2PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
LAYOUTS = {"tp2": (2, {"tensor_model_parallel_size": 2}), "pp2": (2, {"pipeline_model_parallel_size": 2}), "tp2pp2": (4, TP2PP2),
           "dp2": (2, {}), "dp2zero": (2, {"zero_stage": 1}), "tp2pp2dp2zero": (8, {"zero_stage": 1, **TP2PP2})}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def weights_after(world, iterations: int, **changes) -> dict[str, torch.Tensor]:
    trainer = make_trainer(world, small_run(**changes))
    for _ in range(iterations):
        trainer.train_step()
    trainer.close()
    return whole_tensors(trainer, "weight")


# AdamW ------------------------------------------------------------------------------------------------------------------------

def test_ten_steps_equal_torch_adamw():
    run = small_run(weight_decay=0.1, clip_grad=0.3, adam_beta1=0.85, adam_beta2=0.97, adam_eps=1e-6, lr_decay_style="cosine",
                    lr_warmup_iters=3, lr=3e-3, init_method_std=0.1)
    trainer = make_trainer(SoloComm(), run)
    plain = {n: w.double().requires_grad_() for n, w in whole_tensors(trainer, "weight").items()}
    groups = [{"params": [w for w in plain.values() if w.dim() == 2], "weight_decay": 0.1},
              {"params": [w for w in plain.values() if w.dim() == 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.85, 0.97), eps=1e-6)
    for step in range(10):
        result = trainer.train_step()
        for group in adamw.param_groups:
            group["lr"] = result.learning_rate
        adamw.zero_grad()
        expected = plain_loss(plain, *fetch(trainer.train, range(16 * step, 16 * step + 16)), run.model)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.3)
        adamw.step()
        assert norm > 0.3, "clipping is at work"
        assert result.loss == pytest.approx(expected.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=2e-6)
    trainer.close()
    for name, weight in whole_tensors(trainer, "weight").items():
        torch.testing.assert_close(weight.double(), plain[name].detach(), rtol=1e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_weight_decay_touches_matrices_only():
    trainer = make_trainer(SoloComm(), small_run())
    for p in trainer.optimizer.flat.parameters:
        p.data.fill_(1.0)
    trainer.optimizer.zero_grad()
    trainer.optimizer.step(lr=0.5, weight_decay=0.1)
    for p in trainer.optimizer.flat.parameters:
        assert torch.all(p == (1.0 - 0.5 * 0.1 if p.dim() == 2 else 1.0)), p.spec.name


@pytest.mark.parametrize("clip_grad", [0.0, 0.3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_1_has_the_bits_of_no_zero(ranks, clip_grad):
    """Sums over ranks are formed in rank order either way; the norm is a double sum, rounded to the same FP32 factor."""
    plain, sharded = (ThreadWorld(ranks).run(lambda world, z=zero: weights_after(world, 5, clip_grad=clip_grad, zero_stage=z))[0]
                      for zero in (0, 1))
    for name, weight in plain.items():
        assert torch.equal(weight, sharded[name]), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["dp2", "dp2zero"])
def test_master_weights_are_fp32(precision, name):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def check(world) -> None:
        run = small_run(**{precision: True, "initial_loss_scale": 1024.0, "lr": 1e-7, **LAYOUTS[name][1]})
        trainer = make_trainer(world, run)
        optimizer, flat = trainer.optimizer, trainer.optimizer.flat
        before, first, whole = master_weights(trainer), flat.values.clone(), torch.zeros(flat.numel)
        for p, start in zip(flat.parameters, flat.starts, strict=True):
            whole[start : start + p.numel()] = initial_values(p, run.training.seed, kernels).flatten()
        own = [slice(part.start, part.start + len(part.master)) for part in optimizer.parts]
        assert torch.equal(before, torch.cat([whole[part] for part in own])), "not rounded to the model's dtype"
        for _ in range(2):
            assert not trainer.train_step().skipped
        trainer.close()
        after = master_weights(trainer)
        assert flat.values.dtype == dtype and after.dtype == torch.float32
        assert torch.equal(torch.cat([flat.values[part] for part in own]), after.to(dtype))
        moved = (after != before).float().mean()
        kept = (flat.values == first).float().mean()
        assert moved > 0.9 and kept > 0.5, "steps too small for the model's dtype add up in the master weights"

    ThreadWorld(2).run(check)


# Norms ------------------------------------------------------------------------------------------------------------------------

def measures(world, **changes) -> tuple[float, float, float, int]:
    """Norm of the weights, norm of the gradients, their zeros, and (without ZeRO-1) the zeros counted in the global tensors."""
    trainer = make_trainer(world, small_run(max_position_embeddings=32, log_num_zeros_in_grad=True, **changes))
    norm = trainer.optimizer.params_norm()
    result = trainer.train_step()
    trainer.close()
    grads = whole_tensors(trainer, "grad")
    return norm, result.grad_norm, result.num_zeros, sum(int((g == 0).sum()) for n, g in grads.items() if "output_layer" not in n)


@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_and_zeros_count_everything_once(name):
    ranks, layout = LAYOUTS[name]
    whole = make_trainer(SoloComm(), small_run(max_position_embeddings=32))
    by_hand = math.sqrt(sum(p.detach().double().square().sum() for p in whole.optimizer.flat.parameters))
    figures = ThreadWorld(ranks).run(lambda world: measures(world, **layout))
    assert len(set(figures)) == 1, "the same on every rank"
    norm, grad_norm, zeros, _ = figures[0]
    assert norm == pytest.approx(by_hand, rel=1e-6)
    assert grad_norm == pytest.approx(measures(SoloComm())[1], rel=1e-6)
    expected = ThreadWorld(ranks).run(lambda world: measures(world, **{**layout, "zero_stage": 0}))[0][3]
    assert zeros == expected >= 16 * 32, "at least the positions beyond the sequence"


# Loss scale -------------------------------------------------------------------------------------------------------------------

class MegatronGradScaler:
    """The rules of Megatron-LM's DynamicGradScaler.update, written down again."""

    def __init__(self, initial: float, minimum: float, interval: int, hysteresis: int):
        self.scale, self.minimum, self.interval, self.hysteresis = initial, minimum, interval, hysteresis
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.interval:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self.scale = self.scale * 2.0


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_loss_scale_follows_megatron(seed, hysteresis):
    ours = LossScaler(PrecisionConfig(fp16=True, initial_loss_scale=2.0**10, min_loss_scale=4.0, loss_scale_window=5,
                                      hysteresis=hysteresis))
    theirs, chance, scales = MegatronGradScaler(2.0**10, 4.0, 5, hysteresis), random.Random(seed), set()
    for step in range(600):
        overflow = chance.random() < (0.05, 0.6)[step // 100 % 2]
        ours.update(overflow)
        theirs.update(overflow)
        assert ours.scale == theirs.scale, step
        scales.add(ours.scale)
        if step % 7 == 0:  # through a checkpoint
            again = LossScaler(ours.precision)
            again.load(ours.state())
            ours = again
    assert min(scales) == 4.0 and len(scales) > 5


@pytest.mark.parametrize(("precision", "scale"), [
    (PrecisionConfig(), 1.0), (PrecisionConfig(bf16=True), 1.0), (PrecisionConfig(fp16=True, loss_scale=64.0), 64.0)])
def test_a_fixed_scale_stays(precision, scale):
    scaler = LossScaler(precision)
    for overflow in (True, False, True, True, True):
        scaler.update(overflow)
    assert scaler.scale == scale


@pytest.mark.parametrize("name", ["tp2pp2", "dp2", "dp2zero"])
def test_an_overflow_skips_the_update_everywhere(name):
    def check(world) -> list[tuple[bool, float]]:
        trainer = make_trainer(world, small_run(fp16=True, initial_loss_scale=2.0**40, min_loss_scale=2.0**10, **LAYOUTS[name][1]))
        optimizer, scales = trainer.optimizer, []
        before = master_weights(trainer), optimizer.flat.values.clone()
        for _ in range(4):
            result = trainer.train_step()
            assert result.skipped and not math.isfinite(result.grad_norm) and math.isfinite(result.loss)
            assert all(torch.equal(a, b) for a, b in zip(before, (master_weights(trainer), optimizer.flat.values)))
            assert optimizer.steps == 0 and not any(part.exp_avg.any() or part.exp_avg_sq.any() for part in optimizer.parts)
            scales.append(result.loss_scale)
        optimizer.scaler.scale = 1024.0
        assert not trainer.train_step().skipped and optimizer.steps == 1 and not torch.equal(before[0], master_weights(trainer))
        assert (trainer.progress.iteration, trainer.progress.skipped) == (5, 4)
        trainer.close()
        return scales

    for scales in ThreadWorld(LAYOUTS[name][0]).run(check):
        assert scales == [2.0**40, 2.0**40, 2.0**39, 2.0**38], "two overflows before the first halving"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_gradient_on_one_rank_skips_on_all(name, bad):
    def check(world) -> bool:
        trainer = make_trainer(world, small_run(**LAYOUTS[name][1]))
        before = master_weights(trainer)
        trainer.optimizer.zero_grad()
        if world.rank == world.size - 1:
            flat = trainer.optimizer.flat
            flat.gradients.of(len(flat.buckets) // 2)[0] = bad  # of a layer: norms leave out what another rank holds as well
        return trainer.optimizer.step(1e-3, 0.0).skipped and torch.equal(before, master_weights(trainer))

    assert all(ThreadWorld(LAYOUTS[name][0]).run(check))


# Flat buffers -----------------------------------------------------------------------------------------------------------------

def dry_trainer(rank: int, ranks: int, **changes) -> Trainer:
    run = small_run(**changes)
    return Trainer(run, SoloComm(rank, ranks), grid_groups(SoloComm(rank, ranks), run))


@pytest.mark.parametrize("buckets", [{}, {"overlap_grad_reduce": True, "ddp_bucket_size": 20_000}])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranges_cover_every_parameter_once_and_shards_are_aligned(name, buckets):
    ranks, layout = LAYOUTS[name]
    layout = layout | buckets
    for rank in range(ranks):
        optimizer = dry_trainer(rank, ranks, **layout).optimizer
        flat, covered = optimizer.flat, torch.zeros(optimizer.flat.numel, dtype=torch.int32)
        decayed = torch.zeros(flat.numel, dtype=torch.bool)
        for r in flat.ranges(0, flat.numel):
            covered[r.start : r.end] += 1
            decayed[r.start : r.end] = r.decayed
        for p, start in zip(flat.parameters, flat.starts):
            end = start + p.numel()
            assert torch.all(covered[start:end] == 1) and torch.all(decayed[start:end] == (p.dim() == 2)), p.spec.name
            assert p.data_ptr() == flat.values[start:].data_ptr() and flat.gradients.find(p.main_grad) == start
            assert flat.owner(p) is p is flat.owner(p.main_grad)
            covered[start:end] -= 1
        assert not covered.any(), "padding is in no range, and nothing is covered twice"
        small = buckets or optimizer.groups.dp.size == 1
        assert len(flat.buckets) > 1 if small else len(flat.buckets) <= 2, "one, and the tied copy's"
        for part, bucket in zip(optimizer.parts, flat.buckets, strict=True):
            assert len(part.ranges) <= 5, "an update is a few calls"
            assert part.start % FLAT_ALIGNMENT == 0 and len(part.master) % FLAT_ALIGNMENT == 0
            assert (bucket.end - bucket.start) % (optimizer.groups.dp.size * FLAT_ALIGNMENT) == 0


def test_an_initial_shard_is_a_part_of_the_whole():
    flat = dry_trainer(0, 1).optimizer.flat
    whole = flat.initial_shard(0, flat.numel)
    assert torch.equal(whole, flat.values)
    for start, end in ((0, 1), (5, 3077), (3000, 9001), (flat.numel - 7, flat.numel)):
        assert torch.equal(flat.initial_shard(start, end), whole[start:end])


@pytest.mark.parametrize(("ranks", "layout"), [
    *LAYOUTS.values(), (8, {"zero_stage": 1, "tensor_model_parallel_size": 2}),
    (8, {"zero_stage": 1, **TP2PP2, "overlap_grad_reduce": True, "ddp_bucket_size": 1})])
def test_saved_shards_hold_every_element_once_and_every_rank_finds_its_own(ranks, layout):
    """The position embedding, which tensor-parallel ranks hold alike, is long enough to be cut by ZeRO-1's shards."""
    optimizers = [dry_trainer(rank, ranks, max_position_embeddings=512, **layout).optimizer for rank in range(ranks)]
    counts: dict[str, torch.Tensor] = {}
    places = set()
    for shard in (s for o in optimizers for s in o.checkpoint_shards(owned=True)):
        count = counts.setdefault(shard.key, torch.zeros(shard.global_shape))
        piece = torch.zeros(math.prod(shard.slice_shape))
        piece[shard.flat_start : shard.flat_start + shard.tensor.numel()] = 1
        count[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.slice_shape))] += piece.view(shard.slice_shape)
        places.add((shard.key, shard.offset, shard.slice_shape, shard.flat_start, shard.tensor.numel()))
    assert all(torch.all(count == 1) for count in counts.values())
    assert len(counts) == 3 * len({p.spec.name for o in optimizers for p in o.flat.parameters})
    for shard in (s for o in optimizers for s in o.checkpoint_shards()):
        assert (shard.key, shard.offset, shard.slice_shape, shard.flat_start, shard.tensor.numel()) in places, shard.key


# Schedules --------------------------------------------------------------------------------------------------------------------

def schedule(**changes) -> ParamSchedule:
    """100 iterations of 16 samples, rate 1 to 0.1."""
    return ParamSchedule.from_run(small_run(**{"train_iters": 100, "lr": 1.0, "min_lr": 0.1, **changes}), 16)


@pytest.mark.parametrize(("style", "rates"), [
    ("constant", {0: 1, 50: 1, 100: 1, 200: 1}),
    ("linear", {0: 1, 50: 0.55, 75: 0.325, 100: 0.1, 101: 0.1, 200: 0.1}),
    ("cosine", {0: 1, 25: 0.1 + 0.45 * (1 + 0.5**0.5), 50: 0.55, 100: 0.1, 101: 0.1}),
])
def test_decay_without_warm_up(style, rates):
    params = schedule(lr_decay_style=style)
    for iteration, rate in rates.items():
        assert params.learning_rate(16 * iteration) == pytest.approx(rate, rel=1e-12), iteration


@pytest.mark.parametrize("warmup", [{"lr_warmup_iters": 20}, {"lr_warmup_fraction": 0.2},
                                    {"lr_warmup_samples": 320, "train_iters": None, "train_samples": 1600}])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_warm_up_by_iterations_fraction_and_samples(warmup, style):
    params = schedule(lr_decay_style=style, **warmup)
    for iteration in range(21):
        assert params.learning_rate(16 * iteration) == pytest.approx(iteration / 20)
    assert params.learning_rate(16 * 60) == pytest.approx(1.0 if style == "constant" else 0.55)
    assert params.learning_rate(1600) == pytest.approx(1.0 if style == "constant" else 0.1)


def test_decay_length():
    assert schedule(lr_decay_iters=50).learning_rate(16 * 25) == pytest.approx(0.55)
    assert schedule(lr_decay_iters=50).learning_rate(16 * 60) == 0.1
    assert schedule(lr_decay_iters=50, lr_warmup_fraction=0.5).learning_rate(16 * 25) == 1.0
    samples = schedule(train_iters=None, train_samples=1600, lr_decay_samples=800)
    assert samples.learning_rate(400) == pytest.approx(0.55)


@pytest.mark.parametrize(("style", "decays"), [
    ("linear", {0: 0.1, 25: 0.15, 50: 0.2, 100: 0.3, 150: 0.3}),
    ("cosine", {0: 0.1, 25: 0.1 + 0.2 * 0.5 * (math.cos(math.pi * 0.75) + 1), 50: 0.2, 100: 0.3, 150: 0.3}),
])
def test_weight_decay_ramps(style, decays):
    params = schedule(start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style=style)
    for iteration, decay in decays.items():
        assert params.weight_decay(16 * iteration) == pytest.approx(decay, rel=1e-12), iteration
    assert schedule(weight_decay=0.02).weight_decay(700) == 0.02


def test_the_trainer_uses_the_schedule():
    rates = [r.learning_rate for r in train(SoloComm(), small_run(lr_warmup_iters=2, train_iters=6, lr=1.0), 6)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25])
