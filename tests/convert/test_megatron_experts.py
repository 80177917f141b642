"""Checkpoints of Megatron-LM with experts and with a HybridModel's layers, to its layouts and back.

Sources of the layouts: megatron/core/transformer/moe/experts.py (SequentialMLP, GroupedMLP, TEGroupedMLP),
moe/shared_experts.py, moe/router.py, models/hybrid/hybrid_block.py, transformer_block.py (keys of layers),
megatron/training/checkpointing.py (files). tests/foreign/megatron_core.py compares them with megatron-core.
"""

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.convert.megatron.arguments import check_pattern
from fugaku_megatron.convert.megatron.pickles import load_metadata, load_pickled
from fugaku_megatron.convert.open_weights import open_weights
from tests.checks.conversions import (
    BLOCK,
    Attack,
    Tensors,
    change_arguments,
    check_same,
    convert,
    read,
    refused,
    save_random,
    to_megatron,
)
from tests.checks.torch_dist import write_iteration
from tests.helpers import find_checkpoint, make_trainer, small_run

pytestmark = pytest.mark.parallel

EXPERTS = 4
MODEL: dict[str, Any] = {
    **BLOCK,
    "num_experts": EXPERTS,
    "moe_layer_freq": "[0,1]",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """Return a checkpoint of this program with random weights."""
    return save_random(tmp_path_factory.mktemp("ours"), MODEL)


DIST = "--ckpt-format torch_dist"
LEGACY = "--ckpt-format torch"


@pytest.mark.parametrize(
    "flags",
    [
        DIST,
        f"{DIST} --transformer-impl local --common-state object",
        f"{DIST} --hybrid-layer-pattern *-|*E",
        f"{LEGACY} --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
        f"{LEGACY} --transformer-impl local --pipeline-model-parallel-size 2 --expert-model-parallel-size 4",
        f"{LEGACY} --pipeline-model-parallel-size 2",
        "",
    ],
)
def test_experts_come_back_from_megatron_lm_s_layouts(ours, tmp_path, flags):
    theirs = to_megatron(ours, tmp_path, flags)
    assert (theirs / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert convert("--from-megatron", theirs, "--save", tmp_path / "back") == 0
    check_same(read(tmp_path / "back"), read(ours))


# Keys that megatron-core 0.19.2 saves for MODEL with a local GPTModel, layer 0 apart from attention left out.
GPT_KEYS = """\
decoder.layers.1.self_attention.linear_qkv.layer_norm_weight [32]
decoder.layers.1.self_attention.linear_qkv.weight [96, 32]
decoder.layers.1.self_attention.linear_proj.weight [32, 32]
decoder.layers.1.mlp.linear_fc1.layer_norm_weight [32]
decoder.layers.1.mlp.router.weight [4, 32]
decoder.layers.1.mlp.router.expert_bias [4]
decoder.layers.1.mlp.experts.experts.linear_fc1.weight [4, 48, 32]
decoder.layers.1.mlp.experts.experts.linear_fc2.weight [4, 32, 24]
decoder.layers.1.mlp.shared_experts.gate_weight [1, 32]
decoder.layers.1.mlp.shared_experts.linear_fc1.weight [80, 32]
decoder.layers.1.mlp.shared_experts.linear_fc2.weight [32, 40]
decoder.final_layernorm.weight [32]
output_layer.weight [64, 32]
embedding.word_embeddings.weight [64, 32]"""
EXTRA = {
    "decoder.layers.1.self_attention.linear_qkv._extra_state/shard_0_1",
    "decoder.layers.1.self_attention.linear_proj._extra_state/shard_0_1",
    "decoder.layers.1.mlp.shared_experts.linear_fc1._extra_state/shard_0_1",
    "decoder.layers.1.mlp.shared_experts.linear_fc2._extra_state/shard_0_1",
    *(
        f"decoder.layers.1.mlp.experts.experts.linear_fc{half}._extra_state/shard_{expert}_4"
        for half in (1, 2)
        for expert in range(EXPERTS)
    ),
    "common_state/shard_0_1",
}


def test_keys_are_those_of_megatron_core(ours, tmp_path):
    flags = (
        f"{DIST} --transformer-impl local --common-state object --make-vocab-size-divisible-by 64"
    )
    path = to_megatron(ours, tmp_path, flags) / "release"
    stored = load_metadata(path / ".metadata").state_dict_metadata
    kept = {key: value for key, value in stored.items() if ".0." not in key}
    tensors = {f"{key} {[*v.size]}" for key, v in kept.items() if hasattr(v, "size")}
    assert tensors == {*GPT_KEYS.splitlines()}
    assert {key for key in kept if "/shard_" in key} == EXTRA
    assert len(stored["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].chunks) == 8
    config = json.loads((path / "metadata.json").read_text())
    assert (config["sharded_backend"], config["sharded_backend_version"]) == ("torch_dist", 1)


def test_a_hybrid_model_has_its_own_layers(ours, tmp_path):
    flags = f"{DIST} --hybrid-layer-pattern *-*E"
    path = to_megatron(ours, tmp_path, flags) / "release"
    keys = load_metadata(path / ".metadata").state_dict_metadata
    for key in (
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.2.self_attention.linear_proj.weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.layers.3.mlp.router.weight",
        "decoder.final_norm.weight",
        "output_layer._extra_state/shard_0_1",
    ):
        assert key in keys
    args = load_pickled(path / "common.pt")["args"]
    assert (args.hybrid_layer_pattern, args.num_layers, args.is_hybrid_model) == ("*-*E", 4, True)


@pytest.mark.parametrize("engine", ["local", "transformer_engine"])
def test_layers_of_one_part_are_those_of_a_hybrid_model(tmp_path, capsys, engine):
    trainer = make_trainer(SoloComm(), small_run(num_layers=4, layer_types="*,*-,-,-"))
    trainer.save(str(tmp_path / "ours"))
    trainer.close()
    theirs = to_megatron(tmp_path / "ours", tmp_path, f"{DIST} --transformer-impl {engine}")
    args = load_pickled(theirs / "release" / "common.pt")["args"]
    assert (args.hybrid_layer_pattern, args.num_layers) == ("**---", 5)
    keys = load_metadata(theirs / "release" / ".metadata").state_dict_metadata
    for number in (2, 3, 4):
        assert f"decoder.layers.{number}.mlp.linear_fc1.layer_norm_weight" in keys
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in keys
    assert convert("--from-megatron", theirs, "--save", tmp_path / "back") == 0
    assert open_weights(str(tmp_path / "back")).model.layer_types == "*,*-,-,-"
    check_same(read(tmp_path / "back"), read(tmp_path / "ours"))
    for words, message in (
        (["--to-megatron", tmp_path / "no", *LEGACY.split()], "only HybridModel has these layers"),
        (["--to-hf", tmp_path / "no"], "no architecture of Hugging Face has this block"),
    ):
        assert message in refused(capsys, "--load", tmp_path / "ours", *words)
        assert not (tmp_path / "no").exists()


def rewrite(theirs: Path, change: Any) -> None:
    for file in theirs.glob("release/*/model_optim_rng.pt"):
        contents = torch.load(file, weights_only=False)
        change(contents["model"])
        torch.save(contents, file)


def together(model: Tensors) -> None:
    """Store experts as GroupedMLP does: transposed, in one matrix."""
    place = "decoder.layers.1.mlp.experts"
    for half, shape in ((1, (32, -1)), (2, (-1, 32))):
        own = [key for key in model if key.startswith(f"{place}.linear_fc{half}.weight")]
        experts = [model.pop(f"{place}.linear_fc{half}.weight{i}") for i in range(len(own))]
        model[f"{place}.weight{half}"] = torch.stack([e.t() for e in experts]).reshape(shape)


def test_experts_of_a_grouped_mlp_are_read(ours, tmp_path):
    flags = f"{LEGACY} --tensor-model-parallel-size 2 --expert-model-parallel-size 2"
    theirs = to_megatron(ours, tmp_path, flags)
    rewrite(theirs, together)
    check_same(read(theirs), read(ours))


@pytest.mark.parametrize("common_file", [True, False])
def test_experts_with_keys_of_their_own_are_read(ours, tmp_path, common_file):
    """As with singleton_local_shards: each expert, gate and value is a tensor."""
    flags = f"{DIST} --transformer-impl local"
    common = load_pickled(to_megatron(ours, tmp_path, flags) / "release" / "common.pt")
    tensors: Tensors = {}
    for name, tensor in read(ours).items():
        own = name.replace(".gate.weight", ".gate_weight")
        if ".mlp.experts." in name:
            for expert, part in enumerate(tensor):
                key = own.replace(".experts.", f".experts.experts.{expert}.")
                halves = {"_w": part[0], "_v": part[1]} if "fc1" in name else {"": part}
                tensors.update({key + half: value for half, value in halves.items()})
        else:
            tensors[own] = tensor.flatten(0, 1) if "linear_fc1" in name else tensor
    write_iteration(tmp_path / "apart", 7, tensors, common, common_file=common_file)
    check_same(read(tmp_path / "apart"), read(ours))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            f"{DIST} --hybrid-layer-pattern *-*-",
            "--hybrid-layer-pattern is '*-*-', and the layers of the model are '*-*E'",
        ),
        (
            "--tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 2 is for --ckpt-format torch: pass both",
        ),
        (
            f"{LEGACY} --common-state object",
            "--common-state object is for --ckpt-format torch_dist",
        ),
        (f"{LEGACY} --expert-model-parallel-size 3", "4 experts are not divisible by 3 ranks"),
        (f"{LEGACY} --expert-model-parallel-size 0", "--expert-model-parallel-size"),
    ],
)
def test_a_layout_that_cannot_be_written_is_one_line(ours, tmp_path, capsys, flags, message):
    words = ("--load", ours, "--to-megatron", tmp_path / "theirs", *flags.split())
    assert message in refused(capsys, *words) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_latent_size": 16}, "moe_latent_size is 16: this variant of experts"),
        ({"hybrid_layer_pattern": "M*-*E"}, "M at position 1 is a Mamba-2 layer, which is not"),
        ({"hybrid_layer_pattern": "*-*-"}, "holds no decoder.layers.1.input_layernorm.weight"),
        ({"moe_layer_freq": [1, 1]}, "holds no decoder.layers.0.mlp.router.weight"),
        ({"num_experts": 8}, "router.weight has 128 elements, and its shape [8, 32] has 256"),
        ({"moe_router_topk": "two"}, "moe_router_topk is 'two', not int"),
        ({"moe_router_score_function": "sqrtsoftplus"}, "moe-router-score-function"),
    ],
)
def test_saved_arguments_of_experts_are_checked(ours, tmp_path, capsys, change, message):
    theirs = to_megatron(ours, tmp_path, DIST)
    change_arguments(theirs / "release" / "common.pt", **change)
    assert message in refused(capsys, "--from-megatron", theirs, "--save", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_hybrid_model_numbers_other_layers(ours):
    model = replace(open_weights(str(ours)).model, no_rope_freq="[0,1]")
    with pytest.raises(ValueError, match=r"--no-rope-freq is \[0,1\]: in a HybridModel"):
        check_pattern("*-*E", model)


def cut(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("common", "change", "message"),
    [
        ({"x": Attack()}, None, "asks for ['posix.system'], which could run code"),
        ([1, 2], None, "common_state is list, not a dictionary"),
        ({"iteration": 7}, None, "holds no arguments of Megatron-LM"),
        ({"args": Namespace()}, cut, " bytes, and .metadata says that common_state/shard_0_1"),
        (
            {"args": Namespace()},
            lambda path: (path / "__0_0.distcp").unlink(),
            "__0_0.distcp is missing",
        ),
    ],
)
def test_a_damaged_or_malicious_common_state_is_named(
    tmp_path, capsys, monkeypatch, common, change, message
):
    monkeypatch.chdir(tmp_path)
    tensors = {"embedding.word_embeddings.weight": torch.zeros(64, 32)}
    path = write_iteration(tmp_path / "theirs", 7, tensors, common)
    if change is not None:
        change(path)
    words = ("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "back")
    assert message in refused(capsys, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    with pytest.raises(ValueError, match=re.escape(message)):
        find_checkpoint(small_run(load=str(tmp_path / "theirs")), SoloComm())
