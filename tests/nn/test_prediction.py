"""MTP modules against the formulas of DeepSeek-V3's report in FP64, and their tokens and labels against Megatron-core's rule."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.model import ModelConfig
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.convert.own_checkpoint import open_own
from fugaku_megatron.data.marks import COUNTED, FIRST, predicted
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.nn.model import OUTPUT, PREDICTION_EMBEDDINGS
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.observe.export.metrics_writer import MetricsWriter
from fugaku_megatron.observe.log.iteration_metrics import parse_line
from fugaku_megatron.run.loop import Session
from tests.checks.plain_model import plain_head_losses, plain_hidden, plain_layer, plain_norm
from tests.helpers import assert_near, make_trainer, run_layout, small_run, whole_tensors

pytestmark = pytest.mark.parallel

SAMPLES = 8  # of a global batch
FACTOR = 0.6
MTP = {
    "position_embedding_type": "rope",
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": FACTOR,
    "global_batch_size": SAMPLES,
    "init_method_std": 0.2,
    "clip_grad": 0.0,
}
LLAMA = {
    **MTP,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
}
MODELS = {"gpt": MTP, "llama": LLAMA}


def paper_losses(
    weights: dict[str, Tensor], samples: Tensor, model: ModelConfig
) -> tuple[Tensor, list[Tensor]]:
    """Return the losses of the model and of its MTP modules, on samples (b, s + 1).

    Equations 21 to 24 of arXiv:2412.19437: module k projects the norms of the embedding of token i + k and of the state
    of module k - 1 at i, and predicts token i + k + 1 from its layer's output.
    """
    tokens = samples[:, :-1]
    hidden = plain_hidden(weights, tokens, model)
    main = plain_head_losses(weights, hidden, samples[:, 1:], model).mean()
    losses = []
    for depth in range(1, model.predictions + 1):
        name = f"mtp.layers.{depth - 1}"
        # The last tokens have no embedding to read, and no position before them attends to them.
        hidden = hidden[:, :-1]
        embedded = weights["embedding.word_embeddings.weight"][tokens[:, depth:]]
        read = torch.cat(
            (
                plain_norm(embedded, weights, f"{name}.enorm", model),
                plain_norm(hidden, weights, f"{name}.hnorm", model),
            ),
            -1,
        )
        kind = model.all_layer_kinds[model.num_layers + depth - 1]
        x = read @ weights[f"{name}.eh_proj.weight"].t()
        x = plain_layer(x, weights, f"{name}.transformer_layer", kind, model)
        hidden = plain_norm(x, weights, f"{name}.final_layernorm", model)
        losses.append(plain_head_losses(weights, hidden, samples[:, depth + 1 :], model).mean())
    return main, losses


def first_iteration(world: Any, run: RunConfig, backend: str) -> Any:
    """Return (result, gradients, weights before the update, samples)."""
    torch.set_num_threads(1)
    with contextlib.closing(make_trainer(world, run, Ops.build(backend))) as trainer:
        weights = whole_tensors(trainer, "weight")
        result = trainer.train_step()
        samples = None
        if world.rank == 0:
            samples = torch.from_numpy(fetch(trainer.train, range(SAMPLES)))
        return result, whole_tensors(trainer, "grad"), weights, samples


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("layout", ["dp1", "full", "pp2", "tp2 sequence"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_paper(name, layout, backend):
    flags = MODELS[name]
    result, grads, weights, samples = run_layout(layout, first_iteration, flags, backend)[0]
    model = small_run(**flags).model
    exact = {key: value.double().requires_grad_() for key, value in weights.items()}
    copies = (OUTPUT, PREDICTION_EMBEDDINGS) if model.tied else (PREDICTION_EMBEDDINGS,)
    for copy in copies:
        exact.pop(copy, None)
    main, losses = paper_losses(exact, samples.t(), model)
    total = main + FACTOR / len(losses) * sum(losses)
    total.backward()
    assert result.loss == pytest.approx(main.item(), rel=1e-6)
    assert result.predictions == pytest.approx([each.item() for each in losses], rel=1e-6)
    assert len({result.loss, *result.predictions}) == 3
    for key, value in exact.items():
        assert value.grad.abs().max() > 0, key
        assert_near(grads, {key: value.grad.float()}, 1e-5)


def test_an_evaluation_has_the_loss_of_the_model_alone():
    run = small_run(**MTP)
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        found = trainer.evaluate(trainer.valid, 0, 1)
        weights = whole_tensors(trainer, "weight")
        samples = torch.from_numpy(fetch(trainer.valid, range(SAMPLES)))
        assert not trainer.stage.last.prediction_losses
    main, _ = paper_losses(weights, samples.t(), run.model)
    assert found == pytest.approx(main.item(), rel=1e-5)


def test_the_log_has_the_mean_loss_of_each_module(capsys):
    run = small_run(**MTP, log_interval=2)
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        results = []
        step = trainer.train_step
        trainer.train_step = lambda: results.append(step()) or results[-1]
        writer = MetricsWriter(2, 2)
        Session(trainer, writer, 2, ()).run()
        writer.close()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "lm loss" in line]
    assert line.index("lm loss:") < line.index("mtp_1 loss:") < line.index("mtp_2 loss:")
    found = parse_line(line)
    means = [sum(each.predictions[depth] for each in results) / 2 for depth in (0, 1)]
    assert [found.mtp_1_loss, found.mtp_2_loss] == pytest.approx(means, rel=1e-6)
    assert found.mtp_3_loss is None


def test_a_checkpoint_is_opened_with_and_without_its_modules(tmp_path):
    with contextlib.closing(make_trainer(SoloComm(), small_run(**MTP))) as trainer:
        trainer.save(str(tmp_path))
        weights = whole_tensors(trainer, "weight")
    found = open_own(str(tmp_path))
    assert found.model.predictions == 2 and {*found.dtypes} == {*weights}
    for name, tensor in weights.items():
        assert torch.equal(found.read(name), tensor), name
    alone = found.without_predictions()
    assert alone.notes == ("the modules of --mtp-num-layers 2 are left out",)
    assert not alone.model.predictions
    assert {*alone.dtypes} == {name for name in weights if not name.startswith("mtp.")}


TOKENS = torch.arange(10, 19).unsqueeze(1)  # 8 inputs


def test_tokens_and_labels_are_rolled_over_the_ends_of_documents():
    """As in pretrain_gpt.py, which passes no packed sequences: document 10 to 12, then 13 to 18, whose first label is masked."""
    marks = torch.full((9, 1), COUNTED)
    marks[3] = FIRST
    tokens, labels = predicted(TOKENS, marks, 2, inside_documents=False)
    assert tokens.flatten().tolist() == [12, 13, 14, 15, 16, 17, 0, 0]
    assert labels.flatten().tolist() == [-1, 14, 15, 16, 17, 18, -1, -1]
    assert torch.equal(
        predicted(TOKENS, None, 1, False)[0], torch.cat((TOKENS[1:8], TOKENS[:1] * 0))
    )


def test_chats_are_rolled_apart():
    """As _roll_tensor_packed_seq of Megatron-core, once for each module, with chats of 3 and 5 tokens."""
    marks = torch.full((9, 1), COUNTED)
    marks[3] = FIRST | COUNTED
    rolled = [predicted(TOKENS, marks, depth, inside_documents=True) for depth in (1, 2)]
    assert rolled[0][0].flatten().tolist() == [11, 12, 0, 14, 15, 16, 17, 0]
    assert rolled[0][1].flatten().tolist() == [12, 13, -1, 15, 16, 17, 18, -1]
    assert rolled[1][0].flatten().tolist() == [12, 0, 0, 15, 16, 17, 0, 0]
    assert rolled[1][1].flatten().tolist() == [13, -1, -1, 16, 17, 18, -1, -1]
