"""Files that other programs wrote, in tests/foreign next to the scripts that wrote them."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fugaku_megatron as fm
from fugaku_megatron import cli
from fugaku_megatron.convert import megatron_files, peft
from fugaku_megatron.convert.architectures import ARCHITECTURES
from fugaku_megatron.convert.hugging_face import read_config

FOREIGN = Path(__file__).resolve().parents[1] / "foreign"


@pytest.mark.parametrize("name", ["gpt2", "llama_tp2"])
def test_megatron_core_s_checkpoints_are_read(name, tmp_path):
    """Its `.metadata` holds the pickled save plan; the second checkpoint is of two ranks."""
    source = FOREIGN / "torch_dist" / name
    command = ["convert", "--from-megatron", str(source), "--save", str(tmp_path / "ours")]
    assert cli.main(command) == 0
    expected = json.loads((source / "expected.json").read_text())
    logits = fm.load(tmp_path / "ours").logits(expected["ids"])[-1].tolist()
    assert logits == pytest.approx(expected["logits_of_the_last_token"], abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"qk_l2_norm": True}, "qk_l2_norm is True: this form of attention"),
        ({"no_rope_freq": [0, 1]}, "no_rope_freq is [0, 1]: rope holds for all layers"),
        ({"window_attn_skip_freq": 4}, "window_attn_skip_freq is 4"),
        ({"softmax_type": "learnable"}, "softmax_type is 'learnable'"),
        ({"attention_output_gate": True}, "attention_output_gate is True"),
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1"),
        ({"use_mup": True}, "use_mup is True"),
        ({"hybrid_layer_pattern": "*-*-"}, "hybrid_layer_pattern is"),
        ({"multi_latent_attention": True}, "multi_latent_attention is True"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant is 'dsa'"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset is 1.0"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value is 7.0"),
        ({"heterogeneous_layers_config_path": "a.json"}, "heterogeneous_layers_config_path is"),
        ({"retro_add_retriever": True}, "retro_add_retriever is True: no text is retrieved"),
        ({"spec": ["megatron.core", "mamba"]}, "spec is ['megatron.core', 'mamba']"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"some_fork_s_attention": 3}, "some_fork_s_attention (3) are unknown"),
    ],
)
def test_saved_arguments_that_change_the_model_are_refused(arguments, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        megatron_files.check_saved(arguments)


def test_saved_arguments_that_describe_a_run_are_read():
    """Values that are off, what the run reached, flags of train, and what the user names."""
    megatron_files.check_saved(
        {
            "qk_l2_norm": False,
            "no_rope_freq": None,
            "softmax_type": "vanilla",
            "glu_linear_offset": 0.0,
            "mtp_num_layers": None,
            "num_experts": None,
            "spec": None,
            "iteration": 10,
            "consumed_train_samples": 640,
            "params_dtype": "torch.bfloat16",
            "lr": 1e-4,
            "exit_signal": 15,
            "dataloader_type": "cyclic",
            "attention_backend": "AttnBackend.auto",
            "overlap_p2p_comm": True,
            "some_fork_s_option": 3,
        },
        ignored=["some_fork_s_option"],
    )


@given(
    name=st.from_regex(r"[a-z][a-z_]{11,20}", fullmatch=True),
    value=st.one_of(st.just(True), st.integers(1), st.floats(0.5), st.text(min_size=1)),
)
def test_an_unknown_saved_argument_is_never_ignored(name, value):
    with pytest.raises(ValueError, match=name):
        megatron_files.check_saved({"num_layers": 2, name: value})


@pytest.mark.parametrize("kind", [vars, lambda namespace: SimpleNamespace(**vars(namespace))])
def test_arguments_are_read_from_a_dictionary_or_another_namespace(kind, tmp_path):
    source = FOREIGN / "torch_dist" / "gpt2"
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    common = copy / "iter_0000010" / "common.pt"
    contents = torch.load(common, weights_only=False)
    torch.save({**contents, "args": kind(contents["args"])}, common)
    command = ["convert", "--from-megatron", str(copy), "--save", str(tmp_path / "ours")]
    assert cli.main(command) == 0


# Every field of an adapter_config.json that peft 0.21.2 writes for LoRA, with its default.
PEFT = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "base",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 4,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 2,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["v_proj", "q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"use_rslora": True, "layers_to_transform": [0], "fan_in_fan_out": True},
    ],
)
def test_plain_lora_of_peft_is_read(changed):
    peft.check_config({**PEFT, **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": "one of tomorrow"},
        {"alora_invocation_tokens": [10, 43]},
        {"trainable_token_indices": [1]},
        {"use_dora": True},
        {"use_qalora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 1]]},
        {"loftq_config": {"loftq_bits": 4}},
        {"corda_config": {"corda_method": "kpm"}},
        {"arrow_config": {"top_k": 3}},
        {"kasa_config": {"beta": 1e-4}},
        {"use_bdlora": {"nblocks": 2}},
        {"megatron_config": {"a": 1}},
        {"peft_type": "LOHA"},
    ],
)
def test_adapters_that_are_not_plain_lora_are_refused(changed):
    (name,) = changed
    with pytest.raises(ValueError, match=f"adapter_config.json: {name} is"):
        peft.check_config({**PEFT, **changed})


@given(
    name=st.from_regex(r"[a-z][a-z_]{5,20}", fullmatch=True).filter(lambda name: name not in PEFT),
    value=st.one_of(st.just(True), st.integers(1), st.text(min_size=1), st.just({"a": 1})),
)
def test_an_unknown_field_of_adapter_config_is_never_ignored(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        peft.check_config({**PEFT, name: value})


REQUIRED = {
    "vocab_size": 64,
    "hidden_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "new_decoder_architecture": True,
    "n_layer": 2,
    "n_embd": 4096,
    "n_head": 32,
    "n_positions": 128,
    "sliding_window": None,
}


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.model_type)
def test_a_field_that_is_left_out_has_transformers_default(row):
    """The shortest config.json against the one that transformers writes after reading it."""
    transformers = pytest.importorskip("transformers")
    kind = transformers.CONFIG_MAPPING[row.model_type]
    fields = set(kind().to_dict()) | {"new_decoder_architecture"}
    required = {name: value for name, value in REQUIRED.items() if name in fields}
    whole = kind(**required).to_dict()
    short = {"model_type": row.model_type, **required}
    assert read_config(short)[1] == read_config({**whole, "architectures": [row.name]})[1]


def test_rope_scaling_next_to_rope_parameters_wins():
    config = {"model_type": "llama", **REQUIRED, "rope_theta": 5e5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    model = read_config({**config, **rope, **scaled})[1]
    assert model.rotary_seq_len_interpolation_factor == 4.0
    assert model.rotary_base == 5e5, "the base of the dictionary that counts, or rope_theta"
