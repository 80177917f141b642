"""Training under every schedule: the losses of 1F1B, whatever the order, the chunks and what is recomputed."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.comm.base import Comm
from tests.helpers import make_trainer, matrix, small_run, whole_tensors
from tests.threads import ThreadWorld

LAYERS = 8
MODEL = {"num_layers": LAYERS, "vocab_size": 112, "hidden_dropout": 0.1, "attention_dropout": 0.2}
SCHEDULES = {
    "1f1b": {},
    "interleaved 2": {"num_virtual_stages_per_pipeline_rank": 2},
    "interleaved 1 layer": {"num_layers_per_virtual_pipeline_stage": 1},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zb-h1 2": {"pipeline_schedule": "zb-h1", "num_virtual_stages_per_pipeline_rank": 2},
    "zbv": {"pipeline_schedule": "zbv"},
}
LAYOUTS = {  # ranks, changes
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "pp2dp2 zero overlap": (4, {"pipeline_model_parallel_size": 2, "zero_stage": 1, "overlap_grad_reduce": True,
                                "overlap_param_gather": True, "ddp_bucket_size": 3000}),
    "tp2pp2dp2 parts of the sequence": (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 1,
                                            "sequence_parallel": True}),
}
RECOMPUTE = {"none": {}, "selective": {"recompute_granularity": "selective"}, "full": {"recompute_granularity": "full"},
             "block": {"recompute_granularity": "full", "recompute_method": "block"}}


def curve(world: Comm, changes: dict, iterations: int = 6) -> list[float]:
    """Training losses and then one of an evaluation."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, small_run(**MODEL, **changes))
    losses = [trainer.train_step().loss for _ in range(iterations)]
    losses.append(trainer.evaluate(trainer.valid, 0, 1))
    trainer.close()
    return losses


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return ThreadWorld(1).run(curve, {})[0]


QUICK = [("1f1b", "tp2pp2dp2 parts of the sequence"), ("interleaved 2", "pp2dp2 zero overlap"), ("interleaved 1 layer", "pp4"),
         ("zb-h1", "pp4"), ("zb-h1 2", "pp2"), ("zb-h1 2", "pp2dp2 zero overlap"), ("zbv", "pp2dp2 zero overlap"),
         ("zbv", "tp2pp2dp2 parts of the sequence")]


@pytest.mark.parametrize(("name", "layout"), matrix(SCHEDULES, LAYOUTS, quick=QUICK))
def test_losses_are_those_of_one_rank(alone, name, layout):
    ranks, changes = LAYOUTS[layout]
    losses = ThreadWorld(ranks).run(curve, {**changes, **SCHEDULES[name]})
    for ours in losses:
        assert ours == pytest.approx(alone, rel=1e-6)
    assert len(set(alone)) == len(alone), "weights move"


def test_halves_of_backward_keep_the_bits_of_1f1b_however_many_are_pending():
    kinds = [{}, {"pipeline_schedule": "zb-h1"}, {"pipeline_schedule": "zb-h1", "zero_bubble_max_pending_backward": 6}]
    one, *halves = (ThreadWorld(4).run(curve, {**LAYOUTS["pp4"][1], **kind})[0] for kind in kinds)
    assert halves == [one, one]


def test_a_v_that_holds_more_has_the_same_losses(alone):
    ranks, changes = LAYOUTS["pp2"]
    losses = ThreadWorld(ranks).run(curve, {**changes, **SCHEDULES["zbv"], "zero_bubble_max_pending_backward": 3}, 5)
    assert losses[0][:5] == pytest.approx(alone[:5], rel=1e-6)


@pytest.mark.parametrize(("name", "recompute"), matrix(
    ("interleaved 2", "zb-h1 2", "zbv"), list(RECOMPUTE)[1:],
    quick=[("interleaved 2", "selective"), ("zb-h1 2", "full"), ("zbv", "block"), ("zbv", "full")]))
def test_recompute_changes_no_loss(alone, name, recompute):
    ranks, changes = LAYOUTS["pp2"]
    losses = ThreadWorld(ranks).run(curve, {**changes, **SCHEDULES[name], **RECOMPUTE[recompute]}, 5)
    assert losses[0][:5] == pytest.approx(alone[:5], rel=1e-6)


@pytest.mark.parametrize("name", ["zbv", "interleaved 2"])
def test_a_stage_with_both_ends_has_the_tied_weight_once(name):
    def copies(world: Comm) -> tuple[bool, int]:
        trainer = make_trainer(world, small_run(**MODEL, **LAYOUTS["pp4"][1], **SCHEDULES[name]))
        tables = [p for p in trainer.optimizer.flat.parameters if p.spec.shape[0] == trainer.run.model.vocab_size]
        return trainer.stage.tied_copy is None, len(tables)

    found = ThreadWorld(4).run(copies)
    assert found == ([(True, 1), (True, 0), (True, 0), (True, 0)] if name == "zbv" else
                     [(False, 1), (True, 0), (True, 0), (False, 1)])


@pytest.mark.smoke
@pytest.mark.parametrize("name", SCHEDULES)
def test_weights_are_those_of_one_rank(name):
    def weights(world: Comm, changes: dict) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        trainer = make_trainer(world, small_run(**MODEL, **changes))
        trainer.train_step()
        return whole_tensors(trainer, "weight")

    expected = ThreadWorld(1).run(weights, {})[0]
    for ours in ThreadWorld(4).run(weights, {**LAYOUTS["pp4"][1], **SCHEDULES[name]}):
        expected["output_layer.weight"] = expected["embedding.word_embeddings.weight"]  # its copy, where it has one
        for key, tensor in ours.items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)
