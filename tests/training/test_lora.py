"""LoRA: adapters for frozen weights, their gradients and checkpoints, and peft's files."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

import fugaku_megatron as fm
from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.cli import program
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import saved_run
from fugaku_megatron.convert.hugging_face.peft import open_peft
from fugaku_megatron.convert.open_weights import open_weights
from fugaku_megatron.inference.loading import load_model, through_stages
from fugaku_megatron.inference.scoring import EVALUATION
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.run.resume import resume_training
from tests.checks.adapters import ADAPTED_EXPERTS, DELTA_NETS, QWEN
from tests.checks.allocations import allocated
from tests.checks.experts import CAPACITY, EXPERTS, SHARED, layer_of, plain_experts
from tests.helpers import (
    TP2,
    assert_near,
    find_checkpoint,
    make_trainer,
    one_error,
    run_layout,
    small_run,
)
from tests.llama_models import FAMILIES
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


def without_adapters(flags):
    """Return the flags of the model alone."""
    return {name: value for name, value in flags.items() if not name.startswith("lora")}


BASE = without_adapters(QWEN)
MIXTURE = {**FAMILIES["qwen3"], **ADAPTED_EXPERTS, "moe_shared_expert_intermediate_size": None}
TOKENS = torch.arange(12)


def save_model(directory, **flags) -> str:
    """Save a checkpoint of the model that adapters belong to."""
    with contextlib.closing(make_trainer(SoloComm(), small_run(**flags))) as trainer:
        trainer.train_step()
        trainer.save(str(directory))
    return str(directory)


def start(world, run):
    """Return a trainer with loaded adapters, and its log lines."""
    trainer = make_trainer(world, run)
    return trainer, resume_training(trainer, find_checkpoint(run, world))


def start_alone(**flags):
    return start(SoloComm(), small_run(**flags))


def with_output(run, **changes):
    return replace(run, output=replace(run.output, **changes))


def train_losses(trainer, steps: int = 2) -> list[float]:
    return [trainer.train_step().loss for _ in range(steps)]


def logits_of(trainer):
    """Return the logits of TOKENS, (12, 96)."""
    chunk = trainer.stage.chunks[0]
    forward_pass = Pass(first_sample=0, training=False)
    with torch.no_grad():
        hidden = chunk.decode(chunk.embedding(TOKENS[:, None], forward_pass), forward_pass)
        return chunk.logits(hidden)[:, 0, :96]


def convert(*words) -> None:
    assert program.main(["convert", *map(str, words)]) == 0


class Adapted(NamedTuple):
    """Directories with a model, with its trained adapters, and with peft's files; the adapted model's logits."""

    base: str
    run: str
    peft: Path
    logits: torch.Tensor


def train_adapters(folder: Path, flags) -> Adapted:
    base = save_model(folder / "base", **without_adapters(flags))
    run = str(folder / "run")
    trainer, _ = start_alone(**flags, pretrained_checkpoint=base)
    train_losses(trainer)
    trainer.save(run)
    logits = logits_of(trainer)
    trainer.close()
    convert("--load", run, "--to-peft", folder / "peft")
    return Adapted(base, run, folder / "peft", logits)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Adapted:
    return train_adapters(tmp_path_factory.mktemp("dense"), QWEN)


@pytest.fixture
def mixture(tmp_path) -> Adapted:
    """Train adapters for every expert matrix."""
    return train_adapters(tmp_path, MIXTURE)


@pytest.mark.parametrize("layout", ["dp2 ep2", "tp2", "tp2 dp2 ep2 etp1 sequence", "packed"])
def test_a_model_has_the_same_number_in_every_layout(layout, tmp_path):
    """Frozen experts have memory of their own if ranks divide them."""
    base = save_model(tmp_path, **without_adapters(ADAPTED_EXPERTS))
    flags = {**ADAPTED_EXPERTS, "pretrained_checkpoint": base}

    def number(world, run):
        with contextlib.closing(start(world, run)[0]) as trainer:
            frozen = trainer.optimizer.flat.frozen_memory
            assert (frozen[1].values.numel() > 0) == run.parallel.divides_experts
            return trainer.base["fingerprint"]

    assert set(run_layout(layout, number, flags)) == set(run_layout("", number, flags))


def low_rank(a, b, gates_alone: bool):
    """Return B A for each matrix. a: (..., p, r, in). b: (..., p or p + 1, out, r), or (..., out, r) if A is shared"""
    if gates_alone:  # (e, 1, r, h), (e, 2, f, r)
        return torch.stack((b[:, 0] @ a[:, 0], torch.zeros_like(b[:, 1]) @ a[:, 0]), 1)
    if b.dim() == a.dim():  # a gate and what it multiplies
        return b @ (a if a.shape[-3] == 2 else a.expand(*b.shape[:-2], *a.shape[-2:]))
    return b @ a.squeeze(-3)


KINDS = {
    "gates": {},
    "no gates": {"swiglu": False, "squared_relu": True},
    "shared": SHARED,
    "capacity": CAPACITY,
}
TARGETS = {
    "gates": "all-linear",
    "no gates": "up_proj,down_proj",
    "shared": "linear_fc1,linear_fc2",
    "capacity": "gate_proj",
}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_adapters_of_experts_are_torchs(kind, backend):
    """Compare with merged weights and gradients in plain torch."""
    flags = {
        **EXPERTS,
        **KINDS[kind],
        "lora_rank": 4,
        "lora_alpha": 6.0,
        "lora_use_rslora": kind == "gates",
        "lora_target": TARGETS[kind],
        "seed": 3,
    }
    mlp, ours, theirs = layer_of(small_run(**flags), Ops.build(backend))
    x, dy = (torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    y = mlp(x, Pass(first_sample=0))
    y.backward(dy)
    scale = 6.0 / (2.0 if kind == "gates" else 4.0)
    weights = {name: weight.detach() for name, weight in theirs.items()}
    for name, a in theirs.items():
        if name.endswith("lora_A.weight"):
            product = low_rank(a, theirs[name.replace("lora_A", "lora_B")], kind == "capacity")
            weight = name.replace("lora_A.", "")
            weights[weight] = weights[weight] + scale * product
    expected = plain_experts(weights, x.view(32, 32), small_run(**flags).model)
    expected.backward(dy.view(32, 32))
    torch.testing.assert_close(y.view(32, 32), expected, rtol=1e-5, atol=2e-5)
    adapters = [name for name in ours if "lora_" in name]
    assert len(adapters) == 2 * len(TARGETS[kind].split(",")) or kind in ("gates", "shared")
    expected = {name: theirs[name].grad for name in adapters}
    assert all(gradient.abs().max() > 0.01 for gradient in expected.values())
    assert_near({name: ours[name].main_grad for name in adapters}, expected, 1e-5)


@pytest.mark.parametrize("layout", ["tp1", "dp2 zero", "tp2 pp2 sequence zero"])
@pytest.mark.parametrize("precision", ["", "bf16"])
def test_resuming_is_bit_exact_and_saves_adapters_alone(layout, precision, tmp_path):
    base = save_model(tmp_path / "base", **BASE)
    saved = str(tmp_path / "run")

    def train_and_resume(world, run):
        first, lines = start(world, with_output(run, pretrained_checkpoint=base))
        assert lines[0].startswith("new adapters of")
        frozen = first.optimizer.flat.frozen_memory[0].values.clone()
        first.train_step()
        first.save(saved)
        expected = train_losses(first)
        assert torch.equal(frozen, first.optimizer.flat.frozen_memory[0].values)
        first.close()
        again, lines = start(world, with_output(run, load=saved))
        assert "adapters of" in lines[0]
        assert torch.equal(frozen, again.optimizer.flat.frozen_memory[0].values)
        assert train_losses(again) == expected
        again.close()

    run_layout(f"{layout} {precision}", train_and_resume, {**QWEN, "lora_dropout": 0.2})
    files = read_manifest(saved, 1)["files"].values()
    keys = {record["key"] for file in files for record in file["shards"]}
    assert keys and all("lora_" in key for key in keys)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_nothing_of_a_tensors_size_is_made_while_weights_are_read(precision, tmp_path):
    """Initial weights, the file and the number of the model pass in pieces: the frozen weights themselves are the peak."""
    # An embedding of 16 MiB in FP32.
    flags = {"vocab_size": 32768, "hidden_size": 128, "num_layers": 1, **precision}
    base = save_model(tmp_path, **flags)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trainer, _ = start_alone(**flags, lora_rank=4, pretrained_checkpoint=base)
    ends, peak = allocated(recorded)
    assert peak - ends < 12 << 20
    assert ends > (8 << 20 if precision else 16 << 20)
    trainer.close()


@pytest.mark.parametrize(
    ("layout", "other", "target"),
    [
        ("tp2 dp2 ep2 sequence", "tp2 dp2 ep2 etp1 sequence", "all-linear"),
        ("pp2 dp2 ep2 overlap zb-h1", "tp2 pp2 sequence", "linear_fc1,down_proj"),
        ("dp4 zero_stage=0", "dp4 ep2 zero", "up_proj"),
    ],
)
def test_adapters_of_experts_resume_move_merge_and_go_to_peft(layout, other, target, tmp_path):
    """Bit-exact in the layout that saved them, in any other one, in the weights that programs read, and from peft's files."""
    flags = {**MIXTURE, "lora_target": target}
    base = save_model(tmp_path / "base", **without_adapters(flags))
    saved = str(tmp_path / "run")
    peft, back, merged = (tmp_path / name for name in ("peft", "back", "merged"))

    def save(world, run):
        with contextlib.closing(start(world, run)[0]) as trainer:
            trainer.train_step()
            trainer.save(saved)
            return train_losses(trainer)

    def resume(world, run):
        with contextlib.closing(start(world, run)[0]) as trainer:
            return train_losses(trainer)

    losses = run_layout(layout, save, {**flags, "pretrained_checkpoint": base})[0]
    assert run_layout(layout, resume, {**flags, "load": saved})[0] == losses
    found = run_layout(other, resume, {**flags, "load": saved})[0]
    assert found == pytest.approx(losses, rel=1e-6)
    with contextlib.closing(start_alone(**flags, load=saved)[0]) as trainer:
        trained = logits_of(trainer)
    logits = fm.load(saved).logits(TOKENS)
    assert torch.allclose(logits, trained, atol=1e-5)
    assert not torch.allclose(fm.load(base).logits(TOKENS), trained, atol=1e-3)
    convert("--load", saved, "--merge", "--save", merged)
    convert("--load", saved, "--to-peft", peft)
    convert("--load", base, "--from-peft", peft, "--save", back)
    for directory in (merged, back):
        assert torch.equal(fm.load(directory).logits(TOKENS), logits)


def test_what_peft_has_of_experts(mixture):
    """Its layout, restated: a parameter's adapter of rank R is A (e R, in) and B (out, R e), the rank first in the columns."""
    config = json.loads((mixture.peft / "adapter_config.json").read_text())
    theirs = load_file(mixture.peft / "adapter_model.safetensors")
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["r"] == 4
    assert config["target_parameters"] == [
        "mlp.down_proj.weight",
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    ]
    assert config["rank_pattern"] == {r".*\.gate_up_proj": 8}
    assert config["alpha_pattern"] == {r".*\.gate_up_proj": 32}
    prefix = "base_model.model.model.layers.1.mlp.experts"
    for module, linear, rank in (("base_layer.", "linear_fc1", 8), ("", "linear_fc2", 4)):
        a, b = (theirs[f"{prefix}.{module}lora_{kind}.weight"] for kind in "AB")
        delta = torch.einsum("ore,eri->eoi", b.view(len(b), rank, 4), a.view(4, rank, -1)) * 16 / 4
        name = f"decoder.layers.1.mlp.experts.{linear}.weight"
        ours = open_weights(mixture.run).read(name) - open_weights(mixture.base).read(name)
        assert torch.allclose(ours.view(delta.shape), delta, atol=1e-6)
        assert ours.abs().max() > 1e-3
    one_rank = {"rank_pattern": {}, "alpha_pattern": {}}
    for change, message in (
        (
            {"rank_pattern": {"q_proj": 2}},
            "q_proj.lora_A.weight has shape [4, 32], and this model needs [2, 32]",
        ),
        ({**one_rank, "r": 8}, "lora_A.weight has shape [4, 32], and this model needs [8, 32]"),
        (one_rank, "base_layer.lora_A.weight has shape [32, 32], and this model needs [16, 32]"),
    ):
        assert message in peft_refusal(mixture, {**config, **change})


def peft_refusal(adapted: Adapted, config) -> str:
    """Return the error message for peft's files with another config."""
    (adapted.peft / "adapter_config.json").write_text(json.dumps(config))
    return one_error(1, lambda world: open_peft(str(adapted.peft), open_weights(adapted.base), {}))


def test_adapters_of_transformers_4_are_read(mixture, tmp_path):
    """A linear layer for each matrix of each expert."""
    file = mixture.peft / "adapter_model.safetensors"
    made = {}
    for name, tensor in load_file(file).items():
        module, _, rest = name.partition(".experts.")
        if not rest:
            made[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if "base_layer" in name else ("down_proj",)
        count = len(names)
        for e, (number, part) in itertools.product(range(4), enumerate(names)):
            if name.endswith(".lora_A.weight"):
                own = tensor.view(4, count, 4, -1)[e, number]
                made[f"{module}.experts.{e}.{part}.lora_A.weight"] = own
            else:
                own = tensor.view(count, -1, count, 4, 4)[number, :, number, :, e]
                made[f"{module}.experts.{e}.{part}.lora_B.weight"] = own
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, file)
    settings = mixture.peft / "adapter_config.json"
    every = {
        "target_modules": "all-linear",
        "target_parameters": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **every}))
    back = tmp_path / "back"
    convert("--load", mixture.base, "--from-peft", mixture.peft, "--save", back)
    assert torch.equal(fm.load(back).logits(TOKENS), fm.load(mixture.run).logits(TOKENS))


def test_what_does_not_fit_is_refused_in_one_line(dense, tmp_path):
    base = str(shutil.copytree(dense.base, tmp_path / "base"))
    other = save_model(tmp_path / "other", **BASE, seed=7)
    run = str(tmp_path / "run")
    trainer, _ = start_alone(**QWEN, pretrained_checkpoint=base)
    trainer.save(run)
    trainer.close()
    for flags, message in (
        (
            {"load": run, "pretrained_checkpoint": other},
            "has other weights than the one that the adapters were trained for",
        ),
        ({"load": run, "lora_rank": 2}, "--lora-rank 4 (this run: 2)"),
        ({"load": base}, "holds a whole model"),
        ({}, "--lora-rank 4 needs the weights of a model"),
        ({"load": run, "lora_rank": None}, "holds adapters of rank 4 and not a model"),
        ({"pretrained_checkpoint": run}, "holds adapters and not the weights of a model"),
        (
            {"pretrained_checkpoint": base, "hidden_size": 48},
            "holds another model, with --hidden-size 32 (this run: 48)",
        ),
    ):
        assert message in start_refusal(**flags)
    elsewhere = Path(base).rename(tmp_path / "elsewhere")
    message = "which is not there: pass its place as --pretrained-checkpoint"
    assert message in start_refusal(load=run)
    trainer, _ = start_alone(**QWEN, load=run, pretrained_checkpoint=str(elsewhere))
    trainer.close()


def start_refusal(**flags) -> str:
    return one_error(2, lambda world: start(world, small_run(**{**QWEN, **TP2, **flags})))


def test_adapters_load_and_merge_as_the_model_that_was_trained(dense, tmp_path):
    assert not torch.allclose(fm.load(dense.base).logits(TOKENS), dense.logits, atol=1e-3)
    loaded = fm.load(dense.run).logits(TOKENS)
    assert torch.allclose(loaded, dense.logits, atol=1e-5)
    convert("--load", dense.run, "--merge", "--save", tmp_path / "merged")
    assert torch.equal(fm.load(tmp_path / "merged").logits(TOKENS), loaded)

    def split(world):
        manifest = read_manifest(dense.run, 2)
        model = load_model(saved_run(manifest, (2, 1)), world, dense.run, 2, manifest)
        return model.logits(through_stages(model, TOKENS[:, None], EVALUATION))[:, 0]

    whole = torch.cat(ThreadWorld(2).run(split), -1)[:, :96]
    assert torch.allclose(whole, dense.logits, atol=1e-5)


def test_adapters_go_to_peft_and_back(dense, tmp_path):
    back = str(tmp_path / "back")
    theirs = load_file(dense.peft / "adapter_model.safetensors")
    config = json.loads((dense.peft / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 16)
    assert len(theirs) == 4 * 7 * 2
    assert len(config["target_modules"]) == 7
    name = "model.layers.1.self_attn.k_proj"
    a, b = (theirs[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
    ours, plain = (
        open_weights(path).read("decoder.layers.1.self_attention.linear_qkv.weight")
        for path in (dense.run, dense.base)
    )
    keys = (ours - plain).view(2, 4, 8, 32)[:, 2].flatten(0, 1)
    assert torch.allclose(keys, 4.0 * b @ a, atol=1e-6)
    assert keys.abs().max() > 1e-3
    convert("--load", dense.base, "--from-peft", dense.peft, "--save", back)
    assert torch.equal(fm.load(back).logits(TOKENS), fm.load(dense.run).logits(TOKENS))
    target = read_manifest(back, 0)["config"]["lora"]["lora_target"]
    trainer, lines = start_alone(**{**QWEN, "lora_target": target}, load=back, finetune=True)
    assert "starting from the weights" in lines[0]
    trainer.close()


NEXT = {
    **DELTA_NETS,
    "num_experts": 4,
    "moe_layer_freq": "[0,1,1,1]",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
    "lora_target": "in_proj_qkvz,in_proj_ba,out_proj",
}


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (DELTA_NETS, {"qkv": 96, "z": 64, "b": 4, "a": 4}),
        ({**DELTA_NETS, "lora_target": "in_proj"}, {"qkv": 96, "z": 64, "b": 4, "a": 4}),
        (NEXT, {"qkvz": 160, "ba": 8}),
    ],
    ids=["all-linear", "one adapter", "Qwen3-Next"],
)
def test_adapters_of_gated_delta_nets_go_to_peft_and_back(flags, rows, tmp_path):
    trained = train_adapters(tmp_path, flags)
    theirs = load_file(trained.peft / "adapter_model.safetensors")
    merged = open_weights(trained.run)
    plain = open_weights(trained.base)
    name = "decoder.layers.0.self_attention.in_proj.weight"
    found = 0
    for part, count in rows.items():
        module = f"base_model.model.model.layers.0.linear_attn.in_proj_{part}"
        a, b = (theirs[f"{module}.lora_{kind}.weight"] for kind in "AB")
        assert a.shape == (4, 32) and b.shape == (count, 4)
        found += (4.0 * b @ a).square().sum().item()
    difference = merged.read(name) - plain.read(name)
    assert found == pytest.approx(difference.square().sum().item(), rel=1e-4) and found > 1e-6
    assert torch.allclose(fm.load(trained.run).logits(TOKENS), trained.logits, atol=1e-5)
    back = tmp_path / "back"
    convert("--load", trained.base, "--from-peft", trained.peft, "--save", back)
    assert torch.allclose(fm.load(back).logits(TOKENS), trained.logits, atol=1e-5)


ADAPTED = {
    "dense": QWEN,
    "gated delta nets": DELTA_NETS,
    "one adapter": {**DELTA_NETS, "lora_target": "in_proj"},
    "Qwen3-Next": NEXT,
}


def their_model(adapted: Adapted, folder: Path) -> Any:
    """Return transformers' model without adapters."""
    transformers = pytest.importorskip("transformers")
    convert("--load", adapted.base, "--to-hf", folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", ADAPTED)
def test_every_adapter_belongs_to_a_matrix_of_transformers(kind, tmp_path):
    """Add b a to the matrix that an adapter's name names, as peft does."""
    trained = train_adapters(tmp_path, ADAPTED[kind])
    model = their_model(trained, tmp_path / "hf")
    targets = json.loads((trained.peft / "adapter_config.json").read_text())["target_modules"]
    named = [
        name
        for name, _ in model.named_modules()
        if any(name == target or name.endswith(f".{target}") for target in targets)
    ]
    theirs = load_file(trained.peft / "adapter_model.safetensors")
    assert sorted(theirs) == sorted(
        f"base_model.model.{name}.lora_{kind}.weight" for name in named for kind in "AB"
    )
    with torch.no_grad():
        for name in named:
            a, b = (theirs[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
            model.get_submodule(name).weight.add_(4.0 * b @ a)
        logits = model(TOKENS[None]).logits[0]
    assert torch.allclose(logits, trained.logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTED)
def test_peft_computes_our_logits_and_saves_files_that_are_read(kind, tmp_path):
    peft = pytest.importorskip("peft", reason="no peft: pip install -r requirements-trl.txt")
    trained = train_adapters(tmp_path, ADAPTED[kind])
    model = peft.PeftModel.from_pretrained(their_model(trained, tmp_path / "hf"), trained.peft)
    with torch.no_grad():
        logits = model(TOKENS[None]).logits[0]
    assert torch.allclose(logits, trained.logits, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    back = tmp_path / "back"
    convert("--load", trained.base, "--from-peft", tmp_path / "saved", "--save", back)
    assert torch.allclose(fm.load(back).logits(TOKENS), trained.logits, atol=1e-5)


def test_adapters_of_matrices_that_a_file_stores_together_are_refused(tmp_path, capsys):
    flags = {**NEXT, "lora_target": "in_proj_z"}
    base = save_model(tmp_path / "base", **without_adapters(flags))
    trainer, _ = start_alone(**flags, pretrained_checkpoint=base)
    trainer.save(str(tmp_path / "run"))
    trainer.close()
    words = ("--load", str(tmp_path / "run"), "--to-peft", str(tmp_path / "peft"))
    assert program.main(["convert", *words]) == 2
    message = "in_proj_z is no matrix of this model's files, which have in_proj_ba, in_proj_qkvz"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"r": "four"}, "r is 'four', not a number above 0"),
        ({"r": 2}, "has shape [4, 32]"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ],
)
def test_adapters_of_peft_that_are_not_built_are_refused(change, message, dense, tmp_path):
    peft = shutil.copytree(dense.peft, tmp_path / "peft")
    config = json.loads((peft / "adapter_config.json").read_text())
    assert message in peft_refusal(dense._replace(peft=peft), {**config, **change})
