"""Adapters of peft for models of transformers, restated: transformers' weights plus the product of B and A."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import fugaku_megatron as fm
from fugaku_megatron.checkpoint.manifest import read_manifest
from tests.checks.conversions import convert, refused
from tests.checks.refusals import refusals
from tests.hf_models import LENGTH, MODELS, VOCABULARY, decoder, randomized

pytestmark = pytest.mark.unit

PREFIX = "base_model.model."
TOKENS = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(3))
ALPHA = 6
WIDTH = 20  # of an expert
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def ends(name: str, targets) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


class Adapted(NamedTuple):
    """Weight with an adapter, in peft's terms. module: in peft's file; experts: 0 for one matrix"""

    module: str
    weight: torch.Tensor
    rank: int
    experts: int
    outputs: int
    inputs: int


def adapted_weights(model: torch.nn.Module, config: dict) -> Iterator[Adapted]:
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False)] if "experts" in name else ()
        found = [(key, p) for key, p in own if ends(f"{name}.{key}", config["target_parameters"])]
        for number, (key, weight) in enumerate(found, 1):
            experts, *shape = weight.shape
            outputs, inputs = shape[::-1] if inputs_first(model) else shape
            rank = config["r"]
            if key == "gate_up_proj" and config["rank_pattern"]:
                rank *= 2
            wrapped = name + ".base_layer" * (len(found) - number)
            yield Adapted(wrapped, weight, rank, experts, outputs, inputs)
        if isinstance(module, torch.nn.Linear) and ends(name, config["target_modules"]):
            yield Adapted(name, module.weight, config["r"], 0, *module.weight.shape)


def write_adapters(model: torch.nn.Module, folder: Path, divided: bool = False, **changes) -> None:
    """Write random adapters, with gates and values apart if `divided`."""
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj"],
        "target_parameters": [],
        "rank_pattern": {},
        "alpha_pattern": {},
        **changes,
    }
    torch.manual_seed(5)
    tensors = {}
    for row in adapted_weights(model, config):
        width = row.rank * (row.experts or 1)
        a = torch.randn(width, row.inputs)
        b = 0.1 * torch.randn(row.outputs, width)
        if divided and row.rank > config["r"]:
            rows = torch.arange(row.outputs)
            of_values = rows % 2 if inputs_first(model) else rows // WIDTH
            b.view(row.outputs, 2, -1)[rows, 1 - of_values] = 0.0
        for kind, tensor in zip("AB", (a, b)):
            tensors[f"{PREFIX}{row.module}.lora_{kind}.weight"] = tensor
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def inputs_first(model: torch.nn.Module) -> bool:
    return model.config.model_type == "gpt_oss"


def adapted_logits(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    """Return the logits of a model with the adapters of a folder."""
    config = json.loads((folder / "adapter_config.json").read_text())
    config = {"rank_pattern": {}, "target_parameters": [], **config}
    tensors = load_file(folder / "adapter_model.safetensors")
    model = copy.deepcopy(model)
    used = 0
    with torch.no_grad():
        for row in adapted_weights(model, config):
            a, b = (tensors[f"{PREFIX}{row.module}.lora_{kind}.weight"] for kind in "AB")
            used += 2
            delta = b @ a
            if row.experts:
                a = a.view(row.experts, row.rank, -1)
                b = b.view(-1, row.rank, row.experts)
                delta = torch.einsum("ore,eri->eoi", b, a)
                delta = delta.mT if inputs_first(model) else delta
            row.weight.add_(config["lora_alpha"] / config["r"] * delta)
        assert used == len(tensors)
        return model(input_ids=TOKENS[None]).logits[0]


def check_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def check_both_ways(model: torch.nn.Module, folder: Path) -> str:
    """Compare logits of adapters that are merged, loaded, and written again; returns --lora-target."""
    model.save_pretrained(folder / "hf")
    expected = adapted_logits(model, folder / "peft")
    assert (expected - model(input_ids=TOKENS[None]).logits[0]).abs().max() > 0.1
    source = ("--from-hf", folder / "hf")
    peft = ("--from-peft", folder / "peft")
    assert convert(*source, *peft, "--merge", "--save", folder / "merged") == 0
    check_near(fm.load(folder / "merged").logits(TOKENS), expected)
    assert convert(*source, "--save", folder / "base") == 0
    assert convert("--load", folder / "base", *peft, "--save", folder / "adapters") == 0
    check_near(fm.load(folder / "adapters").logits(TOKENS), expected)
    assert convert("--load", folder / "adapters", "--to-peft", folder / "written") == 0
    check_near(adapted_logits(model, folder / "written"), expected)
    return read_manifest(str(folder / "adapters"), 0)["config"]["lora"]["lora_target"]


FEW = {"num_experts_per_tok": 2, "num_hidden_layers": 2, "head_dim": 16}
EXPERTS = {
    "gpt_oss": decoder("GptOss", intermediate_size=WIDTH, num_local_experts=4, **FEW),
    "qwen3_moe": decoder("Qwen3Moe", moe_intermediate_size=WIDTH, num_experts=4, **FEW),
    "mixtral": decoder("Mixtral", intermediate_size=WIDTH, num_local_experts=4, **FEW),
}
ONE_LAYER = ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("gpt_oss", BOTH[:1]),
        ("gpt_oss", BOTH[1:]),
        ("gpt_oss", BOTH),
        ("gpt_oss", ONE_LAYER),
        ("qwen3_moe", ["gate_up_proj", "down_proj"]),
        ("qwen3_moe", ["0.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]),
        ("mixtral", BOTH),
    ],
)
def test_adapters_of_all_experts_or_of_chosen_layers(kind, targets, tmp_path):
    model = randomized(EXPERTS[kind])
    write_adapters(model, tmp_path / "peft", target_parameters=targets)
    check_both_ways(model, tmp_path)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("divided", [True, False])
def test_adapters_of_gates_and_values_with_twice_the_rank(kind, divided, tmp_path):
    """Two adapters that stay two, and one of a larger rank than the others."""
    pattern = r".*\.gate_up_proj"
    model = randomized(EXPERTS[kind])
    write_adapters(
        model,
        tmp_path / "peft",
        divided,
        target_parameters=BOTH,
        rank_pattern={pattern: 8},
        alpha_pattern={pattern: 2 * ALPHA},
    )
    targets = check_both_ways(model, tmp_path).split(",")
    assert ("gate_proj" in targets) == divided


def test_a_matrix_without_a_gate(tmp_path):
    """Apertus has an up_proj alone."""
    model = randomized(MODELS["apertus"])
    write_adapters(model, tmp_path / "peft", target_modules=["up_proj", "down_proj"])
    check_both_ways(model, tmp_path)


@pytest.mark.parametrize(("_", "change", "message"), refusals("adapters"))
def test_adapters_that_are_damaged_or_match_nothing_are_refused(
    _, change, message, tmp_path, capsys
):
    model = randomized(MODELS["qwen3"])
    model.save_pretrained(tmp_path / "hf")
    write_adapters(model, tmp_path / "peft", target_modules=["q_proj", "v_proj"])
    without, fields = re.fullmatch(r"(?:without (\S+) )?(.*)", change).groups()
    edit(tmp_path / "peft", without, json.loads(fields))
    words = ("--from-hf", tmp_path / "hf", "--from-peft", tmp_path / "peft", "--merge")
    assert message in refused(capsys, *words, "--save", tmp_path / "ours")


def edit(folder: Path, removed: str | None, changes: dict) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    kept = {name: x for name, x in tensors.items() if not removed or removed not in name}
    save_file(kept, file)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("kind", "module", "what"),
    [
        ("qwen3_moe", "model.layers.0.mlp.gate", "adapters of router are not supported"),
        ("mixtral", "model.layers.0.mlp.gate", "adapters of router are not supported"),
        ("qwen3_moe", "lm_head", "adapters of output_layer are not supported"),
        ("qwen3_moe", "score", "which this model has no adapter for"),
    ],
)
def test_what_has_no_adapter_here_is_named(kind, module, what, tmp_path, capsys):
    model = randomized(EXPERTS[kind])
    model.save_pretrained(tmp_path / "hf")
    write_adapters(model, tmp_path / "peft", target_parameters=BOTH)
    file = tmp_path / "peft" / "adapter_model.safetensors"
    router = {f"{PREFIX}{module}.lora_{kind}.weight": torch.ones(4, 4) for kind in "AB"}
    save_file({**load_file(file), **router}, file)
    words = ("--from-hf", tmp_path / "hf", "--from-peft", tmp_path / "peft", "--merge")
    assert what in refused(capsys, *words, "--save", tmp_path / "ours")


def as_wrapper(folder: Path, prefix: str) -> None:
    """Give a text model's folder and its adapters the names of a model with images, and tensors of a tower."""
    config = json.loads((folder / "hf" / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (folder / "hf" / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    tower = "model.vision_tower.layers.0.self_attn.q_proj"
    weights = {f"{tower}.weight": torch.ones(2)}
    adapters = {f"{tower}.lora_{kind}.weight": torch.ones(2, 2) for kind in "AB"}
    for file, start, added in (
        (folder / "hf" / "model.safetensors", "", weights),
        (folder / "peft" / "adapter_model.safetensors", PREFIX, adapters),
    ):
        named = {
            start + prefix + name.removeprefix(f"{start}model."): x
            for name, x in load_file(file).items()
        }
        save_file(named | {start + name: x for name, x in added.items()}, file)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_adapters_of_a_model_with_images(prefix, tmp_path, capsys):
    model = randomized(MODELS["gemma3"])
    model.save_pretrained(tmp_path / "hf")
    write_adapters(model, tmp_path / "peft", target_modules=["q_proj", "down_proj"])
    expected = adapted_logits(model, tmp_path / "peft")
    ours = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    as_wrapper(tmp_path, prefix)
    peft = ("--from-peft", tmp_path / "peft")
    assert convert("--from-hf", tmp_path / "hf", *peft, "--merge", "--save", tmp_path / "ours") == 0
    check_near(fm.load(tmp_path / "ours").logits(TOKENS), expected)
    assert "note: 2 adapter tensors of images are left out" in capsys.readouterr().out
    assert convert("--from-hf", tmp_path / "hf", "--save", tmp_path / "base") == 0
    assert convert("--load", tmp_path / "base", *peft, "--save", tmp_path / "adapters") == 0
    assert convert("--load", tmp_path / "adapters", "--to-peft", tmp_path / "written") == 0
    written = load_file(tmp_path / "written" / "adapter_model.safetensors")
    assert len(written) == len(ours)
    for name, tensor in written.items():
        assert torch.equal(tensor, ours[name.replace("model.language_model.", "model.", 1)])
    config = json.loads((tmp_path / "written" / "adapter_config.json").read_text())
    assert "model.language_model.layers.0.self_attn.q_proj" in config["target_modules"]


def test_adapters_in_place_of_a_model_or_next_to_it(tmp_path, capsys):
    """transformers adds adapters in a model's folder to the model."""
    model = randomized(MODELS["qwen3"])
    folder = tmp_path / "peft"
    write_adapters(model, folder, base_model_name_or_path="org/base")
    expected = adapted_logits(model, folder)
    save = ("--save", tmp_path / "ours")
    message = "holds peft's adapters of the model org/base, and no model: pass fugaku-megatron convert --from-hf org/base"
    assert message in refused(capsys, "--from-hf", folder, *save)
    with pytest.raises(ValueError, match="of the model org/base, and no model"):
        fm.load(folder)
    model.save_pretrained(folder)
    message = "has adapter_config.json next to the weights, and transformers adds such adapters"
    assert message in refused(capsys, "--from-hf", folder, *save)
    with pytest.raises(ValueError, match="adapter_config.json next to the weights"):
        fm.load(folder)
    assert convert("--from-hf", folder, "--from-peft", f"{folder}/", "--merge", *save) == 0
    check_near(fm.load(tmp_path / "ours").logits(TOKENS), expected)
