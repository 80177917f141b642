"""LoRA: adapters of frozen weights in every layout, their checkpoints, and what they cost."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fugaku_megatron as fm
from fugaku_megatron import cli
from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.convert.convert_command import open_weights
from fugaku_megatron.convert.peft import open_peft
from fugaku_megatron.inference.loading import load_model, through_stages
from fugaku_megatron.inference.scoring import EVALUATION
from fugaku_megatron.nn.passes import Pass
from fugaku_megatron.training.resume import find_checkpoint, resume_training
from tests.helpers import CP2, DROPOUT, OVERLAP, TP2, TP2PP2, make_trainer, one_error, small_run, whole_tensors
from tests.llama_models import FAMILIES
from tests.threads import ThreadWorld

LORA = {"lora_rank": 4, "lora_alpha": 16.0, "lr": 1e-2, "num_layers": 4, "global_batch_size": 8}
QWEN = {**FAMILIES["qwen2"], **LORA}
SP = {"sequence_parallel": True}
LAYOUTS = {
    "tp": (2, TP2), "sp": (2, {**TP2, **SP}), "tp pp": (4, TP2PP2),
    "sp pp zb-h1": (4, {**TP2PP2, **SP, "pipeline_schedule": "zb-h1"}),
    "zbv": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "interleaved": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "zero": (2, {**OVERLAP, "ddp_bucket_size": 500}), "full recompute": (1, {"recompute_granularity": "full"}),
    "selective recompute": (1, {"recompute_granularity": "selective"}), "packed": (1, {"cache_packed_weights": True}),
    "cp": (4, {**CP2, **OVERLAP}),
}


def curve(world, run, steps: int = 3):
    """Losses and gradient norms of some steps, and the adapters after them."""
    with contextlib.closing(make_trainer(world, run)) as trainer:
        results = [trainer.train_step() for _ in range(steps)]
        trainer.optimizer.buckets.await_weights()
        return [r.loss for r in results], [r.grad_norm for r in results], whole_tensors(trainer, "weight")


@pytest.fixture(scope="module")
def alone():
    made = {}

    def of(**flags):
        key = str(sorted(flags.items()))
        if key not in made:
            made[key] = curve(SoloComm(), small_run(**flags))
        return made[key]
    return of


@pytest.mark.parametrize("dropout", [{}, {"lora_dropout": 0.3, **DROPOUT}], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_same_adapters(layout, dropout, alone):
    ranks, flags = LAYOUTS[layout]
    dropout = DROPOUT if dropout and "context_parallel_size" in flags else dropout  # which refuses --lora-dropout
    losses, norms, adapters = alone(**QWEN, **dropout)
    for own in ThreadWorld(ranks).run(curve, small_run(**QWEN, **dropout, **flags)):
        assert own[0] == pytest.approx(losses, rel=2e-6)
        assert own[1] == pytest.approx(norms, rel=2e-5)
        assert own[2].keys() == adapters.keys()
        for name, tensor in adapters.items():
            assert torch.allclose(own[2][name], tensor, atol=2e-5), name


MOE = {**LORA, "lora_target": "q_proj,k_proj,v_proj,o_proj", "num_layers": 2, "num_experts": 4, "swiglu": True,
       "disable_bias_linear": True, "normalization": "RMSNorm", "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": (0.01,),
       "moe_shared_expert_intermediate_size": 16, "zero_stage": 1}
EP = {"expert_model_parallel_size": 2}


@pytest.mark.parametrize(("ranks", "layout"), [(2, EP), (2, TP2), (4, {**EP, **TP2, **SP}), (4, {**EP, **TP2, **SP, "bf16": True})])
def test_adapters_of_attention_train_next_to_frozen_experts(ranks, layout, tmp_path):
    """In every layout from one model, which has the same number everywhere; experts stay as they are."""
    base, precision = str(tmp_path / "base"), {"bf16": True} if "bf16" in layout else {}
    whole_model(SoloComm(), base, **{name: value for name, value in MOE.items() if not name.startswith("lora")})

    def run(world, **flags):
        trainer, _ = started(world, **MOE, **flags, pretrained_checkpoint=base)
        with contextlib.closing(trainer):
            before = [memory.values.clone() for memory in trainer.optimizer.flat.frozen_memory]
            steps = [trainer.train_step() for _ in range(3)]
            after = [memory.values for memory in trainer.optimizer.flat.frozen_memory]
            assert all(map(torch.equal, before, after)) and (before[1].numel() > 0) == ("expert_model_parallel_size" in flags)
            return [step.loss for step in steps], [step.grad_norm for step in steps], trainer.base["fingerprint"]

    losses, norms, number = run(SoloComm(), **precision)
    assert min(norms) > 0
    for own in ThreadWorld(ranks).run(lambda world: run(world, **layout)):
        assert own[0] == pytest.approx(losses, rel=5e-3 if precision else 5e-6) and own[2] == number
        assert own[1] == pytest.approx(norms, rel=5e-2 if precision else 5e-5)


def whole_model(world, directory, **flags) -> None:
    """Save a checkpoint of the model that adapters belong to."""
    with contextlib.closing(make_trainer(world, small_run(**flags))) as trainer:
        trainer.train_step()
        trainer.save(str(directory))


BASE = {name: value for name, value in QWEN.items() if not name.startswith("lora")}


def started(world, **flags):
    """A trainer of adapters that has loaded what its flags name, and the lines of its log."""
    trainer = make_trainer(world, small_run(**flags))
    return trainer, resume_training(trainer, find_checkpoint(trainer.run, world))


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {"zero_stage": 1}), (4, {**TP2PP2, **SP, "zero_stage": 1})])
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_resuming_is_bit_exact_and_saves_adapters_alone(ranks, layout, precision, tmp_path):
    whole_model(SoloComm(), tmp_path / "base", **BASE)
    flags = {**QWEN, **precision, **layout, "lora_dropout": 0.2}

    def run(world):
        first, lines = started(world, **flags, pretrained_checkpoint=str(tmp_path / "base"))
        assert lines[0].startswith("new adapters of")
        frozen = first.optimizer.flat.frozen_memory[0].values.clone()
        first.train_step()
        first.save(str(tmp_path / "run"))
        expected = [first.train_step().loss for _ in range(2)]
        assert torch.equal(frozen, first.optimizer.flat.frozen_memory[0].values)
        first.close()
        again, lines = started(world, **flags, load=str(tmp_path / "run"))
        assert "adapters of" in lines[0]
        assert torch.equal(frozen, again.optimizer.flat.frozen_memory[0].values)
        assert [again.train_step().loss for _ in range(2)] == expected
        again.close()

    ThreadWorld(ranks).run(run)
    keys = {record["key"] for file in read_manifest(tmp_path / "run", 1)["files"].values() for record in file["shards"]}
    assert keys and all("lora_" in key for key in keys)


def test_a_checkpoint_of_adapters_loads_in_another_layout(tmp_path):
    whole_model(SoloComm(), tmp_path / "base", **BASE)

    def save(world):
        trainer, _ = started(world, **QWEN, **TP2PP2, pretrained_checkpoint=str(tmp_path / "base"))
        trainer.train_step()
        trainer.save(str(tmp_path / "run"))
        trainer.optimizer.buckets.await_weights()
        values = whole_tensors(trainer, "weight"), trainer.train_step().loss
        trainer.close()
        return values

    values, loss = ThreadWorld(4).run(save)[0]

    def load(world):
        trainer, _ = started(world, **QWEN, **TP2, **SP, load=str(tmp_path / "run"))
        loaded = whole_tensors(trainer, "weight")
        assert all(torch.equal(values[name], loaded[name]) for name in values)
        assert trainer.train_step().loss == pytest.approx(loss, rel=2e-6)
        trainer.close()

    ThreadWorld(2).run(load)


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    base, other, run = (str(tmp_path / name) for name in ("base", "other", "run"))
    whole_model(SoloComm(), base, **BASE)
    whole_model(SoloComm(), other, **{**BASE, "seed": 7})
    trainer, _ = started(SoloComm(), **QWEN, pretrained_checkpoint=base)
    trainer.save(run)
    trainer.close()

    def refusal(**flags) -> str:
        return one_error(2, lambda world: started(world, **{**QWEN, **TP2, **flags}))

    assert "has other weights than the one that the adapters were trained for" in refusal(load=run, pretrained_checkpoint=other)
    assert "--lora-rank 4 (this run: 2)" in refusal(load=run, lora_rank=2)
    assert "holds a whole model" in refusal(load=base)
    assert "--lora-rank 4 needs the weights of a model" in refusal()
    assert "holds adapters of rank 4 and not a model" in refusal(load=run, lora_rank=None)
    assert "holds adapters and not the weights of a model" in refusal(pretrained_checkpoint=run)
    assert "holds another model, with --hidden-size 32 (this run: 48)" in refusal(pretrained_checkpoint=base, hidden_size=48)
    Path(base).rename(tmp_path / "elsewhere")
    assert "which is not there: pass its place as --pretrained-checkpoint" in refusal(load=run)
    trainer, _ = started(SoloComm(), **QWEN, load=run, pretrained_checkpoint=str(tmp_path / "elsewhere"))
    trainer.close()


@pytest.fixture
def trained(tmp_path):
    """Directories of a base and of adapters of it that have been trained, and their weights' logits of some tokens."""
    base, run = str(tmp_path / "base"), str(tmp_path / "run")
    whole_model(SoloComm(), base, **BASE)
    trainer, _ = started(SoloComm(), **QWEN, pretrained_checkpoint=base)
    trainer.train_step()
    trainer.train_step()
    trainer.save(run)
    chunk, tokens = trainer.stage.chunks[0], torch.arange(12)
    forward_pass = Pass(first_sample=0, training=False)
    with torch.no_grad():
        logits = chunk.logits(chunk.decode(chunk.embedding(tokens[:, None], forward_pass), forward_pass))[:, 0, :96]
    trainer.close()
    return base, run, tokens, logits


def test_adapters_load_and_merge_as_the_model_that_was_trained(trained, tmp_path):
    base, run, tokens, logits = trained
    assert not torch.allclose(fm.load(base).logits(tokens), logits, atol=1e-3)
    assert torch.allclose(fm.load(run).logits(tokens), logits, atol=1e-5)
    assert cli.main(["convert", "--load", run, "--merge", "--save", str(tmp_path / "merged")]) == 0
    assert torch.equal(fm.load(tmp_path / "merged").logits(tokens), fm.load(run).logits(tokens))

    def split(world):
        manifest = read_manifest(run, 2)
        loaded = load_model(saved_run(manifest, (2, 1)), world, run, 2, manifest)
        return loaded.logits(through_stages(loaded, tokens[:, None], EVALUATION))[:, 0]

    assert torch.allclose(torch.cat(ThreadWorld(2).run(split), -1)[:, :96], logits, atol=1e-5)


def test_adapters_go_to_peft_and_back(trained, tmp_path):
    base, run, tokens, _ = trained
    peft, back = str(tmp_path / "peft"), str(tmp_path / "back")
    assert cli.main(["convert", "--load", run, "--to-peft", peft]) == 0
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(theirs), len(config["target_modules"])) == (4, 16, 4 * 7 * 2, 7)
    name = "model.layers.1.self_attn.k_proj"
    a, b = (theirs[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
    ours, plain = (open_weights(path).read("decoder.layers.1.self_attention.linear_qkv.weight") for path in (run, base))
    keys = (ours - plain).view(2, 4, 8, 32)[:, 2].flatten(0, 1)
    assert torch.allclose(keys, 4.0 * b @ a, atol=1e-6) and keys.abs().max() > 1e-3
    assert cli.main(["convert", "--load", base, "--from-peft", peft, "--save", back]) == 0
    assert torch.equal(fm.load(back).logits(tokens), fm.load(run).logits(tokens))
    trainer, lines = started(SoloComm(), **{**QWEN, "lora_target": read_manifest(back, 0)["config"]["lora"]["lora_target"]},
                             load=back, finetune=True)
    assert "starting from the weights" in lines[0]
    trainer.close()


@pytest.mark.parametrize(("change", "message"), [
    ({"use_dora": True}, "use_dora is True"), ({"r": "four"}, "r is 'four', not a number"), ({"r": 2}, "has shape [4, 32]"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'")])
def test_adapters_of_peft_that_are_not_built_are_refused(change, message, trained, tmp_path, capsys):
    base, run, *_ = trained
    assert cli.main(["convert", "--load", run, "--to-peft", str(tmp_path / "peft")]) == 0
    file = tmp_path / "peft" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError) as caught:
        open_peft(str(tmp_path / "peft"), open_weights(base), {})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("flags", "message"), [
    ({"lora_rank": 40}, "--lora-rank 40 is larger than the smaller side of q_proj, 32 x 32: lower it to 32 or less"),
    ({"lora_target": "q_proj,c_attn"}, "--lora-target c_attn is not known"),
    ({"lora_target": "q_proj,linear_qkv"}, "linear_qkv holds q_proj"),
    ({**MOE, "num_layers": 4, "lora_target": "all-linear"}, "--lora-target all-linear: adapters of the MLPs of a model with "
     "--num-experts 4 are not built: pass q_proj,k_proj,v_proj,o_proj, or some of them"),
    ({"lora_rank": 0}, "--lora-rank is 0"), ({"lora_dropout": 1.0}, "--lora-dropout is 1.0"),
    ({**TP2, **SP, "tp_comm_overlap": True}, "--lora-rank 4 is not built for --tp-comm-overlap"),
    ({"abft": ("all",)}, "--lora-rank 4 is not built for --abft")])
def test_flags_that_cannot_be_are_refused(flags, message):
    with pytest.raises(ValueError) as caught:
        small_run(**{**QWEN, **flags})
    assert message in str(caught.value) and "\n" not in str(caught.value)
