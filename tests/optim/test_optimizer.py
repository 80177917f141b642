"""AdamW, clipping, norms, loss scaling, ZeRO-1, flat buffers, learning rates and moments in BF16, against torch or Megatron."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.param_schedule import ParamSchedule
from fugaku_megatron.config.precision import PrecisionConfig
from fugaku_megatron.costs.buckets import FLAT_ALIGNMENT
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.host import kernels
from fugaku_megatron.optim.flat import Place, initial_values
from fugaku_megatron.optim.loss_scaler import LossScaler
from fugaku_megatron.optim.rounding import round_at_random
from fugaku_megatron.planner import model as perf_model
from fugaku_megatron.planner.system import System
from fugaku_megatron.run.resume import resume_training
from fugaku_megatron.training.trainer import Trainer
from tests.checks.moments import BF16_MOMENTS
from tests.checks.training import trained
from tests.helpers import (
    dry_trainer,
    find_checkpoint,
    make_trainer,
    master_weights,
    parse_layout,
    plain_loss,
    run_layout,
    small_run,
    whole_tensors,
)
from tests.llama_models import FAMILIES

pytestmark = pytest.mark.parallel


def test_ten_steps_equal_torch_adamw():
    run = small_run(
        weight_decay=0.1,
        clip_grad=0.3,
        adam_beta1=0.85,
        adam_beta2=0.97,
        adam_eps=1e-6,
        lr_decay_style="cosine",
        lr_warmup_iters=3,
        lr=3e-3,
        init_method_std=0.1,
    )
    trainer = make_trainer(SoloComm(), run)
    plain = {n: w.double().requires_grad_() for n, w in whole_tensors(trainer, "weight").items()}
    groups = [
        {"params": [w for w in plain.values() if w.dim() == 2], "weight_decay": 0.1},
        {"params": [w for w in plain.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.85, 0.97), eps=1e-6)
    for step in range(10):
        result = trainer.train_step()
        for group in adamw.param_groups:
            group["lr"] = result.learning_rate
        adamw.zero_grad()
        samples = torch.from_numpy(fetch(trainer.train, range(16 * step, 16 * step + 16)))
        expected = plain_loss(plain, samples[:-1], samples[1:], run.model)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.3)
        adamw.step()
        assert norm > 0.3, "clipping is at work"
        assert result.loss == pytest.approx(expected.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=2e-6)
    trainer.close()
    torch.testing.assert_close(
        whole_tensors(trainer, "weight"), plain, rtol=1e-6, atol=2e-6, check_dtype=False
    )


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("dp2 zero bf16", torch.bfloat16), ("dp2 fp16", torch.float16)],
)
def test_master_weights_are_fp32(layout, dtype):
    def check(world, run) -> None:
        trainer = make_trainer(world, run)
        optimizer = trainer.optimizer
        flat = trainer.optimizer.flat
        before = master_weights(trainer)
        first = flat.values.clone()
        whole = torch.zeros(flat.numel)
        for p, start in zip(flat.parameters, flat.starts, strict=True):
            whole[start : start + p.numel()] = initial_values(
                p, run.training.seed, kernels
            ).flatten()
        own = [slice(part.start, part.start + len(part.master)) for part in optimizer.shards]
        assert torch.equal(before, torch.cat([whole[part] for part in own])), (
            "not rounded to the model's dtype"
        )
        for _ in range(2):
            assert not trainer.train_step().skipped
        trainer.close()
        after = master_weights(trainer)
        assert flat.values.dtype == dtype and after.dtype == torch.float32
        assert torch.equal(torch.cat([flat.values[part] for part in own]), after.to(dtype))
        moved = (after != before).float().mean()
        kept = (flat.values == first).float().mean()
        assert moved > 0.9 and kept > 0.5, (
            "steps too small for the model's dtype add up in the master weights"
        )

    run_layout(layout, check, {"initial_loss_scale": 1024.0, "lr": 1e-7})


def measures(world, run) -> tuple[float, float, float, int]:
    """Return the norms of weights and gradients, the gradients' zeros, and (without ZeRO-1) the global tensors' zeros."""
    trainer = make_trainer(world, run)
    norm = trainer.optimizer.params_norm()
    result = trainer.train_step()
    trainer.close()
    grads = whole_tensors(trainer, "grad")
    return (
        norm,
        result.grad_norm,
        result.num_zeros,
        sum(int((g == 0).sum()) for n, g in grads.items() if "output_layer" not in n),
    )


@pytest.mark.parametrize("layout", ["tp2 pp2", "dp2 zero", "tp2 pp2 dp2 zero"])
def test_norms_and_zeros_count_everything_once(layout):
    flags = {"max_position_embeddings": 32, "log_num_zeros_in_grad": True}
    whole = make_trainer(SoloComm(), small_run(**flags))
    by_hand = math.sqrt(
        sum(p.detach().double().square().sum() for p in whole.optimizer.flat.parameters)
    )
    figures = run_layout(layout, measures, flags)
    assert len(set(figures)) == 1, "the same on every rank"
    norm, grad_norm, zeros, _ = figures[0]
    assert norm == pytest.approx(by_hand, rel=1e-6)
    assert grad_norm == pytest.approx(run_layout("", measures, flags)[0][1], rel=1e-6)
    *_, expected = run_layout(f"{layout} zero_stage=0", measures, flags)[0]
    assert zeros == expected >= 16 * 32, "at least the positions beyond the sequence"


class MegatronGradScaler:
    """An independent implementation of Megatron-LM's DynamicGradScaler.update."""

    def __init__(self, initial: float, minimum: float, interval: int, hysteresis: int):
        self.scale = initial
        self.minimum = minimum
        self.interval = interval
        self.hysteresis = hysteresis
        self.growth_tracker = 0
        self.hysteresis_tracker = hysteresis

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


@pytest.mark.parametrize(("seed", "hysteresis"), [(0, 1), (1, 2), (2, 3)])
def test_loss_scale_follows_megatron(seed, hysteresis):
    ours = LossScaler(
        PrecisionConfig(
            fp16=True,
            initial_loss_scale=2.0**10,
            min_loss_scale=4.0,
            loss_scale_window=5,
            hysteresis=hysteresis,
        )
    )
    theirs = MegatronGradScaler(2.0**10, 4.0, 5, hysteresis)
    rng = random.Random(seed)
    scales = set()
    for step in range(600):
        overflow = rng.random() < (0.05, 0.6)[step // 100 % 2]
        ours.update(overflow)
        theirs.update(overflow)
        assert ours.scale == theirs.scale, step
        scales.add(ours.scale)
        if step % 7 == 0:  # through a checkpoint
            again = LossScaler(ours.precision)
            again.load(ours.state())
            ours = again
    assert min(scales) == 4.0 and len(scales) > 5


@pytest.mark.parametrize(
    ("precision", "scale"),
    [
        (PrecisionConfig(), 1.0),
        (PrecisionConfig(bf16=True), 1.0),
        (PrecisionConfig(fp16=True, loss_scale=64.0), 64.0),
    ],
)
def test_a_fixed_scale_stays(precision, scale):
    scaler = LossScaler(precision)
    for overflow in (True, False, True, True, True):
        scaler.update(overflow)
    assert scaler.scale == scale


@pytest.mark.parametrize("layout", ["tp2 pp2", "dp2 zero"])
def test_an_overflow_skips_the_update_everywhere(layout):
    def check(world, run) -> list[float]:
        trainer = make_trainer(world, run)
        optimizer = trainer.optimizer
        scales = []
        before = master_weights(trainer), optimizer.flat.values.clone()
        for _ in range(4):
            result = trainer.train_step()
            assert (
                result.skipped
                and not math.isfinite(result.grad_norm)
                and math.isfinite(result.loss)
            )
            assert all(
                torch.equal(a, b)
                for a, b in zip(before, (master_weights(trainer), optimizer.flat.values))
            )
            assert optimizer.steps == 0 and not any(
                part.exp_avg.any() or part.exp_avg_sq.any() for part in optimizer.shards
            )
            scales.append(result.loss_scale)
        optimizer.scaler.scale = 1024.0
        assert (
            not trainer.train_step().skipped
            and optimizer.steps == 1
            and not torch.equal(before[0], master_weights(trainer))
        )
        assert (trainer.progress.iteration, trainer.progress.skipped) == (5, 4)
        trainer.close()
        return scales

    flags = {"fp16": True, "initial_loss_scale": 2.0**40, "min_loss_scale": 2.0**10}
    for scales in run_layout(layout, check, flags):
        assert scales == [2.0**40, 2.0**40, 2.0**39, 2.0**38], (
            "two overflows before the first halving"
        )


@pytest.mark.parametrize(
    ("layout", "bad"),
    [
        ("tp2 pp2", math.inf),
        ("dp2", math.nan),
        ("dp2 zero", math.inf),
        ("tp2 pp2 dp2 zero", math.nan),
    ],
)
def test_one_bad_gradient_on_one_rank_skips_on_all(layout, bad):
    def check(world, run) -> bool:
        trainer = make_trainer(world, run)
        before = master_weights(trainer)
        trainer.optimizer.zero_grad()
        if world.rank == world.size - 1:
            flat = trainer.optimizer.flat
            flat.gradients.of(len(flat.buckets) // 2)[0] = (
                bad  # of a layer: norms leave out what another rank holds as well
            )
        return trainer.optimizer.step(1e-3, 0.0).skipped and torch.equal(
            before, master_weights(trainer)
        )

    assert all(run_layout(layout, check))


@pytest.mark.parametrize(
    "layout", ["tp2 pp2", "dp2 zero", "tp2 pp2 dp2 overlap ddp_bucket_size=20_000"]
)
def test_ranges_cover_every_parameter_once_and_shards_are_aligned(layout):
    ranks, flags = parse_layout(layout)
    for rank in range(ranks):
        optimizer = dry_trainer(rank, ranks, **flags).optimizer
        flat = optimizer.flat
        covered = torch.zeros(optimizer.flat.numel, dtype=torch.int32)
        decayed = torch.zeros(flat.numel, dtype=torch.bool)
        for r in flat.ranges(0, flat.numel):
            covered[r.start : r.end] += 1
            decayed[r.start : r.end] = r.decayed
        for p, start in zip(flat.parameters, flat.starts):
            end = start + p.numel()
            assert torch.all(covered[start:end] == 1) and torch.all(
                decayed[start:end] == (p.dim() == 2)
            ), p.spec.name
            assert (
                p.data_ptr() == flat.values[start:].data_ptr()
                and flat.gradients.find(p.main_grad) == start
            )
            covered[start:end] -= 1
        assert not covered.any(), "padding is in no range, and nothing is covered twice"
        small = "ddp_bucket_size" in layout or optimizer.groups.dp.size == 1
        assert len(flat.buckets) > 1 if small else len(flat.buckets) <= 2, (
            "one, and the tied copy's"
        )
        for part, bucket in zip(optimizer.shards, flat.buckets, strict=True):
            assert len(part.ranges) <= 5, "an update is a few calls"
            assert part.start % FLAT_ALIGNMENT == 0 and len(part.master) % FLAT_ALIGNMENT == 0
            assert (bucket.end - bucket.start) % (optimizer.groups.dp.size * FLAT_ALIGNMENT) == 0


def test_biases_are_not_decayed():
    """A gated MLP's biases have two dimensions."""
    run = small_run(**{**FAMILIES["llama"], "disable_bias_linear": False, "weight_decay": 0.5})
    flat = make_trainer(SoloComm(), run).optimizer.flat
    decayed = {
        p.spec.name.split(".")[-1]
        for p, start in zip(flat.parameters, flat.starts)
        if any(r.decayed and r.start <= start < r.end for r in flat.ranges(0, flat.numel))
    }
    assert decayed == {"weight"} and any(
        p.dim() == 2 and p.spec.name.endswith(".bias") for p in flat.parameters
    )


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_weight_decay_of_norms_of_heads(normalization):
    """megatron/core/optimizer/__init__.py, get_standard_config_overrides: their weights and biases decay like matrices."""
    norms = {"qk_layernorm": True, "normalization": normalization}
    flags = {**norms, "apply_wd_to_qk_layernorm": True, "optimizer": "muon"}
    flat = make_trainer(SoloComm(), small_run(**flags)).optimizer.flat
    vectors = {
        p.spec.name.split("self_attention.")[-1]
        for p in flat.parameters
        if p.spec.decayed and p.dim() == 1 and p.spec.name.startswith("decoder.layers.0.")
    }
    kinds = ("weight", "bias") if normalization == "LayerNorm" else ("weight",)
    assert vectors == {f"{name}_layernorm.{kind}" for name in "qk" for kind in kinds}
    assert all(p.spec.decayed and p.dim() > 1 for p in flat.parameters if p.spec.orthogonal)


def schedule(**changes) -> ParamSchedule:
    """Return the schedule over 100 iterations with 16 samples, rate 1 to 0.1."""
    return ParamSchedule.from_run(
        small_run(**{"train_iters": 100, "lr": 1.0, "min_lr": 0.1, **changes}), 16
    )


LINEAR = {"lr_decay_style": "linear"}
COSINE = {"lr_decay_style": "cosine"}
WARM = {0: 0, 7: 0.35, 20: 1, 60: 0.55, 100: 0.1}


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        (
            {"lr_decay_style": "constant", "lr_warmup_iters": 20},
            {0: 0, 7: 0.35, 50: 1, 100: 1, 200: 1},
        ),
        (LINEAR, {0: 1, 50: 0.55, 75: 0.325, 100: 0.1, 101: 0.1, 200: 0.1}),
        (COSINE, {0: 1, 25: 0.1 + 0.45 * (1 + 0.5**0.5), 50: 0.55, 100: 0.1, 101: 0.1}),
        ({**COSINE, "lr_warmup_iters": 20}, WARM),
        ({**LINEAR, "lr_warmup_fraction": 0.2}, WARM),
        ({**LINEAR, "lr_warmup_samples": 320, "train_iters": None, "train_samples": 1600}, WARM),
        ({**LINEAR, "lr_decay_iters": 50}, {25: 0.55, 60: 0.1}),
        ({**LINEAR, "lr_decay_iters": 50, "lr_warmup_fraction": 0.5}, {25: 1}),
        (
            {**LINEAR, "train_iters": None, "train_samples": 1600, "lr_decay_samples": 800},
            {25: 0.55},
        ),
    ],
)
def test_learning_rates(changes, rates):
    params = schedule(**changes)
    for iteration, rate in rates.items():
        assert params.learning_rate(16 * iteration) == pytest.approx(rate, rel=1e-12), iteration


def change(weights, others) -> float:
    """Return the root mean square difference of all weights, relative to their root mean square."""
    difference, size = (
        sum(f(name).double().square().sum() for name in weights)
        for f in (lambda name: weights[name] - others[name], lambda name: weights[name])
    )
    return math.sqrt(difference / size)


def test_twelve_iterations_stay_with_fp32s():
    alone = trained(SoloComm(), small_run(**BF16_MOMENTS))
    losses, weights = trained(SoloComm(), small_run())
    assert alone[0] == pytest.approx(losses, rel=1e-5) and alone[0] != losses
    before = whole_tensors(make_trainer(SoloComm(), small_run()), "weight")
    assert 0 < change(weights, alone[1]) < 0.005 * change(weights, before), (
        "of the way that the weights have gone"
    )


def test_the_planner_counts_fewer_bytes_and_less_traffic():
    system = System.from_names("a64fx", "fugaku_megatron", 4, 4)
    plain, half = (
        make_run("1.3b", {"tensor_model_parallel_size": 4, **changes})
        for changes in ({}, BF16_MOMENTS)
    )
    layout = Layout.from_run(plain, system.world_size)
    steps = [perf_model.step(run, layout, system, system.parameters) for run in (plain, half)]
    assert steps[1].optimizer / steps[0].optimizer == pytest.approx((36 - 8) / 36, rel=0.01)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return checkpoint directories: FP32 moments in TP 2 x PP 2 x DP 2 with ZeRO-1, BF16 moments on one rank."""
    whole, half = (tmp_path_factory.mktemp(name) for name in ("fp32", "bf16"))
    run_layout("tp2 pp2 dp2 zero", trained, {}, None, whole, 3)
    trained(SoloComm(), small_run(**BF16_MOMENTS), None, half, 3)
    return whole, half


def moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        s.key: s.tensor.clone()
        for s in trainer.optimizer.checkpoint_shards()
        if s.key.startswith("exp_avg")
    }


def test_a_checkpoint_of_the_other_format_is_converted(saved):
    """Resume across layouts too; BF16 moments are kept in FP32 and restored exactly."""
    plain, rounded, widened = (
        make_trainer(SoloComm(), small_run(**changes)) for changes in ({}, BF16_MOMENTS, {})
    )
    plain.load(str(saved[0]))
    rounded.load(str(saved[0]))
    exact = moments(plain)
    for key, tensor in moments(rounded).items():
        assert (
            tensor.dtype == torch.bfloat16
            and torch.equal(tensor, exact[key].bfloat16())
            and tensor.any()
        ), key
    widened.load(str(saved[1]))
    rounded.load(str(saved[1]))
    stored = moments(rounded)
    for key, tensor in moments(widened).items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, stored[key].float()), key
    assert math.isfinite(widened.train_step().loss)
    for trainer in (plain, rounded, widened):
        trainer.close()


@pytest.mark.parametrize(
    ("source", "changes", "notes"),
    [
        (
            0,
            BF16_MOMENTS,
            [
                "note: --exp-avg-dtype is bf16, was fp32: the checkpoint's values are rounded to nearest",
                "note: --exp-avg-sq-dtype is bf16, was fp32: the checkpoint's values are rounded to nearest",
            ],
        ),
        (
            1,
            {**BF16_MOMENTS, "exp_avg_dtype": "fp32"},
            [
                "note: --exp-avg-dtype is fp32, was bf16: the checkpoint's values are taken as they are"
            ],
        ),
        (1, BF16_MOMENTS, []),
        (0, {**BF16_MOMENTS, "no_load_optim": True}, []),
    ],
)
def test_the_log_says_that_moments_are_converted(source, changes, notes, saved):
    run = small_run(load=str(saved[source]), **changes)
    lines = resume_training(make_trainer(SoloComm(), run), find_checkpoint(run, SoloComm()))
    assert [line for line in lines if "exp-avg" in line] == notes


LOW = {
    "bf16": True,
    "use_precision_aware_optimizer": True,
    "main_params_dtype": "bf16",
    "lr_decay_style": "constant",
}


def test_weights_are_rounded_at_random_without_bias():
    """Round to a neighbour in BF16 by random words that depend only on seed, step and element."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * torch.logspace(
        -6, 2, 1000
    )
    place = Place(stream=9, offset=11, first=3, columns=37, row=90)
    bits = values.view(torch.int32)
    down = (bits & ~0xFFFF).view(torch.float32)  # towards 0
    away = ((bits & ~0xFFFF) + 0x10000).view(torch.float32)
    mean = torch.zeros(1000, dtype=torch.float64)
    steps = 2000
    for step in range(steps):
        rounded = round_at_random(values, place, 5, step)
        assert ((rounded == down) | (rounded == away)).all()
        mean += rounded.double() / steps
    deviation = (away - down).abs().double() / 2 / steps**0.5
    assert ((mean - values).abs() <= 4.5 * deviation).all()
    part = round_at_random(values[100:300], replace(place, first=103), 5, 7)
    assert torch.equal(part, round_at_random(values, place, 5, 7)[100:300])
    others = (
        round_at_random(values, place, 6, 7),
        round_at_random(values, replace(place, stream=8), 5, 7),
    )
    assert all(
        200 < (other != round_at_random(values, place, 5, 7)).sum() < 500 for other in others
    ), "a third where words differ"
    assert torch.equal(round_at_random(rounded.float(), place, 5, 7), rounded), (
        "what BF16 holds stays"
    )


@pytest.mark.parametrize(
    "moments",
    [
        {},
        {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"},
    ],
    ids=["fp32", "bf16", "int8"],
)
def test_weights_without_fp32_masters_stay_with_those_that_have_them(moments, tmp_path):
    """Train 60 steps and resume with the same bits; rounding to nearest would lose such small steps."""
    changes = {"train_iters": 60, "lr": 3e-4, "global_batch_size": 4}
    run = small_run(**{**LOW, **moments, **changes})
    with_masters = {name: value for name, value in LOW.items() if name != "main_params_dtype"}
    plain, whole = trained(
        SoloComm(), small_run(**{**with_masters, **moments, **changes}), iterations=60
    )
    losses, weights = trained(SoloComm(), run, None, tmp_path, 60, saved_at=30)
    assert losses != plain and losses == pytest.approx(plain, rel=0.005)
    again, resumed = trained(SoloComm(), run, tmp_path, None, 30)
    assert again == losses[30:] and all(
        torch.equal(w, resumed[name]) for name, w in weights.items()
    )
    before = whole_tensors(make_trainer(SoloComm(), run), "weight")
    assert change(weights, whole) < 0.35 * change(whole, before), (
        "of the way that the weights have gone"
    )


@pytest.mark.parametrize("layout", ["dp2 zero", "tp2", "tp2 pp2 dp2 overlap"])
def test_layouts_round_weights_alike(layout):
    """Compare layouts: with different random numbers only two thirds would be equal. Gradients near 0 may differ in sign."""
    losses, weights = trained(SoloComm(), small_run(**LOW), iterations=1)
    for own, values in run_layout(layout, trained, LOW, None, None, 1):
        assert own == pytest.approx(losses, rel=2e-3)
        equal = sum(int((values[name] == weight).sum()) for name, weight in weights.items())
        assert equal > 0.95 * sum(weight.numel() for weight in weights.values())
