"""Hugging Face models to checkpoints and back: the same bytes, the same logits, and clean failures."""

import copy
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.architecture import architecture
from fugaku_megatron.config.model import ModelConfig
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.run_config import RunConfig, saved_run
from fugaku_megatron.config.training import BatchConfig
from fugaku_megatron.convert import convert_command
from fugaku_megatron.convert.hugging_face.config_json import plain_config, read_config
from fugaku_megatron.convert.hugging_face.conversion import open_hugging_face
from fugaku_megatron.convert.hugging_face.tensor_mapping import (
    in_their_shape,
    tensor_mappings,
)
from fugaku_megatron.convert.new_directory import new_directory
from fugaku_megatron.costs.stages import model_parameters
from fugaku_megatron.inference.generation import Decoder
from fugaku_megatron.inference.loading import load_model
from fugaku_megatron.nn.attention.rotary_angles import frequencies, rotary_angles
from fugaku_megatron.nn.forward_context import PackedDocuments, Pass
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.training import expert_counts
from tests.checks.refusals import refusals
from tests.file_damage import MISSING, changed
from tests.helpers import make_trainer, small_run

transformers = pytest.importorskip("transformers")

from tests.hf_models import (  # noqa: E402
    LENGTH,
    LLAMA3,
    MODELS,
    RECENT,
    VOCABULARY,
    YARN,
    convert,
    decoder,
    gradients,
    our_logits,
    randomized,
    read_hf,
    same,
    tensors,
    write_hf,
)

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Converted:
    """A Hugging Face model, its directory, the checkpoint made of it, and the directory made of that checkpoint."""

    model: torch.nn.Module
    theirs: Path
    ours: Path
    back: Path


@pytest.fixture(scope="module", params=list(MODELS))
def converted(request, tmp_path_factory) -> Converted:
    directory = tmp_path_factory.mktemp(request.param)
    theirs, ours, back = (directory / name for name in ("theirs", "ours", "back"))
    model = randomized(MODELS[request.param])
    model.save_pretrained(theirs, max_shard_size="60KB")
    (theirs / "tokenizer.json").write_text("{}")
    read_hf(theirs, ours)
    write_hf(ours, back, "--max-shard-size", "60KB")
    return Converted(model, theirs, ours, back)


def test_there_and_back_every_byte_is_the_same(converted):
    assert same(tensors(converted.theirs), tensors(converted.back))
    assert len(list(converted.back.glob("model-*-of-*.safetensors"))) > 2
    for file in ("config.json", "generation_config.json"):
        assert json.loads((converted.theirs / file).read_text()) == json.loads(
            (converted.back / file).read_text()
        )
    assert (
        (converted.back / "tokenizer.json").read_text()
        == "{}"
        == (converted.ours / "hugging_face/tokenizer.json").read_text()
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(converted.back)
    assert type(again) is type(converted.model) and same(
        again.state_dict(), converted.model.state_dict()
    )


# Largest difference of logits, relative to the largest logit. Compared with transformers' code in FP64, transformers is off by
# 3e-7 to 2.4e-6 and this program by 3e-7 to 2.2e-6: FP32 does not allow 1e-6 for the families with larger bounds.
CLOSE = 2e-6
CLOSE_IN_FP32 = {"smollm3": 4e-6, "gpt_oss": 4e-6} | dict.fromkeys(
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 5e-6
)


def assert_same_logits(
    model: torch.nn.Module, ours: Path, length: int, bound: float | None = None
) -> None:
    tokens = torch.randint(
        0, VOCABULARY, (length, 2), generator=torch.Generator().manual_seed(3)
    )  # (s, b)
    with torch.no_grad():
        expected = model(tokens.t()).logits.transpose(0, 1)
    largest = expected.abs().max().item()
    if bound is None:
        bound = CLOSE_IN_FP32.get(model.config.model_type, CLOSE)
    torch.testing.assert_close(our_logits(ours, tokens), expected, rtol=0, atol=bound * largest)


def fused_experts(directory: Path) -> None:
    """Store each layer's experts as one tensor, as published files of Qwen3.5 do."""
    stored = load_file(directory / "model.safetensors")
    fused = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for name in stored:
        if not name.endswith(".experts.0.gate_proj.weight"):
            continue
        prefix = name.removesuffix("0.gate_proj.weight")
        count = sum(each.startswith(prefix) for each in stored) // 3
        gates, ups, downs = (
            torch.stack([stored[f"{prefix}{expert}.{part}.weight"] for expert in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        fused[f"{prefix}gate_up_proj"] = torch.cat((gates, ups), 1)
        fused[f"{prefix}down_proj"] = downs
    save_file(fused, directory / "model.safetensors", {"format": "pt"})


def test_a_published_model_with_images_is_converted_as_a_text_model(tmp_path, capsys):
    """Leave out the tower and the layers that predict several tokens, and read experts stored as one tensor."""
    model = randomized(MODELS["qwen3_5_moe"])
    model.save_pretrained(tmp_path / "text")
    read_hf(tmp_path / "text", tmp_path / "expected")
    whole_model = tmp_path / "whole"
    shutil.copytree(tmp_path / "text", whole_model)
    fused_experts(whole_model)
    stored = load_file(whole_model / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in stored.items()
    }
    extra = {"model.visual.blocks.0.norm1.weight": torch.ones(4), "mtp.fc.weight": torch.ones(4, 8)}
    save_file({**renamed, **extra}, whole_model / "model.safetensors", {"format": "pt"})
    text = json.loads((whole_model / "config.json").read_text())
    text |= {"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 1},
    }
    (whole_model / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    read_hf(whole_model, tmp_path / "ours")
    printed = capsys.readouterr().out
    assert "1 tensors of images are left out" in printed
    assert "1 tensors of multi-token-prediction layers are left out" in printed
    for directory in (tmp_path / "expected", tmp_path / "ours"):
        write_hf(directory, tmp_path / f"{directory.name} back")
    assert same(tensors(tmp_path / "expected back"), tensors(tmp_path / "ours back"))


def model_of_flags(ours: Path) -> ModelConfig:
    """Return the model of the flags next to a checkpoint."""
    words = (ours / "model.flags").read_text().split()
    return parse([*words, "--seq-length", "8", "--micro-batch-size", "1", "--mock-data"]).run.model


def test_the_same_logits_and_flags_that_make_the_model(converted):
    assert_same_logits(converted.model, converted.ours, LENGTH)
    saved = read_manifest(converted.ours, 0)["config"]["model"]
    model = model_of_flags(converted.ours)
    assert all(
        saved[name] == value for name, value in architecture(model).items()
    ) and model.num_layers in (2, 3)


def test_greedy_tokens_are_those_of_transformers(converted):
    """Generate beyond a window, with the key-value cache of each layer."""
    torch.manual_seed(6)
    prompts = torch.randint(3, VOCABULARY, (2, 5))
    new = LENGTH - 5
    with torch.no_grad():
        tokens = prompts
        for _ in range(new):
            best = converted.model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, best), 1)
    manifest = read_manifest(converted.ours, 0)
    run = saved_run(manifest, (1, 1))
    loaded = load_model(run, SoloComm(), str(converted.ours), 0, manifest)
    decoder = Decoder(loaded, [LENGTH, LENGTH])
    samples = torch.arange(2)
    ours = [prompts]
    logits = decoder.logits(samples, [5, 5], prompts.flatten())
    for _ in range(new):
        ours.append(logits.argmax(-1, keepdim=True))
        logits = decoder.logits(samples, [1, 1], ours[-1].flatten())
    assert torch.equal(torch.cat(ours, 1), tokens)


@pytest.mark.parametrize("kind", RECENT)
def test_a_greedy_text_of_100_tokens_is_transformers(tmp_path, kind):
    """Pass every window and a chunk of the delta rule, with the caches of both programs."""
    model = randomized(MODELS[kind])
    model.config.max_position_embeddings = 128
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "hf")
    read_hf(tmp_path / "hf", tmp_path / "ours")
    prompt = torch.randint(3, VOCABULARY, (1, 5), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        expected = model.generate(prompt, do_sample=False, max_new_tokens=100, use_cache=True)
    manifest = read_manifest(tmp_path / "ours", 0)
    loaded = load_model(
        saved_run(manifest, (1, 1)), SoloComm(), str(tmp_path / "ours"), 0, manifest
    )
    decoder = Decoder(loaded, [105])
    samples = torch.arange(1)
    ours = [prompt]
    logits = decoder.logits(samples, [5], prompt.flatten())
    for _ in range(100):
        ours.append(logits.argmax(-1, keepdim=True))
        logits = decoder.logits(samples, [1], ours[-1].flatten())
    assert torch.equal(torch.cat(ours, 1), expected)


# Gradients that transformers computes with differences of long FP32 sums: they differ by up to 2e-4 from the same code in FP64,
# with which this program's are compared (largest difference 2e-5).
OF_DECAYS = ("dt_bias", "A_log", "in_proj_a.weight", "in_proj_ba.weight")
IN_FP64 = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class InDouble(TorchFunctionMode):
    """Replace FP32 by FP64 where code asks for FP32."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        if function is torch.Tensor.float:
            return arguments[0].double()

        def widened(value: object) -> object:
            return torch.float64 if value is torch.float32 else value

        named = {name: widened(value) for name, value in (named or {}).items()}
        return function(*map(widened, arguments), **named)


Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(
    model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())


def exact_gradients(
    model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor, loss_of: Loss
) -> dict[str, torch.Tensor]:
    """Return the gradients of the loss from transformers' code in FP64."""
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"
    exact.zero_grad()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            loss_of(exact, tokens, labels).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: gradient.float() for name, gradient in gradients(exact).items()}


def check_training(
    theirs: torch.nn.Module,
    directory: Path,
    backend: str,
    loss_of: Loss = cross_entropy,
    documents: PackedDocuments | None = None,
    **changes: object,
) -> None:
    """Compare the loss and the gradient of every weight, norms and biases included. loss_of: of transformers' model"""
    architecture, model = read_config(json.loads((directory / "config.json").read_text()))
    plain = {
        "seq_length": LENGTH,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "make_vocab_size_divisible_by": 1,
    }
    trainer = make_trainer(
        SoloComm(), small_run(**{**asdict(model), **plain, **changes}), Ops.build(backend)
    )
    weights = open_hugging_face(str(directory))
    ours = {p.spec.name: p for p in trainer.optimizer.flat.parameters}
    for name, parameter in ours.items():
        parameter.data.copy_(weights.read(name))
    tokens, labels = torch.randint(
        0, VOCABULARY, (2, LENGTH, 2), generator=torch.Generator().manual_seed(5)
    )  # (s, b) each
    theirs.zero_grad()
    expected = loss_of(theirs, tokens.t(), labels.t())
    expected.backward()
    trainer.optimizer.zero_grad()
    loss = trainer.stage.last(
        tokens, labels, Pass(first_sample=0, documents=documents or PackedDocuments())
    )
    loss.backward()
    balance = sum(
        router.take_load()[-2].item() for router in expert_counts.routers(trainer.stage).values()
    )
    torch.testing.assert_close(
        loss + balance * sum(trainer.run.model.moe_aux_loss_coeff), expected, rtol=1e-5, atol=0
    )
    found = gradients(theirs)
    if architecture.model_type in IN_FP64:
        exact = exact_gradients(theirs, tokens.t(), labels.t(), loss_of)
        found |= {name: exact[name] for name in exact if name.endswith(OF_DECAYS)}
    made = {
        "lm_head.weight" if name == architecture.head else name: part
        for name, part in tensor_mappings(architecture, model).items()
        if not name.endswith("e_score_correction_bias")  # has no gradient
    }
    assert made.keys() == found.keys()
    for name, part in made.items():
        gradient = in_their_shape(ours[part.ours].main_grad, part, model)
        scale = found[name].abs().max()
        torch.testing.assert_close(
            gradient / scale,
            found[name] / scale,
            rtol=0,
            atol=3e-5 if name.endswith(OF_DECAYS) else 1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_same_loss_and_gradients(converted, backend):
    check_training(converted.model, converted.theirs, backend)


BORDERS = ((0, 1, 9, LENGTH), (0, 8, LENGTH))  # of the documents of two samples


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_same_loss_and_gradients_of_documents(converted, backend):
    """A sample's documents are texts of their own in transformers."""
    starts = torch.zeros(2, LENGTH, dtype=torch.int32)
    for own, borders in zip(starts, BORDERS, strict=True):
        for border in borders[:-1]:
            own[border:] = border
    positions = (torch.arange(LENGTH, dtype=torch.int32) - starts).t().contiguous()

    def loss(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sums = [
            cross_entropy(model, tokens[i : i + 1, first:end], labels[i, first:end]) * (end - first)
            for i, borders in enumerate(BORDERS)
            for first, end in itertools.pairwise(borders)
        ]
        return torch.stack(sums).sum() / tokens.numel()

    check_training(
        converted.model, converted.theirs, backend, loss, PackedDocuments(starts, positions)
    )


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Mixtral", {"num_local_experts": 4}),
        ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True}),
        (
            "Qwen2Moe",
            {"num_experts": 6, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 36},
        ),
        ("Olmoe", {"num_experts": 6}),
    ],
)
def test_the_same_loss_with_the_balancing_loss(tmp_path, kind, more, backend):
    """Use one layer, since theirs joins the layers' tokens; their sum over a token's experts is not divided by k."""
    model = randomized(decoder(kind, num_hidden_layers=1, num_experts_per_tok=2, **more))
    model.save_pretrained(tmp_path)

    def loss(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = model(tokens, output_router_logits=True)
        return (
            torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
            + 0.7 * out.aux_loss
        )

    check_training(model, tmp_path, backend, loss, moe_aux_loss_coeff=(2 * 0.7,))


def test_without_the_config_that_it_came_with_one_is_made(converted, tmp_path):
    """Write it as transformers 4 and published files do."""
    write_hf(converted.ours, tmp_path / "hf", *without_files(tmp_path))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    if (
        converted.model.config.model_type == "granitemoehybrid"
    ):  # without Mamba it is Granite's block
        assert type(again).__name__ == "GraniteForCausalLM"
    else:
        assert type(again) is type(converted.model)
        assert same(again.state_dict(), converted.model.state_dict())
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = again(tokens).logits, converted.model(tokens).logits
    # Granite's separate matmuls round differently from Granite 4's fused one.
    rtol = 1e-5 if type(again) is not type(converted.model) else 0.0
    torch.testing.assert_close(*logits, rtol=rtol, atol=rtol)
    read_hf(tmp_path / "hf", tmp_path / "ours")
    first, second = (
        read_manifest(path, 0)["config"]["model"] for path in (converted.ours, tmp_path / "ours")
    )
    assert first == second


# Fields of the config.json that models were published with at huggingface.co, by recipe or by architecture.
PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "foreign" / "published_configs.json").read_text()
)


@pytest.mark.parametrize("recipe", sorted(PUBLISHED.keys() & RECIPES.keys()))
def test_a_recipe_is_the_published_model(recipe):
    assert architecture(read_config(PUBLISHED[recipe])[1]) == architecture(RECIPES[recipe]().model)


def test_the_chat_template_is_copied_or_is_a_named_one(converted, tmp_path):
    source = tmp_path / "source"
    named = tmp_path / "named.jinja"
    shutil.copytree(converted.theirs, source)
    (source / "chat_template.jinja").write_text("own")
    (source / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    named.write_text("named")
    read_hf(source, tmp_path / "ours")
    for more, expected in (((), "own"), (("--chat-template", named), "named")):
        made = tmp_path / expected
        write_hf(tmp_path / "ours", made, *more)
        assert (made / "chat_template.jinja").read_text() == expected
        assert (made / "tokenizer_config.json").read_text() == '{"chat_template": "old"}'
    read_hf(converted.theirs, tmp_path / "with", "--chat-template", named)
    assert (tmp_path / "with" / "hugging_face" / "chat_template.jinja").read_text() == "named"


def test_every_file_of_a_tokenizer_goes_there_and_back(copied, tmp_path, capsys):
    """Include named templates, and the files of any tokenizer in transformers."""
    source = copied("llama")
    names = {
        *"tokenizer.json tokenizer.model tekken.json qwen.tiktoken added_tokens.json".split(),
        *"additional_chat_templates/tool_use.jinja chat_template.jinja tokenization_own.py".split(),
    }
    for module in "marian roformer xlm luke bertweet prophetnet t5 gpt2 bert".split():
        text = importlib.util.find_spec(f"transformers.models.{module}").submodule_search_locations[
            0
        ]
        for file in Path(text).glob("tokenization*.py"):
            table = re.search(r"VOCAB_FILES_NAMES[^=]*=\s*\{(.*?)\}", file.read_text(), re.DOTALL)
            names |= {*re.findall(r':\s*"([^"]+)"', table[1])} if table else set()
    assert {"source.spm", "vocab.txt", "spiece.model", "merges.txt"} <= names
    for name in names:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"{{}} {name}")
    back = there_and_back(tmp_path)
    for name in names:
        assert (back / name).read_text() == f"{{}} {name}"
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (source / "tokenizer.json").write_text(pointer)
    capsys.readouterr()
    assert convert("--from-hf", source, "--save", tmp_path / "again") == 2
    assert "tokenizer.json cannot be read (it is a Git LFS pointer: run git lfs pull)" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "again").exists()


def test_a_named_chat_template_leaves_templates_with_names(copied, tmp_path, capsys):
    source = copied("llama")
    named = tmp_path / "named.jinja"
    rows = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": rows}))
    named.write_text("named")
    made = tmp_path / "made"
    assert convert("--from-hf", source, "--to-hf", made, "--chat-template", named) == 0
    assert (made / "chat_template.jinja").read_text() == "named"
    assert (made / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    rows[1]["name"] = "../tool_use"
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": rows}))
    capsys.readouterr()
    assert convert("--from-hf", source, "--to-hf", tmp_path / "m", "--chat-template", named) == 2
    assert "has a chat template named '../tool_use'" in capsys.readouterr().err


def test_a_dtype_of_ones_own_and_one_file(converted, tmp_path):
    write_hf(converted.ours, tmp_path / "half", "--dtype", "bf16")
    half = tensors(tmp_path / "half")
    whole = tensors(converted.theirs)
    assert sorted(file.name for file in (tmp_path / "half").glob("model*")) == ["model.safetensors"]
    assert same(half, {name: tensor.bfloat16() for name, tensor in whole.items()})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert again.dtype == torch.bfloat16
    read_hf(tmp_path / "half", tmp_path / "kept")
    write_hf(tmp_path / "kept", tmp_path / "again")
    assert same(half, tensors(tmp_path / "again")), "BF16 is kept as BF16"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a checkpoint of this program with a padded vocabulary."""
    directory = tmp_path_factory.mktemp("trained")
    trainer = make_trainer(SoloComm(), small_run(vocab_size=VOCABULARY))
    trainer.train_step()
    trainer.save(str(directory))
    trainer.close()
    return directory


def test_a_model_trained_here_is_exported(trained, tmp_path):
    write_hf(trained, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "GPT2LMHeadModel" and model.config.vocab_size == VOCABULARY
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers refuses files without it"


def edit(path: Path, field: str, value: object) -> None:
    path.write_text(json.dumps(changed(json.loads(path.read_text()), field, value)))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Return a directory of every model, in one file."""
    directory = tmp_path_factory.mktemp("sources")
    for name, build in MODELS.items():
        build().save_pretrained(directory / name)
    return {name: directory / name for name in MODELS}


@pytest.fixture
def copied(sources, tmp_path) -> Callable[[str], Path]:
    """Copy the directory of a model to `hf`."""
    return lambda name: Path(shutil.copytree(sources[name], tmp_path / "hf"))


def there_and_back(folder: Path, *more: object) -> Path:
    """Convert `hf` to a checkpoint and back; return the new directory."""
    read_hf(folder / "hf", folder / "ours")
    write_hf(folder / "ours", folder / "back", *more)
    return folder / "back"


def without_files(folder: Path) -> tuple[str, Path]:
    """Return flags for a conversion that has no file of the original model."""
    (folder / "none").mkdir()
    return "--hf-files", folder / "none"


def refused(capsys, *words: object) -> str:
    """Return the one line of a refused conversion."""
    assert convert(*words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(("model", "change", "message"), refusals("config_json"))
def test_what_the_block_cannot_do_is_named(copied, tmp_path, capsys, model, change, message):
    field, value = change.split(" ", 1)
    hf = copied(model)
    edit(hf / "config.json", field, MISSING if value == "removed" else json.loads(value))
    assert message in refused(capsys, "--from-hf", hf, "--save", tmp_path / "ours")
    assert not list(tmp_path.glob("*ours*"))


def stored(path: Path, change: Callable[[dict], dict]) -> None:
    """Change the tensors of a safetensors file."""
    save_file(change(load_file(path)), path, {"format": "pt"})


DAMAGE = [
    ("model-00002-of-*", Path.unlink, "is missing, and model.safetensors.index.json names it"),
    (
        "model-00002-of-*",
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        "is not a valid safetensors file: its header is damaged (a tensor of shape",
    ),
    (
        "model-00002-of-*",
        lambda path: path.write_bytes(b"\xff" * 64),
        "is not a valid safetensors file: its header of ",
    ),
    (
        "model-00002-of-*",
        lambda path: save_file({"x": torch.ones(1)}, path),
        "does not hold transformer.",
    ),
    (
        "model.safetensors.index.json",
        Path.unlink,
        "holds neither model.safetensors nor model.safetensors.index.json",
    ),
    (
        "model.safetensors.index.json",
        lambda path: path.write_text('{"weight_map": {"a": "../b"}}'),
        "has no weight_map of tensors",
    ),
    ("config.json", lambda path: path.write_text("{"), "config.json is not JSON: Expecting"),
    ("config.json", lambda path: path.write_text("[]"), "config.json holds list, not an object"),
    ("config.json", Path.unlink, "config.json is missing"),
    (
        "model-00001-of-*",
        lambda path: stored(path, lambda old: {**old, "score.weight": torch.ones(2)}),
        "tensors that GPT2LMHeadModel does not have here",
    ),
    (
        "model-00001-of-*",
        lambda path: stored(
            path, lambda old: {**old, "lm_head.weight": torch.ones(VOCABULARY, 48)}
        ),
        "lm_head.weight differs from ",
    ),
    *(
        (
            "model-00002-of-*",
            lambda path, to=dtype: stored(
                path, lambda old: {name: t.to(to) for name, t in old.items()}
            ),
            message,
        )
        for dtype, message in (
            (torch.float8_e4m3fn, "has the format F8_E4M3, which is not supported: save the model"),
            (torch.int8, "has the format I8, which is not supported: save the model"),
            (torch.int64, "has the format I64, which is not supported for weights: save"),
        )
    ),
]


@pytest.mark.parametrize(
    ("file", "damage", "message"), DAMAGE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_damaged_files_are_named_and_nothing_is_left(
    tmp_path, capsys, sources, file, damage, message
):
    transformers.GPT2LMHeadModel.from_pretrained(sources["gpt2"]).save_pretrained(
        tmp_path / "hf", max_shard_size="60KB"
    )
    capsys.readouterr()
    damage(next((tmp_path / "hf").glob(file)))
    line = refused(capsys, "--from-hf", tmp_path / "hf", "--save", tmp_path / "ours")
    assert message in line and line.startswith(
        f"fugaku-megatron convert: --from-hf {tmp_path / 'hf'}: "
    )
    assert not list(tmp_path.glob("*ours*"))


def test_a_disk_that_fails_in_the_middle_leaves_nothing(sources, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert_command, "carry", full)
    line = refused(capsys, "--from-hf", sources["gpt2"], "--save", tmp_path / "ours")
    assert line.endswith("ours: No space left on device: pass another directory") and not list(
        tmp_path.iterdir()
    )


def test_what_a_killed_conversion_left_is_removed_and_other_directories_stay(sources, tmp_path):
    """Remove directories of dead processes on this host; processes of other hosts may be running."""
    killed = subprocess.Popen(
        [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    own = f".ours.converting.{platform.node()}.{killed.pid}"
    killed.kill()
    killed.communicate()
    others = [
        ".ours.converting.elsewhere.7.ab",
        f".ours.converting.{platform.node()}.{os.getppid()}.ab",
        "ours.tmp",
    ]
    for name in (f"{own}.ab", *others):
        (tmp_path / name).mkdir()
    read_hf(sources["gpt2"], tmp_path / "ours")
    assert {path.name for path in tmp_path.iterdir()} == {"ours", *others}


def test_two_conversions_into_one_directory_do_not_disturb_each_other(tmp_path):
    """Start the second while the first writes. The first to end gets the name, and the other is refused."""
    with pytest.raises(ValueError, match=r"--save .*ours is not empty: pass a new directory"):
        with new_directory("--save", str(tmp_path / "ours")) as first:
            (first / "weights").write_text("first")
            with new_directory("--save", str(tmp_path / "ours")) as second:
                (second / "weights").write_text("second")
            assert (first / "weights").read_text() == "first"
    assert (tmp_path / "ours" / "weights").read_text() == "second" and len(
        list(tmp_path.iterdir())
    ) == 1


@pytest.mark.parametrize(
    ("query", "others", "widest"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_tensors_that_become_one_are_kept_in_the_widest_of_their_formats(
    copied, tmp_path, query, others, widest
):
    """Queries, keys and values are one tensor here. No value changes."""
    file = copied("llama") / "model.safetensors"
    stored = {
        name: tensor.to(
            query if "q_proj" in name else others if ".self_attn." in name else tensor.dtype
        )
        for name, tensor in load_file(file).items()
    }
    save_file(stored, file, {"format": "pt"})
    back = there_and_back(tmp_path)
    joined = ("q_proj", "k_proj", "v_proj")
    expected = {
        name: tensor.to(widest) if any(part in name for part in joined) else tensor
        for name, tensor in stored.items()
    }
    assert same(tensors(back), expected)


TYPES = {  # of rope_scaling, each with positions beyond the original ones
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn with its own numbers": {
        **YARN,
        "beta_fast": 4.0,
        "beta_slow": 0.25,
        "truncate": False,
        "attention_factor": 1.3,
    },
    "yarn with mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("Llama", kind) for kind in TYPES), ("Qwen3", "yarn"), ("StableLm", "linear")],
)
def test_every_type_of_rope_scaling_is_computed_and_comes_back(tmp_path, family, kind):
    rope = {"rope_theta": 10000.0, **TYPES[kind]}
    heads = {"partial_rotary_factor": 0.5} if family == "StableLm" else {"head_dim": 24}
    model = randomized(
        decoder(family, rope_parameters=rope, max_position_embeddings=LENGTH, **heads)
    )
    model.save_pretrained(tmp_path / "hf")
    back = there_and_back(tmp_path, *without_files(tmp_path))
    assert_same_logits(model, tmp_path / "ours", 4 * LENGTH, 1e-5)
    again, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        for path in (back, tmp_path / "hf")
    )
    tokens = torch.arange(3 * LENGTH).remainder(VOCABULARY)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-6)
    assert again.config.rope_parameters["rope_type"] == rope["rope_type"]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("length", [LENGTH, 5 * LENGTH, 131072])
def test_angles_are_those_of_transformers(kind, length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **TYPES[kind]}
    config = decoder("Llama", rope_parameters=rope, head_dim=24)().config
    wanted, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, torch.device("cpu"), seq_len=length
    )
    model = read_config(json.loads(config.to_json_string()))[1]
    scaled = frequencies(model, length) / (model.rotary_seq_len_interpolation_factor or 1.0)
    torch.testing.assert_close(scaled, wanted, rtol=1e-6, atol=0)
    cosines, _ = rotary_angles(model, torch.zeros(1), length)
    torch.testing.assert_close(cosines, torch.full_like(cosines, factor), rtol=1e-6, atol=0)


SCALINGS = [
    {
        "factor": 16.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    {
        "factor": 3.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 32.5,
    },  # transformers then takes max_position_embeddings
    {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_any_scaling_of_llama_3_is_computed_and_comes_back(tmp_path, scaling):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, **scaling}
    model = randomized(
        decoder("Llama", rope_parameters=rope, max_position_embeddings=256, head_dim=24)
    )
    model.save_pretrained(tmp_path / "hf")
    if "original_max_position_embeddings" not in scaling:
        edit(tmp_path / "hf" / "config.json", "rope_parameters", rope)
    back = there_and_back(tmp_path, *without_files(tmp_path))
    assert_same_logits(model, tmp_path / "ours", 200, 1e-4)
    flags = model_of_flags(tmp_path / "ours")
    assert flags.rope_scaling_original_max_position_embeddings == scaling.get(
        "original_max_position_embeddings", 256
    )
    assert (flags.rope_scaling_low_freq_factor, flags.rope_scaling_high_freq_factor) == (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
    )
    made = transformers.AutoConfig.from_pretrained(back).rope_parameters
    assert made == {**rope, "original_max_position_embeddings": 256, **scaling}
    again, theirs = (
        read_config(json.loads((path / "config.json").read_text()))[1]
        for path in (back, tmp_path / "hf")
    )
    assert torch.equal(frequencies(again, 256), frequencies(theirs, 256))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "llama3", **SCALINGS[0]},
            "--rope-scaling-low-freq-factor is 2.0, and Megatron-LM computes 1.0",
        ),
        (TYPES["dynamic"], "--rope-dynamic-factor is 2.0, and Megatron-LM's GPT computes None"),
    ],
)
def test_a_scaling_that_megatron_has_no_arguments_for_is_refused(
    tmp_path, capsys, scaling, message
):
    rope = {"rope_theta": 10000.0, **scaling}
    randomized(decoder("Llama", rope_parameters=rope, max_position_embeddings=256)).save_pretrained(
        tmp_path / "hf"
    )
    capsys.readouterr()
    line = refused(capsys, "--from-hf", tmp_path / "hf", "--to-megatron", tmp_path / "megatron")
    assert message in line and not list(tmp_path.glob("*megatron*"))


@pytest.mark.parametrize(
    ("model", "flag"),
    [
        ("olmo", "--normalization is PlainLayerNorm"),
        ("gpt_neox", "--parallel-residual is True"),
        ("gemma", "--geglu is True"),
        ("granite", "--embedding-multiplier is 3.0"),
        ("falcon", "--parallel-residual is True"),
    ],
)
def test_a_block_that_megatron_does_not_have_is_refused(sources, tmp_path, capsys, model, flag):
    capsys.readouterr()
    line = refused(capsys, "--from-hf", sources[model], "--to-megatron", tmp_path / "megatron")
    assert (
        f"{flag}" in line and "Megatron-LM's GPT computes" in line and not list(tmp_path.iterdir())
    )


# config.json of models as published, each with the file that it was found in. "parameters": transformers' number.
MODELS_PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "foreign" / "published_models.json").read_text()
)
CONVERTED = {name: row for name, row in MODELS_PUBLISHED.items() if "parameters" in row}
REFUSED = {
    "MiniMaxAI/MiniMax-M2.5": "model_type is 'minimax_m2'",
    "Qwen/Qwen3-32B-FP8": "quantization_config is",
    "Qwen/Qwen3-VL-2B-Instruct": "model_type is 'qwen3_vl'",
    "XiaomiMiMo/MiMo-7B-Base": "model_type is 'mimo'",
    "deepseek-ai/DeepSeek-V3.2": "model_type is 'deepseek_v32'",
    "google/gemma-4-26B-A4B": "model_type is 'gemma4'",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "model_type is 'llama4'",
    "moonshotai/Kimi-K2-Instruct": "model_type is 'kimi_k2'",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "model_type is 'nemotron_h'",
    "swiss-ai/Apertus 8B with 8192 positions": "rope_scaling is None without rope_parameters",
    "zai-org/GLM-5": "model_type is 'glm_moe_dsa'",
}


def model_of_file(name: str) -> ModelConfig:
    return read_config(plain_config(MODELS_PUBLISHED[name]["config"]))[1]


@pytest.mark.parametrize("name", CONVERTED)
def test_a_published_file_is_a_model_of_the_published_size(name):
    model = replace(model_of_file(name), make_vocab_size_divisible_by=1)
    run = RunConfig(model=model, batch=BatchConfig(micro_batch_size=1))
    assert model_parameters(run) == CONVERTED[name]["parameters"]


def test_apertus_with_rope_as_the_message_asks_has_the_published_size():
    config = MODELS_PUBLISHED["swiss-ai/Apertus 8B with 8192 positions"]["config"]
    rope = {"rope_type": "default", "rope_theta": 5e5}
    model = read_config({**config, "rope_parameters": rope})[1]
    assert (model.rotary_base, model.use_rope_scaling) == (5e5, False)
    linear = {"rope_type": "linear", "factor": 2.0}
    scaled = {name: config[name] for name in config if name != "rope_theta"}
    assert read_config({**scaled, "rope_scaling": linear})[1].rotary_base == 12e6
    model = replace(model, make_vocab_size_divisible_by=1)
    run = RunConfig(model=model, batch=BatchConfig(micro_batch_size=1))
    assert model_parameters(run) == 8053338176


def test_a_pattern_of_exaone_in_letters():
    """The text of EXAONE 4.5 has both."""
    published = MODELS_PUBLISHED["LGAI-EXAONE/EXAONE-4.0-1.2B"]["config"]
    config = {**published, "sliding_window": 4096, "num_hidden_layers": 8, "reorder_qk_norm": True}
    kinds = 2 * [*3 * ["sliding_attention"], "full_attention"]
    named = read_config({**config, "layer_types": kinds, "sliding_window_pattern": "LLLG"})[1]
    assert (named.window_size, named.window_attn_skip_freq) == ("4095,0", "4")
    for pattern in ("LLLG", 4):
        given = {**config, "layer_types": None, "sliding_window_pattern": pattern}
        assert read_config(given)[1] == named
    with pytest.raises(ValueError, match="sliding_window_pattern is 'LGLL', not a whole number"):
        read_config({**config, "layer_types": None, "sliding_window_pattern": "LGLL"})


@pytest.mark.parametrize("size", ["27B", "35B-A3B"])
def test_the_recipes_of_qwen3_6_are_the_published_models(size):
    found = model_of_file(f"nvidia/Qwen3.6-{size}-NVFP4")
    recipe = RECIPES[f"qwen3.6-{size.lower()}"]()
    assert architecture(found) == architecture(recipe.model)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_file_that_is_not_built_is_refused_by_a_field(name):
    with pytest.raises(ValueError, match=REFUSED[name]) as error:
        model_of_file(name)
    assert "\n" not in str(error.value)


def test_names_of_published_files(copied, tmp_path):
    """GPT-2's own files have no prefix, and contain causal masks; a tied head may be stored as well."""
    file = copied("gpt2") / "model.safetensors"
    stored = load_file(file)
    published = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(
        {**published, **masks, "lm_head.weight": published["wte.weight"].clone()},
        file,
        {"format": "pt"},
    )
    back = there_and_back(tmp_path)
    assert same(tensors(back), stored)


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random blocks and scales for an expert weight (e, h, f), and transformers' values of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, inputs, outputs = weight.shape
    generator = torch.Generator().manual_seed(7)
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 127, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales, convert_moe_packed_tensors(blocks, scales)


def test_mxfp4_weights_of_gpt_oss_are_converted_to_bf16(tmp_path, capsys):
    size = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}
    model = randomized(decoder("GptOss", head_dim=16, num_experts_per_tok=2, **size)).bfloat16()
    source = tmp_path / "hf"
    model.save_pretrained(source)
    expected = tensors(source)
    stored = {}
    for name, tensor in expected.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        blocks, scales, expected[name] = mxfp4(tensor)
        stored[f"{name}_blocks"] = blocks
        stored[f"{name}_scales"] = scales
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    edit(source / "config.json", "quantization_config", quantization)
    back = there_and_back(tmp_path)
    assert same(tensors(back), expected)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert same(again.state_dict(), expected)
    capsys.readouterr()
    name = next(name for name in stored if name.endswith("_scales"))
    for wrong, message in (
        ({name: stored[name][:, :1].clone()}, "which is not MXFP4: copy the whole directory again"),
        ({}, f"without {name}: copy the whole directory again"),
    ):
        others = {place: x for place, x in stored.items() if place != name}
        save_file({**others, **wrong}, source / "model.safetensors", {"format": "pt"})
        assert message in refused(capsys, "--from-hf", source, "--save", tmp_path / "none")


def test_the_text_model_of_a_multimodal_model_is_converted(copied, tmp_path, capsys):
    """Read names of transformers 4 and 5; the written model is a text model."""
    folder = copied("gemma3")
    file = folder / "model.safetensors"
    text = json.loads((folder / "config.json").read_text())
    whole_model = load_file(file)
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": text}))
    for number, prefix in enumerate(("language_model.model.", "model.language_model.")):
        named = {prefix + name.removeprefix("model."): x for name, x in whole_model.items()}
        images = {
            "vision_tower.patch.weight": torch.ones(2),
            "multi_modal_projector.x": torch.ones(2),
        }
        save_file({**named, **images}, file, {"format": "pt"})
        capsys.readouterr()
        read_hf(folder, tmp_path / f"ours{number}")
        assert "note: 2 tensors of images are left out: the text" in capsys.readouterr().out
        write_hf(tmp_path / f"ours{number}", tmp_path / f"back{number}")
        assert same(tensors(tmp_path / f"back{number}"), whole_model)
        written = json.loads((tmp_path / f"back{number}" / "config.json").read_text())
        assert read_config(written)[1] == read_config(text)[1]
    edit(folder / "config.json", "text_config", {**text, "model_type": "qwen2"})
    message = "text_config has the model_type 'qwen2': it can be gemma3_text"
    assert message in refused(capsys, "--from-hf", folder, "--save", tmp_path / "none")


def test_fields_next_to_a_text_config_count_in_its_place(tmp_path, capsys):
    """A head of its own as the whole model's config says, and a quantization that is refused."""
    model = randomized(decoder("Gemma3", head_dim=16, tie_word_embeddings=False))
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    outer = {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": text}
    config = {**outer, "image_token_index": 99, "hidden_size": text["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(config))
    read_hf(folder, tmp_path / "ours")
    assert_same_logits(model, tmp_path / "ours", LENGTH)
    capsys.readouterr()
    for name, value, message in (
        (
            "quantization_config",
            {"load_in_4bit": True},
            "quantization_config is {'load_in_4bit': Tr",
        ),
        ("tie_word_embeddings", True, "says tie_word_embeddings true: correct one of them"),
        ("hidden_size", 7, "hidden_size is 7 next to text_config, which is not known of gemma3"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, name: value}))
        assert message in refused(capsys, "--from-hf", folder, "--save", tmp_path / "none")


def test_flags_that_do_not_go_together(trained, sources, tmp_path, capsys, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    hf = ["--from-hf", sources["gpt2"]]
    new = ["--save", tmp_path / "new"]
    for words, message in [
        (hf, "no destination given: pass exactly one of --save, --to-hf"),
        ([*hf, "--load", trained, *new], "more than one source, --load and --from-hf: pass"),
        (["--load", trained, *new], "a checkpoint loads into any layout"),
        ([*hf, "--save", tmp_path / "full"], "is not empty: pass a new directory"),
        ([*hf, "--save", tmp_path / "full" / "thesis.tex"], "is a file: pass a directory"),
        (
            [*hf, *new, "--max-shard-size", "5 apples"],
            "--max-shard-size is '5 apples': pass a size such as 5GB",
        ),
        ([*hf, *new, "--ckpt-step", "3"], "--ckpt-step 3 is for --load"),
        ([*hf, *new, "--vocab-size", "3"], "--vocab-size 3 is for --from-megatron"),
        (
            [*hf, *new, "--tensor-model-parallel-size", "0"],
            "--tensor-model-parallel-size is 0: pass a number above 0",
        ),
        ([*hf, *new, "--hf-files", tmp_path / "none"], "is not a directory"),
        ([*hf, *new, "--chat-template", tmp_path / "none"], "is not a file"),
        (
            ["--from-hf", tmp_path / "none", *new],
            "is not a directory: pass one that holds config.json",
        ),
        (["--load", tmp_path / "none", "--to-hf", tmp_path / "new"], "holds no checkpoint"),
        (
            ["--load", trained, "--ckpt-step", "9", "--to-hf", tmp_path / "new"],
            "manifest.json is missing",
        ),
    ]:
        assert message in refused(capsys, *words)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["full"]
    monkeypatch.setenv("PMI_SIZE", "2")
    assert "convert is one process, and PMI_SIZE says that 2 were started" in refused(
        capsys, *hf, *new
    )


# Prints by how many bytes the memory of a conversion exceeded what was there before it.
MEASURED = """
import sys
from pathlib import Path
from fugaku_megatron.cli import program
from fugaku_megatron.convert import convert_command

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

hf, ours, back = sys.argv[1:]
for words in (["--from-hf", hf, "--save", ours], ["--load", ours, "--to-hf", back]):
    Path("/proc/self/clear_refs").write_text("5")  # the highest value begins anew
    before = status("VmRSS")
    assert program.main(["convert", *words]) == 0
    print("PEAK", status("VmHWM") - before)
"""


@pytest.mark.system
def test_memory_is_twice_the_largest_tensor(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=4096,
        n_positions=8,
        n_embd=1024,
        n_layer=2,
        n_head=4,
        n_inner=16384,
        bos_token_id=1,
        eos_token_id=2,
    )
    largest = config.n_embd * config.n_inner * 2
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "hf")
    save_file(
        {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in model.named_parameters()},
        tmp_path / "hf" / "model.safetensors",
        {"format": "pt"},
    )
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 4 * largest, (
        "the whole model would be seen"
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *(tmp_path / name for name in ("hf", "ours", "back"))],
        check=True,
        capture_output=True,
        text=True,
    )
    peaks = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("PEAK")]
    assert len(peaks) == 2 and max(peaks) < 2.2 * largest, [peak / largest for peak in peaks]
