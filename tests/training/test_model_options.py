"""Options of Megatron-LM's models against plain PyTorch: losses, gradients and updates on one rank and in TP2 x PP2."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs.layers import layer_records
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.observe.export.metrics_writer import MetricsWriter
from fugaku_megatron.observe.log.iteration_metrics import parse_line
from fugaku_megatron.run.dry_run import report
from fugaku_megatron.run.loop import Session
from tests.checks.plain_model import plain_losses
from tests.checks.tables import read_rows
from tests.helpers import lay_out, make_trainer, run_layout, small_run, whole_tensors

pytestmark = pytest.mark.parallel

SAMPLES = 8  # of a global batch
OPTIONS = {
    name: flags
    for name, (_, flags) in read_rows(Path(__file__).with_name("options.txt"), {}).items()
}
ONE = "dp1"
# The gradients of a tied weight are two parts on two stages.
SPLIT = "tp2 pp2 untie_embeddings_and_output_weights"


def option_flags(name: str, **more: Any) -> dict[str, Any]:
    return {**OPTIONS[name], "global_batch_size": SAMPLES, "init_method_std": 0.2, **more}


@functools.cache
def computed(
    name: str, layout: str, backend: str
) -> tuple[float, dict[str, Tensor], dict[str, Tensor], Tensor]:
    """(loss, gradients, the weights they are at, samples) of the first iteration."""

    def work(world: Any, run: RunConfig) -> Any:
        torch.set_num_threads(1)
        trainer = make_trainer(world, run, Ops.build(backend))
        weights = whole_tensors(trainer, "weight")
        loss = trainer.train_step().loss
        trainer.close()
        return (
            loss,
            whole_tensors(trainer, "grad"),
            weights,
            fetch(trainer.train, range(SAMPLES)) if world.rank == 0 else None,
        )

    return run_layout(layout, work, option_flags(name, clip_grad=0.0))[0]


BLOCKS = ("squared relu", "parallel residual", "multipliers", "gated gelu and centred norms")
CASES = [
    *((name, layout) for name in OPTIONS for layout in (ONE, SPLIT)),
    *((name, "tp2 sequence blocks") for name in BLOCKS),
    *((name, "pp2 zbv") for name in ("parallel residual", "exact gelu", "squared relu")),
]
# Operations of torch are the same on every rank, so that few layouts are enough for them.
SPLIT_IN_TORCH = ("z-loss in chunks of masked rows", "yarn", "parallel residual")


@pytest.mark.parametrize(
    ("name", "layout", "backend"),
    [
        *((name, layout, "native") for name, layout in CASES),
        *(
            pytest.param(
                name,
                layout,
                "torch",
                marks=() if layout == ONE or name in SPLIT_IN_TORCH else pytest.mark.full,
            )
            for name, layout in CASES
        ),
    ],
)
def test_losses_and_gradients_are_those_of_plain_torch(name, layout, backend):
    model = lay_out(layout, OPTIONS[name])[0].model
    loss, grads, weights, samples = computed(name, layout, backend)
    tokens = torch.from_numpy(samples[:-1])
    labels = torch.from_numpy(samples[1:])
    plain = {key: value.clone().requires_grad_() for key, value in weights.items()}
    expected = plain_losses(plain, tokens.t(), labels.t(), model).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert grads.keys() == plain.keys()
    largest = max(value.grad.abs().max() for value in plain.values())
    for key, value in plain.items():
        # without positions the keys' biases change nothing: rounding
        scale = max(value.grad.abs().max(), 1e-2 * largest)
        torch.testing.assert_close(
            grads[key] / scale,
            value.grad / scale,
            rtol=0,
            atol=1e-5,
            msg=lambda m, k=key: f"{k}: {m}",
        )


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("layout", [ONE, SPLIT])
def test_the_z_loss_is_a_part_of_the_training_loss_alone(layout, backend):
    """Validation and its perplexity come from the cross entropy alone, and the log has both losses of training."""

    def work(world: Any, run: RunConfig, z_loss: bool) -> tuple[float, float, float | None]:
        torch.set_num_threads(1)
        run = replace(run, model=replace(run.model, use_z_loss=z_loss))
        with contextlib.closing(make_trainer(world, run, Ops.build(backend))) as trainer:
            valid = trainer.evaluate(trainer.valid, 0, 2)
            result = trainer.train_step()
        return valid, result.loss, result.z_loss

    flags = option_flags("z-loss")
    for (valid, loss, z_loss), (valid_alone, alone, none) in zip(
        *(run_layout(layout, work, flags, z_loss) for z_loss in (True, False)), strict=True
    ):
        assert valid == valid_alone and none is None
        assert z_loss > 0.05 and loss - z_loss == pytest.approx(alone, rel=1e-6)


def test_the_log_has_the_loss_without_the_z_loss(capsys):
    run = small_run(**OPTIONS["z-loss"], log_interval=2, eval_interval=2)
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        results = []
        step = trainer.train_step
        trainer.train_step = lambda: results.append(step()) or results[-1]
        writer = MetricsWriter(2, 2)
        Session(trainer, writer, 2, ()).run()
        writer.close()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "lm loss" in line]
    found = parse_line(line)
    assert found.lm_loss == pytest.approx(sum(r.loss for r in results) / 2, rel=1e-6)
    alone = sum(r.loss - r.z_loss for r in results) / 2
    assert found.lm_loss_alone == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("layout", [ONE, SPLIT])
@pytest.mark.parametrize("untied", [False, True])
def test_decoupled_learning_rates_reach_the_embedding_and_the_head_alone(layout, untied):
    """Against torch.optim.AdamW with two groups, over a warm-up and a decay."""
    rates = {
        "lr": 1e-3,
        "min_lr": 1e-4,
        "decoupled_lr": 3e-3,
        "decoupled_min_lr": 2e-3,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 2,
        "lr_decay_iters": 6,
    }
    flags = {**rates, "clip_grad": 0.0, "global_batch_size": SAMPLES}

    def work(world: Any, run: RunConfig) -> Any:
        torch.set_num_threads(1)
        trainer = make_trainer(world, run)
        first = whole_tensors(trainer, "weight")
        steps = []
        for _ in range(5):
            trainer.train_step()
            steps.append((whole_tensors(trainer, "grad"), whole_tensors(trainer, "weight")))
        trainer.close()
        return first, steps

    tied = f"untie_embeddings_and_output_weights={untied}"
    first, steps = run_layout(f"{layout} {tied}", work, flags)[0]
    plain = {name: torch.nn.Parameter(value) for name, value in first.items()}
    decoupled = {"embedding.word_embeddings.weight", "output_layer.weight"}
    groups = [
        {"params": [p], "decoupled": name in decoupled, "weight_decay": 0.01 * (p.dim() > 1)}
        for name, p in plain.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    for step, (grads, weights) in enumerate(steps):
        left = 1 - (1 - math.cos(math.pi * (step - 2) / 4)) / 2
        for group in optimizer.param_groups:
            peak, lowest = (3e-3, 2e-3) if group["decoupled"] else (1e-3, 1e-4)
            group["lr"] = peak * step / 2 if step <= 2 else lowest + left * (peak - lowest)
        for name, parameter in plain.items():
            parameter.grad = grads[name]
        optimizer.step()
        for name, parameter in plain.items():
            assert torch.allclose(weights[name], parameter.data, rtol=1e-5, atol=1e-6), (step, name)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_dry_run_and_the_formulas_know_them(name):
    run, _ = lay_out(SPLIT, option_flags(name))
    assert "memory of one rank per stage" in report(run, 4)
    records = layer_records(run)
    assert [r for r in records if r.name == run.model.activation][0].saved_bytes == 32 * 64 * 4
    assert Layout.from_run(run, 4).dp == 1
