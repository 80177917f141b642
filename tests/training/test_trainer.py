"""The trainer: evaluation, resuming to the same bits, checkpoints that do not fit, and runs that begin with weights alone."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.convert.own_checkpoint import open_own, save_own
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.host import kernels
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.nn.parameter import PARAMETER_DTYPES
from fugaku_megatron.optim.buckets import BucketComm
from fugaku_megatron.run.resume import resume_training
from fugaku_megatron.training.checkpoints import Progress
from fugaku_megatron.training.micro_batches import reads_data
from fugaku_megatron.training.trainer import Trainer
from tests.checks.experts import ALL as EXPERTS
from tests.checks.moments import BF16_MOMENTS, EIGHT, SIZES
from tests.helpers import (
    DROPOUT,
    find_checkpoint,
    flat_gradients,
    grid_groups,
    make_trainer,
    master_weights,
    mock,
    plain_loss,
    run_layout,
    small_run,
    train,
    whole_tensors,
)
from tests.llama_models import DELTA_NETS, FAMILIES
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

FP16 = {"fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1, "loss_scale_window": 2}
SMALLER = {"num_layers": 2, "global_batch_size": 8}


@pytest.mark.parametrize("layout", ["", "tp2 pp2", "dp2 zero"])
def test_evaluation_is_deterministic_and_without_dropout(layout):
    def evaluate(world, run) -> list[float]:
        trainer = make_trainer(world, run)
        before = trainer.optimizer.flat.values.clone()
        losses = [trainer.evaluate(trainer.valid, first, 2) for first in (0, 0, 16)]
        assert trainer.progress == Progress()
        assert (
            torch.equal(before, trainer.optimizer.flat.values) and not flat_gradients(trainer).any()
        )
        trainer.train_step()
        assert trainer.stage.training
        trainer.close()
        return losses

    trainer = make_trainer(SoloComm(), small_run(**SMALLER))
    weights = whole_tensors(trainer, "weight")
    batches = (
        torch.from_numpy(fetch(mock(trainer.run, 8), range(first, first + 16))) for first in (0, 16)
    )
    expected = [
        plain_loss(weights, batch[:-1], batch[1:], trainer.run.model).item() for batch in batches
    ]
    for first, again, other in run_layout(layout, evaluate, {**SMALLER, **DROPOUT}):
        assert first == again
        assert [first, other] == pytest.approx(expected, rel=1e-5)


def test_evaluation_between_steps_changes_nothing():
    def curve(evaluate: bool) -> list[float]:
        trainer = make_trainer(SoloComm(), small_run(**DROPOUT))
        losses = []
        for _ in range(4):
            losses.append(trainer.train_step().loss)
            if evaluate:
                trainer.evaluate(trainer.valid, 0, 1)
        trainer.close()
        return losses

    assert curve(True) == curve(False)


def test_a_micro_batch_is_one_broadcast_over_tensor_parallel_ranks():
    """Samples with the next token, int64. Labels are the next rows."""

    def broadcasts(world):
        trainer = make_trainer(world, small_run(num_layers=2, tensor_model_parallel_size=2))
        sent = []
        tp = trainer.groups.tp
        verb = trainer.groups.tp.broadcast
        tp.broadcast = lambda tensor, *root: (
            sent.append((tensor.dtype, tuple(tensor.shape))) or verb(tensor, *root)
        )
        count = trainer.layout.microbatches(trainer.run, 16)
        with closing(trainer.read_train(0)) as reader:
            micro_batches = list(reader.micro_batches(0, count))
        assert all(torch.equal(batch.tokens[1:], batch.labels[:-1]) for batch in micro_batches)
        return sent, count

    for sent, count in ThreadWorld(2).run(broadcasts):
        assert sent == [(torch.int64, (17, 2)) for _ in range(count)]


def test_gradients_are_reduced_once_in_a_step(monkeypatch):
    calls = []
    reduce = BucketComm.reduce
    monkeypatch.setattr(BucketComm, "reduce", lambda self: calls.append(1) or reduce(self))
    trainer = make_trainer(SoloComm(), small_run(num_layers=2))
    trainer.before_update = lambda consumed, loss: trainer.optimizer.grad_norm() and loss
    trainer.train_step()
    trainer.train_step()
    trainer.close()
    assert len(calls) == 2


def test_only_the_first_tensor_rank_of_the_edge_stages_reads():
    run = small_run(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    readers = [rank for rank in range(16) if reads_data(run, grid_groups(SoloComm(rank, 16), run))]
    assert readers == [0, 6, 8, 14]


def steps(trainer: Trainer, number: int) -> list[str]:
    """The results to the last bit, as text because a NaN does not equal itself."""
    return [str(replace(trainer.train_step(), seconds=0.0)) for _ in range(number)]


def whole_and_parts(world, run, directory: str) -> None:
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
    a = straight.optimizer
    b = second.optimizer
    assert torch.equal(a.flat.values, b.flat.values)
    for x, y in zip(a.shards, b.shards, strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(x, name), getattr(y, name))
    assert (
        a.steps == b.steps
        and a.scaler.state() == b.scaler.state()
        and straight.progress == second.progress
    )
    straight.close()
    second.close()


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("rampup_batch_size=(2,2,8)", {}),
        ("tp2 pp2", FP16),
        ("dp2 zero", FP16),
        ("dp2 bf16", {}),
        ("tp2 dp2 zero bf16", {}),
        ("tp2 pp2 dp2 sequence zero", {}),
        ("tp2 pp2 dp2 zero bf16", BF16_MOMENTS),
        ("pp2 zbv num_layers=4", {}),
        ("tp2 dp2 zero", FAMILIES["qwen3"]),
        ("pp2 dp2 zero bf16 num_layers=4", EXPERTS),
        ("pp2 dp2 ep2 overlap num_layers=4", EXPERTS),
        ("pp2 dp2 zero bf16 int8 int8_wgrad int8_stochastic_rounding num_layers=4", EXPERTS),
        ("dp4 ep2 zero bf16 num_layers=4 global_batch_size=8", {**EXPERTS, **SIZES, **EIGHT}),
        ("tp2 dp2 zero bf16", {**DELTA_NETS, **SIZES, **EIGHT}),
        ("tp2 pp2 dp2 zero bf16", {**FAMILIES["qwen3"], "mtp_num_layers": 1}),
    ],
    ids=str,
)
def test_resuming_goes_on_with_the_same_bits(layout, model, tmp_path):
    schedule = {"lr_decay_style": "cosine", "lr_warmup_iters": 1}
    flags = {**SMALLER, **DROPOUT, **model, **schedule}
    run_layout(layout, whole_and_parts, flags, str(tmp_path))


@pytest.fixture
def saved(tmp_path) -> str:
    """Return a checkpoint directory with a new small model."""
    make_trainer(SoloComm(), small_run()).save(str(tmp_path))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (
            1,
            {"num_layers": 2},
            r"another model, with --num-layers 4 \(this run: 2\); pass its values",
        ),
        (2, {"num_layers": 8}, r"another model, with --num-layers 4 \(this run: 8\)"),
        (
            1,
            {"hidden_size": 64, "vocab_size": 80},
            r"--hidden-size 32 \(this run: 64\), --ffn-hidden-size 128 \(this run: 256\), "
            r"--vocab-size 96 \(this run: 80\)",
        ),
        (1, {"num_attention_heads": 2}, r"--num-attention-heads 4 \(this run: 2\)"),
        (1, {"swiglu": True}, "--swiglu False"),
        (1, {"window_size": "3,0"}, r"--window-size None \(this run: 3,0\)"),
        (
            1,
            {"position_embedding_type": "none"},
            r"--position-embedding-type learned_absolute \(this run: none\)",
        ),
        (1, {"layernorm_epsilon": 1e-6}, r"--layernorm-epsilon 1e-05 \(this run: 1e-06\)"),
        (1, {"max_position_embeddings": 64}, r"--max-position-embeddings 16 \(this run: 64\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_one_line(saved, ranks, changes, message):
    def load(world) -> None:
        trainer = make_trainer(world, small_run(**changes))
        before = master_weights(trainer)
        with pytest.raises(ValueError, match=message) as caught:
            trainer.load(saved)
        assert "\n" not in str(caught.value) and str(caught.value).startswith(f"--load {saved}: ")
        assert torch.equal(before, master_weights(trainer)) and trainer.progress == Progress()

    ThreadWorld(ranks).run(load)


@pytest.mark.parametrize(
    "layout",
    [
        "dp2",
        "bf16",
        "hidden_dropout=0.2 lr=1e-4 train_iters=99 weight_decay=0.2",
        "full micro_batch_size=4 global_batch_size=32",
    ],
)
def test_what_does_not_change_the_model_may_change(saved, layout):
    # One bucket: any number of ranks has the same order of parameters.
    bucket = {"ddp_bucket_size": 10**9}

    def load(world, run) -> None:
        trainer = make_trainer(world, run)
        fresh = make_trainer(SoloComm(), small_run(**bucket))
        trainer.optimizer.shards[0].master.zero_()
        trainer.load(saved)
        numel = sum(p.numel() for p in fresh.stage.parameters())
        assert torch.equal(master_weights(trainer)[:numel], master_weights(fresh)[:numel])
        dtype = PARAMETER_DTYPES[trainer.run.precision.name]
        assert torch.equal(trainer.optimizer.flat.values, master_weights(trainer).to(dtype))

    run_layout(layout, load, bucket)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a checkpoint directory after two iterations, its weights by name, and a directory with BF16 weights alone."""
    directory = tmp_path_factory.mktemp("finetune")
    trainer = make_trainer(SoloComm(), small_run())
    for _ in range(2):
        trainer.train_step()
    trainer.save(str(directory / "run"))
    trainer.close()
    save_own(open_own(str(directory / "run")).cast(torch.bfloat16), directory / "alone")
    return str(directory / "run"), whole_tensors(trainer, "weight"), str(directory / "alone")


def started(world, **changes):
    return begin(world, small_run(**changes))


def begin(world, run):
    """Return a trainer that has begun as the flags say, and the lines of its log."""
    trainer = make_trainer(world, run)
    resume = find_checkpoint(run, world)
    assert (resume.iteration, resume.state) == (None, {}), (
        "nothing of the saved state is left to anybody"
    )
    return trainer, resume_training(trainer, resume)


def test_the_weights_are_those_of_the_checkpoint_and_all_else_begins(pretrained):
    directory, weights, _ = pretrained
    trainer, lines = started(SoloComm(), load=directory, finetune=True, lr=0.5)
    assert lines == [
        f"starting from the weights of {directory}, iteration 2: iteration 0, a fresh optimizer, data from the start"
    ]
    assert all(
        torch.equal(tensor, weights[name])
        for name, tensor in whole_tensors(trainer, "weight").items()
    )
    assert (
        trainer.progress.iteration
        == trainer.progress.consumed_samples
        == trainer.optimizer.steps
        == 0
    )
    assert not any(part.exp_avg.any() or part.exp_avg_sq.any() for part in trainer.optimizer.shards)
    fresh = make_trainer(SoloComm(), small_run(lr=0.5))
    assert trainer.train_step().learning_rate == fresh.train_step().learning_rate
    trainer.close(), fresh.close()


@pytest.mark.parametrize("layout", ["", "tp2 pp2 dp2 zero"])
def test_weights_alone_of_another_dtype_load_into_any_layout(pretrained, layout):
    _, weights, alone = pretrained
    tied = weights["embedding.word_embeddings.weight"]

    def loaded(world, run):
        trainer, _ = begin(world, run)
        trainer.close()
        return whole_tensors(trainer, "weight")

    flags = {"load": alone, "finetune": True}
    for name, tensor in run_layout(layout, loaded, flags)[0].items():
        assert torch.equal(tensor, weights.get(name, tied).bfloat16().float()), name


def test_a_run_from_weights_may_scale_rope_and_one_that_goes_on_may_not(tmp_path):
    rope = {"position_embedding_type": "rope"}
    longer = {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 2.0,
        "yarn_original_max_position_embeddings": 16,
        "seq_length": 32,
    }
    trainer = make_trainer(SoloComm(), small_run(**rope))
    trainer.save(str(tmp_path / "short"))
    trainer.close()
    trainer, lines = started(SoloComm(), load=str(tmp_path / "short"), finetune=True, **longer)
    assert lines[1:] == [
        "note: positions have other angles than the weights were trained with: --position-embedding-type is yarn, "
        "was rope, --rotary-scaling-factor is 2.0, was 1.0, --yarn-original-max-position-embeddings is 16, was "
        "4096"
    ]
    assert trainer.train_step().loss < 10
    trainer.save(str(tmp_path / "long"))
    trainer.close()
    again = make_trainer(SoloComm(), small_run(**rope, seq_length=32))
    with pytest.raises(
        ValueError,
        match=r"another model, with --position-embedding-type yarn \(this run: rope\), --rotary",
    ):
        again.load(str(tmp_path / "long"))
    again.close()
    with pytest.raises(
        ValueError, match=r"--position-embedding-type rope \(this run: learned_absolute\)"
    ):
        started(SoloComm(), load=str(tmp_path / "short"), finetune=True)


def test_files_that_came_with_the_model_go_on_with_it(pretrained, tmp_path):
    source = shutil.copytree(pretrained[2], tmp_path / "source")
    own = tmp_path / "own"
    (source / "hugging_face").mkdir()
    (source / "hugging_face" / "tokenizer.json").write_text("{}")
    trainer, _ = started(SoloComm(), load=str(source), save=str(own), finetune=True)
    trainer.close()
    assert (own / "hugging_face" / "tokenizer.json").read_text() == "{}"


def test_other_uses_of_weights_alone_are_refused(pretrained):
    with pytest.raises(
        ValueError,
        match=f"--load {pretrained[2]} holds only weights.*: pass --finetune to start from them",
    ):
        find_checkpoint(small_run(load=pretrained[2]), SoloComm())
    with pytest.raises(
        ValueError, match=r"holds another model, with --hidden-size 32 \(this run: 64\)"
    ):
        started(SoloComm(), load=pretrained[2], finetune=True, hidden_size=64)


def test_the_pretrained_checkpoint_counts_until_the_run_has_its_own(pretrained, tmp_path):
    own = str(tmp_path / "own")
    flags = {"pretrained_checkpoint": pretrained[2]}
    trainer, lines = started(SoloComm(), load=own, save=own, **flags)
    assert len(lines) == 1 and lines[0].startswith(
        f"starting from the weights of {pretrained[2]}, iteration 0:"
    )
    trainer.train_step()
    trainer.save(own)
    trainer.close()
    assert find_checkpoint(small_run(load=own, save=own, **flags), SoloComm()).iteration == 1


@pytest.mark.parametrize("iterations", [10, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "changes", [{"cache_packed_weights": True}, {"swiglu": True, "disable_bias_linear": True}]
)
def test_fp32_matmuls_in_bf16_parts_have_the_losses_of_fp32(iterations, changes):
    """Losses agree on every target that multiplies BF16; on emulating targets in the first iterations alone."""
    run = small_run(**SMALLER, **changes, hidden_size=64)
    for name in kernels.runnable_targets(emulated=iterations < 200):
        with kernels.target(name):
            if not kernels.has_bf16_arithmetic():
                continue
            keep = run.system.cache_packed_weights
            exact, split = (
                train(
                    SoloComm(), run, iterations, Ops.build(bf16x3=parts, keep_packed_weights=keep)
                )
                for parts in (False, True)
            )
            ours = [result.loss for result in split]
            theirs = [result.loss for result in exact]
            assert ours != theirs and ours == pytest.approx(theirs, rel=1e-5), name
            assert theirs[-1] < theirs[0]
