"""Write weights and tokenizer as one GGUF file for llama.cpp.

The package gguf (extra [gguf]) writes the file. Memory: one tensor, or a layer's experts. Norms,
biases and routers are F32, as in llama.cpp's convert_hf_to_gguf.py. Left out: other quantizations,
which llama-quantize makes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...config.fields import check, declarations, flag
from ...config.model import YARN_DETAILS, ModelConfig
from ...config.rows import YARN
from ...nn.attention.rotary_angles import frequencies
from ...text.named_files import read_text
from ...text.optional_packages import optional_package
from ..hugging_face.architectures import Architecture
from ..hugging_face.config_json import architecture_of, carried_config
from ..hugging_face.tensor_mapping import in_their_shape, tensor_mappings
from ..weights import Weights
from . import latent_attention
from .tokenizer import read_tokenizer

TYPES = {
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
}  # --gguf-type -> the package's name
BLOCK = 32  # elements of a row that Q8_0 scales together
ROPE = "rope_freqs.weight"
_EXPERT = re.compile(r"\.experts\.\d+\.")
_FULL = re.compile(
    r"norm|\.bias$|ffn_gate_inp|position_embd|rope_freqs"
)  # names of tensors that stay F32


@dataclass(frozen=True)
class Kind:
    """A row in KINDS.

    interleaved: rope rotates neighbours, so query and key rows move
    scaled: supports Llama 3's rope scaling
    only: values that llama.cpp assumes
    grouped: heads may share keys and values
    numbers: keys of this row alone, and the model's values
    differences: yields further parts of a model that llama.cpp lacks, as `_differences`
    absorbed: attention is latent, with narrow vectors as keys and values, and the first layers may have no experts
    """

    name: str
    interleaved: bool = False
    scaled: bool = False
    only: tuple[tuple[str, Any], ...] = ()
    grouped: bool = True
    numbers: Mapping[str, str] = field(default_factory=dict)
    differences: Callable[[ModelConfig], Iterator[tuple[str, str]]] | None = None
    absorbed: bool = False


_NORMALIZED = (("moe_router_pre_softmax", False),)
_PLAIN = (("moe_router_pre_softmax", True),)
_ABSORBED = Kind("deepseek2", differences=latent_attention.absorbed_differences, absorbed=True)
KINDS = {  # by Hugging Face's model_type
    "gpt2": Kind("gpt2"),
    "llama": Kind("llama", True, True),
    "mistral": Kind("llama", True, True),
    "mixtral": Kind("llama", True, True, _NORMALIZED),
    "granite": Kind(
        "granite",
        True,
        numbers={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
            "attention_scale": "attention_scale",
        },
    ),
    "qwen2": Kind("qwen2"),
    "qwen3": Kind("qwen3"),
    "qwen2_moe": Kind("qwen2moe", only=_PLAIN),
    "qwen3_moe": Kind("qwen3moe", only=_NORMALIZED),
    "olmoe": Kind("olmoe", only=_PLAIN, grouped=False),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _ABSORBED),
    "minicpm3": Kind("minicpm3", differences=latent_attention.scaled_differences),
    "stablelm": Kind("stablelm", numbers={"parallel_residual": "parallel_residual"}),
}


def save_gguf(
    weights: Weights,
    file: Path,
    kind: str | None,
    chat_template: str | None,
    inexact: bool = False,
) -> list[str]:
    """Write the file, and return notes about differences in llama.cpp.

    kind: --gguf-type
    inexact: allow differences in a few texts

    Raise ValueError for a model that llama.cpp cannot represent.
    """
    gguf = optional_package("gguf", "gguf", "--to-gguf")
    model = weights.model
    architecture = architecture_of(model, carried_config(weights.carried))
    row = _row(architecture, model)
    name = weights.precision.name
    kind = kind or {"fp32": "f32", "fp16": "f16"}.get(name, name)
    template = chat_template and read_text(chat_template, "--chat-template")
    tokenizer = read_tokenizer(weights.carried, model.vocab_size or 0, template, inexact)
    writer = gguf.GGUFWriter(file, row.name)
    _add_numbers(writer, model, row)
    writer.add_file_type(
        gguf.LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{TYPES[kind]}"]
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    tokenizer.write(writer)
    tensors = _tensors(gguf, weights, architecture, row)
    types = {name: _type(gguf, name, tensor.shape, kind) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        quantization = types[name]
        kinds = {
            gguf.GGMLQuantizationType.F32: np.float32,
            gguf.GGMLQuantizationType.F16: np.float16,
        }
        dtype = np.dtype(kinds.get(quantization, np.uint8))
        stored = (
            gguf.quant_shape_to_byte_shape(tensor.shape, quantization)
            if dtype == np.uint8
            else tensor.shape
        )
        writer.add_tensor_info(
            name, stored, dtype, math.prod(stored) * dtype.itemsize, quantization
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor.read().float().numpy())
        writer.write_tensor_data(gguf.quants.quantize(values, types[name]))
    writer.close()
    notes = [
        f"llama.cpp reads some texts differently: {difference}"
        for difference in tokenizer.differences
    ]
    if note := latent_attention.epsilon_note(model):
        notes.append(note)
    return notes


def _row(architecture: Architecture, model: ModelConfig) -> Kind:
    name = f"--to-gguf: a model of {architecture.name}"
    row = KINDS.get(architecture.model_type)
    if row is None:
        raise ValueError(
            f"{name} is not converted to GGUF, only {', '.join(KINDS)}: pass --to-hf, and llama.cpp's "
            "convert_hf_to_gguf.py may know it"
        )
    for part, instead in _differences(row, model):
        which = f", which is {instead}" if instead else ""
        raise ValueError(f"{name} with {part} is not what llama.cpp computes{which}")
    return row


def _differences(row: Kind, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield (part of the model that llama.cpp lacks, value that llama.cpp has instead, or "")."""
    if model.window is not None:
        yield f"a window of {model.window} tokens", ""
    refused = {"rope_dynamic_factor", "longrope_short_factors"}
    scalings = refused if row.scaled else {*refused, "use_rope_scaling"}
    yield from ((flag(name), "") for name in sorted(scalings) if getattr(model, name))
    if row.differences is not None:
        yield from row.differences(model)
    if model.position_embedding_type == YARN:
        yield from _yarn_differences(model, ("mscale", "mscale_all_dim") if row.absorbed else ())
    if model.num_experts and not row.absorbed and {*model.mlps} != {"experts"}:
        yield "layers without experts", ""
    if not row.grouped and model.query_groups != model.num_attention_heads:
        heads = f"{model.query_groups} groups of {model.num_attention_heads} heads"
        yield heads, "as many groups as heads"
    for name, needed in row.only:
        if getattr(model, name) != needed:
            yield f"{name} {getattr(model, name)}", ""


def _yarn_differences(model: ModelConfig, described: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the details of yarn that differ. described: fields that the file has"""
    for each in declarations(ModelConfig):
        value = getattr(model, each.name)
        if each.topic == YARN_DETAILS and each.name not in described and value != each.default:
            yield f"{flag(each.name)} {value}", str(each.default)


def _add_numbers(writer: Any, model: ModelConfig, row: Kind) -> None:
    head = model.kv_channels
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.ffn_hidden_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(1 if row.absorbed else model.query_groups)
    writer.add_vocab_size(model.vocab_size)
    getattr(writer, f"add_{model.norm.gguf}")(model.layernorm_epsilon)
    if model.rotary:
        _add_scaling(writer, model)
        writer.add_rope_freq_base(model.rotary_base)
    if model.multi_latent_attention:
        latent_attention.add_numbers(writer, model, row.absorbed)
    elif model.rotary:
        writer.add_rope_dimension_count(int(head * model.rotary_percent))
        writer.add_key_length(head)
        writer.add_value_length(head)
    for key, name in row.numbers.items():
        getattr(writer, f"add_{key}")(getattr(model, name))
    if model.num_experts:
        writer.add_expert_count(model.num_experts)
        writer.add_expert_used_count(model.moe_router_topk)
        writer.add_expert_feed_forward_length(model.moe_ffn_hidden_size)
        if model.moe_shared_expert_intermediate_size:
            writer.add_expert_shared_feed_forward_length(model.moe_shared_expert_intermediate_size)


def _add_scaling(writer: Any, model: ModelConfig) -> None:
    """Write linear scaling or yarn; Llama 3's scaling is a tensor (`rope_factors`)."""
    kinds = optional_package("gguf", "gguf", "--to-gguf").RopeScalingType
    if model.position_embedding_type == YARN:
        writer.add_rope_scaling_type(kinds.YARN)
        writer.add_rope_scaling_factor(model.rotary_scaling_factor)
        writer.add_rope_scaling_orig_ctx_len(model.yarn_original_max_position_embeddings)
    elif model.rotary_seq_len_interpolation_factor:
        writer.add_rope_scaling_type(kinds.LINEAR)
        writer.add_rope_scaling_factor(model.rotary_seq_len_interpolation_factor)


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def _tensors(
    gguf: Any, weights: Weights, architecture: Architecture, row: Kind
) -> dict[str, _Tensor]:
    model = weights.model
    like = weights.like()
    read = lru_cache(maxsize=2)(weights.read)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == row.name)
    names = gguf.get_tensor_name_map(arch, model.num_layers)
    theirs: dict[str, list[str]] = defaultdict(list)
    table = tensor_mappings(architecture, model)
    for their in table:
        spelled = _EXPERT.sub(".experts.", their).replace("_correction_bias", "_correction.bias")
        for part in latent_attention.parts_of(spelled) if row.absorbed else (spelled,):
            name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            check(
                name is not None,
                f"--to-gguf: the package gguf knows no name for {part}: update it",
            )
            theirs[name].append(their)

    def tensor(name: str, group: list[str]) -> _Tensor:
        def values(source: Callable[[str], Tensor]) -> Tensor:
            found = []
            for their in group:
                part = in_their_shape(source(table[their].ours), table[their], model)
                found.append(_arranged(part, name, their, model=model, row=row))
            return torch.stack(found) if _EXPERT.search(group[0]) else found[0]

        return _Tensor(tuple(values(like.__getitem__).shape), lambda: values(read))

    found = {name: tensor(name, group) for name, group in theirs.items()}
    if model.use_rope_scaling:
        factors = rope_factors(model)
        found[ROPE] = _Tensor(tuple(factors.shape), lambda: factors)
    return found


def _arranged(tensor: Tensor, name: str, their: str, model: ModelConfig, row: Kind) -> Tensor:
    """Return their tensor in llama.cpp's arrangement, (out, in)."""
    if "c_attn.weight" in their or ".c_proj.weight" in their or ".c_fc.weight" in their:
        tensor = tensor.t()  # GPT-2's are (in, out) in Hugging Face
    module = name.split(".")[-2]
    tensor = latent_attention.part_of(tensor, module, model)
    heads = {"attn_q": model.num_attention_heads, "attn_k": model.query_groups}.get(module)
    if row.interleaved and heads:
        tensor = (
            tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            .transpose(1, 2)
            .reshape(tensor.shape)
        )
    return tensor


def rope_factors(model: ModelConfig) -> Tensor:
    """Return Llama 3's frequency divisors (head / 2,)."""
    return frequencies(replace(model, use_rope_scaling=False), 0) / frequencies(model, 0)


def _type(gguf: Any, name: str, shape: tuple[int, ...], kind: str) -> Any:
    """Return a tensor's storage type; F16 for rows that Q8_0 blocks do not divide."""
    if len(shape) < 2 or _FULL.search(name):
        kind = "f32"
    elif kind == "q8_0" and shape[-1] % BLOCK:
        kind = "f16"
    return gguf.GGMLQuantizationType[TYPES[kind]]
