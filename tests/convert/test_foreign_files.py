"""Files that other programs wrote, in tests/foreign next to the scripts that wrote them."""

import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
from argparse import Namespace
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

import fugaku_megatron as fm
from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.config.fields import is_off
from fugaku_megatron.config.lora import LoraConfig
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.convert.hugging_face import peft
from fugaku_megatron.convert.hugging_face.architectures import ARCHITECTURES, LLAMA, ONLY
from fugaku_megatron.convert.hugging_face.config_json import (
    IGNORED,
    IGNORED_OF,
    read_config,
    read_fields,
)
from fugaku_megatron.convert.hugging_face.conversion import open_hugging_face
from fugaku_megatron.convert.megatron import arguments as megatron_arguments
from fugaku_megatron.convert.megatron.pickles import load_metadata, load_pickled
from fugaku_megatron.convert.open_weights import open_weights
from fugaku_megatron.data.indexed import IndexedDataset
from fugaku_megatron.run.checkpoint_source import matrices
from tests.checks.conversions import convert
from tests.checks.refusals import refusals
from tests.file_damage import damages
from tests.helpers import document_indices
from tools.foreign_fields import LINE, PAGE, tables

pytestmark = pytest.mark.unit

FOREIGN = Path(__file__).resolve().parents[1] / "foreign"


@pytest.mark.parametrize("name", ["gpt2", "llama_tp2"])
def test_megatron_core_s_checkpoints_are_read(name, tmp_path):
    """Its `.metadata` holds the pickled save plan; the second checkpoint is of two ranks."""
    source = FOREIGN / "torch_dist" / name
    assert convert("--from-megatron", source, "--save", tmp_path / "ours") == 0
    expected = json.loads((source / "expected.json").read_text())
    logits = fm.load(tmp_path / "ours").logits(expected["ids"])[-1].tolist()
    assert logits == pytest.approx(expected["logits_of_the_last_token"], abs=1e-4)


MEGATRON = sorted(path.name for path in (FOREIGN / "megatron").iterdir())


@pytest.mark.parametrize("name", MEGATRON)
def test_checkpoints_with_all_arguments_of_megatron_lm_are_read(name, tmp_path):
    """Each saved every argument of its version's parser, with the defaults."""
    source = FOREIGN / "megatron" / name
    common = load_pickled(source / "iter_0000010" / "common.pt")
    assert len(vars(common["args"])) > 400
    assert convert("--from-megatron", source, "--save", tmp_path / "ours") == 0
    check_logits(tmp_path / "ours", source)


@pytest.mark.parametrize(
    "value",
    [PurePosixPath("a/b"), Path("a"), io.BytesIO(b"state"), signal.SIGTERM, getattr],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_megatron_core_allows_are_read_and_do_nothing(value, tmp_path):
    torch.save({"args": Namespace(num_layers=2), "other": value}, tmp_path / "common.pt")
    contents = load_pickled(tmp_path / "common.pt")
    assert contents["args"].num_layers == 2
    metadata = Metadata({}, planner_data=value)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert isinstance(load_metadata(tmp_path / ".metadata"), Metadata)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_damage_to_a_torch_dist_checkpoint_is_one_line(tmp_path, name):
    shutil.copytree(FOREIGN / "torch_dist" / "llama_tp2", tmp_path / "run")
    file = tmp_path / "run" / "iter_0000010" / name
    refused = 0
    for content in damages(file.read_bytes(), 60):
        file.write_bytes(content)
        try:
            weights = open_weights(str(tmp_path / "run"))
            for each in weights.dtypes:
                weights.read(each)
        except ValueError as error:
            assert str(tmp_path / "run") in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 10


@pytest.mark.parametrize("value", [eval, os.system, subprocess.Popen, torch.load, pickle.loads])
def test_names_that_could_run_code_are_refused(value, tmp_path):
    torch.save({"args": Namespace(), "other": value}, tmp_path / "common.pt")
    with pytest.raises(ValueError, match="could run code"):
        load_pickled(tmp_path / "common.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=value)))
    with pytest.raises(ValueError, match="could run code"):
        load_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize(("_", "argument", "line"), refusals("megatron_arguments"))
def test_saved_arguments_that_change_the_model_are_refused(_, argument, line):
    name, value = argument.split(" ", 1)
    with pytest.raises(ValueError, match=re.escape(line)):
        megatron_arguments.check_saved({name: json.loads(value)})


def test_layers_that_differ_are_saved_arguments_and_flags():
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
    layers = {"window_size": (3, 0), "window_attn_skip_freq": 2, "no_rope_freq": [0, 1]}
    given = {**sizes, **layers, "max_position_embeddings": 16, "position_embedding_type": "rope"}
    model = megatron_arguments.model_of(given, 96, None)
    assert [kind.window for kind in model.layer_kinds] == [4, None]
    assert [kind.rope for kind in model.layer_kinds] == ["global", None]
    written = vars(megatron_arguments.arguments_of(model, 96, torch.float32, 1, 1))
    assert {name: written[name] for name in layers} == layers


def test_saved_arguments_that_describe_a_run_are_read():
    """Values that are off, what the run reached, flags of train, and what the user names."""
    megatron_arguments.check_saved(
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
            # Defaults of Megatron-LM's main of August 2026 without a flag of their name.
            "dsa_indexer_rotate_activation": True,
            "dsa_indexer_scoring_relu": True,
            "gtp_weight_remat_size": 1,
            "expert_gtp_weight_remat_size": 1,
            "some_fork_s_option": 3,
        },
        ignored=["some_fork_s_option"],
    )
    hybrid = {
        "hybrid_layer_pattern": "*-*E",
        "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        "is_hybrid_model": True,
        "hybrid_attention_ratio": 0.5,
    }
    megatron_arguments.check_saved(hybrid)
    with pytest.raises(ValueError, match="is_hybrid_model is True"):
        megatron_arguments.check_saved({**hybrid, "hybrid_layer_pattern": None})


@given(
    name=st.from_regex(r"[a-z][a-z_]{11,20}", fullmatch=True),
    value=st.one_of(st.just(True), st.integers(1), st.floats(0.5), st.text(min_size=1)),
)
def test_an_unknown_saved_argument_is_never_ignored(name, value):
    with pytest.raises(ValueError, match=name):
        megatron_arguments.check_saved({"num_layers": 2, name: value})


@pytest.mark.parametrize("kind", [vars, lambda namespace: SimpleNamespace(**vars(namespace))])
def test_arguments_are_read_from_a_dictionary_or_another_namespace(kind, tmp_path):
    source = FOREIGN / "torch_dist" / "gpt2"
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    common = copy / "iter_0000010" / "common.pt"
    contents = torch.load(common, weights_only=False)
    torch.save({**contents, "args": kind(contents["args"])}, common)
    assert convert("--from-megatron", copy, "--save", tmp_path / "ours") == 0


# Every field that peft 0.21.2 writes for LoRA
PEFT = json.loads((FOREIGN / "peft" / "adapter_config.json").read_text())


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"init_lora_weights": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"use_rslora": True, "layers_to_transform": [0], "fan_in_fan_out": True},
    ],
)
def test_plain_lora_of_peft_is_read(changed):
    peft.check_config({**PEFT, **changed})


NOT_PLAIN = """\
peft_type "LOHA"
init_lora_weights "pissa"
init_lora_weights "pissa_niter_16"
init_lora_weights "olora"
init_lora_weights "corda"
init_lora_weights "loftq"
init_lora_weights "lora_ga"
init_lora_weights "one of tomorrow"
alora_invocation_tokens [10, 43]
trainable_token_indices [1]
use_dora true
use_qalora true
lora_bias true
bias "all"
modules_to_save ["lm_head"]
layer_replication [[0, 1]]
loftq_config {"loftq_bits": 4}
corda_config {"corda_method": "kpm"}
arrow_config {"top_k": 3}
kasa_config {"beta": 0.0001}
use_bdlora {"nblocks": 2}
megatron_config {"a": 1}"""


@pytest.mark.parametrize("field", NOT_PLAIN.splitlines())
def test_adapters_that_are_not_plain_lora_are_refused(field):
    name, value = field.split(" ", 1)
    with pytest.raises(ValueError, match=f"adapter_config.json: {name} is"):
        peft.check_config({**PEFT, name: json.loads(value)})


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
    "n_routed_experts": 16,
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
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 0,  # transformers says 1, and files without the field have none
}
# Published under a model_type that transformers lacks.
ALSO_CALLED = {"kimi_k2": "deepseek_v3"}


def short_config(row) -> dict:
    """Return the shortest config.json of an architecture."""
    read = read_fields(row) - set(row.only)
    given = {name: value for name, value in REQUIRED.items() if name in read}
    named = row.model_type in ("mixtral", "gpt_oss")
    given.pop("num_experts" if named else "num_local_experts", None)
    if "sliding_window_pattern" in read_fields(row):  # some layers have a window
        given.pop("sliding_window")
    if "kv_lora_rank" in read:  # transformers' default is that of another number of heads
        given["num_key_value_heads"] = given["num_attention_heads"]
    if (
        row.name == "DeepseekV3ForCausalLM"
    ):  # its defaults are three dense layers and groups of experts
        given |= {"num_hidden_layers": 4, "num_experts_per_tok": 8}
    if row.model_type == "granitemoehybrid":  # its defaults are layers of Mamba with experts
        given |= {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 2,
            "mamba_d_head": 64,
        }
    return {"model_type": row.model_type, **given}


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.model_type)
def test_a_field_that_is_left_out_has_transformers_default(row):
    """The shortest config.json against the one that transformers writes after reading it."""
    transformers = pytest.importorskip("transformers")
    kind = transformers.CONFIG_MAPPING[ALSO_CALLED.get(row.model_type, row.model_type)]
    short = short_config(row)
    own = {name: value for name, value in short.items() if name != "model_type"}
    whole = kind(**own).to_dict()
    assert read_config(short)[1] == read_config({**whole, "architectures": [row.name]})[1]


def test_a_value_that_no_field_can_say_fits_no_architecture():
    row = next(row for row in ARCHITECTURES if row.model_type == "gpt_oss")
    model = read_config(short_config(row))[1]
    assert [row.name for row in ARCHITECTURES if row.fits(model)] == [row.name]
    for changes in (
        {"activation_func_clamp_value": None},
        {"glu_linear_offset": 0.5},
        {"moe_ffn_hidden_size": 2 * model.ffn_hidden_size},
    ):
        assert not any(row.fits(replace(model, **changes)) for row in ARCHITECTURES)


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_router_topk_scaling_factor": 1.0},
        {"moe_router_num_groups": 1, "moe_router_group_topk": 1},
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_a_value_of_experts_that_changes_nothing_fits(family, changes):
    row = next(row for row in ARCHITECTURES if row.model_type == family)
    model = read_config(short_config(row))[1]
    assert row.fits(replace(model, **changes))


def test_a_value_of_another_family_changes_nothing():
    model = read_config(short_config(LLAMA))[1]
    model = replace(model, use_rope_scaling=True, mscale_all_dim=1.0)
    assert LLAMA in [row for row in ARCHITECTURES if row.fits(model)]


def test_rope_scaling_next_to_rope_parameters_wins():
    config = {**short_config(LLAMA), "rope_theta": 5e5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    model = read_config({**config, **rope, **scaled})[1]
    assert model.rotary_seq_len_interpolation_factor == 4.0
    assert model.rotary_base == 5e5, "the base of the dictionary that counts, or rope_theta"


# The fields that transformers' base class and config classes of 4.30 to 5.23 write, with a value that is not off.
WRITTEN = {
    "_name_or_path": "model",
    "_attn_implementation_autoset": True,
    "auto_map": {"AutoConfig": "configuration.Config"},
    "bos_token_id": 1,
    "chunk_size_feed_forward": 0,
    "dtype": "bfloat16",
    "eos_token_id": [2, 3],
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "max_length": 20,
    "min_length": 0,
    "num_beams": 1,
    "output_attentions": False,
    "pad_token_id": 0,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "temperature": 1.0,
    "top_k": 50,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
}


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.model_type)
def test_every_field_that_transformers_writes_is_known(row):
    transformers = pytest.importorskip("transformers")
    own = transformers.CONFIG_MAPPING[ALSO_CALLED.get(row.model_type, row.model_type)]().to_dict()
    ignored = {name for names in IGNORED.values() for name in names}
    ignored |= set(IGNORED_OF.get(row.model_type, ()))
    unknown = {name for name, value in own.items() if not is_off(value)} - ignored
    assert unknown <= read_fields(row)
    short = short_config(row)
    assert read_config({**short, **WRITTEN})[1] == read_config(short)[1]


@given(
    row=st.sampled_from(ARCHITECTURES),
    name=st.from_regex(r"[a-z][a-z_]{5,20}", fullmatch=True),
    value=st.one_of(
        st.just(True), st.integers(), st.floats(allow_nan=False), st.text(min_size=1), st.just([1])
    ),
    off=st.sampled_from([None, False, [], {}, ""]),
)
def test_an_unknown_field_of_config_json_is_never_ignored(row, name, value, off):
    ignored = {name for names in IGNORED.values() for name in names}
    assume(name not in read_fields(row) | ignored)
    short = short_config(row)
    with pytest.raises(ValueError, match=f"config.json: {name} is .*remove the field"):
        read_config({**short, name: value})
    read_config({**short, name: off})


SWITCHED = {
    "attn_logit_softcapping": 40.0,
    "final_logit_softcapping": 20.0,
    "query_pre_attn_scalar": 200,
    "use_qk_norm": True,
    "no_rope_layers": [1, 0],
    "rope_local_base_freq": 2e4,
    "add_cross_attention": True,
    "is_encoder_decoder": True,
    "pruned_heads": {"0": [1]},
    "quantization_config": {"bits": 4},
    "tie_encoder_decoder": True,
    "mlp_bias": True,
    "clip_qkv": 8.0,
    "first_k_dense_replace": 1,
    "n_shared_experts": 3,
    "embedding_multiplier": 12.0,
    "rope_interleaved": True,
}


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.model_type)
def test_a_field_that_changes_the_function_is_refused_or_read(row):
    short = short_config(row)
    read = read_fields(row) - set(row.only) - set(ONLY)
    if "mlp_layer_types" in read:  # first_k_dense_replace must say the same
        short["mlp_layer_types"] = ["sparse", "sparse"]
        read -= {"first_k_dense_replace"}
    elif "first_k_dense_replace" in read:
        short["first_k_dense_replace"] = 0
    for name, value in SWITCHED.items():
        if name in read:
            assert read_config({**short, name: value})[1] != read_config(short)[1]
            continue
        if value in row.only.get(name, ()):
            assert read_config({**short, name: value})[1] == read_config(short)[1]
            continue
        with pytest.raises(ValueError, match=f"config.json: {name} is"):
            read_config({**short, name: value})


def test_an_unknown_field_of_rope_is_refused():
    config = short_config(LLAMA)
    for name in ("rope_scaling", "rope_parameters"):
        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        read_config({**config, name: {**rope, "long_factor": None}})
        with pytest.raises(ValueError, match="rope_parameters has mrope_section, which is"):
            read_config({**config, name: {**rope, "mrope_section": [8, 12, 12]}})


def test_a_tied_model_whose_file_has_the_head_alone(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=50, num_attention_heads=4, tie_word_embeddings=True, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, "lm_head.weight": embedding}, tmp_path / "hf" / "model.safetensors")
    weights = open_hugging_face(str(tmp_path / "hf"))
    assert torch.equal(weights.read("embedding.word_embeddings.weight"), embedding)


def check_logits(weights: Path, expected: Path) -> None:
    """Compare a converted checkpoint with the logits that another program stored."""
    stored = json.loads((expected / "expected.json").read_text())
    logits = fm.load(weights).logits(stored["tokens"])
    theirs = torch.tensor(stored["logits"])[:, : logits.shape[1]]
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_files_of_transformers_and_peft_are_read(tmp_path):
    source = ("--from-hf", FOREIGN / "hugging_face")
    assert convert(*source, "--save", tmp_path / "base") == 0
    check_logits(tmp_path / "base", FOREIGN / "hugging_face")
    adapters = ("--from-peft", FOREIGN / "peft", "--merge")
    assert convert(*source, *adapters, "--save", tmp_path / "merged") == 0
    check_logits(tmp_path / "merged", FOREIGN / "peft")


def test_a_dataset_of_megatron_core_is_read():
    prefix = FOREIGN / "indexed" / "text_document"
    documents = json.loads((FOREIGN / "indexed" / "expected.json").read_text())["documents"]
    dataset = IndexedDataset(str(prefix))
    assert len(document_indices(prefix)) == len(documents) + 1
    found = [dataset[number].tolist() for number in range(len(dataset))]
    assert found == [sentence for document in documents for sentence in document]


def test_the_yaml_file_of_megatron_lm_s_example_is_read():
    run = parse(["--yaml-cfg", str(FOREIGN / "yaml" / "gpt_config.yaml"), "--dry-run"]).run
    assert (run.model.num_layers, run.model.hidden_size, run.model.rotary_percent) == (
        24,
        1024,
        0.5,
    )
    assert run.model.swiglu and run.model.apply_layernorm_1p and run.model.disable_bias_linear


def test_the_page_has_the_tables_of_the_program():
    assert PAGE.read_text().partition(LINE)[2] == "\n" + "\n".join(tables()), (
        "python -m tools.foreign_fields --write"
    )


def test_targets_of_adapters_are_compared_as_matrices():
    model = RECIPES["qwen2.5-0.5b"]().model

    def of(target: str) -> list[tuple[str, ...]]:
        return matrices(LoraConfig(lora_rank=4, lora_target=target), model)

    assert of("q_proj,v_proj") == of("v_proj, q_proj") != of("q_proj,k_proj")
    assert of("all-linear") == of("down_proj,up_proj,gate_proj,o_proj,v_proj,k_proj,q_proj")
    assert of("linear_qkv") != of("q_proj,k_proj,v_proj")
