"""--load of a Megatron-LM run: weights, moments, FP32 weights, step, schedule and samples continue.

Sources of the layouts: megatron/core/optimizer/distrib_optimizer.py and optimizer.py (keys, groups),
megatron/core/optimizer_param_scheduler.py, megatron/training/checkpointing.py.
"""

import contextlib
import functools
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import fugaku_megatron as fm
from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.cli import program
from fugaku_megatron.cli.arguments import build_parser, interpret
from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.architecture import architecture
from fugaku_megatron.config.model import ModelConfig
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.convert.megatron.arguments import arguments_of
from fugaku_megatron.convert.megatron.delta_net import parts_of, split_parts
from fugaku_megatron.convert.megatron.pickles import load_pickled
from fugaku_megatron.convert.open_weights import open_megatron
from fugaku_megatron.run.checkpoint_source import with_padding
from fugaku_megatron.run.resume import resume_training
from fugaku_megatron.run.train_command import with_checkpoint_model
from tests.checks.torch_dist import write_iteration
from tests.helpers import (
    find_checkpoint,
    make_trainer,
    mock,
    parse_layout,
    plain_loss,
    small_run,
    whole_tensors,
)
from tests.llama_models import DELTA_NETS
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

FOREIGN = Path(__file__).parents[1] / "foreign"
DONE = 3  # iterations before the checkpoint
MORE = 5
BATCH = 4
FLAGS: dict[str, Any] = {
    "num_layers": 2,
    "global_batch_size": BATCH,
    "train_iters": DONE + MORE,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "weight_decay": 0.1,
    "adam_eps": 1e-6,
    "clip_grad": 1.0,
    "make_vocab_size_divisible_by": 64,
}
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
Tensors = dict[str, torch.Tensor]


class Reference(NamedTuple):
    """Plain PyTorch's training: weights at the checkpoint, moments there, and weights at the end."""

    saved: Tensors
    moments: dict[str, Tensors]
    trained: Tensors


def arguments(run: RunConfig, **changes: Any) -> Namespace:
    """Return Megatron-LM's saved arguments."""
    values: dict[str, Any] = {
        "num_layers": run.model.num_layers,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "norm_epsilon": 1e-5,
        "bias_gelu_fusion": True,
        "padded_vocab_size": 128,
        "vocab_size": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": 2,
        "consumed_train_samples": DONE * BATCH,
        "micro_batch_size": 2,
        **{name: FLAGS[name] for name in FLAGS if name != "make_vocab_size_divisible_by"},
    }
    return Namespace(**{**values, **changes})


@functools.cache
def reference() -> Reference:
    """Train a GPT with torch.optim.AdamW and the schedule of FLAGS."""
    run = small_run(**FLAGS)
    trainer = make_trainer(SoloComm(), run)
    weights = {
        n: torch.nn.Parameter(w.clone()) for n, w in whole_tensors(trainer, "weight").items()
    }
    schedule = trainer.param_schedule
    trainer.close()
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in weights.values()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-6)
    data = mock(run)
    for step in range(DONE + MORE):
        if step == DONE:
            saved = {name: p.detach().clone() for name, p in weights.items()}
            moments = {
                kind: {name: optimizer.state[p][kind].clone() for name, p in weights.items()}
                for kind in ("exp_avg", "exp_avg_sq")
            }
        samples = torch.tensor(np.stack([data[step * BATCH + i] for i in range(BATCH)])).t()
        loss = plain_loss(weights, samples[:-1], samples[1:], run.model)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step * BATCH)
        optimizer.step()
    return Reference(saved, moments, {name: p.detach() for name, p in weights.items()})


def stacked(tensors: Tensors, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a GPTModel's keys: equal layers are one tensor."""
    for name, tensor in tensors.items():
        if ".layers." not in name:
            yield prefix + name, tensor
        elif ".layers.0." in name:
            theirs = name.replace(".layers.0.", ".layers.")
            for norm, fused in NORMS.items():
                theirs = theirs.replace(norm, fused)
            layers = [tensors[name.replace(".0.", f".{layer}.", 1)] for layer in range(2)]
            yield prefix + theirs, torch.stack(layers)


SCHEDULER = {
    "max_lr": 1e-3,
    "lr_warmup_steps": 2 * BATCH,
    "num_steps": DONE * BATCH,
    "lr_decay_style": "cosine",
    "lr_decay_steps": (DONE + MORE) * BATCH,
    "min_lr": 1e-4,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": (DONE + MORE) * BATCH,
}
GROUPS = {"param_groups": [{"lr": 1e-3, "step": DONE}, {"lr": 1e-3, "step": DONE}]}


def write_run(directory: Path, kind: str = "fully_reshardable", **changes: Any) -> Path:
    """Write the reference's checkpoint with optimizer state in a format of Megatron-LM.

    changes: saved arguments
    """
    found = reference()
    half = changes.get("bf16", False)
    tensors = dict(stacked(found.saved))
    if half:
        tensors = {key: tensor.bfloat16() for key, tensor in tensors.items()}
    chained = "chained_0." if kind == "fully_sharded_model_space" else ""
    states = {**found.moments, "fp32_param": found.saved}
    if kind == "dp_reshardable":
        states = {}
        tensors["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg"] = torch.zeros(5)
    for state, values in states.items():
        if state != "fp32_param" or half:
            tensors.update(stacked(values, f"{chained}optimizer.state.{state}."))
    objects: dict[str, Any] = {}
    optimizer: dict[Any, Any] = {"optimizer": GROUPS, "param_state_sharding_type": kind}
    if kind == "fully_sharded_model_space":
        objects["chained_0.optimizer.distributed.dp_group_idx_0.optimizer"] = GROUPS
        optimizer = {0: {"param_state_sharding_type": kind}}
    elif kind == "fp32":
        optimizer = {"param_groups": [{"lr": 1e-3}], "state": {"common_step": torch.tensor(3.0)}}
    elif kind == "offloaded":
        optimizer["optimizer"] = {"param_groups": [{"step": 0}, {"step": 0}]}
    elif kind == "two_steps":
        optimizer["optimizer"] = {"param_groups": [{"step": DONE}, {"step": DONE + 1}]}
    elif kind == "chained":
        optimizer = {0: optimizer, 1: optimizer}
    common = {
        "args": arguments(small_run(**FLAGS), **changes),
        "iteration": DONE,
        "optimizer": optimizer,
        "opt_param_scheduler": SCHEDULER,
    }
    flattened = (f"{chained}optimizer.",) if chained else ()
    write_iteration(
        directory, DONE, tensors, common, objects, common_file=bool(chained), flattened=flattened
    )
    return directory


def resumed(world: Comm, directory: Path, **changes: Any) -> tuple[Any, list[str]]:
    run = small_run(**{**FLAGS, "load": str(directory), **changes})
    resume = find_checkpoint(run, world)
    trainer = make_trainer(world, with_padding(run, resume))
    return trainer, resume_training(trainer, resume)


def updated(world: Comm, directory: Path, **changes: Any) -> Tensors:
    """Resume, make the remaining updates and return the weights."""
    trainer, _ = resumed(world, directory, **changes)
    assert trainer.progress.iteration == DONE
    for _ in range(MORE):
        trainer.train_step()
    weights = whole_tensors(trainer, "weight")
    trainer.close()
    return weights


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("fully_reshardable", ""),
        ("fully_reshardable", "tp2 dp2 zero"),
        ("fully_sharded_model_space", "pp2"),
        ("fp32", ""),
        ("chained", ""),
        ("offloaded", ""),
    ],
)
def test_updates_equal_those_of_torch_s_adamw_from_the_same_state(tmp_path, kind, layout):
    directory = write_run(tmp_path, kind)
    ranks, flags = parse_layout(layout)
    world = ThreadWorld(ranks)
    found = world.run(lambda comm: updated(comm, directory, **flags))[0]
    for name, tensor in reference().trained.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
        assert (tensor - reference().saved[name]).abs().max() > 1e-4, "an update without moments"


DELTA_FLAGS: dict[str, Any] = {
    **FLAGS,
    **DELTA_NETS,
    "apply_layernorm_1p": True,
    "mask_vocab_padding": "no",
}


def delta_keys(name: str, tensor: torch.Tensor, model: ModelConfig) -> Tensors:
    """Return a tensor's keys in a checkpoint whose layers differ."""
    mixer = "in_proj" if ".layers.0." in name else "linear_qkv"
    theirs = name.replace("input_layernorm.", f"self_attention.{mixer}.layer_norm_")
    theirs = theirs.replace("pre_mlp_layernorm.", NORMS["pre_mlp_layernorm."])
    if parts := parts_of(name):
        return dict(zip(parts, split_parts(name, tensor, model), strict=True))
    return {theirs: tensor.flatten(0, 1) if ".linear_fc1.weight" in name else tensor}


def write_delta_nets(directory: Path) -> Tensors:
    """Write a run's checkpoint with optimizer state; return its weights after the remaining updates."""
    run = small_run(**DELTA_FLAGS)
    trainer = make_trainer(SoloComm(), run)
    for _ in range(DONE):
        trainer.train_step()
    weights = whole_tensors(trainer, "weight")
    stored = {s.key: s.tensor.clone() for s in trainer.optimizer.checkpoint_shards()}
    tensors: Tensors = {}
    for name, weight in weights.items():
        saved = weight - 1 if name.endswith(".out_norm.weight") else weight
        tensors |= delta_keys(name, saved, run.model)
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = stored[f"{kind}/{name}"].view(weight.shape)
            found = delta_keys(name, moment, run.model)
            tensors |= {f"optimizer.state.{kind}.{key}": found[key] for key in found}
    args = arguments_of(run.model, 128, torch.float32, 1, 1)
    vars(args).update(
        {
            name: value
            for name, value in vars(arguments(run)).items()
            if name in FLAGS or name in ("consumed_train_samples", "micro_batch_size")
        }
    )
    common = {
        "args": args,
        "iteration": DONE,
        "optimizer": {"optimizer": GROUPS, "param_state_sharding_type": "fully_reshardable"},
        "opt_param_scheduler": SCHEDULER,
    }
    write_iteration(directory, DONE, tensors, common)
    for _ in range(MORE):
        trainer.train_step()
    trainer.close()
    return whole_tensors(trainer, "weight")


@pytest.mark.parametrize("layout", ["", "tp2 dp2 zero"])
def test_updates_of_gated_delta_nets_continue(tmp_path, layout):
    """Parts of a projection and of a convolution have moments of their own, and the norm's weight is 1 less."""
    expected = write_delta_nets(tmp_path)
    ranks, flags = parse_layout(layout)
    changes = {**DELTA_FLAGS, **flags}
    found = ThreadWorld(ranks).run(lambda comm: updated(comm, tmp_path, **changes))[0]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


def test_the_log_names_what_continues(tmp_path):
    trainer, lines = resumed(SoloComm(), write_run(tmp_path))
    assert lines[0] == f"resumed from {tmp_path} at iteration {DONE}"
    assert "note: saved with TP 2 x PP 1 x DP 1, continues with TP 1 x PP 1 x DP 1" in lines
    assert [line for line in lines if "learning rate" in line or "vocabulary" in line] == [
        "note: the 32 padding rows of the vocabulary count in the loss, as in the saved run; --mask-vocab-padding yes excludes them"
    ]
    assert trainer.progress.consumed_samples == DONE * BATCH
    trainer.close()


@pytest.mark.parametrize(("factor", "steps"), [(1.0, DONE), (0.0, 0)])
def test_a_step_of_zero_is_the_iteration_if_there_are_moments(tmp_path, factor, steps, monkeypatch):
    found = reference()
    moments = {
        kind: {name: factor * tensor for name, tensor in each.items()}
        for kind, each in found.moments.items()
    }
    changed = found._replace(moments=moments)
    monkeypatch.setitem(globals(), "reference", lambda: changed)
    trainer, lines = resumed(SoloComm(), write_run(tmp_path, "offloaded"))
    trainer.close()
    assert trainer.optimizer.steps == steps
    noted = [line for line in lines if f"continues from step {DONE}" in line]
    assert len(noted) == bool(steps)


def test_the_library_continues_a_run(tmp_path):
    directory = write_run(tmp_path)
    config = fm.Config(
        **{name: value for name, value in FLAGS.items() if name != "num_layers"},
        seq_length=16,
        micro_batch_size=2,
        mock_data=True,
        load=str(directory),
        use_checkpoint_args=True,
    )
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 32, 128)
    with (
        pytest.warns(UserWarning) as notes,
        contextlib.closing(fm.Trainer(config)) as trainer,
    ):
        assert [str(note.message).partition(":")[0] for note in notes] == [
            "saved with TP 2 x PP 1 x DP 1, continues with TP 1 x PP 1 x DP 1"
        ]
        assert trainer.iteration == DONE
        saved = trainer._trainer.optimizer.checkpoint_shards()
        found = {shard.key: shard.tensor for shard in saved}
        for name, tensor in reference().moments["exp_avg"].items():
            assert torch.equal(found[f"exp_avg/{name}"].view(tensor.shape), tensor), name
        trainer.load(directory, weights_only=True)
        assert trainer.iteration == 0
    with pytest.raises(ValueError, match="pass --no-load-optim"):
        fm.Trainer(config.replace(load=str(write_run(tmp_path / "other", "dp_reshardable"))))


@pytest.mark.parametrize(
    "folder", ["megatron/llama_0_18", "torch_dist/llama_tp2", "megatron/gpt_tp2"]
)
def test_the_saved_arguments_are_the_model(folder, tmp_path):
    directory = FOREIGN / folder
    words = "--micro-batch-size 1 --num-layers 7 --seq-length 8 --use-checkpoint-args --mock-data"
    values = vars(build_parser().parse_args([*words.split(), "--load", str(directory)]))
    model = interpret(with_checkpoint_model(values)).run.model
    assert architecture(model) == architecture(open_megatron(str(directory), None, None).model)
    assert model.seq_length == 8
    saved = with_checkpoint_model({**values, "seq_length": None})
    assert interpret(saved).run.model.seq_length == 32
    values = vars(
        build_parser().parse_args(
            [*words.split(), "--load", str(tmp_path), "--vocab-file", "v", "--merge-file", "m"]
        )
    )
    (tmp_path / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ValueError) as refused:
        with_checkpoint_model(values)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"--use-checkpoint-args --load {tmp_path}: ")


def test_the_saved_arguments_of_a_legacy_checkpoint_are_the_model(tmp_path):
    theirs = FOREIGN / "torch_dist" / "llama_tp2"
    words = ["convert", "--from-megatron", theirs, "--to-megatron", tmp_path / "legacy"]
    assert program.main([*map(str, words), "--ckpt-format", "torch"]) == 0
    words = ["--micro-batch-size", "1", "--seq-length", "8", "--mock-data", "--use-checkpoint-args"]
    values = vars(build_parser().parse_args([*words, "--load", str(tmp_path / "legacy")]))
    model = interpret(with_checkpoint_model(values)).run.model
    assert architecture(model) == architecture(open_megatron(str(theirs), None, None).model)


def test_a_release_with_arguments_of_a_fork_begins_a_run(tmp_path):
    """Weights alone, whose arguments a user declares harmless, with the tokens' rows of the embedding."""
    theirs = FOREIGN / "megatron" / "llama_0_18"
    words = ["convert", "--from-megatron", theirs, "--to-megatron", tmp_path]
    assert program.main([*map(str, words)]) == 0
    common = load_pickled(tmp_path / "release" / "common.pt")
    common["args"].some_fork_s_option = 3
    torch.save(common, tmp_path / "release" / "common.pt")
    words = f"--micro-batch-size 1 --use-checkpoint-args --mock-data --load {tmp_path} --finetune"

    def start(*more: str) -> RunConfig:
        values = vars(build_parser().parse_args([*words.split(), *more]))
        return interpret(with_checkpoint_model(values)).run

    with pytest.raises(ValueError, match="--ignore-saved-arguments, to train or to convert"):
        start()
    run = start("--ignore-saved-arguments", "some_fork_s_option", "x")
    trainer = make_trainer(SoloComm(), run)
    lines = resume_training(trainer, find_checkpoint(run, SoloComm()))
    assert lines[0].startswith(f"starting from the weights of {tmp_path}, iteration 0: iteration 0")
    expected = open_megatron(str(theirs), None, None)
    found = whole_tensors(trainer, "weight")
    trainer.close()
    for name in expected.dtypes:
        weight = expected.read(name).float()
        assert torch.equal(found[name][: len(weight)], weight), name


def test_weights_of_bf16_continue_from_their_fp32_copies(tmp_path):
    trainer, _ = resumed(SoloComm(), write_run(tmp_path, bf16=True), bf16=True)
    saved = {s.key: s.tensor.clone() for s in trainer.optimizer.checkpoint_shards()}
    trainer.close()
    for kind, expected in {"weight": reference().saved, **reference().moments}.items():
        for name, tensor in expected.items():
            assert torch.equal(saved[f"{kind}/{name}"].view(tensor.shape), tensor), (kind, name)


def test_a_save_into_the_same_directory_is_a_checkpoint_of_this_program(tmp_path):
    directory = write_run(tmp_path)
    trainer, _ = resumed(SoloComm(), directory)
    trainer.train_step()
    trainer.save(str(directory))
    trainer.close()
    assert read_manifest(directory, DONE + 1)["state"]["optimizer_steps"] == DONE + 1
    trainer, lines = resumed(SoloComm(), directory)
    trainer.close()
    assert lines[0].endswith(f"at iteration {DONE + 1}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"consumed_train_samples": None},
            "consumed_train_samples is None, not a number of samples",
        ),
        ({"consumed_train_samples": 4}, "the scheduler counted 12 samples, and the run consumed 4"),
        ({"num_layers": 1}, "layer_norm_weight has shape [2, 32], and num_layers is 1"),
        ({"hybrid_layer_pattern": "M*-"}, "--hybrid-layer-pattern 'M*-': M at position 1"),
    ],
)
def test_a_run_that_cannot_continue_is_refused_in_one_line(tmp_path, change, message):
    directory = write_run(tmp_path, **change)
    with pytest.raises(ValueError) as caught:
        resumed(SoloComm(), directory)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"--load {directory}: ") and message in line


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "dp_reshardable",
            "holds no exp_avg of embedding.word_embeddings.weight that every layout",
        ),
        ("two_steps", "the optimizer's step is [3, 4], not one number"),
    ],
)
def test_an_optimizer_state_that_cannot_be_read_is_named(tmp_path, kind, message):
    directory = write_run(tmp_path, kind)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        resumed(SoloComm(), directory)
    assert str(caught.value).endswith("pass --no-load-optim")
    trainer, lines = resumed(SoloComm(), directory, no_load_optim=True)
    trainer.close()
    assert trainer.progress.iteration == DONE and trainer.optimizer.steps == 0
    assert [line for line in lines if "--no-load-optim: moments and loss scale begin anew" in line]


def test_another_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds another model, with --num-attention-heads 4"):
        resumed(SoloComm(), write_run(tmp_path), num_attention_heads=2)


def test_finetune_begins_with_its_weights_alone(tmp_path):
    directory = write_run(tmp_path, "dp_reshardable", consumed_train_samples=None)
    trainer, lines = resumed(SoloComm(), directory, finetune=True)
    weights = whole_tensors(trainer, "weight")
    trainer.close()
    assert f"starting from the weights of {directory}, iteration {DONE}" in lines[0]
    assert trainer.progress.iteration == trainer.optimizer.steps == 0
    for name, tensor in reference().saved.items():
        assert torch.equal(weights[name], tensor)
