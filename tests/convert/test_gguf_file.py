"""convert --to-gguf: the file as gguf reads it, against Hugging Face's tensors and tokenizer."""

import json
import sys

import numpy as np
import pytest
import torch

from fugaku_megatron.convert.gguf.conversion import KINDS
from tests.checks.conversions import convert as run
from tests.checks.conversions import refused
from tests.checks.gguf import (
    MODELS,
    SIZES,
    TEMPLATE,
    convert,
    write_model,
    write_tokenizer,
)
from tests.checks.refusals import refusals

pytestmark = pytest.mark.unit

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

INEXACT = "--gguf-inexact-tokenizer"


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a model of a kind and its tokenizer into `hf`."""

    def write(kind):
        return write_model(tmp_path / "hf", kind), write_tokenizer(tmp_path / "hf")

    return write


@pytest.fixture
def converted(tmp_path):
    """Return a function that converts `hf` with some flags, and returns a reader of the file."""

    def read(*flags):
        assert convert(tmp_path / "hf", tmp_path / "m.gguf", *flags) == 0
        return gguf.GGUFReader(tmp_path / "m.gguf")

    return read


def value(reader, name):
    return reader.fields[name].contents()


def interleaved(tensor, heads):
    """Return the rows of a head's two halves alternately, as llama.cpp's rope for Llama has them."""
    rows = torch.arange(len(tensor)).view(heads, -1)
    half = rows.shape[1] // 2
    order = torch.stack([rows[:, :half], rows[:, half:]], 2).flatten()
    return tensor[order]


def expected(model, kind):
    """Return name in GGUF -> tensor, by the package's map and the rules of each architecture, from transformers' parameters."""
    config = model.config
    name_map = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == KINDS[kind].name), 3
    )
    tied = getattr(config, "tie_word_embeddings", False)
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if name.endswith("experts.gate_up_proj"):  # transformers 5 keeps the experts together
            gate, up = tensor.chunk(2, 1)
            for part, half in (("gate_proj", gate), ("up_proj", up)):
                found[
                    name_map.get_name(
                        f"{name.rsplit('.', 1)[0].replace('block_sparse_moe', 'mlp')}.{part}"
                    )
                    + ".weight"
                ] = half
            continue
        if name.endswith("experts.down_proj"):
            found[name_map.get_name(name.replace("block_sparse_moe", "mlp")) + ".weight"] = tensor
            continue
        theirs = (
            name.replace("mlp.gate.weight", "block_sparse_moe.gate.weight")
            if kind == "mixtral"
            else name
        )
        if "kv_b_proj" in name and KINDS[kind].absorbed:
            keys, values = tensor.unflatten(0, (4, -1)).split((12, 16), 1)
            for part, half in (("k_b", keys.transpose(1, 2)), ("v_b", values)):
                found[name_map.get_name(name[:-7].replace("kv_b", part)) + ".weight"] = half
            continue
        theirs = theirs.replace("_correction_bias", "_correction.bias")
        ours = name_map.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.t()
        heads = {
            "attn_q": config.num_attention_heads,
            "attn_k": getattr(config, "num_key_value_heads", 0),
        }.get(ours.split(".")[-2])
        found[ours] = interleaved(tensor, heads) if heads and KINDS[kind].interleaved else tensor
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_every_tensor_is_read_back(written, converted, kind):
    assert MODELS.keys() == KINDS.keys() - {"kimi_k2"}  # DeepSeek-V3 with another name
    model, _ = written(kind)
    tensors = {tensor.name: tensor for tensor in converted().tensors}
    factors = tensors.pop("rope_freqs.weight", None)
    wanted = expected(model, kind)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(
            np.asarray(tensors[name].data).reshape(tensor.shape), tensor.numpy(), err_msg=name
        )
    if kind == "llama":
        frequencies = 10000.0 ** -(torch.arange(4) / 4)
        np.testing.assert_allclose(
            frequencies / torch.tensor(np.asarray(factors.data)),
            model.model.rotary_emb.inv_freq,
            rtol=1e-6,
        )
    else:
        assert factors is None


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_formats_of_matrices(written, converted, kind):
    model, _ = written("qwen2")
    reader = converted("--gguf-type", kind)
    assert value(reader, "general.file_type") == {"f16": 1, "bf16": 32, "q8_0": 7}[kind]
    wanted = expected(model, "qwen2")
    for tensor in reader.tensors:
        right = wanted[tensor.name].numpy()
        vector = len(tensor.shape) == 1
        assert tensor.tensor_type.name == ("F32" if vector else kind.upper())
        got = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(
            right.shape
        )
        if kind == "q8_0" and not vector:
            scales = np.abs(right.reshape(-1, 32)).max(1, keepdims=True)
            assert (np.abs(got - right).reshape(-1, 32) <= scales * (0.5 / 127 + 2**-11)).all()
        else:
            like = torch.from_numpy(right)
            np.testing.assert_array_equal(
                got,
                right if vector else like.to({"f16": torch.half}.get(kind, torch.bfloat16)).float(),
            )


def test_numbers_and_tokenizer(tmp_path, written, converted):
    _, tokenizer = written("qwen3_moe")
    reader = converted()
    numbers = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "rope.dimension_count": 8,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "rope.freq_base": 10000.0,
    }
    assert {name: value(reader, f"qwen3moe.{name}") for name in numbers} == numbers
    assert (
        value(reader, "tokenizer.ggml.model") == "gpt2"
        and value(reader, "tokenizer.ggml.pre") == "gpt-2"
    )
    tokens = value(reader, "tokenizer.ggml.tokens")
    kinds = value(reader, "tokenizer.ggml.token_type")
    vocabulary = tokenizer.get_vocab()
    assert len(tokens) == len(kinds) == 320 and [tokens[i] for i in vocabulary.values()] == [
        *vocabulary
    ]
    assert {tokens[i]: kind for i, kind in enumerate(kinds) if kind not in (1, 5)} == {
        "<|end|>": 3,
        "<|user|>": 3,
        "extra": 4,
    }
    assert kinds[len(vocabulary) :] == [5] * (320 - len(vocabulary))
    merges = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]["merges"]
    assert value(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in merges]
    assert (
        value(reader, "tokenizer.ggml.eos_token_id") == 0
        and value(reader, "tokenizer.chat_template") == TEMPLATE
    )
    (tmp_path / "m.gguf").unlink()
    (tmp_path / "t.jinja").write_text("another")
    again = converted("--chat-template", str(tmp_path / "t.jinja"))
    assert value(again, "tokenizer.chat_template") == "another"


def test_a_checkpoint_and_the_model_that_it_came_from_become_the_same_file(tmp_path, written):
    written("qwen3")
    hf, ours, direct, own = (tmp_path / name for name in ("hf", "ours", "a.gguf", "b.gguf"))
    assert run("--from-hf", hf, "--to-gguf", direct) == 0
    assert run("--from-hf", hf, "--save", ours) == 0
    assert run("--load", ours, "--to-gguf", own) == 0
    assert own.read_bytes() == direct.read_bytes()


def test_pieces_of_sentencepiece(tmp_path, converted):
    sentencepiece = pytest.importorskip("sentencepiece")
    write_model(tmp_path / "hf", "llama")
    (tmp_path / "text").write_text("the model is the model that the user of the model has\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "hf" / "tokenizer"),
        vocab_size=290,
        byte_fallback=True,
        model_type="bpe",
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(tmp_path / "hf" / "tokenizer.model")
    )
    reader = converted()
    pieces = range(len(model))
    assert value(reader, "tokenizer.ggml.model") == "llama"
    assert value(reader, "tokenizer.ggml.tokens")[: len(pieces)] == [
        model.id_to_piece(i) for i in pieces
    ]
    assert value(reader, "tokenizer.ggml.scores")[: len(pieces)] == [
        model.get_score(i) for i in pieces
    ]
    kinds = value(reader, "tokenizer.ggml.token_type")
    assert (
        kinds[:3] == [2, 3, 3]
        and [kinds[i] for i in pieces if model.is_byte(i)] == [6] * 256
        and kinds[-1] == 5
    )


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        ({"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
        ),
    ],
)
def test_linear_scaling_and_yarn(tmp_path, converted, rope, keys):
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(**SIZES, rope_scaling=rope)
    ).save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    reader = converted()
    assert {name: value(reader, f"qwen2.rope.scaling.{name}") for name in keys} == keys
    assert value(reader, "qwen2.rope.freq_base") == 10000.0


def test_numbers_of_latent_attention(written, converted):
    """As llama.cpp's converter writes them, sizes of keys with the narrow vector in the first two."""
    written("deepseek_v3")
    reader = converted()
    numbers = {
        "attention.head_count_kv": 1,
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.key_length_mla": 20,
        "attention.value_length_mla": 16,
        "attention.q_lora_rank": 20,
        "attention.kv_lora_rank": 16,
        "rope.dimension_count": 8,
        "leading_dense_block_count": 2,
        "expert_count": 8,
        "expert_used_count": 4,
        "expert_shared_count": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
    }
    assert {name: value(reader, f"deepseek2.{name}") for name in numbers} == numbers
    multiplier = value(reader, "deepseek2.rope.scaling.yarn_log_multiplier")
    assert multiplier == pytest.approx(0.1)


def test_another_epsilon_of_narrow_vectors_is_noted(tmp_path, capsys):
    config = MODELS["glm4_moe_lite"](transformers)
    config.rms_norm_eps = 1e-5
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    assert convert(tmp_path / "hf", tmp_path / "m.gguf") == 0
    note = "note: llama.cpp adds 1e-05 in the norms of --kv-lora-rank and --q-lora-rank numbers"
    assert note in capsys.readouterr().out


def test_a_tokenizer_that_is_read_differently_needs_a_flag(tmp_path, capsys, written):
    written("qwen2")
    hf = ("--from-hf", tmp_path / "hf")
    to_gguf = ("--to-gguf", tmp_path / "m.gguf")
    line = refused(capsys, *hf, *to_gguf)
    assert (
        "it normalizes a text to NFC (normalizer), and llama.cpp does not: pass --gguf-ine" in line
    )
    assert not (tmp_path / "m.gguf").exists()
    assert run(*hf, *to_gguf, INEXACT) == 0
    said = capsys.readouterr().out
    assert "note: llama.cpp reads some texts differently: it normalizes a text to NFC" in said
    line = refused(capsys, *hf, "--save", tmp_path / "s", INEXACT)
    assert "--gguf-inexact-tokenizer is for --to-gguf: pass both" in line


@pytest.mark.parametrize(("kind", "change", "message"), refusals("gguf"))
def test_a_model_that_llama_cpp_computes_differently_is_refused(
    tmp_path, capsys, kind, change, message
):
    config = MODELS[kind](transformers)
    config.update(json.loads(change))
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    words = ("--from-hf", tmp_path / "hf", "--to-gguf", tmp_path / "m.gguf", INEXACT)
    assert message in refused(capsys, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_destination_and_a_tokenizer_are_needed(tmp_path, capsys):
    write_model(tmp_path / "hf", "qwen2")
    words = ("--from-hf", tmp_path / "hf", "--to-gguf", tmp_path / "m.gguf", INEXACT)
    line = refused(capsys, *words)
    assert "--to-gguf needs the tokenizer, and " in line
    assert " has neither tokenizer.json nor tokenizer.model: pass its folder" in line
    line = refused(capsys, *words, "--to-hf", "x")
    assert "more than one destination, --to-hf and --to-gguf: pass exactly one of" in line


def test_files_are_not_replaced_and_a_missing_package_is_named(
    tmp_path, capsys, monkeypatch, written
):
    written("qwen2")
    (tmp_path / "m.gguf").write_text("mine")
    hf = ("--from-hf", tmp_path / "hf")
    line = refused(capsys, *hf, "--to-gguf", tmp_path / "m.gguf")
    assert "m.gguf exists: pass a new file, so that nothing is replaced" in line
    assert (tmp_path / "m.gguf").read_text() == "mine"
    line = refused(capsys, *hf, "--save", tmp_path / "s", "--gguf-type", "f16")
    assert "--gguf-type f16 is for --to-gguf: pass both" in line
    monkeypatch.setitem(sys.modules, "gguf", None)
    line = refused(capsys, *hf, "--to-gguf", tmp_path / "n.gguf")
    assert "--to-gguf needs the Python package gguf (" in line
