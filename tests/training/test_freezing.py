"""Frozen parts of a model: what is trained, against plain torch, and checkpoints."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.costs.memory import frozen_elements
from fugaku_megatron.costs.stages import model_parameters
from fugaku_megatron.inference.loading import load_model
from fugaku_megatron.run.resume import resume_training
from tests.checks.costs import tallies
from tests.checks.experts import EXPERTS
from tests.checks.plain_model import plain_losses
from tests.helpers import (
    assert_near,
    find_checkpoint,
    lay_out,
    make_trainer,
    one_error,
    run_layout,
    small_run,
    whole_tensors,
)

pytestmark = pytest.mark.parallel

STEPS = 3
UNTIED = "untie_embeddings_and_output_weights"
PLAIN = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "lr": 0.003,
    "lr_decay_style": "constant",
    "clip_grad": 1.0,
    "adam_eps": 1e-3,
}
LAYERS = "decoder.layers."
# Flags -> beginnings of the trained parameters' names.
PARTS = {
    "freeze=('embedding',)": (LAYERS, "decoder.final_layernorm."),
    f"freeze=('embedding',) {UNTIED}": (LAYERS, "decoder.final_layernorm.", "output_layer."),
    f"freeze=('head',) {UNTIED}": ("embedding.", LAYERS),
    "freeze=('layers',)": ("embedding.", "decoder.final_layernorm."),
    f"freeze=('embedding','layers') {UNTIED}": ("decoder.final_layernorm.", "output_layer."),
    "freeze=('head',) freeze_first_layers=3": ("embedding.", f"{LAYERS}3."),
    f"freeze=('embedding','head') freeze_first_layers=2 {UNTIED}": (f"{LAYERS}2.", f"{LAYERS}3."),
}


def all_weights(trainer) -> dict[str, torch.Tensor]:
    """Return copies of all weights of a model on one rank."""
    return {
        parameter.spec.name: parameter.detach().clone() for parameter in trainer.stage.parameters()
    }


def reference(weights, names, batches, run):
    """Train parameters whose name begins with one of `names` with torch's AdamW; return all weights."""
    plain = {
        name: value.clone().requires_grad_(name.startswith(names))
        for name, value in weights.items()
    }
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": 0.01 * (p.dim() > 1 and not name.endswith(".bias"))}
            for name, p in plain.items()
            if p.requires_grad
        ],
        lr=run.optimizer.lr,
        betas=(run.optimizer.adam_beta1, run.optimizer.adam_beta2),
        eps=run.optimizer.adam_eps,
    )
    for tokens, labels in batches:
        optimizer.zero_grad()
        plain_losses(plain, tokens.t(), labels.t(), run.model).mean().backward()
        trained = [p for p in plain.values() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, run.optimizer.clip_grad)
        optimizer.step()
    return {name: p.detach() for name, p in plain.items()}


@pytest.mark.parametrize("flags", PARTS)
def test_trained_parts_are_those_of_torch_without_the_others_gradients(flags):
    run, _ = lay_out(f"{flags} micro_batch_size=4 global_batch_size=4", PLAIN)
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        first = all_weights(trainer)
        samples = [
            torch.stack([torch.as_tensor(trainer.train[4 * i + j]) for j in range(4)], 1)
            for i in range(STEPS)
        ]
        for _ in range(STEPS):
            trainer.train_step()
        found = all_weights(trainer)
        trained = {p.spec.name for p in trainer.optimizer.flat.parameters}
        count = sum(p.numel() for p in trainer.optimizer.flat.parameters)
    batches = [(x[:-1].long(), x[1:].long()) for x in samples]
    assert trained == {name for name in first if name.startswith(PARTS[flags])}
    expected = reference(first, PARTS[flags], batches, run)
    for name in first.keys() - trained:
        assert torch.equal(found[name], first[name]), name
    assert_near(found, {name: expected[name] for name in trained}, 1e-4)
    assert count == model_parameters(run) - frozen_elements(run, 0)


def test_experts_keep_their_weights_and_the_router_does_not():
    run = small_run(**{**EXPERTS, "freeze": ("experts",)})
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        first = all_weights(trainer)
        trainer.train_step()
        found = all_weights(trainer)
        count = sum(p.numel() for p in trainer.optimizer.flat.parameters)
    kept = {name for name in first if torch.equal(first[name], found[name])}
    assert kept == {name for name in first if ".mlp.experts." in name}
    assert count == model_parameters(run) - frozen_elements(run, 0)


@pytest.mark.parametrize("layout", ["", "tp2 pp2 dp2 zero overlap", "pp2 zb-h1"])
def test_all_layers_frozen_log_losses_and_train_nothing(layout):
    def losses(comm, run):
        with contextlib.closing(make_trainer(comm, run)) as trainer:
            steps = [trainer.train_step() for _ in range(2)]
            assert not trainer.optimizer.flat.parameters
            assert {step.grad_norm for step in steps} == {0.0}
            assert trainer.progress.iteration == 2
            return [step.loss for step in steps]

    flags = {**PLAIN, "freeze_all_layers": True, "global_batch_size": 8}
    found = run_layout(layout, losses, flags)
    with contextlib.closing(
        make_trainer(SoloComm(), small_run(**{**flags, "freeze_all_layers": False, "lr": 1e-12}))
    ) as trainer:
        expected = [trainer.train_step().loss for _ in range(2)]
    for each in found:
        assert each == pytest.approx(expected, rel=1e-6)


def save_frozen(directory, layout, flags):
    def save(comm, run):
        with contextlib.closing(make_trainer(comm, run)) as trainer:
            trainer.train_step()
            trainer.save(str(directory))
            trainer.train_step()
            return whole_tensors(trainer, "weight")

    return run_layout(layout, save, flags)[0]


@pytest.mark.parametrize("precision", ["", "bf16"])
def test_a_checkpoint_has_all_weights_and_resumes_in_another_layout(tmp_path, precision):
    flags = {**PLAIN, "freeze": ("embedding",), "freeze_first_layers": 2, "global_batch_size": 4}
    expected = save_frozen(tmp_path, f"tp2 dp2 zero {precision}", flags)

    def resume(comm, run):
        run = replace(run, output=replace(run.output, load=str(tmp_path)))
        with contextlib.closing(make_trainer(comm, run)) as trainer:
            resume_training(trainer, find_checkpoint(run, comm))
            trainer.train_step()
            return whole_tensors(trainer, "weight")

    found = run_layout(f"pp2 {precision}", resume, flags)[0]
    assert_near(found, expected, 1e-5 if not precision else 2e-2)
    whole = weights_for_inference(tmp_path)
    plain = run_layout(precision, lambda comm, run: all_weights(make_trainer(comm, run)), flags)[0]
    frozen = [
        name for name in plain if name.startswith(("embedding.", f"{LAYERS}0.", f"{LAYERS}1."))
    ]
    for name in frozen:
        assert torch.equal(whole[name], plain[name]), name


def weights_for_inference(directory):
    """Return the weights of a checkpoint's model for inference."""
    manifest = read_manifest(directory, 1)
    loaded = load_model(saved_run(manifest, (1, 1)), SoloComm(), str(directory), 1, manifest)
    return all_weights(loaded)


@pytest.mark.parametrize(
    ("now", "text"),
    [
        ({}, "no frozen weights"),
        ({"freeze": ("layers",)}, "--freeze layers"),
        (
            {"freeze": ("embedding",), "freeze_first_layers": 1},
            "--freeze embedding --freeze-first-layers 1",
        ),
    ],
)
def test_other_frozen_parts_are_refused_on_resume(tmp_path, now, text):
    before = {"freeze": ("embedding",), "freeze_first_layers": 2}
    save_frozen(tmp_path, "", {**PLAIN, **before})
    run = small_run(**{**PLAIN, **now, "load": str(tmp_path)})
    error = one_error(1, lambda comm: find_checkpoint(run, comm))
    assert error == (
        f"--load {tmp_path} (iteration 1) was trained with --freeze embedding --freeze-first-layers 2 (this run: {text}): "
        "pass the same, or --finetune to start from its weights"
    )
    tuned = replace(run, output=replace(run.output, finetune=True))
    with contextlib.closing(make_trainer(SoloComm(), tuned)) as trainer:
        resume_training(trainer, find_checkpoint(tuned, SoloComm()))


def test_no_gradient_message_reaches_a_stage_with_nothing_to_train():
    flags = {**PLAIN, "freeze": ("embedding",), "freeze_first_layers": 2}
    run, ranks = lay_out("pp2 micro_batch_size=1 global_batch_size=2", flags)
    first, last = tallies(run, ranks)
    assert ("pp", "recv") not in first and ("pp", "send") not in last
