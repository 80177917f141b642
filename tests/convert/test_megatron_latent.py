"""Latent attention and MTP modules in Megatron-LM's checkpoints: names, arguments, and what is refused.

Sources of the names: megatron/core/models/gpt/gpt_layer_specs.py (norms that Transformer Engine's layers have in the next
matmul), transformer/multi_latent_attention.py, transformer/multi_token_prediction.py (sharded_state_dict).
tests/convert/test_megatron_core.py compares losses and weights with megatron-core.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fugaku_megatron.convert.megatron.arguments import arguments_of, model_of
from fugaku_megatron.convert.megatron.pickles import load_metadata
from fugaku_megatron.convert.open_weights import open_weights
from tests.checks.conversions import (
    BLOCK,
    change_arguments,
    check_same,
    convert,
    read,
    refused,
    save_random,
    to_megatron,
)
from tests.helpers import small_run

pytestmark = pytest.mark.parallel

LATENT: dict[str, Any] = {
    **BLOCK,
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "rotary_scaling_factor": 4.0,
    "mscale_all_dim": 0.5,
    "mtp_num_layers": 1,
}
EXPERTS: dict[str, Any] = {
    **LATENT,
    "num_experts": 4,
    "moe_layer_freq": "[0,1]",
    "moe_ffn_hidden_size": 24,
}
ALONE: dict[str, Any] = {**LATENT, "mtp_num_layers": None}


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> dict[str, Path]:
    """Return checkpoints of this program with random weights."""
    models = {"latent": LATENT, "experts": EXPERTS, "alone": ALONE}
    return {
        name: save_random(tmp_path_factory.mktemp(name), flags) for name, flags in models.items()
    }


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("latent", ""),
        ("latent", "--transformer-impl local"),
        ("experts", ""),
        ("experts", "--transformer-impl local"),
        ("alone", "--hybrid-layer-pattern +-+-"),
    ],
)
def test_weights_come_back(ours, tmp_path, name, flags):
    theirs = to_megatron(ours[name], tmp_path, flags)
    assert convert("--from-megatron", theirs, "--save", tmp_path / "back") == 0
    before = open_weights(str(ours[name]))
    after = open_weights(str(tmp_path / "back"))
    for field in LATENT:
        assert getattr(after.model, field) == getattr(before.model, field), field
    check_same(read(tmp_path / "back"), read(ours[name]))


# Weights of a layer with an MLP, and of one with experts, in the order of their modules.
ATTENTION = [
    "linear_kv_down_proj.weight",
    "linear_kv_up_proj.layer_norm_weight",
    "linear_kv_up_proj.weight",
    "linear_proj.weight",
    "linear_q_down_proj.weight",
    "linear_q_up_proj.layer_norm_weight",
    "linear_q_up_proj.weight",
]
MLP = ["linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight"]
STATES = [
    "input_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "self_attention.core_attention",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.linear_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
]


def test_norms_are_parts_of_the_next_matmul_with_transformer_engine(ours, tmp_path):
    theirs = to_megatron(ours["latent"], tmp_path)
    stored = load_metadata(theirs / "release" / ".metadata").state_dict_metadata
    tensors = {key for key, value in stored.items() if hasattr(value, "size")}
    layer = {f"self_attention.{name}" for name in ATTENTION} | {f"mlp.{name}" for name in MLP}
    layer.add("input_layernorm.weight")
    module = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"}
    module |= {f"transformer_layer.{name}" for name in layer}
    assert tensors == {
        *(f"decoder.layers.{name}" for name in layer),
        *(f"mtp.layers.0.{name}" for name in module),
        "decoder.final_layernorm.weight",
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }
    states = {key.replace("._extra_state", "") for key in stored if "_extra_state" in key}
    inside = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    inside += tuple(f"transformer_layer.{name}" for name in STATES)
    assert states == {
        *(f"decoder.layers.{name}/shard_{layer}_2" for name in STATES for layer in range(2)),
        *(f"mtp.layers.0.{name}/shard_0_1" for name in inside),
        "decoder.final_layernorm/shard_0_1",
    }


def test_norms_keep_their_names_without_transformer_engine(ours, tmp_path):
    theirs = to_megatron(ours["experts"], tmp_path, "--transformer-impl local")
    stored = load_metadata(theirs / "release" / ".metadata").state_dict_metadata
    for place in ("decoder.layers.0", "decoder.layers.1", "mtp.layers.0.transformer_layer"):
        for norm in ("input_layernorm", "pre_mlp_layernorm", "self_attention.kv_layernorm"):
            assert f"{place}.{norm}.weight" in stored
    assert "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight" in stored
    assert not [key for key in stored if "layer_norm_" in key]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ckpt-format torch", "--ckpt-format torch does not have layers with latent attention"),
        (
            "--hybrid-layer-pattern +-+-",
            "--mtp-num-layers 1: the MTP modules of a HybridModel are not converted",
        ),
    ],
)
def test_a_format_without_the_parts_is_one_line(ours, tmp_path, capsys, flags, message):
    words = ("--load", ours["latent"], "--to-megatron", tmp_path / "theirs", *flags.split())
    assert message in refused(capsys, *words) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": None}, "holds no decoder.layers.0.self_attention.linear_q_proj.weight"),
        ({"kv_lora_rank": 24}, "linear_kv_down_proj.weight has 768 elements, and its shape"),
        ({"mtp_num_layers": None}, "tensors that the block does not have, such as ['mtp.layers.0."),
        ({"mtp_num_layers": 2}, "holds no mtp.layers.1.enorm.weight"),
        ({"mtp_use_repeated_layer": True}, "each MTP module has its own layer"),
    ],
)
def test_saved_arguments_are_compared_with_the_tensors(ours, tmp_path, capsys, change, message):
    theirs = to_megatron(ours["latent"], tmp_path)
    change_arguments(theirs / "release" / "common.pt", **change)
    assert message in refused(capsys, "--from-megatron", theirs, "--save", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def arguments(**changes: Any) -> dict[str, Any]:
    """Return the saved arguments of a model of Megatron-LM with latent attention."""
    model = small_run(**ALONE).model
    return {**vars(arguments_of(model, 64, torch.float32, 1, 1)), **changes}


def test_arguments_that_latent_attention_does_not_read_are_left_out():
    """Rope is scaled by --rope-type yarn alone, whose lengths megatron-core names otherwise."""
    unread = {
        "use_rope_scaling": True,
        "rotary_seq_len_interpolation_factor": 2,
        "no_rope_freq": 2,
        "yarn_original_max_position_embeddings": 16,
    }
    model = model_of(arguments(**unread, position_embedding_type="none"), 64, None)
    assert model == model_of(arguments(), 64, None)
    assert model.yarn_original_max_position_embeddings == 4096
    named = {"original_max_position_embeddings": 512, "beta_fast": 16}
    model = model_of(arguments(**named), 64, None)
    assert (model.yarn_original_max_position_embeddings, model.yarn_beta_fast) == (512, 16)
    plain = model_of(arguments(rope_type="rope", mscale_all_dim=0.0), 64, None)
    assert (plain.position_embedding_type, plain.rotary_scaling_factor) == ("rope", 1.0)
    other = model_of(arguments(multi_latent_attention=False), 64, None)
    assert (other.q_lora_rank, other.kv_lora_rank) == (None, 32)


def test_arguments_that_differ_from_megatron_lm_are_refused():
    with pytest.raises(ValueError, match=r"mscale_all_dim is 0\.5 and rotary_scaling_factor 4\.0"):
        model_of(arguments(rope_type="rope"), 64, None)
    with pytest.raises(ValueError, match="learned_absolute"):
        learned = {"position_embedding_type": "learned_absolute", "add_position_embedding": True}
        model_of(arguments(**learned), 64, None)
    model = small_run(**LATENT, yarn_original_max_position_embeddings=16).model
    with pytest.raises(ValueError, match="--yarn-original-max-position-embeddings is 16, and Mega"):
        arguments_of(model, 64, torch.float32, 1, 1)
