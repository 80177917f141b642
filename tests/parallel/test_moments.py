"""AdamW's moments in BF16: memory, layouts, checkpoints of the other format, and how near the run stays to FP32's."""

from __future__ import annotations

import math

import pytest
import torch

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import memory, run_schedule
from fugaku_megatron.perf import model as perf_model
from fugaku_megatron.perf.model import System
from fugaku_megatron.training.resume import find_checkpoint, resume_training
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, make_trainer, small_run, whole_tensors
from tests.threads import ThreadWorld

MOMENTS = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
TP2PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
BUCKETS = {"zero_stage": 1, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 5000}
ITERATIONS = 12


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def trained(world, run, source=None, target=None, iterations=ITERATIONS):
    """Losses and weights after so many iterations, from one checkpoint to another."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, run)
    if source:
        trainer.load(str(source))
    losses = [trainer.train_step().loss for _ in range(iterations)]
    if target:
        trainer.save(str(target))
    trainer.close()
    return losses, whole_tensors(trainer, "weight")


@pytest.fixture(scope="module")
def alone():
    """Losses and weights of one rank with moments in BF16."""
    return trained(SoloComm(), small_run(**MOMENTS))


def change(weights, others) -> float:
    """Root mean square difference of all weights over that of their size."""
    difference, size = (sum(f(name).double().square().sum() for name in weights)
                        for f in (lambda name: weights[name] - others[name], lambda name: weights[name]))
    return math.sqrt(difference / size)


def test_twelve_iterations_stay_with_fp32s(alone):
    losses, weights = trained(SoloComm(), small_run())
    assert alone[0] == pytest.approx(losses, rel=1e-5) and alone[0] != losses
    before = whole_tensors(make_trainer(SoloComm(), small_run()), "weight")
    assert 0 < change(weights, alone[1]) < 0.005 * change(weights, before), "of the way that the weights have gone"


@pytest.mark.parametrize(("ranks", "layout"), [(8, {**TP2PP2}), (8, {**TP2PP2, **BUCKETS})], ids=["plain", "buckets"])
def test_layouts_train_as_one_rank(ranks, layout, alone):
    losses, weights = ThreadWorld(ranks).run(trained, small_run(**MOMENTS, **layout))[0]
    assert losses == pytest.approx(alone[0], rel=1e-5)
    assert change(alone[1], weights) < 1e-5
    assert torch.equal(weights["output_layer.weight"], weights["embedding.word_embeddings.weight"]), "the copies stay equal"


@pytest.mark.parametrize("model", [{}, {"swiglu": True, "group_query_attention": True, "num_query_groups": 2}],
                         ids=["gpt", "llama"])
def test_places_are_those_of_the_global_tensor(model):
    """Every piece of every rank's shard of every bucket."""
    run = small_run(**TP2PP2, **BUCKETS, **model)
    for rank in range(8):
        optimizer = Trainer(run, SoloComm(rank, 8), grid_groups(SoloComm(rank, 8), run)).optimizer
        flat = optimizer.flat
        for part in optimizer.parts:
            pieces = flat.pieces(part.start, part.start + len(part.master))
            for (piece, place), covered in zip(pieces, pieces_by_hand(flat, part), strict=True):
                local = torch.arange(piece.end - piece.start) + place.first
                numbers = place.offset + local // place.columns * place.row + local % place.columns
                assert torch.equal(numbers, covered)


def pieces_by_hand(flat, part):
    """The numbers of the elements of each parameter that lies in a part, from the parameters' own slices."""
    for parameter, start in zip(flat.parameters, flat.starts, strict=True):
        spec = parameter.spec
        whole = torch.arange(math.prod(spec.shape)).view(spec.shape)
        own = whole[tuple(slice(o, o + n) for o, n in zip(spec.offset, parameter.shape))].flatten()
        inside = own[max(0, part.start - start) : max(0, part.start + len(part.master) - start)]
        if len(inside):
            yield inside


@pytest.mark.parametrize("changes", [{}, {"exp_avg_sq_dtype": "fp32"}, {"bf16": True}, {"bf16": True, **TP2PP2, "zero_stage": 1}])
def test_memory_is_what_the_formula_says(changes):
    ranks = 8 if "zero_stage" in changes else 1
    run = small_run(**{**MOMENTS, **changes})
    trainer = Trainer(run, SoloComm(0, ranks), grid_groups(SoloComm(0, ranks), run))
    held = sum(t.nbytes for part in trainer.optimizer.parts for t in (part.exp_avg, part.exp_avg_sq))
    masters = sum(part.master.nbytes for part in trainer.optimizer.parts if part.low is not None)
    layout, lists = Layout.from_run(run, ranks), run_schedule.of_run(run, 2)
    planned = memory.stage_memory(run, layout, 0, lists.held(0))
    assert held + masters == planned.optimizer
    whole = memory.stage_memory(small_run(**{k: v for k, v in changes.items() if "dtype" not in k}), layout, 0, lists.held(0))
    elements = sum(len(part.master) for part in trainer.optimizer.parts)
    assert whole.total - planned.total == elements * (2 if "exp_avg_sq_dtype" in changes else 4)


def test_the_planner_counts_fewer_bytes_and_less_traffic():
    system = System.from_names("a64fx", "fugaku_megatron", 4, 4)
    plain, half = (make_run("1.3b", {"tensor_model_parallel_size": 4, **changes}) for changes in ({}, MOMENTS))
    layout = Layout.from_run(plain, system.world_size)
    steps = [perf_model.step(run, layout, system, system.parameters) for run in (plain, half)]
    assert steps[1].optimizer / steps[0].optimizer == pytest.approx((36 - 8) / 36, rel=0.01)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of checkpoints with moments in FP32 and in BF16, of TP 2 x PP 2 x DP 2 with ZeRO-1 and of one rank."""
    whole, half = (tmp_path_factory.mktemp(name) for name in ("fp32", "bf16"))
    ThreadWorld(8).run(trained, small_run(**TP2PP2, zero_stage=1), None, whole, 3)
    trained(SoloComm(), small_run(**MOMENTS), None, half, 3)
    return whole, half


def moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {s.key: s.tensor.clone() for s in trainer.optimizer.checkpoint_shards() if s.key.startswith("exp_avg")}


def test_a_checkpoint_of_the_other_format_is_converted(saved):
    """Across layouts, too; what was BF16 keeps its values in FP32, and comes back as it was."""
    plain, rounded, widened = (make_trainer(SoloComm(), small_run(**changes)) for changes in ({}, MOMENTS, {}))
    plain.load(str(saved[0]))
    rounded.load(str(saved[0]))
    exact = moments(plain)
    for key, tensor in moments(rounded).items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, exact[key].bfloat16()) and tensor.any(), key
    widened.load(str(saved[1]))
    rounded.load(str(saved[1]))
    stored = moments(rounded)
    for key, tensor in moments(widened).items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, stored[key].float()), key
    assert math.isfinite(widened.train_step().loss)
    for trainer in (plain, rounded, widened):
        trainer.close()


@pytest.mark.parametrize(("source", "changes", "notes"), [
    (0, MOMENTS, ["note: --exp-avg-dtype is bf16, was fp32: the checkpoint's values are rounded to nearest",
                  "note: --exp-avg-sq-dtype is bf16, was fp32: the checkpoint's values are rounded to nearest"]),
    (1, {**MOMENTS, "exp_avg_dtype": "fp32"},
     ["note: --exp-avg-dtype is fp32, was bf16: the checkpoint's values are taken as they are"]),
    (1, MOMENTS, []), (0, {**MOMENTS, "no_load_optim": True}, [])])
def test_the_log_says_that_moments_are_converted(source, changes, notes, saved):
    run = small_run(load=str(saved[source]), **changes)
    lines = resume_training(make_trainer(SoloComm(), run), find_checkpoint(run, SoloComm()))
    assert [line for line in lines if "exp-avg" in line] == notes


def test_the_bits_do_not_depend_on_when_a_run_was_stopped(saved):
    """Three iterations more from a checkpoint of three, against six at once, on one rank."""
    run = small_run(**MOMENTS)
    losses, weights = trained(SoloComm(), run, saved[1], None, 3)
    expected = trained(SoloComm(), run, None, None, 6)
    assert losses == expected[0][3:] and all(torch.equal(weights[name], expected[1][name]) for name in weights)
