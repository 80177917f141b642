"""Megatron-LM checkpoints, written here in its layouts, to ours and back: the same tensors, and no code runs.

Sources of the layouts: megatron/training/checkpointing.py (files, arguments), megatron/core/transformer and megatron/legacy/model
(names), megatron/core/dist_checkpointing (torch_dist).
"""

import io
import os
import pickle
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.convert.megatron.delta_net import shifted
from fugaku_megatron.convert.megatron.torch_dist import DistFiles
from tests.checks.conversions import Attack, change_arguments, convert, refused
from tests.checks.torch_dist import append, write_iteration
from tests.helpers import find_checkpoint, largest_file, small_run

transformers = pytest.importorskip("transformers")

from tests.hf_models import (  # noqa: E402
    MODELS,
    VOCABULARY,
    decoder,
    gpt2,
    our_logits,
    randomized,
    same,
    tensors,
)

pytestmark = pytest.mark.parallel

TP = 2
PP = 2
LAYERS = 4
ROWS = 128  # of the padded vocabulary
GPT2_ARGS = Namespace(
    num_layers=LAYERS,
    hidden_size=48,
    num_attention_heads=4,
    ffn_hidden_size=192,
    seq_length=24,
    max_position_embeddings=24,
    layernorm_epsilon=1e-5,
    init_method_std=0.2,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    padded_vocab_size=ROWS,
    make_vocab_size_divisible_by=64,
    tensor_model_parallel_size=TP,
    pipeline_model_parallel_size=PP,
    params_dtype=torch.float32,
    bf16=False,
    fp16=False,
    bias_gelu_fusion=True,
    swiglu=False,
    vocab_size=None,
)
LLAMA_ARGS = Namespace(
    num_layers=LAYERS,
    hidden_size=48,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=72,
    seq_length=24,
    max_position_embeddings=24,
    norm_epsilon=1e-6,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    rotary_base=10000,
    rotary_percent=1.0,
    add_bias_linear=False,
    add_qkv_bias=False,
    untie_embeddings_and_output_weights=True,
    init_method_std=0.2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    padded_vocab_size=ROWS,
    vocab_size=VOCABULARY,
    tensor_model_parallel_size=TP,
    pipeline_model_parallel_size=PP,
    params_dtype=torch.float32,
    window_size=None,
    num_experts=None,
    add_position_embedding=False,
    rotary_interleaved=False,
)
MEGATRON_LAYOUT = (
    f"--ckpt-format torch --tensor-model-parallel-size {TP} --pipeline-model-parallel-size {PP} "
    "--make-vocab-size-divisible-by 64"
).split()
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {
        "gpt2": randomized(lambda: gpt2(n_layer=LAYERS)),
        "llama": randomized(
            decoder("Llama", num_hidden_layers=LAYERS, head_dim=16, tie_word_embeddings=False)
        ),
    }


def padded(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight, torch.zeros(ROWS - len(weight), weight.shape[1])])


def share(tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return tensor.chunk(TP, dim)[rank].clone()


def gpt2_layer(theirs: State, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Return a tensor-parallel rank's layer with names as in Megatron-LM's first models. theirs: Hugging Face's tensors"""
    for norm, name in (("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm")):
        yield from (
            (f"{name}.{kind}", theirs[f"{norm}.{kind}"].clone()) for kind in ("weight", "bias")
        )
    for kind in ("weight", "bias"):
        heads = [
            part.chunk(4, -1) for part in theirs[f"attn.c_attn.{kind}"].chunk(3, -1)
        ]  # of queries, keys, values
        mixed = torch.cat(
            [part[head] for head in range(rank * 2, rank * 2 + 2) for part in heads], -1
        )
        yield f"self_attention.query_key_value.{kind}", mixed.t().contiguous()
        yield f"mlp.dense_h_to_4h.{kind}", share(theirs[f"mlp.c_fc.{kind}"].t(), 0, rank)
    for name, part in (
        ("self_attention.dense", "attn.c_proj"),
        ("mlp.dense_4h_to_h", "mlp.c_proj"),
    ):
        yield f"{name}.weight", share(theirs[f"{part}.weight"].t(), 1, rank).contiguous()
        yield f"{name}.bias", theirs[f"{part}.bias"].clone()


def llama_layer(theirs: State, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the shard with Megatron-core's names, norms fused by transformer engine; each rank has one of two groups."""
    q, k, v = (share(theirs[f"self_attn.{part}_proj.weight"], 0, rank) for part in "qkv")
    yield "self_attention.linear_qkv.weight", torch.cat([q, k, v])
    yield "self_attention.linear_qkv.layer_norm_weight", theirs["input_layernorm.weight"].clone()
    yield "self_attention.linear_proj.weight", share(theirs["self_attn.o_proj.weight"], 1, rank)
    yield "mlp.linear_fc1.layer_norm_weight", theirs["post_attention_layernorm.weight"].clone()
    yield (
        "mlp.linear_fc1.weight",
        torch.cat([share(theirs[f"mlp.{part}_proj.weight"], 0, rank) for part in ("gate", "up")]),
    )
    yield "mlp.linear_fc2.weight", share(theirs["mlp.down_proj.weight"], 1, rank)


def below(theirs: State, prefix: str) -> State:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in theirs.items()
        if name.startswith(prefix)
    }


def gpt2_chunk(theirs: State, layers: range, rank: int) -> dict:
    """Return a rank's model chunk, nested as in Megatron-LM's first models; the last has a copy of the embedding."""
    encoder = {
        f"layers.{local}.{name}": tensor
        for local, layer in enumerate(layers)
        for name, tensor in gpt2_layer(below(theirs, f"transformer.h.{layer}."), rank)
    }
    words = share(padded(theirs["transformer.wte.weight"]), 0, rank)
    chunk: dict = {"language_model": {"encoder": encoder}}
    if layers.start == 0:
        positions = {"weight": theirs["transformer.wpe.weight"].clone()}
        chunk["language_model"]["embedding"] = {
            "word_embeddings": {"weight": words},
            "position_embeddings": positions,
        }
    if layers.stop == LAYERS:
        encoder |= {
            f"final_layernorm.{kind}": theirs[f"transformer.ln_f.{kind}"].clone()
            for kind in ("weight", "bias")
        }
        chunk["word_embeddings_for_head"] = {"weight": words.clone()}
    return chunk


def llama_chunk(theirs: State, layers: range, rank: int) -> State:
    chunk = {
        f"decoder.layers.{local}.{name}": tensor
        for local, layer in enumerate(layers)
        for name, tensor in llama_layer(below(theirs, f"model.layers.{layer}."), rank)
    }
    chunk["decoder.layers.0.self_attention.core_attention._extra_state"] = torch.zeros(
        3, dtype=torch.uint8
    )
    if layers.start == 0:
        chunk["embedding.word_embeddings.weight"] = share(
            padded(theirs["model.embed_tokens.weight"]), 0, rank
        )
    if layers.stop == LAYERS:
        chunk["decoder.final_layernorm.weight"] = theirs["model.norm.weight"].clone()
        chunk["output_layer.weight"] = share(padded(theirs["lm_head.weight"]), 0, rank)
    return chunk


CHUNKS = {"gpt2": (gpt2_chunk, GPT2_ARGS), "llama": (llama_chunk, LLAMA_ARGS)}
RNG = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]


def write_legacy(directory: Path, kind: str, theirs: State, virtual: int = 1, **changes) -> Path:
    """Write a checkpoint of iteration 7 at TP2 x PP2, with `virtual` model chunks per stage."""
    make, args = CHUNKS[kind]
    each = LAYERS // (PP * virtual)
    for stage in range(PP):
        for rank in range(TP):
            places = [(number * PP + stage) * each for number in range(virtual)]
            parts = [make(theirs, range(first, first + each), rank) for first in places]
            state = (
                {"model": parts[0]}
                if virtual == 1
                else {f"model{number}": part for number, part in enumerate(parts)}
            )
            folder = directory / "iter_0000007" / f"mp_rank_{rank:02d}_{stage:03d}"
            folder.mkdir(parents=True)
            torch.save(
                {
                    "args": Namespace(**{**vars(args), **changes}),
                    "checkpoint_version": 3.0,
                    "iteration": 7,
                    **state,
                    "rng_state": RNG,
                },
                folder / "model_optim_rng.pt",
            )
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
    return directory


def there(source: Path, directory: Path, *more: object) -> State:
    """Convert a Megatron-LM checkpoint to our format and to Hugging Face, and return the tensors."""
    assert convert("--from-megatron", source, "--save", directory / "ours", *more) == 0
    assert convert("--load", directory / "ours", "--to-hf", directory / "hf") == 0
    return tensors(directory / "hf")


def check_logits(theirs: torch.nn.Module, ours: Path) -> None:
    tokens = torch.randint(0, VOCABULARY, (24, 2), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(tokens.t()).logits.transpose(0, 1)
    tolerance = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(our_logits(ours, tokens), expected, rtol=1e-5, atol=tolerance)


def weights_of(model: torch.nn.Module) -> State:
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "virtual"), [("gpt2", 1), ("gpt2", 2), ("llama", 1), ("llama", 2)]
)
def test_a_legacy_checkpoint(models, tmp_path, kind, virtual):
    theirs = weights_of(models[kind])
    source = write_legacy(tmp_path / "megatron", kind, theirs, virtual)
    assert same(there(source, tmp_path, "--vocab-size", VOCABULARY), theirs)
    check_logits(models[kind], tmp_path / "ours")


@pytest.mark.parametrize("version", [0, 1.0])
def test_queries_keys_and_values_of_old_versions(models, tmp_path, version):
    theirs = weights_of(models["gpt2"])
    source = write_legacy(tmp_path / "megatron", "gpt2", theirs)
    for file in source.glob("iter_*/*/*.pt"):
        contents = torch.load(file, weights_only=False)
        contents["checkpoint_version"] = version
        encoder = contents["model"]["language_model"].pop("encoder")
        for name, tensor in encoder.items():
            if "query_key_value" in name:
                heads = tensor.view(2, 3, 12, -1)  # heads of a rank, parts, d
                encoder[name] = (
                    heads.permute(*((1, 0, 2) if version == 0 else (0, 2, 1)), 3)
                    .reshape(tensor.shape)
                    .contiguous()
                )
        contents["model"]["language_model"]["transformer"] = {
            name.replace("self_attention", "attention"): tensor for name, tensor in encoder.items()
        }
        torch.save(contents, file)
    assert same(there(source, tmp_path, "--vocab-size", VOCABULARY), theirs)


def dist_tensors(theirs: State, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Megatron-core's keys and global tensors.

    Layers are stacked; a gated MLP has all gates first. Different layers (kind "layers") have separate keys, and if every rank's piece is
    one tensor (kind "apart") so have gate and value.
    """
    for key, tensor in stacked_tensors(theirs, kind == "apart"):
        if kind == "layers" and "decoder.layers." in key:
            for layer, own in enumerate(tensor):
                yield key.replace("layers.", f"layers.{layer}."), own
        else:
            yield key, tensor


def stacked_tensors(theirs: State, apart: bool) -> Iterator[tuple[str, torch.Tensor]]:
    def layers(name: str) -> torch.Tensor:
        return torch.stack(
            [theirs[f"model.layers.{layer}.{name}.weight"] for layer in range(LAYERS)]
        )

    by_group = [layers(f"self_attn.{part}_proj").view(LAYERS, 2, -1, 48) for part in "qkv"]
    attention = "decoder.layers.self_attention"
    mlp = "decoder.layers.mlp.linear_fc1"
    yield f"{attention}.linear_qkv.weight", torch.cat(by_group, 2).flatten(1, 2)
    yield f"{attention}.linear_qkv.layer_norm_weight", layers("input_layernorm")
    yield f"{attention}.linear_proj.weight", layers("self_attn.o_proj")
    yield f"{mlp}.layer_norm_weight", layers("post_attention_layernorm")
    gate = layers("mlp.gate_proj")
    up = layers("mlp.up_proj")
    if apart:
        yield f"{mlp}.weight_w", gate
        yield f"{mlp}.weight_v", up
    else:
        yield f"{mlp}.weight", torch.cat([gate, up], 1)
    yield "decoder.layers.mlp.linear_fc2.weight", layers("mlp.down_proj")
    yield "embedding.word_embeddings.weight", padded(theirs["model.embed_tokens.weight"])
    yield "decoder.final_layernorm.weight", theirs["model.norm.weight"]
    yield "output_layer.weight", padded(theirs["lm_head.weight"])


def write_dist(directory: Path, theirs: State, kind: str = "stacked") -> Path:
    """Write a torch_dist checkpoint of two ranks."""
    tensors = dict(dist_tensors(theirs, kind))
    common = {"args": LLAMA_ARGS, "iteration": 7, "rng": np.random.get_state()}
    write_iteration(directory, 7, tensors, common, common_file=True)
    return directory


@pytest.mark.parametrize("kind", ["stacked", "apart", "layers"])
def test_a_checkpoint_of_torch_dist(models, tmp_path, kind):
    theirs = weights_of(models["llama"])
    source = write_dist(tmp_path / "megatron", theirs, kind)
    assert same(there(source, tmp_path), theirs)


def read_last(directory: Path) -> dict:
    """Return the file of the last rank that was written for Megatron-LM."""
    file = directory / "release" / "mp_rank_01_001" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_what_is_written_for_megatron_has_its_layout(models, tmp_path, kind, impl):
    theirs = weights_of(models[kind])
    models[kind].save_pretrained(tmp_path / "start")
    words = ("--from-hf", tmp_path / "start", "--to-megatron", tmp_path / "megatron")
    assert convert(*words, *MEGATRON_LAYOUT, "--transformer-impl", impl) == 0
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    contents = read_last(tmp_path / "megatron")
    args = contents["args"]
    expected = vars(CHUNKS[kind][1])
    assert not hasattr(args, "mask_vocab_padding"), "Megatron-LM has no such argument"
    assert contents["checkpoint_version"] == 3.0 and args.add_bias_linear is (kind == "gpt2")
    assert all(
        getattr(args, name) == value
        for name, value in expected.items()
        if name not in ("vocab_size", "window_size") and hasattr(args, name)
    )
    if (kind, impl) == ("llama", "transformer_engine"):
        last = llama_chunk(theirs, range(2, 4), 1)
        vocabulary = last.pop("output_layer.weight")[: VOCABULARY - ROWS // 2]
        last.pop("decoder.layers.0.self_attention.core_attention._extra_state")
        assert torch.equal(
            contents["model"].pop("output_layer.weight")[: len(vocabulary)], vocabulary
        )
        assert same(contents["model"], last)
    assert same(there(tmp_path / "megatron", tmp_path), theirs)


DELTA_KEYS = {
    "self_attention.in_proj.layer_norm_weight": (48,),
    "self_attention.in_proj.weight.query": (16, 48),
    "self_attention.in_proj.weight.key": (16, 48),
    "self_attention.in_proj.weight.value": (48, 48),
    "self_attention.in_proj.weight.z": (48, 48),
    "self_attention.in_proj.weight.beta": (4, 48),
    "self_attention.in_proj.weight.alpha": (4, 48),
    "self_attention.conv1d.weight.query": (16, 1, 4),
    "self_attention.conv1d.weight.key": (16, 1, 4),
    "self_attention.conv1d.weight.value": (48, 1, 4),
    "self_attention.dt_bias": (4,),
    "self_attention.A_log": (4,),
    "self_attention.out_norm.weight": (12,),
    "self_attention.out_proj.weight": (48, 48),
}


def write_delta_nets(kind: str, dtype: torch.dtype, directory: Path) -> None:
    """Write a random model with gated delta nets for Megatron-LM."""
    randomized(MODELS[kind]).to(dtype).save_pretrained(directory / "start")
    words = ("--from-hf", directory / "start", "--to-megatron", directory / "megatron")
    more = "--ckpt-format torch_dist --make-vocab-size-divisible-by 64"
    assert convert(*words, *more.split()) == 0


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen3_next", torch.bfloat16), ("qwen3_5", torch.float32)]
)
def test_gated_delta_nets_have_the_tensors_of_megatron(tmp_path, kind, dtype):
    """Layers have keys of their own, and the norm after the delta rule its weight minus 1."""
    write_delta_nets(kind, dtype, tmp_path)
    files = DistFiles.open(tmp_path / "megatron" / "release")
    prefix = "decoder.layers.0."
    found = {
        key.removeprefix(prefix): files.shape(key)
        for key in files.tensors
        if key.startswith(f"{prefix}self_attention.")
    }
    assert found == DELTA_KEYS
    theirs = tensors(tmp_path / "start")
    layer = "model.layers.0.linear_attn."
    norm = files.tensor(f"{prefix}self_attention.out_norm.weight")
    assert torch.equal(norm.float() + 1, theirs[f"{layer}norm.weight"].float())
    if kind == "qwen3_5":
        queries = files.tensor(f"{prefix}self_attention.in_proj.weight.query")
        assert torch.equal(queries, theirs[f"{layer}in_proj_qkv.weight"][:16])
    args = vars(files.common()["args"])
    assert args["experimental_attention_variant"] == "gated_delta_net"
    assert args["linear_attention_freq"] == 2 and args["apply_layernorm_1p"]
    assert same(there(tmp_path / "megatron", tmp_path), theirs)


def test_a_norm_that_its_format_would_round_is_fp32():
    """0.2 - 1 has more digits than BF16."""
    weight = torch.tensor([0.2, 1.25]).bfloat16()
    stored = shifted(weight, -1.0, torch.bfloat16)
    assert stored.dtype is torch.float32
    back = shifted(stored, 1.0, torch.bfloat16)
    assert back.dtype is torch.bfloat16 and torch.equal(back, weight)


def test_gated_delta_nets_of_the_legacy_format_are_refused(tmp_path, capsys):
    write_delta_nets("qwen3_5", torch.float32, tmp_path)
    words = ("--from-hf", tmp_path / "start", "--to-megatron", tmp_path / "old")
    message = "--ckpt-format torch does not have gated delta nets"
    assert message in refused(capsys, *words, "--ckpt-format", "torch")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_norms_that_store_their_weight_minus_one(models, tmp_path, kind):
    theirs = {
        name: tensor - 1 if "ln_" in name and "weight" in name or "norm" in name else tensor
        for name, tensor in weights_of(models[kind]).items()
    }
    source = write_legacy(tmp_path / "megatron", kind, theirs, apply_layernorm_1p=True)
    ours = tmp_path / "ours"
    words = ("--from-megatron", source, "--save", ours, "--vocab-size", VOCABULARY)
    assert convert(*words) == 0
    check_logits(models[kind], ours)
    assert convert("--load", ours, "--to-megatron", tmp_path / "back", *MEGATRON_LAYOUT) == 0
    contents = read_last(tmp_path / "back")
    last = {"gpt2": "transformer.ln_f.weight", "llama": "model.norm.weight"}[kind]
    assert contents["args"].apply_layernorm_1p and torch.equal(
        contents["model"]["decoder.final_layernorm.weight"], theirs[last]
    )


def with_attack(file: Path) -> None:
    contents = torch.load(file, weights_only=False)
    torch.save({**contents, "rng_state": Attack()}, file)


FIRST = "iter_0000007/mp_rank_00_000/model_optim_rng.pt"
LAST = "iter_0000007/mp_rank_01_001/model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
LEGACY_DAMAGE = [
    (lambda d: with_attack(d / LAST), "asks for ['posix.system'], which could run code"),
    (lambda d: (d / LAST).unlink(), "model_optim_rng.pt is missing"),
    (
        lambda d: shutil.rmtree((d / LAST).parent),
        "has no file of pipeline stage and tensor-parallel rank (1, 1)",
    ),
    (lambda d: os.truncate(d / LAST, 5000), "is not a file of torch.save"),
    (
        lambda d: (d / TRACKER).write_text("soon"),
        "should hold an iteration or release, it holds",
    ),
    (lambda d: (d / TRACKER).unlink(), f"{TRACKER} is not there"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quick_geglu": True},
            "quick_geglu is True: Megatron-LM's weights of such layers are not converted",
        ),
        (
            {"num_experts": 8, "add_bias_linear": False},
            "holds no decoder.layers.0.mlp.router.weight",
        ),
        ({"num_layers": 5}, "holds no decoder.layers.4."),
        (
            {"num_layers": 3},
            "tensors that the block does not have, such as ['decoder.layers.3.",
        ),
        (
            {"ffn_hidden_size": 96},
            "linear_fc1.weight has 9216 elements, and its shape [96, 48]",
        ),
        ({"hidden_size": "48"}, "hidden_size is '48', not int"),
    ],
)
def test_saved_arguments_are_compared_with_the_tensors(models, tmp_path, capsys, changes, message):
    source = write_legacy(tmp_path / "megatron", "gpt2", weights_of(models["gpt2"]))
    change_arguments(source / FIRST, **changes)
    assert message in line_of(capsys, source, tmp_path)


def line_of(capsys, source: Path, directory: Path, *more: object) -> str:
    """Return a refused conversion's line. The conversion leaves nothing behind."""
    line = refused(capsys, "--from-megatron", source, "--save", directory / "ours", *more)
    assert not list(directory.glob("*ours*")) and not Path("attacked").exists()
    assert line.startswith("fugaku-megatron convert: ") and str(source) in line
    return line


DIST = "iter_0000007"


def with_metadata(change: Callable[[Metadata], object]) -> Callable[[Path], None]:
    """Return a change of a checkpoint's metadata."""

    def changed(directory: Path) -> None:
        path = directory / DIST / ".metadata"
        contents = pickle.loads(path.read_bytes())
        change(contents)
        path.write_bytes(pickle.dumps(contents))

    return changed


def overlap(contents: Metadata) -> None:
    """Move the second half of a tensor by a row, into the first half."""
    key = "output_layer.weight"
    second = contents.state_dict_metadata[key].chunks[1]
    place = contents.storage_data.pop(MetadataIndex(key, second.offsets))
    second.offsets = torch.Size([second.offsets[0] - 1, second.offsets[1]])
    contents.storage_data[MetadataIndex(key, second.offsets)] = place


def leave_row_out(directory: Path) -> None:
    """Write the second half of a tensor without its last row."""

    def change(contents: Metadata) -> None:
        key = "output_layer.weight"
        second = contents.state_dict_metadata[key].chunks[1]
        second.sizes = torch.Size([second.sizes[0] - 1, second.sizes[1]])
        index = MetadataIndex(key, second.offsets)
        piece = append(directory / DIST / "__9_0.distcp", torch.zeros(second.sizes))
        contents.storage_data[index] = piece

    with_metadata(change)(directory)


def move_pieces(contents: Metadata, **place: Any) -> None:
    for found in contents.storage_data.values():
        for name, value in place.items():
            setattr(found, name, value)


def compress_a_piece(directory: Path) -> None:
    """Write a piece anew as a compressed zip file, in which a record expands a thousand times."""

    def change(contents: Metadata) -> None:
        stored = io.BytesIO()
        torch.save(torch.zeros(2**20), stored)
        packed = io.BytesIO()
        with (
            zipfile.ZipFile(stored) as source,
            zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
        ):
            for name in source.namelist():
                target.writestr(name, source.read(name))
        (directory / DIST / "__0_0.distcp").write_bytes(packed.getvalue())
        move_pieces(contents, relative_path="__0_0.distcp", offset=0, length=len(packed.getvalue()))

    with_metadata(change)(directory)


DIST_DAMAGE = [
    (lambda d: (d / DIST / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    (
        lambda d: os.truncate(d / DIST / "__1_0.distcp", 5000),
        "__1_0.distcp has 5000 bytes, and .metadata says that",
    ),
    (
        lambda d: (d / DIST / "__1_0.distcp").write_bytes(b"x" * 10**6),
        "__1_0.distcp is damaged at byte",
    ),
    (
        with_metadata(lambda m: m.state_dict_metadata["output_layer.weight"].chunks.pop()),
        "output_layer.weight of shape [128, 48] has 24576 bytes, and its pieces 14",
    ),
    (
        with_metadata(overlap),
        "output_layer.weight has several pieces with the elements at [64, 0]",
    ),
    (leave_row_out, "hold 6096 of its 6144 elements"),
    (with_metadata(partial(move_pieces, length=2**62)), "ends at byte 46116860184276"),
    (with_metadata(partial(move_pieces, offset=2**70)), "_0.distcp has"),
    (
        with_metadata(partial(move_pieces, relative_path="../common.pt")),
        "../common.pt is missing",
    ),
    (
        compress_a_piece,
        "__0_0.distcp is damaged at byte 0: its",
    ),
    (
        with_metadata(lambda m: setattr(m, "planner_data", Attack())),
        "it asks for posix.system, which could run code",
    ),
    (
        lambda d: (d / DIST / ".metadata").write_bytes(b"nothing"),
        ".metadata is damaged, or is not metadata of",
    ),
    (
        lambda d: (d / DIST / "common.pt").unlink(),
        "holds neither common.pt nor the object common_state",
    ),
]


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [*(("gpt2", *row) for row in LEGACY_DAMAGE), *(("llama", *row) for row in DIST_DAMAGE)],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_missing_damaged_or_malicious_is_named(
    models, tmp_path, capsys, kind, damage, message
):
    source = tmp_path / "megatron"
    theirs = weights_of(models[kind])
    write_legacy(source, kind, theirs) if kind == "gpt2" else write_dist(source, theirs)
    damage(source)
    assert message in line_of(capsys, source, tmp_path)


def test_other_mistakes(models, tmp_path, capsys):
    source = write_legacy(tmp_path / "megatron", "gpt2", weights_of(models["gpt2"]))
    assert "iter_0000008 holds neither mp_rank_* nor .metadata" in line_of(
        capsys, source, tmp_path, "--ckpt-step", 8
    )
    assert "the vocabulary has 129 tokens, its embedding 128 rows" in line_of(
        capsys, source, tmp_path, "--vocab-size", 129
    )
    words = "--ckpt-format torch --tensor-model-parallel-size 3 --to-megatron".split()
    line = refused(capsys, "--from-megatron", source, *words, tmp_path / "other")
    assert "4 attention heads are not divisible by 3 ranks" in line
    assert not (tmp_path / "other").exists()
    with pytest.raises(
        ValueError, match="is a checkpoint of Megatron-LM .*fugaku-megatron convert --from-megatron"
    ):
        find_checkpoint(small_run(load=str(source)), SoloComm())
    itself = there(source / "iter_0000007", tmp_path, "--vocab-size", VOCABULARY)
    assert same(itself, weights_of(models["gpt2"]))


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_disk_that_is_full_is_one_line(models, tmp_path, capsys, form):
    """A limit of a file's size fails as a full disk does, within torch.save."""
    source = write_dist(tmp_path / "megatron", weights_of(models["llama"]))
    target = tmp_path / "other"
    words = ("--from-megatron", source, "--to-megatron", target, "--ckpt-format", form)
    with largest_file(20_000):
        line = refused(capsys, *words)
    assert f"--to-megatron {target}: File too large" in line
    assert [*tmp_path.iterdir()] == [tmp_path / "megatron"]
