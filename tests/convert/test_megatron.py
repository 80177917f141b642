"""Megatron-LM checkpoints, written here in its layouts, to ours and back: the same tensors, and no code runs.

Sources of the layouts: megatron/training/checkpointing.py (files, arguments), megatron/core/transformer and megatron/legacy/model
(names), megatron/core/dist_checkpointing (torch_dist).
"""

import io
import os
import pickle
import resource
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.convert.megatron.delta_net import shifted
from fugaku_megatron.convert.megatron.torch_dist import DistFiles
from tests.helpers import find_checkpoint, small_run

transformers = pytest.importorskip("transformers")

from tests.hf_models import (  # noqa: E402
    MODELS,
    VOCABULARY,
    convert,
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


def append(file: Path, tensor: torch.Tensor) -> _StorageInfo:
    """Append a piece to a file."""
    buffer = io.BytesIO()
    torch.save(tensor.clone(), buffer)
    offset = file.stat().st_size if file.exists() else 0
    with open(file, "ab") as stream:
        stream.write(buffer.getvalue())
    return _StorageInfo(file.name, offset, len(buffer.getvalue()))


def pieces(theirs: State, kind: str) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """Yield (key, global tensor, tensor-parallel dimension) as in Megatron-core's sharded state.

    Layers are stacked; a gated MLP has all gates first. Different layers (kind "layers") have separate keys, and if every rank's piece is
    one tensor (kind "apart") so have gate and value.
    """
    for key, tensor, dim in stacked_pieces(theirs, kind == "apart"):
        if kind != "layers" or "decoder.layers." not in key:
            yield key, tensor, dim
            continue
        for layer, own in enumerate(tensor):
            yield key.replace("layers.", f"layers.{layer}."), own, None if dim is None else dim - 1


def stacked_pieces(theirs: State, apart: bool) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    def layers(name: str) -> torch.Tensor:
        return torch.stack(
            [theirs[f"model.layers.{layer}.{name}.weight"] for layer in range(LAYERS)]
        )

    q, k, v = (
        layers(f"self_attn.{part}_proj").view(LAYERS, 2, -1, 48) for part in "qkv"
    )  # by groups
    yield (
        "decoder.layers.self_attention.linear_qkv.weight",
        torch.cat([q, k, v], 2).flatten(1, 2),
        1,
    )
    yield (
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        layers("input_layernorm"),
        None,
    )
    yield "decoder.layers.self_attention.linear_proj.weight", layers("self_attn.o_proj"), 2
    yield (
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        layers("post_attention_layernorm"),
        None,
    )
    gate = layers("mlp.gate_proj")
    up = layers("mlp.up_proj")
    key = "decoder.layers.mlp.linear_fc1.weight"
    yield from (
        ((f"{key}_w", gate, 1), (f"{key}_v", up, 1))
        if apart
        else ((key, torch.cat([gate, up], 1), 1),)
    )
    yield "decoder.layers.mlp.linear_fc2.weight", layers("mlp.down_proj"), 2
    yield "embedding.word_embeddings.weight", padded(theirs["model.embed_tokens.weight"]), 0
    yield "decoder.final_layernorm.weight", theirs["model.norm.weight"], None
    yield "output_layer.weight", padded(theirs["lm_head.weight"]), 0


def write_dist(directory: Path, theirs: State, kind: str = "stacked") -> Path:
    """Write a torch_dist checkpoint at TP2 x PP2: a file per rank, pieces of a layer each."""
    path = directory / "iter_0000007"
    path.mkdir(parents=True)
    tables: tuple[dict, dict] = {}, {}
    for key, tensor, dim in pieces(theirs, kind):
        chunks = []
        for layer in (
            range(LAYERS) if key.startswith("decoder.layers.") and kind != "layers" else (None,)
        ):
            own = tensor if layer is None else tensor[layer : layer + 1]
            for rank, part in enumerate(own.chunk(TP, dim) if dim is not None else [own]):
                offsets = [0] * tensor.dim()
                offsets[0] = layer or 0
                if dim is not None:
                    offsets[dim] += rank * part.shape[dim]
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
                stage = 0 if layer is None else layer // 2
                tables[1][MetadataIndex(key, torch.Size(offsets))] = append(
                    path / f"__{stage * TP + rank}_0.distcp", part
                )
        tables[0][key] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.shape, chunks
        )
    tables[0]["decoder.layers.self_attention.core_attention._extra_state/shard_0_4"] = (
        BytesStorageMetadata()
    )
    moments = TensorStorageMetadata(TensorProperties(), torch.Size([5]), [])
    tables[0]["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = moments
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(tables[0], storage_data=tables[1])))
    torch.save(
        {
            "args": LLAMA_ARGS,
            "iteration": 7,
            "checkpoint_version": 3.0,
            "rng": np.random.get_state(),
        },
        path / "common.pt",
    )
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
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
    assert (
        convert(
            "--from-hf",
            tmp_path / "start",
            "--to-megatron",
            tmp_path / "megatron",
            *MEGATRON_LAYOUT,
            "--transformer-impl",
            impl,
        )
        == 0
    )
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
    words = ("--ckpt-format", "torch_dist", "--make-vocab-size-divisible-by", 64)
    assert (
        convert("--from-hf", directory / "start", "--to-megatron", directory / "megatron", *words)
        == 0
    )


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
    capsys.readouterr()
    words = ("--from-hf", tmp_path / "start", "--to-megatron", tmp_path / "old")
    assert convert(*words, "--ckpt-format", "torch") == 2
    message = capsys.readouterr().err
    assert "--ckpt-format torch does not have gated delta nets" in message


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_norms_that_store_their_weight_minus_one(models, tmp_path, kind):
    theirs = {
        name: tensor - 1 if "ln_" in name and "weight" in name or "norm" in name else tensor
        for name, tensor in weights_of(models[kind]).items()
    }
    source = write_legacy(tmp_path / "megatron", kind, theirs, apply_layernorm_1p=True)
    assert (
        convert("--from-megatron", source, "--save", tmp_path / "ours", "--vocab-size", VOCABULARY)
        == 0
    )
    check_logits(models[kind], tmp_path / "ours")
    assert (
        convert(
            "--load",
            tmp_path / "ours",
            "--to-megatron",
            tmp_path / "back",
            *MEGATRON_LAYOUT,
        )
        == 0
    )
    contents = read_last(tmp_path / "back")
    last = {"gpt2": "transformer.ln_f.weight", "llama": "model.norm.weight"}[kind]
    assert contents["args"].apply_layernorm_1p and torch.equal(
        contents["model"]["decoder.final_layernorm.weight"], theirs[last]
    )


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def rewrite(file: Path, **values: object) -> None:
    contents = torch.load(file, weights_only=False)
    args = values.pop("args", {})
    contents["args"] = Namespace(**{**vars(contents["args"]), **args})
    torch.save({**contents, **values}, file)


FIRST = "iter_0000007/mp_rank_00_000/model_optim_rng.pt"
LAST = "iter_0000007/mp_rank_01_001/model_optim_rng.pt"
LEGACY_DAMAGE = [
    (
        lambda d: rewrite(d / LAST, rng_state=Attack()),
        "asks for ['posix.system'], which could run code",
    ),
    (lambda d: (d / LAST).unlink(), "model_optim_rng.pt is missing"),
    (
        lambda d: ((d / LAST).unlink(), (d / LAST).parent.rmdir()),
        "has no file of pipeline stage and tensor-parallel rank (1, 1)",
    ),
    (
        lambda d: (d / LAST).write_bytes((d / LAST).read_bytes()[:5000]),
        "is not a file of torch.save",
    ),
    (
        lambda d: rewrite(d / FIRST, args={"quick_geglu": True}),
        "quick_geglu is True: Megatron-LM's weights of such layers are not converted",
    ),
    (
        lambda d: rewrite(d / FIRST, args={"num_experts": 8, "add_bias_linear": False}),
        "holds no decoder.layers.0.mlp.router.weight",
    ),
    (lambda d: rewrite(d / FIRST, args={"num_layers": 5}), "holds no decoder.layers.4."),
    (
        lambda d: rewrite(d / FIRST, args={"num_layers": 3}),
        "tensors that the block does not have, such as ['decoder.layers.3.",
    ),
    (
        lambda d: rewrite(d / FIRST, args={"ffn_hidden_size": 96}),
        "linear_fc1.weight has 9216 elements, and its shape [96, 48]",
    ),
    (lambda d: rewrite(d / FIRST, args={"hidden_size": "48"}), "hidden_size is '48', not int"),
    (
        lambda d: (d / "latest_checkpointed_iteration.txt").write_text("soon"),
        "should hold an iteration or release, it holds",
    ),
    (
        lambda d: (d / "latest_checkpointed_iteration.txt").unlink(),
        "latest_checkpointed_iteration.txt is not there",
    ),
]


def line_of(capsys, source: Path, directory: Path, *more: object) -> str:
    """Return a refused conversion's line. The conversion leaves nothing behind."""
    assert convert("--from-megatron", source, "--save", directory / "ours", *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not list(directory.glob("*ours*")) and not Path("attacked").exists()
    assert line.startswith("fugaku-megatron convert: ") and str(source) in line
    return line


def metadata_with(path: Path, change) -> None:
    contents = pickle.loads(path.read_bytes())
    change(contents)
    path.write_bytes(pickle.dumps(contents))


def overlap(contents: Metadata) -> None:
    """Move the second half of a tensor by a row, into the first half."""
    key = "output_layer.weight"
    second = contents.state_dict_metadata[key].chunks[1]
    place = contents.storage_data.pop(MetadataIndex(key, second.offsets))
    second.offsets = torch.Size([second.offsets[0] - 1, second.offsets[1]])
    contents.storage_data[MetadataIndex(key, second.offsets)] = place


def leave_row_out(path: Path) -> None:
    """Write the second half of a tensor without its last row."""

    def change(contents: Metadata) -> None:
        key = "output_layer.weight"
        second = contents.state_dict_metadata[key].chunks[1]
        second.sizes = torch.Size([second.sizes[0] - 1, second.sizes[1]])
        index = MetadataIndex(key, second.offsets)
        contents.storage_data[index] = append(path / "__9_0.distcp", torch.zeros(second.sizes))

    metadata_with(path / ".metadata", change)


def move_pieces(contents: Metadata, **place: Any) -> None:
    for found in contents.storage_data.values():
        for name, value in place.items():
            setattr(found, name, value)


def compress_a_piece(path: Path) -> None:
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
        (path / "__0_0.distcp").write_bytes(packed.getvalue())
        move_pieces(contents, relative_path="__0_0.distcp", offset=0, length=len(packed.getvalue()))

    metadata_with(path / ".metadata", change)


DIST = "iter_0000007"
DIST_DAMAGE = [
    (lambda d: (d / DIST / "__3_0.distcp").unlink(), "__3_0.distcp is missing"),
    (
        lambda d: os.truncate(d / DIST / "__3_0.distcp", 5000),
        "__3_0.distcp has 5000 bytes, and .metadata says that",
    ),
    (
        lambda d: (d / DIST / "__3_0.distcp").write_bytes(b"x" * 10**5),
        "__3_0.distcp is damaged at byte",
    ),
    (
        lambda d: metadata_with(
            d / DIST / ".metadata",
            lambda m: m.state_dict_metadata["output_layer.weight"].chunks.pop(),
        ),
        "output_layer.weight of shape [128, 48] has 24576 bytes, and its pieces 13",
    ),
    (
        lambda d: metadata_with(d / DIST / ".metadata", overlap),
        "output_layer.weight has several pieces with the elements at [63, 0]",
    ),
    (lambda d: leave_row_out(d / DIST), "hold 6096 of its 6144 elements"),
    *(
        (
            lambda d, place=place: metadata_with(
                d / DIST / ".metadata", lambda m: move_pieces(m, **place)
            ),
            message,
        )
        for place, message in (
            ({"length": 2**62}, "ends at byte 46116860184274"),
            ({"offset": 2**70}, "_0.distcp has"),
            ({"relative_path": "../common.pt"}, "../common.pt is missing"),
        )
    ),
    (
        lambda d: compress_a_piece(d / DIST),
        "__0_0.distcp is damaged at byte 0: its",
    ),
    (
        lambda d: metadata_with(
            d / DIST / ".metadata", lambda m: setattr(m, "planner_data", Attack())
        ),
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
    assert (
        convert(
            "--from-megatron",
            source,
            "--to-megatron",
            tmp_path / "other",
            "--ckpt-format",
            "torch",
            "--tensor-model-parallel-size",
            3,
        )
        == 2
    )
    assert (
        "4 attention heads are not divisible by 3 ranks" in capsys.readouterr().err
        and not (tmp_path / "other").exists()
    )
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
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        code = convert("--from-megatron", source, "--to-megatron", target, "--ckpt-format", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert code == 2 and f"--to-megatron {target}: File too large" in said
    assert said.count("\n") == 1 and [*tmp_path.iterdir()] == [tmp_path / "megatron"]
