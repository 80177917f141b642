"""The trainer: evaluation, order of samples, batch ramp-up, resuming to the same bits, and checkpoints that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.nn.parameter import PARAMETER_DTYPES
from fugaku_megatron.training.train import Progress, Trainer, reads_data
from tests.helpers import (
    flat_gradients,
    grid_groups,
    make_trainer,
    master_weights,
    mock,
    plain_loss,
    small_run,
    train,
    whole_tensors,
)
from tests.threads import ThreadWorld

TP2PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
LAYOUTS = {"one": (1, {}), "tp2": (2, {"tensor_model_parallel_size": 2}), "pp2": (2, {"pipeline_model_parallel_size": 2}),
           "dp2": (2, {}), "dp2zero": (2, {"zero_stage": 1}), "tp2pp2": (4, TP2PP2),
           "tp2dp2zero": (4, {"tensor_model_parallel_size": 2, "zero_stage": 1}),
           "tp2pp2dp2zero": (8, {"zero_stage": 1, **TP2PP2})}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FP16 = {"fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1, "loss_scale_window": 2}
SMALLER = {"num_layers": 2, "global_batch_size": 8}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# Evaluation -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["one", "tp2pp2", "dp2zero"])
def test_evaluation_is_deterministic_and_without_dropout(name):
    ranks, layout = LAYOUTS[name]

    def evaluate(world) -> list[float]:
        trainer = make_trainer(world, small_run(**SMALLER, **DROPOUT, **layout))
        before = trainer.optimizer.flat.values.clone()
        losses = [trainer.evaluate(trainer.valid, first, 2) for first in (0, 0, 16)]
        assert trainer.progress == Progress()
        assert torch.equal(before, trainer.optimizer.flat.values) and not flat_gradients(trainer).any()
        trainer.train_step()
        assert trainer.stage.training
        trainer.close()
        return losses

    trainer = make_trainer(SoloComm(), small_run(**SMALLER))
    weights = whole_tensors(trainer, "weight")
    batches = (fetch(mock(trainer.run, 8), range(first, first + 16)) for first in (0, 16))
    expected = [plain_loss(weights, *batch, trainer.run.model).item() for batch in batches]
    for first, again, other in ThreadWorld(ranks).run(evaluate):
        assert first == again
        assert [first, other] == pytest.approx(expected, rel=1e-5)


def test_evaluation_between_steps_changes_nothing():
    def curve(evaluate: bool) -> list[float]:
        trainer, losses = make_trainer(SoloComm(), small_run(**DROPOUT)), []
        for _ in range(4):
            losses.append(trainer.train_step().loss)
            if evaluate:
                trainer.evaluate(trainer.valid, 0, 1)
        trainer.close()
        return losses

    assert curve(True) == curve(False)


# Data -------------------------------------------------------------------------------------------------------------------------

def record_batches(world, iterations: int, **changes) -> list[tuple[int, torch.Tensor]]:
    """(first sample, tokens (s, b)) of every micro-batch that entered the first stage here."""
    trainer, seen = make_trainer(world, small_run(num_layers=2, **changes)), []
    if trainer.stage.first:
        embedding = trainer.stage.first.embedding
        embedding.register_forward_pre_hook(lambda module, args: seen.append((args[1].first_sample, args[0].clone())))
    for _ in range(iterations):
        trainer.train_step()
    trainer.close()
    return seen


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_order_of_samples_does_not_depend_on_the_layout(name):
    ranks, layout = LAYOUTS[name]
    data = mock(small_run())
    seen = ThreadWorld(ranks).run(lambda world: record_batches(world, 3, **layout))
    tp, pp = layout.get("tensor_model_parallel_size", 1), layout.get("pipeline_model_parallel_size", 1)
    firsts = []
    for batches in seen:
        for first, tokens in batches:
            same = torch.equal(tokens, fetch(data, range(first, first + 2))[0])
            assert same, "the tokens are those of the sample that dropout is told of"
            firsts.append(first)
    assert sorted(firsts) == sorted(list(range(0, 48, 2)) * tp), "each micro-batch once, on every tensor-parallel rank"
    for iteration in range(3):  # each iteration takes the same 16 samples
        part = [first for batches in seen if batches for first, _ in batches[iteration * len(batches) // 3:][: len(batches) // 3]]
        assert set(part) == set(range(16 * iteration, 16 * iteration + 16, 2))
    assert sum(bool(batches) for batches in seen) == ranks // pp


def test_only_the_first_tensor_rank_of_the_edge_stages_reads():
    run = small_run(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    readers = [rank for rank in range(16) if reads_data(run, grid_groups(SoloComm(rank, 16), run))]
    assert readers == [0, 6, 8, 14]


@pytest.mark.parametrize("ranks", [1, 2])
def test_batch_ramp_up(ranks):
    def sizes(world) -> list[tuple[int, int]]:
        trainer = make_trainer(world, small_run(rampup_batch_size=(4, 4, 60)))
        steps = [(trainer.train_step().global_batch_size, trainer.progress.consumed_samples) for _ in range(9)]
        trainer.close()
        return steps

    # Sizes 4, 8, 12 cover 20 samples each: 0 4 8 12 16 | 20 28 36 | 40 52 | 64 80
    expected = [4, 4, 4, 4, 4, 8, 8, 8, 12]
    for steps in ThreadWorld(ranks).run(sizes):
        assert [size for size, _ in steps] == expected
        assert [consumed for _, consumed in steps] == [sum(expected[: i + 1]) for i in range(9)]


def test_a_run_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="world size 3 is not divisible by --tensor-model-parallel-size 2"):
        Trainer(small_run(tensor_model_parallel_size=2), SoloComm(0, 3), grid_groups(SoloComm(0, 3), small_run()))


# Checkpoints --------------------------------------------------------------------------------------------------------------------

def steps(trainer: Trainer, number: int) -> list[str]:
    """The results to the last bit, as text because a NaN does not equal itself."""
    return [str(replace(trainer.train_step(), seconds=0.0)) for _ in range(number)]


def whole_and_parts(world, directory: str, run) -> None:
    """Four steps; against two, a checkpoint, and two more from it in a new trainer."""
    straight = make_trainer(world, run)
    expected = steps(straight, 2)
    middle = replace(straight.progress)
    expected += steps(straight, 2)
    first = make_trainer(world, run)
    steps(first, 2)
    first.save(directory)
    steps(first, 1)  # beyond the checkpoint: must leave no trace
    first.close()
    second = make_trainer(world, run)
    steps(second, 1)  # whatever was here before
    second.load(directory)
    assert second.progress == middle and middle.iteration == 2 and middle.consumed_samples > 0
    assert steps(second, 2) == expected[2:]
    a, b = straight.optimizer, second.optimizer
    assert torch.equal(a.flat.values, b.flat.values)
    for x, y in zip(a.parts, b.parts, strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(x, name), getattr(y, name))
    assert a.steps == b.steps and a.scaler.state() == b.scaler.state() and straight.progress == second.progress
    straight.close()
    second.close()


@pytest.mark.parametrize(("name", "changes"), [
    ("one", {}), ("tp2pp2", {}), ("tp2pp2", {"bf16": True}), ("tp2pp2", FP16), ("dp2", {"bf16": True}), ("dp2zero", {}),
    ("dp2zero", {"bf16": True}), ("dp2zero", FP16), ("tp2dp2zero", {"bf16": True}), ("tp2pp2dp2zero", {}),
    ("tp2pp2dp2zero", {"sequence_parallel": True}),
    ("tp2pp2dp2zero", {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    ("one", {"rampup_batch_size": (2, 2, 8)}),
], ids=lambda value: value if isinstance(value, str) else "-".join(value) or "fp32")
def test_resuming_goes_on_with_the_same_bits(name, changes, tmp_path):
    ranks, layout = LAYOUTS[name]
    run = small_run(**SMALLER, **DROPOUT, **layout, **changes, lr_decay_style="cosine", lr_warmup_iters=1)
    ThreadWorld(ranks).run(whole_and_parts, str(tmp_path), run)


def test_the_fp16_runs_resume_in_the_middle_of_loss_scaling():
    trainer = make_trainer(SoloComm(), small_run(**SMALLER, **DROPOUT, **FP16))
    steps = [trainer.train_step() for _ in range(4)]
    trainer.close()
    assert [r.loss_scale for r in steps] == [2.0**22, 2.0**21, 2.0**21, 2.0**22], "one of the window's two steps is before the save"
    assert [r.skipped for r in steps] == [True, False, False, True]


@pytest.fixture
def saved(tmp_path) -> str:
    """The directory of a checkpoint of a fresh small model on one rank."""
    make_trainer(SoloComm(), small_run()).save(str(tmp_path))
    return str(tmp_path)


@pytest.mark.parametrize(("ranks", "changes", "message"), [
    (1, {"num_layers": 2}, r"another model, with --num-layers 4 \(this run: 2\); pass its values"),
    (2, {"num_layers": 8}, r"another model, with --num-layers 4 \(this run: 8\)"),
    (1, {"hidden_size": 64, "vocab_size": 80}, r"--hidden-size 32 \(this run: 64\), --ffn-hidden-size 128 \(this run: 256\), "
                                               r"--vocab-size 96 \(this run: 80\)"),
    (1, {"num_attention_heads": 2}, r"--num-attention-heads 4 \(this run: 2\)"),
    (1, {"layernorm_epsilon": 1e-6}, r"--layernorm-epsilon 1e-05 \(this run: 1e-06\)"),
    (1, {"max_position_embeddings": 64}, r"--max-position-embeddings 16 \(this run: 64\)"),
])
def test_a_checkpoint_that_does_not_fit_is_refused_with_one_line(saved, ranks, changes, message):
    def load(world) -> None:
        trainer = make_trainer(world, small_run(**changes))
        before = master_weights(trainer)
        with pytest.raises(ValueError, match=message) as caught:
            trainer.load(saved)
        assert "\n" not in str(caught.value) and str(caught.value).startswith(f"--load {saved}: ")
        assert torch.equal(before, master_weights(trainer)) and trainer.progress == Progress()

    ThreadWorld(ranks).run(load)


@pytest.mark.parametrize(("ranks", "changes"), [
    (2, {}), (1, {"bf16": True}), (1, {"hidden_dropout": 0.2, "lr": 1e-4, "train_iters": 99, "weight_decay": 0.2}),
    (1, {"micro_batch_size": 4, "global_batch_size": 32, "recompute_granularity": "full"}),
])
def test_what_does_not_change_the_model_may_change(saved, ranks, changes):
    def load(world) -> None:
        bucket = {"ddp_bucket_size": 10**9}  # one: any number of ranks has the same order of parameters
        trainer, fresh = make_trainer(world, small_run(**changes, **bucket)), make_trainer(SoloComm(), small_run(**bucket))
        trainer.optimizer.parts[0].master.zero_()
        trainer.load(saved)
        numel = sum(p.numel() for p in fresh.stage.parameters())
        assert torch.equal(master_weights(trainer)[:numel], master_weights(fresh)[:numel])
        dtype = PARAMETER_DTYPES[trainer.run.precision.name]
        assert torch.equal(trainer.optimizer.flat.values, master_weights(trainer).to(dtype))

    ThreadWorld(ranks).run(load)


@pytest.mark.parametrize("parts", [False, True])
def test_a_checkpoint_goes_on_with_and_without_sequence_parallelism(parts, tmp_path):
    def curves(world) -> list[float]:
        trainers = [make_trainer(world, small_run(**SMALLER, **DROPOUT, **TP2PP2, sequence_parallel=p)) for p in (parts, not parts)]
        straight, other = trainers
        steps(straight, 2)
        straight.save(str(tmp_path))
        other.load(str(tmp_path))
        assert torch.equal(master_weights(straight), master_weights(other))
        losses = [[trainer.train_step().loss for _ in range(2)] for trainer in trainers]
        evaluations = [trainer.evaluate(trainer.valid, 0, 1) for trainer in trainers]
        for trainer in trainers:
            trainer.close()
        return [*zip(*losses), tuple(evaluations)]

    for one, other in ThreadWorld(4).run(curves)[0]:
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"pipeline_model_parallel_size": 2}])
def test_packed_weights_that_are_kept_change_no_bit(changes):
    run = small_run(**changes)
    world = ThreadWorld(run.parallel.pipeline_model_parallel_size)
    plain = world.run(lambda comm: train(comm, run, 3))[0]
    kept = world.run(lambda comm: train(comm, run, 3, Ops.build(keep_packed_weights=True)))[0]
    assert [(r.loss, r.grad_norm) for r in kept] == [(r.loss, r.grad_norm) for r in plain]
