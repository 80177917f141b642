"""Files of Hugging Face models: tokenizers, chat templates, formats, quantized weights, models with images, memory."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fugaku_megatron.convert.hugging_face.config_json import read_config

transformers = pytest.importorskip("transformers")

from tests.hf_models import (  # noqa: E402
    LENGTH,
    MODELS,
    convert,
    decoder,
    randomized,
    read_hf,
    same,
    tensors,
    write_hf,
)

pytestmark = pytest.mark.unit
from tests.checks.conversions import refused  # noqa: E402
from tests.checks.hugging_face import assert_same_logits, edit, there_and_back  # noqa: E402

Tensors = dict[str, torch.Tensor]


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


def check_widened(folder: Path, stored: Tensors, quantization: dict, expected: Tensors) -> Path:
    """Convert a quantized model there and back, and compare its tensors; return the new directory."""
    save_file(stored, folder / "hf" / "model.safetensors", {"format": "pt"})
    edit(folder / "hf" / "config.json", "quantization_config", quantization)
    back = there_and_back(folder)
    assert same(tensors(back), expected)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    return back


def check_wrong_scales(capsys, folder: Path, stored: Tensors, wrong: Tensors, message: str) -> None:
    """Check that scales of a wrong shape are refused, and the missing ones too."""
    (name,) = wrong
    others = {place: x for place, x in stored.items() if place != name}
    for added, said in ((wrong, message), ({}, f"without {name}: copy the whole directory again")):
        save_file({**others, **added}, folder / "hf" / "model.safetensors", {"format": "pt"})
        assert said in refused(capsys, "--from-hf", folder / "hf", "--save", folder / "none")


def test_mxfp4_weights_of_gpt_oss_are_converted_to_bf16(tmp_path, capsys):
    size = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}
    model = randomized(decoder("GptOss", head_dim=16, num_experts_per_tok=2, **size)).bfloat16()
    model.save_pretrained(tmp_path / "hf")
    expected = tensors(tmp_path / "hf")
    stored = {}
    for name, tensor in expected.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        blocks, scales, expected[name] = mxfp4(tensor)
        stored[f"{name}_blocks"] = blocks
        stored[f"{name}_scales"] = scales
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    back = check_widened(tmp_path, stored, quantization, expected)
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert same(again.state_dict(), expected)
    name = next(name for name in stored if name.endswith("_scales"))
    wrong = {name: stored[name][:, :1].clone()}
    message = "which is not MXFP4: copy the whole directory again"
    check_wrong_scales(capsys, tmp_path, stored, wrong, message)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def in_fp8(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Return FP8 numbers of a matrix, the scales of blocks, and the matrix that both describe."""
    row = torch.arange(weight.shape[0]) // rows
    column = torch.arange(weight.shape[1]) // columns
    numbers = (100 * weight.float()).to(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(len(weight))
    scales = 0.005 + 0.01 * torch.rand(int(row[-1]) + 1, int(column[-1]) + 1, generator=generator)
    expected = numbers.double() * scales.double()[row][:, column]
    return numbers, scales, expected.float().bfloat16()


@pytest.mark.parametrize("block", [(128, 128), (16, 24)])
def test_fp8_weights_are_widened_to_bf16(tmp_path, capsys, block):
    """Blocks at the end of a row or a column are smaller."""
    model = randomized(MODELS["deepseek_v3"]).bfloat16()
    source = tmp_path / "hf"
    model.save_pretrained(source)
    expected = tensors(source)
    stored = {}
    for name, tensor in expected.items():
        stored[name] = tensor
        if name.endswith("_proj.weight"):
            stored[name], scales, expected[name] = in_fp8(tensor, *block)
            stored[f"{name}_scale_inv"] = scales
    quantization = {**FP8, "weight_block_size": [*block], "modules_to_not_convert": ["lm_head"]}
    check_widened(tmp_path, stored, quantization, expected)
    name = next(name for name in stored if name.endswith("_scale_inv"))
    wrong = {name: stored[name].repeat(2, 1)}
    message = f"FP8 in blocks of {block[0]} x {block[1]}: copy the"
    check_wrong_scales(capsys, tmp_path, stored, wrong, message)
    for field, value in (("weight_block_size", [128]), ("activation_scheme", "static")):
        edit(source / "config.json", "quantization_config", {**quantization, field: value})
        message = "and FP8 is read with fmt e4m3, a weight_block_size of two numbers"
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
