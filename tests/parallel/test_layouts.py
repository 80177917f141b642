"""Every parallel layout trains as one rank does: losses, gradient norms and all gradients, with ranks as threads."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.nn.ops import Ops
from tests.helpers import make_trainer, matrix, small_run, train, whole_tensors
from tests.threads import ThreadWorld

LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "dp2": (2, {}),
    "tp2pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2pp2dp2": (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
ITERATIONS = 20
FEW = 6  # where an option is tried: an iteration has felt every gradient of those before it


def losses(ranks: int, iterations: int = ITERATIONS, backend: str = "native", **changes) -> list[tuple[float, float]]:
    results = ThreadWorld(ranks).run(lambda world: train(world, small_run(**changes), iterations, Ops.build(backend)))
    curves = [[(r.loss, r.grad_norm) for r in rank] for rank in results]
    assert all(rank == curves[0] for rank in curves), "every rank reports the same losses"
    return curves[0]


@pytest.fixture(scope="module")
def reference() -> list[tuple[float, float]]:
    return losses(1)


SHARDED = ("dp2", "tp2pp2dp2")  # ZeRO-1 shards over data-parallel ranks, of which the other layouts have one
QUICK = [("tp2", "selective", 0), ("pp2", None, 0), ("pp4", "full", 0), ("dp2", "selective", 1), ("tp2pp2dp2", None, 0),
         ("tp2pp2dp2", "full", 1)]


@pytest.mark.parametrize(("name", "recompute", "zero_stage"), [
    *matrix(LAYOUTS, (None, "full", "selective"), (0,), quick=[case for case in QUICK if case[2] == 0]),
    *matrix(SHARDED, (None, "full", "selective"), (1,), quick=[case for case in QUICK if case[2] == 1])])
def test_layout_equals_one_rank(name, recompute, zero_stage, reference):
    ranks, layout = LAYOUTS[name]
    count = FEW if zero_stage or recompute else ITERATIONS
    result = losses(ranks, count, zero_stage=zero_stage, recompute_granularity=recompute, **layout)
    torch.testing.assert_close(torch.tensor(result), torch.tensor(reference[:count]), rtol=1e-5, atol=0)


def test_dropout_masks_do_not_depend_on_the_layout():
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    alone = losses(1, 3, **dropout)
    for ranks, layout in (LAYOUTS["tp2"], LAYOUTS["pp4"], LAYOUTS["tp2pp2dp2"]):
        torch.testing.assert_close(torch.tensor(losses(ranks, 3, **dropout, **layout)), torch.tensor(alone), rtol=1e-5, atol=0)
    assert alone != losses(1, 3)


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
TP2PP2DP2 = LAYOUTS["tp2pp2dp2"][1]


@pytest.fixture(scope="module")
def reference_with_dropout() -> list[tuple[float, float]]:
    return losses(1, FEW, **DROPOUT)


@pytest.mark.parametrize(("ranks", "changes"), [
    pytest.param(2, LAYOUTS["tp2"][1], marks=pytest.mark.full),
    (2, {**LAYOUTS["tp2"][1], "recompute_granularity": "full", "recompute_num_layers": 2}),
    (2, {**LAYOUTS["tp2"][1], "recompute_granularity": "selective", "backend": "torch"}),
    (4, {"tensor_model_parallel_size": 4, "make_vocab_size_divisible_by": 4}),
    pytest.param(8, TP2PP2DP2, marks=pytest.mark.full),
    (8, {**TP2PP2DP2, "zero_stage": 1, "recompute_granularity": "full", "overlap_grad_reduce": True, "overlap_param_gather": True,
         "ddp_bucket_size": 5000}),
    pytest.param(8, {**TP2PP2DP2, "zero_stage": 1, "recompute_granularity": "selective"}, marks=pytest.mark.full),
])
def test_parts_of_the_sequence_train_as_one_rank(ranks, changes, reference_with_dropout):
    """Sequence parallelism: the same masks, losses and norms, with dropout."""
    result = losses(ranks, FEW, sequence_parallel=True, **changes, **DROPOUT)
    torch.testing.assert_close(torch.tensor(result), torch.tensor(reference_with_dropout), rtol=1e-5, atol=0)


def test_sequence_parallelism_means_nothing_on_one_rank(reference_with_dropout):
    assert losses(1, FEW, sequence_parallel=True, **DROPOUT) == reference_with_dropout


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_recompute_has_the_same_bits_with_dropout(granularity, method):
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    again = losses(1, 5, recompute_granularity=granularity, recompute_method=method, recompute_num_layers=2, **dropout)
    assert again == losses(1, 5, **dropout)


def gradients(ranks: int, **changes) -> dict[str, torch.Tensor]:
    def one_step(world):
        torch.set_num_threads(1)
        trainer = make_trainer(world, small_run(**changes))
        trainer.train_step()
        trainer.close()
        return whole_tensors(trainer, "grad")

    return ThreadWorld(ranks).run(one_step)[0]


@pytest.fixture(scope="module")
def gradients_alone() -> dict[str, torch.Tensor]:
    return gradients(1)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["tp2", "pp4", "dp2", "tp2pp2dp2", "tp2pp2 sequence"])
def test_all_gradients_equal_one_rank(name, gradients_alone):
    ranks, layout = LAYOUTS[name.split()[0]]
    layout = {**layout, "sequence_parallel": "sequence" in name}
    alone, result = gradients_alone, gradients(ranks, **layout)
    assert alone.keys() <= result.keys()
    for parameter, grad in alone.items():
        scale = grad.abs().max()
        torch.testing.assert_close(result[parameter] / scale, grad / scale, rtol=0, atol=1e-5,
                                   msg=lambda m, p=parameter: f"{p}: {m}")
    if "output_layer.weight" in result:
        assert torch.equal(result["output_layer.weight"], result["embedding.word_embeddings.weight"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_layouts_stay_close(precision):
    flags = {precision: True, "initial_loss_scale": 1024.0}
    alone = torch.tensor(losses(1, 5, **flags))
    for ranks, layout in (LAYOUTS["dp2"], (4, {**LAYOUTS["tp2pp2"][1], "sequence_parallel": True})):
        result = torch.tensor(losses(ranks, 5, zero_stage=1, **flags, **layout))
        torch.testing.assert_close(result, alone, rtol=0.02, atol=0)
