"""LoRA next to frozen weights in eight bits: losses of the same model in plain torch, layouts, resuming, export and memory."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fugaku_megatron as fm
from fugaku_megatron.cli import program
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.convert.open_weights import open_weights
from fugaku_megatron.costs.memory import frozen_bytes
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.nn.parameter import Q8Weight, scales_of
from fugaku_megatron.optim import flat as flat_parameters
from fugaku_megatron.run.resume import resume_training
from tests.checks.adapters import ADAPTED_EXPERTS
from tests.checks.plain_model import plain_losses
from tests.helpers import (
    find_checkpoint,
    lay_out,
    make_trainer,
    run_layout,
    small_run,
    whole_tensors,
)

pytestmark = pytest.mark.parallel

MATRICES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
MODEL = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "ffn_hidden_size": 256,
    "init_method_std": 0.1,
    "global_batch_size": 8,
}
INT8 = {
    "lora_rank": 4,
    "lora_alpha": 16.0,
    "lora_base_format": "int8",
    "lr": 3e-3,
    "train_iters": 60,
    "lr_decay_style": "constant",
    "weight_decay": 0.0,
    "clip_grad": 0.0,
}
EXPERTS = {
    **ADAPTED_EXPERTS,
    "hidden_size": 128,
    "moe_ffn_hidden_size": 128,
    "ffn_hidden_size": 256,
    "moe_shared_expert_intermediate_size": 128,
    "lora_base_format": "int8",
}


def model_alone(flags):
    return {name: value for name, value in flags.items() if not name.startswith("lora")}


def save_model(directory, flags) -> str:
    with contextlib.closing(make_trainer(SoloComm(), small_run(**model_alone(flags)))) as trainer:
        trainer.train_step()
        trainer.save(str(directory))
    return str(directory)


@contextlib.contextmanager
def started(world, run):
    """Yield a trainer with loaded weights and adapters."""
    with contextlib.closing(make_trainer(world, run)) as trainer:
        resume_training(trainer, find_checkpoint(run, world))
        yield trainer


def train_losses(world, run, steps: int = 3) -> list[float]:
    with started(world, run) as trainer:
        return [trainer.train_step().loss for _ in range(steps)]


@pytest.fixture
def base(tmp_path) -> str:
    return save_model(tmp_path / "base", MODEL)


# Losses --------------------------------------------------------------------------------------------------------------------------


def dequantized(base: str, model) -> dict[str, torch.Tensor]:
    """Return the whole weights of a checkpoint, the linear layers' as eight bits hold them."""
    source = open_weights(base)
    weights = {name: source.read(name).float() for name in source.dtypes}
    for name, weight in weights.items():
        if name.rsplit(".", 2)[-2] in MATRICES and name.endswith(".weight"):
            weights[name] = Q8Weight.of(weight).dequantize()
    return weights


def plain_curve(weights, adapters, samples, run) -> list[float]:
    """Return the losses of torch's AdamW on adapters of a plain model. samples: (s + 1, b) of every step"""
    leaves = {name: value.clone().requires_grad_() for name, value in adapters.items()}
    optimizer = torch.optim.AdamW(
        leaves.values(), lr=INT8["lr"], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    losses = []
    for batch in samples:
        merged = dict(weights)
        for name, a in leaves.items():
            if name.endswith("lora_A.weight"):
                weight = name.replace(".lora_A", "")
                b = leaves[name.replace("lora_A", "lora_B")]
                delta = run.lora.scale * b.flatten(0, -2) @ a[0]
                merged[weight] = merged[weight] + delta.view(merged[weight].shape)
        tokens, labels = (torch.from_numpy(part).t() for part in (batch[:-1], batch[1:]))
        loss = plain_losses(merged, tokens, labels, run.model).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", ["tp1", "tp2 pp2 sequence zero"])
def test_losses_are_those_of_a_plain_model_with_the_dequantized_weights(layout, base):
    flags = {**MODEL, **INT8, "lora_target": ",".join(MATRICES), "pretrained_checkpoint": base}
    steps = 50

    def train(world, run):
        with started(world, run) as trainer:
            adapters = whole_tensors(trainer, "weight")
            size = run.batch.global_batch_size
            samples = None
            if world.rank == 0:
                samples = [
                    fetch(trainer.train, range(first, first + size))
                    for first in range(0, steps * size, size)
                ]
            return adapters, samples, [trainer.train_step().loss for _ in range(steps)]

    adapters, samples, losses = run_layout(layout, train, flags)[0]
    run = small_run(**flags)
    expected = plain_curve(dequantized(base, run.model), adapters, samples, run)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == steps
    # The weights of the file would have other losses.
    exact = train_losses(SoloComm(), small_run(**{**flags, "lora_base_format": None}), 1)
    assert abs(exact[0] - losses[0]) > 1e-5 * losses[0]


@pytest.mark.parametrize(
    "layout",
    [
        "dp2 zero",
        "tp2 sequence",
        "pp2 zb-h1",
        "cp2",
        "full",
        "packed",
        "int8",
    ],
)
def test_no_layout_changes_the_losses(layout, base):
    flags = {**MODEL, **INT8, "pretrained_checkpoint": base}
    if "int8" in layout:
        flags = {**flags, "int8": True}
    layout = layout.replace("int8", "").strip()
    (expected,) = run_layout("", train_losses, flags)
    for losses in run_layout(layout, train_losses, flags):
        assert losses == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("layout", ["dp2 ep2", "tp2 dp2 ep2 etp1 sequence", "tp2", "full"])
def test_no_layout_changes_the_losses_of_experts(layout, tmp_path):
    flags = {**EXPERTS, "pretrained_checkpoint": save_model(tmp_path, EXPERTS)}
    (expected,) = run_layout("", train_losses, flags)
    for losses in run_layout(layout, train_losses, flags):
        assert losses == pytest.approx(expected, rel=2e-6)


# Checkpoints ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp1", "dp2 zero", "tp2 pp2 sequence zero"])
@pytest.mark.parametrize("precision", ["", "bf16"])
def test_resuming_is_bit_exact(layout, precision, base, tmp_path):
    saved = str(tmp_path / "run")

    def save(world, run):
        with started(world, run) as trainer:
            trainer.train_step()
            trainer.save(saved)
            return [trainer.train_step().loss for _ in range(2)], trainer.base["fingerprint"]

    def resume(world, run):
        with started(world, run) as trainer:
            return [trainer.train_step().loss for _ in range(2)], trainer.base["fingerprint"]

    layout = f"{layout} {precision}"
    expected = run_layout(layout, save, {**MODEL, **INT8, "pretrained_checkpoint": base})
    assert run_layout(layout, resume, {**MODEL, **INT8, "load": saved}) == expected
    # The record of the base is that of its own weights: a run without this format resumes from it.
    plain = {**MODEL, **INT8, "load": saved, "lora_base_format": None}
    _, fingerprint = run_layout("tp1", resume, plain)[0]
    assert fingerprint == expected[0][1]


def test_export_and_merge_use_the_weights_of_the_file(base, tmp_path):
    saved, merged = (str(tmp_path / name) for name in ("run", "merged"))
    with started(
        SoloComm(), small_run(**{**MODEL, **INT8, "lr": 1e-5, "pretrained_checkpoint": base})
    ) as trainer:
        trainer.train_step()
        trainer.save(saved)
    words = ["convert", "--load", saved, "--merge", "--save", merged]
    assert program.main(words) == 0
    tokens = torch.arange(12)
    assert torch.equal(fm.load(merged).logits(tokens), fm.load(saved).logits(tokens))
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    exact = open_weights(base).read(name)
    change = (open_weights(merged).read(name) - exact).abs().max()
    assert change < (Q8Weight.of(exact).dequantize() - exact).abs().max()


# Memory --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("tp1", {**MODEL, **INT8}),
        ("tp1", {**MODEL, **INT8, "hidden_size": 72, "ffn_hidden_size": 100}),
        ("tp2 pp2 bf16", {**MODEL, **INT8}),
        ("tp2", EXPERTS),
        ("tp2 dp2 ep2 etp1 sequence", EXPERTS),
        ("dp2 ep2 bf16", EXPERTS),
    ],
)
def test_frozen_weights_take_the_bytes_of_the_formula(layout, flags):
    def held(world, run):
        with contextlib.closing(make_trainer(world, run)) as trainer:
            flat = trainer.optimizer.flat
            linear = [p for p in flat.frozen if p.spec.name.rsplit(".", 2)[-2] in MATRICES]
            for parameter in linear:
                in_int8 = parameter.spec.name.endswith(".weight")
                assert (scales_of(parameter) is not None) == in_int8
            return sum(memory.values.nbytes for memory in flat.frozen_memory)

    run, ranks = lay_out(layout, flags)
    plan = Layout.from_run(run, ranks)
    for rank, nbytes in enumerate(run_layout(layout, held, flags)):
        stage = rank // plan.tp % plan.pp
        assert nbytes == frozen_bytes(run, stage)


def test_one_tensor_at_a_time_is_read(base, monkeypatch):
    """Batches of one tensor have the losses of one batch."""
    flags = {**MODEL, **INT8, "pretrained_checkpoint": base}
    expected = train_losses(SoloComm(), small_run(**flags))
    monkeypatch.setattr(flat_parameters, "BATCH", 1)
    for losses in run_layout("pp2 tp2", train_losses, flags):
        assert losses == pytest.approx(expected, rel=2e-6)
