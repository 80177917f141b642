"""Weights as one GGUF file, which llama.cpp reads: tensors under its names, the model's numbers, and the tokenizer.

The package gguf of llama.cpp's authors writes the file and knows the names of Hugging Face's tensors (extra [gguf]). One tensor
is in memory at a time, or all experts of a layer. Norms, biases and routers are F32, as in llama.cpp's own converter.
Sources: convert_hf_to_gguf.py and src/llama-vocab.cpp of ggml-org/llama.cpp.

llama.cpp tokenizes by one of two algorithms. "gpt2" is byte-level BPE, whose split of a text into pieces has a name there, which
follows from the regular expression of tokenizer.json. "llama" is that of SentencePiece, also for a tokenizer.json of BPE with bytes
as a fallback. Left out: other tokenizers; other quantizations, which llama.cpp's llama-quantize makes of such a file.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.checks import check, flag
from ..config.model_config import YARN, YARN_SCALING, ModelConfig
from ..data.files import read_text
from ..data.formats import library
from ..nn.passes import frequencies
from .architectures import Architecture
from .hugging_face import architecture_of, carried_config, in_their_shape, parts, read_json
from .weights import Weights

TYPES = {
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
}  # --gguf-type -> the package's name
JSON, PIECES, CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of tokens in llama.cpp
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's name of a split: the expressions of tokenizer.json for which it stands.
SPLITS = {_WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORDS + r"\p{N}" + _REST: "qwen2"}
BYTE_LEVEL, DIGITS = "gpt-2", "smollm"  # ByteLevel's own split, and this after single digits
BLOCK = 32  # elements of a row that Q8_0 scales together
ROPE = "rope_freqs.weight"
_EXPERT = re.compile(r"\.experts\.\d+\.")
_FULL = re.compile(
    r"norm|\.bias$|ffn_gate_inp|position_embd|rope_freqs"
)  # names of tensors that stay F32


@dataclass(frozen=True)
class Kind:
    """A row of KINDS. name: of the architecture in GGUF. interleaved: rope turns neighbours, so rows of queries and keys move.

    scaled: Llama 3's rope scaling is known there. only: our values that llama.cpp computes for it.
    """

    name: str
    interleaved: bool = False
    scaled: bool = False
    only: tuple[tuple[str, Any], ...] = ()


_NORMALIZED, _PLAIN = (("moe_router_pre_softmax", False),), (("moe_router_pre_softmax", True),)
KINDS = {  # by Hugging Face's model_type
    "gpt2": Kind("gpt2"),
    "llama": Kind("llama", True, True),
    "mistral": Kind("llama", True, True),
    "mixtral": Kind("llama", True, True, _NORMALIZED),
    "granite": Kind("granite", True),
    "qwen2": Kind("qwen2"),
    "qwen3": Kind("qwen3"),
    "qwen2_moe": Kind("qwen2moe", only=_PLAIN),
    "qwen3_moe": Kind("qwen3moe", only=_NORMALIZED),
    "olmoe": Kind("olmoe", only=_PLAIN),
    "stablelm": Kind("stablelm"),
}


def save_gguf(weights: Weights, file: Path, kind: str | None, chat_template: str | None) -> None:
    """Write the file. kind: --gguf-type. chat_template: a file. ValueError, one line, for what llama.cpp has no form of."""
    gguf = library("gguf", "gguf", "--to-gguf")
    model, before = weights.model, carried_config(weights.carried)
    architecture = architecture_of(model, before)
    row, kind = (
        _row(architecture, model),
        kind or {"fp32": "f32", "fp16": "f16"}.get(weights.precision, weights.precision),
    )
    writer = gguf.GGUFWriter(file, row.name)
    _add_numbers(writer, model, row)
    writer.add_file_type(
        gguf.LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{TYPES[kind]}"]
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    template = chat_template and read_text(chat_template, "--chat-template")
    add_tokenizer(gguf, writer, weights.carried, model.vocab_size or 0, template)
    tensors = _tensors(gguf, weights, architecture, row)
    for name, tensor in tensors.items():
        _add_info(gguf, writer, name, tensor.shape, _type(gguf, name, tensor.shape, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        values = tensor.read().float().numpy()
        writer.write_tensor_data(
            gguf.quants.quantize(
                np.ascontiguousarray(values), _type(gguf, name, tensor.shape, kind)
            )
        )
    writer.close()


def _row(architecture: Architecture, model: ModelConfig) -> Kind:
    name = f"--to-gguf: a model of {architecture.name}"
    row = KINDS.get(architecture.model_type)
    if row is None:
        raise ValueError(
            f"{name} is not converted to GGUF, only {', '.join(KINDS)}: pass --to-hf, and llama.cpp's "
            "convert_hf_to_gguf.py may know it"
        )
    check(
        model.window is None,
        f"{name} with a window of {model.window} tokens is not what llama.cpp computes",
    )
    check(
        row.scaled or not model.use_rope_scaling,
        f"{name} with --use-rope-scaling is not what llama.cpp computes",
    )
    check(
        model.rope_dynamic_factor is None,
        f"{name} with --rope-dynamic-factor is not what llama.cpp computes",
    )
    for f in fields(model) if model.position_embedding_type == YARN else ():
        same = f.name not in YARN_SCALING[2:] or getattr(model, f.name) == f.default
        check(
            same,
            f"{name} with {flag(f.name)} {getattr(model, f.name)} is not what llama.cpp computes, which is {f.default}",
        )
    check(
        model.num_experts is None or {*model.mlps} == {"experts"},
        f"{name} with layers without experts is not what llama.cpp computes",
    )
    for field, value in row.only:
        check(
            getattr(model, field) == value,
            f"{name} with {field} {getattr(model, field)} is not what llama.cpp computes",
        )
    return row


def _add_numbers(writer: Any, model: ModelConfig, row: Kind) -> None:
    """What the architecture's keys are, in the order of their names in the package."""
    head = model.kv_channels
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.ffn_hidden_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.query_groups)
    writer.add_vocab_size(model.vocab_size)
    (
        writer.add_layer_norm_rms_eps
        if model.normalization == "RMSNorm"
        else writer.add_layer_norm_eps
    )(model.layernorm_epsilon)
    if model.rotary:
        _add_scaling(writer, model)
        writer.add_rope_freq_base(model.rotary_base)
        writer.add_rope_dimension_count(int(head * model.rotary_percent))
        writer.add_key_length(head)
        writer.add_value_length(head)
    if row.name == "stablelm":
        writer.add_parallel_residual(model.parallel_residual)
    if row.name == "granite":
        writer.add_embedding_scale(model.embedding_multiplier)
        writer.add_residual_scale(model.residual_multiplier)
        writer.add_logit_scale(model.logits_scaling)
        writer.add_attention_scale(model.attention_multiplier or head**-0.5)
    if model.num_experts:
        writer.add_expert_count(model.num_experts)
        writer.add_expert_used_count(model.moe_router_topk)
        writer.add_expert_feed_forward_length(model.moe_ffn_hidden_size)
        if model.moe_shared_expert_intermediate_size:
            writer.add_expert_shared_feed_forward_length(model.moe_shared_expert_intermediate_size)


def _add_scaling(writer: Any, model: ModelConfig) -> None:
    """Linear scaling and yarn; Llama 3's scaling is a tensor (`rope_factors`)."""
    yarn, linear = model.position_embedding_type == YARN, model.rotary_seq_len_interpolation_factor
    if not (yarn or linear):
        return
    kinds = library("gguf", "gguf", "--to-gguf").RopeScalingType
    writer.add_rope_scaling_type(kinds.YARN if yarn else kinds.LINEAR)
    writer.add_rope_scaling_factor(model.rotary_scaling_factor if yarn else linear)
    if yarn:
        writer.add_rope_scaling_orig_ctx_len(model.yarn_original_max_position_embeddings)


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def _tensors(
    gguf: Any, weights: Weights, architecture: Architecture, row: Kind
) -> dict[str, _Tensor]:
    """Each tensor of the file under its name there."""
    model, like, read = weights.model, weights.like(), lru_cache(maxsize=2)(weights.read)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == row.name)
    names = gguf.get_tensor_name_map(arch, model.num_layers)
    theirs: dict[str, list[str]] = defaultdict(list)
    table = parts(architecture, model)
    for their in table:
        name = names.get_name(_EXPERT.sub(".experts.", their), try_suffixes=(".weight", ".bias"))
        check(name is not None, f"--to-gguf: the package gguf knows no name for {their}: update it")
        theirs[name].append(their)

    def tensor(name: str, group: list[str]) -> _Tensor:
        def values(source: Callable[[str], Tensor]) -> Tensor:
            found = [
                _arranged(
                    in_their_shape(source(table[their].ours), table[their], model),
                    name,
                    their,
                    model,
                    row,
                )
                for their in group
            ]
            return torch.stack(found) if _EXPERT.search(group[0]) else found[0]

        return _Tensor(tuple(values(like.__getitem__).shape), lambda: values(read))

    found = {name: tensor(name, group) for name, group in theirs.items()}
    if model.use_rope_scaling:
        factors = rope_factors(model)
        found[ROPE] = _Tensor(tuple(factors.shape), lambda: factors)
    return found


def _arranged(tensor: Tensor, name: str, their: str, model: ModelConfig, row: Kind) -> Tensor:
    """A tensor of theirs as llama.cpp has it, (out, in)."""
    if "c_attn.weight" in their or ".c_proj.weight" in their or ".c_fc.weight" in their:
        tensor = tensor.t()  # GPT-2's are (in, out) in Hugging Face
    heads = {"attn_q": model.num_attention_heads, "attn_k": model.query_groups}.get(
        name.split(".")[-2]
    )
    if row.interleaved and heads:
        tensor = (
            tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            .transpose(1, 2)
            .reshape(tensor.shape)
        )
    return tensor


def rope_factors(model: ModelConfig) -> Tensor:
    """(head / 2,): what Llama 3's scaling divides each frequency by."""
    return frequencies(replace(model, use_rope_scaling=False), 0) / frequencies(model, 0)


def _type(gguf: Any, name: str, shape: tuple[int, ...], kind: str) -> Any:
    """How a tensor is stored; a row that Q8_0 cannot cut into blocks is F16, as in llama.cpp's converter."""
    if len(shape) < 2 or _FULL.search(name):
        kind = "f32"
    elif kind == "q8_0" and shape[-1] % BLOCK:
        kind = "f16"
    return gguf.GGMLQuantizationType[TYPES[kind]]


def _add_info(gguf: Any, writer: Any, name: str, shape: tuple[int, ...], quantization: Any) -> None:
    stored = shape
    kinds = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    dtype = np.dtype(kinds.get(quantization, np.uint8))
    if dtype == np.uint8:
        stored = gguf.quant_shape_to_byte_shape(shape, quantization)
    writer.add_tensor_info(name, stored, dtype, math.prod(stored) * dtype.itemsize, quantization)


# The tokenizer -----------------------------------------------------------------------------------------------------------------

Vocabulary = list[tuple[str, int, float]]  # of each id: token, kind, score


def add_tokenizer(
    gguf: Any, writer: Any, folder: Path | None, rows: int, chat_template: str | None
) -> None:
    """Add the tokenizer of a folder of Hugging Face. rows: of the embedding. chat_template: its text; None: the folder's.

    ValueError, one line, for a folder without one and for one that llama.cpp has no form of.
    """
    if folder is None or not any((folder / name).is_file() for name in (JSON, PIECES)):
        raise ValueError(
            f"--to-gguf needs the tokenizer, and {folder or 'the checkpoint'} has neither {JSON} nor {PIECES}: pass "
            "its folder with --hf-files"
        )
    if (folder / PIECES).is_file():
        algorithm, split, vocabulary = "llama", "default", _pieces(folder)
    else:
        algorithm, split, vocabulary = _of_json(folder)
    check(
        len(vocabulary) <= rows,
        f"--to-gguf: the tokenizer in {folder} has {len(vocabulary)} tokens, and the model {rows}: pass "
        "the model's with --hf-files",
    )
    vocabulary += [(f"[PAD{token}]", UNUSED, -10000.0) for token in range(len(vocabulary), rows)]
    tokens, kinds, scores = zip(*vocabulary)
    writer.add_tokenizer_model(algorithm)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if algorithm == "llama":
        writer.add_token_scores(scores)
    special = gguf.SpecialVocab(folder, load_merges=algorithm == "gpt2", n_vocab=rows)
    special.chat_template = chat_template or special.chat_template
    special.add_to_gguf(writer, quiet=True)


def _added(folder: Path) -> list[dict[str, Any]]:
    """The added tokens of tokenizer.json, or of tokenizer_config.json."""
    if (folder / JSON).is_file():
        return read_json(folder / JSON).get("added_tokens") or []
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    return [
        {"id": int(number), **token}
        for number, token in (config.get("added_tokens_decoder") or {}).items()
    ]


def _with_added(vocabulary: dict[int, tuple[str, int, float]], folder: Path) -> Vocabulary:
    """All tokens up to the largest id; what is missing stands for nothing."""
    for token in _added(folder):
        _, kind, score = vocabulary.get(token["id"], ("", NORMAL, -1000.0))
        kind = UNKNOWN if kind == UNKNOWN else CONTROL if token.get("special") else USER
        vocabulary[token["id"]] = (token["content"], kind, score)
    return [
        vocabulary.get(token, (f"[PAD{token}]", UNUSED, -10000.0))
        for token in range(max(vocabulary) + 1)
    ]


def _pieces(folder: Path) -> Vocabulary:
    """Those of a SentencePiece model."""
    model = library("sentencepiece", "sentencepiece", "--to-gguf").SentencePieceProcessor(
        model_file=str(folder / PIECES)
    )
    tests: list[tuple[Callable[[int], bool], int]] = [
        (model.is_unknown, UNKNOWN),
        (model.is_control, CONTROL),
        (model.is_unused, UNUSED),
        (model.is_byte, BYTE),
    ]
    found = {
        piece: (
            model.id_to_piece(piece),
            next((kind for test, kind in tests if test(piece)), NORMAL),
            model.get_score(piece),
        )
        for piece in range(len(model))
    }
    return _with_added(found, folder)


def _of_json(folder: Path) -> tuple[str, str, Vocabulary]:
    """(algorithm, name of the split, tokens) of a tokenizer.json."""
    contents = read_json(folder / JSON)
    model = contents.get("model") or {}
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    check(
        kind == "BPE",
        f"--to-gguf: {folder / JSON} is a tokenizer of type {kind}, and BPE is converted: pass --hf-files with "
        f"{PIECES}",
    )
    vocabulary = model["vocab"]
    if not model.get("byte_fallback"):
        return (
            "gpt2",
            _split(folder, contents),
            _with_added({number: (t, NORMAL, 0.0) for t, number in vocabulary.items()}, folder),
        )
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    ranks = {"".join(pair): -float(rank) for rank, pair in reversed([*enumerate(merges)])}
    unknown = model.get("unk_token")
    found = {
        number: (
            t,
            UNKNOWN if t == unknown else BYTE if _is_byte(t) else NORMAL,
            ranks.get(t, -1e6),
        )
        for t, number in vocabulary.items()
    }
    return "llama", "default", _with_added(found, folder)


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _split(folder: Path, contents: dict[str, Any]) -> str:
    """llama.cpp's name of how tokenizer.json splits a text. ValueError where it has none."""
    before = contents.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers") or [before]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return BYTE_LEVEL
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return DIGITS
    pattern = (
        (steps[0].get("pattern") or {}).get("Regex") if kinds == ["Split", "ByteLevel"] else None
    )
    if pattern not in SPLITS:
        raise ValueError(
            f"--to-gguf: {folder / JSON} splits a text by {json.dumps(before)[:150]}, which has no name in "
            "llama.cpp that this program knows: pass --to-hf, and llama.cpp's convert_hf_to_gguf.py may know it"
        )
    return SPLITS[pattern]
