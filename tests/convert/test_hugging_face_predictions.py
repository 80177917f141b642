"""MTP modules of Hugging Face files: losses of transformers' layers, the same bytes there and back, and damaged files."""

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.convert.hugging_face.conversion import open_hugging_face
from fugaku_megatron.convert.open_weights import open_weights
from fugaku_megatron.data.sampler import fetch
from tests.helpers import make_trainer, run_layout, small_run

transformers = pytest.importorskip("transformers")

from transformers.modeling_layers import MtpLayer  # noqa: E402

from tests.checks.conversions import refused  # noqa: E402
from tests.checks.hugging_face import edit, there_and_back, without_files  # noqa: E402
from tests.hf_models import LENGTH, MODELS, convert, randomized, read_hf, same, tensors, write_hf  # noqa: E402

pytestmark = pytest.mark.parallel
SAMPLES = 4
FILE = "model.safetensors"


class Predicting(NamedTuple):
    """A model of transformers, its MTP modules, and a directory of both."""

    model: nn.Module
    modules: list[nn.Module]
    directory: Path

    @property
    def layer(self) -> str:
        """Prefix of the first module's tensors."""
        return f"model.layers.{self.model.config.num_hidden_layers}."


def stored(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return a module's tensors by their names in published files, where experts are separate."""
    found = {}
    for name, tensor in module.state_dict().items():
        name = name.replace("post_norm.", "shared_head.norm.").removeprefix("mtp_block.")
        place, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            found[prefix + name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, own in enumerate(tensor):
            for each, part in zip(kinds, own.chunk(len(kinds)), strict=True):
                found[f"{prefix}{place}.{expert}.{each}.weight"] = part.clone()
    return found


def predicting(kind: str, directory: Path, count: int = 1) -> Predicting:
    """Save a model with random MTP modules, of which each repeats the word embedding and the head."""
    model = randomized(MODELS[kind])
    config = copy.deepcopy(model.config)
    config.first_k_dense_replace = 0
    config.mlp_layer_types = ["sparse"] * count
    layer = model.model.layers[-1]

    def build() -> nn.Module:
        norm = type(layer.input_layernorm)
        modules = [MtpLayer(config, type(layer), norm, number) for number in range(count)]
        for parameter in nn.ModuleList(modules).parameters():
            nn.init.normal_(parameter, std=0.2)
        return nn.ModuleList(modules)

    modules = [*randomized(build)]
    model.save_pretrained(directory)
    layers = model.config.num_hidden_layers
    whole = load_file(directory / FILE)
    for number, module in enumerate(modules):
        prefix = f"model.layers.{layers + number}."
        whole |= stored(module, prefix)
        whole[f"{prefix}embed_tokens.weight"] = whole["model.embed_tokens.weight"].clone()
        whole[f"{prefix}shared_head.head.weight"] = whole["lm_head.weight"].clone()
    save_file(whole, directory / FILE, {"format": "pt"})
    edit(directory / "config.json", "num_nextn_predict_layers", count)
    return Predicting(model, modules, directory)


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def made(request, tmp_path_factory) -> Predicting:
    return predicting(request.param, tmp_path_factory.mktemp(request.param) / "hf", count=2)


@pytest.fixture
def copied(tmp_path) -> Predicting:
    return predicting("deepseek_v3", tmp_path / "hf")


def in_double(module: nn.Module) -> nn.Module:
    exact = copy.deepcopy(module).double()
    for each in exact.modules():
        if hasattr(each, "config"):
            each.config._experts_implementation = "eager"
    return exact


def expected_losses(made: Predicting, samples: Tensor) -> list[Tensor]:
    """Return the losses of the model and of its modules in FP64, on samples (b, s + 1)."""
    model = in_double(made.model)
    tokens = samples[:, :-1]
    hidden = model.model(tokens).last_hidden_state
    losses = [F.cross_entropy(model.lm_head(hidden).flatten(0, 1), samples[:, 1:].flatten())]
    for depth, module in enumerate(made.modules, 1):
        module = in_double(module)
        hidden = hidden[:, :-1]
        embedded = model.model.embed_tokens(tokens[:, depth:])
        count = hidden.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)
        hidden = module(
            embedded,
            hidden,
            position_embeddings=model.model.rotary_emb(embedded, positions),
            attention_mask=mask[None, None],
            position_ids=positions,
            past_key_values=None,
        )
        logits = model.lm_head(hidden).flatten(0, 1)
        losses.append(F.cross_entropy(logits, samples[:, depth + 1 :].flatten()))
    return losses


def test_losses_are_those_of_transformers_layers(made):
    weights = open_hugging_face(str(made.directory))
    flags = {
        **asdict(weights.model),
        "seq_length": LENGTH,
        "global_batch_size": SAMPLES,
        "make_vocab_size_divisible_by": 1,
    }
    with contextlib.closing(make_trainer(SoloComm(), small_run(**flags))) as trainer:
        for parameter in trainer.optimizer.flat.parameters:
            parameter.data.copy_(weights.read(parameter.spec.name))
        samples = torch.from_numpy(fetch(trainer.train, range(SAMPLES))).t()
        result = trainer.train_step()
    main, *losses = expected_losses(made, samples.long())
    assert result.loss == pytest.approx(main.item(), rel=1e-5)
    assert result.predictions == pytest.approx([each.item() for each in losses], rel=1e-5)


@pytest.mark.parametrize("fresh", [False, True])
def test_there_and_back_every_byte_is_the_same(made, tmp_path, fresh):
    (tmp_path / "hf").symlink_to(made.directory)
    back = there_and_back(tmp_path, *(without_files(tmp_path) if fresh else ()))
    assert same(tensors(made.directory), tensors(back))
    written = json.loads((back / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 2
    if not fresh:
        assert written == json.loads((made.directory / "config.json").read_text())


def save_again(world: Comm, run: RunConfig, source: Path, target: Path) -> None:
    with contextlib.closing(make_trainer(world, run)) as trainer:
        trainer.load(str(source), weights_only=True)
        trainer.save(str(target))


def test_the_bytes_pass_through_a_run_in_another_layout(copied, tmp_path):
    """The last stage has an embedding of its own for the modules."""
    read_hf(copied.directory, tmp_path / "ours")
    flags = asdict(open_weights(str(tmp_path / "ours")).model)
    run_layout("tp2 pp2", save_again, flags, tmp_path / "ours", tmp_path / "saved")
    write_hf(tmp_path / "saved", tmp_path / "back", "--hf-files", tmp_path / "ours/hugging_face")
    assert same(tensors(copied.directory), tensors(tmp_path / "back"))


def test_modules_are_left_out_with_a_flag_and_where_the_destination_has_none(
    copied, tmp_path, capsys
):
    alone = {
        name: tensor
        for name, tensor in tensors(copied.directory).items()
        if not name.startswith(copied.layer)
    }
    count = len(tensors(copied.directory)) - len(alone)
    capsys.readouterr()
    read_hf(copied.directory, tmp_path / "whole")
    assert "note" not in capsys.readouterr().out
    read_hf(copied.directory, tmp_path / "dropped", "--drop-mtp")
    note = f"note: {count} tensors of multi-token-prediction layers are left out"
    assert note in capsys.readouterr().out
    for source, more in (("whole", ["--drop-mtp"]), ("dropped", [])):
        back = tmp_path / f"{source} back"
        assert convert("--load", tmp_path / source, "--to-hf", back, *more) == 0
        assert same(tensors(back), alone)
        assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert "the modules of --mtp-num-layers 1 are left out" in capsys.readouterr().out


def test_a_block_without_modules_in_hugging_face_is_written_alone(tmp_path, capsys):
    """Llama's files have no MTP modules, which a run may have trained next to its block."""
    randomized(MODELS["llama"]).save_pretrained(tmp_path / "hf")
    read_hf(tmp_path / "hf", tmp_path / "ours")
    flags = {**asdict(open_weights(str(tmp_path / "ours")).model), "mtp_num_layers": 1}
    run = small_run(**{**flags, "seq_length": LENGTH, "make_vocab_size_divisible_by": 1})
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        trainer.save(str(tmp_path / "trained"))
    capsys.readouterr()
    assert convert("--load", tmp_path / "trained", "--to-hf", tmp_path / "back") == 0
    assert "the modules of --mtp-num-layers 1 are left out" in capsys.readouterr().out
    assert tensors(tmp_path / "back").keys() == tensors(tmp_path / "hf").keys()


def test_files_that_hold_no_modules_make_a_model_without(copied, tmp_path, capsys):
    """transformers saves num_nextn_predict_layers and no such layers."""
    copied.model.save_pretrained(copied.directory)
    edit(copied.directory / "config.json", "num_nextn_predict_layers", 1)
    capsys.readouterr()
    read_hf(copied.directory, tmp_path / "ours")
    note = "note: config.json says num_nextn_predict_layers 1, and the files hold no such layers"
    assert note in capsys.readouterr().out
    assert not open_weights(str(tmp_path / "ours")).model.predictions


def without(*names: str) -> Callable[[Predicting, dict[str, Tensor]], dict[str, Tensor]]:
    return lambda made, whole: {
        name: x for name, x in whole.items() if name.removeprefix(made.layer) not in names
    }


def changed(name: str) -> Callable[[Predicting, dict[str, Tensor]], dict[str, Tensor]]:
    return lambda made, whole: {**whole, made.layer + name: whole[made.layer + name] + 1}


def test_kimi_k2_keeps_its_model_type(copied, tmp_path):
    """The model is DeepSeek-V3's under another name."""
    edit(copied.directory / "config.json", "model_type", "kimi_k2")
    back = there_and_back(tmp_path)
    assert same(tensors(copied.directory), tensors(back))
    config = json.loads((back / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (
        "kimi_k2",
        ["DeepseekV3ForCausalLM"],
    )


def test_modules_that_store_no_copies_are_read(copied, tmp_path):
    whole = tensors(copied.directory)
    few = without("embed_tokens.weight", "shared_head.head.weight")(copied, whole)
    save_file(few, copied.directory / FILE, {"format": "pt"})
    assert same(tensors(there_and_back(tmp_path)), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("eh_proj.weight"), "holds no tensor model.layers.3.eh_proj.weight, which config"),
        (
            changed("embed_tokens.weight"),
            "model.layers.3.embed_tokens.weight differs from model.embed_tokens.weight, and MTP modules share it "
            "here: pass --drop-mtp",
        ),
        (changed("shared_head.head.weight"), "shared_head.head.weight differs from lm_head.weight"),
    ],
)
def test_modules_that_do_not_fit_are_named_and_can_be_left_out(
    copied, tmp_path, capsys, change, message
):
    whole = tensors(copied.directory)
    save_file(change(copied, whole), copied.directory / FILE, {"format": "pt"})
    line = refused(capsys, "--from-hf", copied.directory, "--save", tmp_path / "ours")
    assert message in line
    read_hf(copied.directory, tmp_path / "ours", "--drop-mtp")


def test_modules_that_config_json_does_not_say_are_refused(copied, tmp_path, capsys):
    edit(copied.directory / "config.json", "num_nextn_predict_layers", 0)
    line = refused(capsys, "--from-hf", copied.directory, "--save", tmp_path / "ours")
    assert (
        "tensors that DeepseekV3ForCausalLM does not have here, such as ['model.layers.3." in line
    )
    edit(copied.directory / "config.json", "num_nextn_predict_layers", "one")
    line = refused(capsys, "--from-hf", copied.directory, "--save", tmp_path / "ours")
    assert "num_nextn_predict_layers is 'one', not a number of layers" in line


def test_a_file_cut_anywhere_is_named_in_one_line(copied, tmp_path, capsys):
    whole = (copied.directory / FILE).read_bytes()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, len(whole), (25,), generator=generator).tolist()
    for length in (0, 7, 8, *lengths, len(whole) - 1):
        (copied.directory / FILE).write_bytes(whole[:length])
        capsys.readouterr()
        line = refused(capsys, "--from-hf", copied.directory, "--save", tmp_path / "ours")
        assert f"{FILE} is not a valid safetensors file" in line
        assert not (tmp_path / "ours").exists()
