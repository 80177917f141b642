"""config.json of Hugging Face, read into a ModelConfig and written from it.

architectures.py names the fields that are read, IGNORED others with the reason. Other fields are
refused unless off (null, false or empty).
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...config.architecture import architecture as shape_values
from ...config.fields import check, is_off
from ...config.model import ModelConfig
from ...text.named_files import JsonObject
from .architectures import (
    ARCHITECTURES,
    MXFP4_MODELS,
    ONLY,
    REFUSED,
    TEXT_OF,
    Architecture,
)
from .rules import FILE
from .tensor_directory import read_json

_OF_TRAINING = "it is about training, where flags say it"
# Reason -> fields of every architecture.
IGNORED = {
    reason: tuple(names.split())
    for reason, names in {
        "it describes the file, or the program that wrote it": (
            "_commit_hash _name_or_path architectures auto_map dtype is_llama_config model_type name_or_path "
            "tokenizer_class torch_dtype transformers.js_config transformers_version unsloth_fixed unsloth_version"
        ),
        "it is about tokens, of which the tokenizer's files and the generation config say more": (
            "bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id forced_eos_token_id pad_token_id "
            "prefix sep_token_id"
        ),
        "it describes generation, which has flags of its own": (
            "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
            "encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length "
            "max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
            "remove_invalid_values repetition_penalty suppress_tokens task_specific_params temperature top_k "
            "top_p typical_p"
        ),
        "it says what a call of transformers returns or keeps": (
            "gradient_checkpointing output_attentions output_hidden_states output_router_logits output_scores "
            "return_dict return_dict_in_generate torchscript use_cache use_return_dict"
        ),
        "it chooses a kernel of the same function": (
            "_attn_implementation _attn_implementation_autoset _attn_implementation_internal "
            "_experts_implementation _flash_attn_2_enabled attn_implementation chunk_size_feed_forward "
            "experts_implementation reorder_and_upcast_attn use_flash_attention_2"
        ),
        "it describes other heads than the language model's": (
            "classifier_activation classifier_dropout finetuning_task id2label is_decoder label2id num_labels "
            "problem_type summary_activation summary_first_dropout summary_proj_to_labels summary_type "
            "summary_use_proj"
        ),
        _OF_TRAINING: ("embd_pdrop hidden_dropout init_method router_aux_loss_coef"),
        # max_window_layers: of windows, which use_sliding_window must have switched off; multi_query: of Falcon before
        # new_decoder_architecture
        "transformers' class of this model_type does not read it": (
            "max_sequence_length max_window_layers multi_query n_ctx"
        ),
    }.items()
}
_LEFT_OUT = "it describes layers that are left out with a note"
# model_type -> fields that this architecture alone does not read, with the reason.
IGNORED_OF: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
        {"sliding_window": "no layer has a window without `use_sliding_window`"},
    ),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        {
            "mtp_num_hidden_layers": _LEFT_OUT,
            "mtp_use_dedicated_embeddings": _LEFT_OUT,
            "mamba_ssm_dtype": "it is the format of a state in other programs",
        },
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"),
        {
            "aux_loss_alpha": _OF_TRAINING,
            "seq_aux": _OF_TRAINING,
            "ep_size": "it is a number of ranks",
        },
    ),
    "gpt_oss": dict.fromkeys(
        ("experts_per_token", "initial_context_length"),
        "`num_experts_per_tok` and `rope_scaling` say the same",
    ),
    "granitemoehybrid": dict.fromkeys(
        (
            "intermediate_size mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state "
            "mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias num_experts_per_tok "
            "time_step_limit"
        ).split(),
        "the model has neither Mamba layers nor experts",
    ),
}
# Fields next to a text_config that count in place of those in it, as in transformers.
OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config")
# Reason -> fields next to a text_config.
IGNORED_OUTSIDE = {
    "it describes images, whose towers are left out with a note": (
        "boi_token_id boi_token_index eoi_token_id eoi_token_index image_token_id image_token_index "
        "mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size "
        "video_token_id vision_config vision_end_token_id vision_feature_layer vision_start_token_id"
    ).split(),
    "text_config has the text model's": ("initializer_range", "text_config"),
}
_EVERYWHERE = frozenset(name for names in IGNORED.values() for name in names)


def read_fields(architecture: Architecture) -> frozenset[str]:
    return frozenset(
        {
            *(row.theirs for row in architecture.fields),
            *architecture.only,
            *ONLY,
            *(name for rule in architecture.rules for name in rule.names),
        }
    )


def check_fields(architecture: Architecture, config: JsonObject) -> None:
    known = read_fields(architecture) | _EVERYWHERE
    known |= frozenset(IGNORED_OF.get(architecture.model_type, ()))
    for name, value in config.items():
        check(
            name in known or is_off(value),
            f"{FILE}: {name} is {value!r:.80}, which is not known of {architecture.name} and may "
            f"change the model: remove the field from {FILE} if it does not",
        )


# Values of quant_method.
OF_FP8 = "fp8"
OF_MXFP4 = "mxfp4"


def quant_method(config: JsonObject) -> str | None:
    """Return OF_FP8 or OF_MXFP4 if the weights are quantized so, which is unpacked."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    of_experts = method == OF_MXFP4 and config.get("model_type") in MXFP4_MODELS
    return method if method == OF_FP8 or of_experts else None


def has_text_config(config: JsonObject) -> bool:
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in TEXT_OF


def plain_config(config: JsonObject) -> JsonObject:
    """Return the text model's config.json, without a quantization that is unpacked."""
    if has_text_config(config):
        config = text_config(config)
    if quant_method(config):
        config = {**config, "quantization_config": None}
    return config


def text_config(config: JsonObject) -> JsonObject:
    """Return the language model's part of a multimodal config.json. Raise ValueError for an unknown field next to it."""
    kinds = TEXT_OF[config["model_type"]]
    text = config.get("text_config")
    found = text.get("model_type") if isinstance(text, dict) else text
    if not isinstance(text, dict) or found not in kinds:
        raise ValueError(
            f"{FILE}: text_config has the model_type {found!r:.60}: it can be {' or '.join(kinds)}"
        )
    known = _EVERYWHERE.union(OF_THE_WHOLE, *IGNORED_OUTSIDE.values())
    for name, value in config.items():
        repeated = name in text and text[name] == value
        check(
            name in known or is_off(value) or repeated,
            f"{FILE}: {name} is {value!r:.80} next to text_config, which is not known of "
            f"{config['model_type']} and may change the model: remove the field from {FILE} if it does not",
        )
    outer = {name: config[name] for name in OF_THE_WHOLE if config.get(name) is not None}
    return {**text, **outer, "architectures": None}


def read_config(config: JsonObject) -> tuple[Architecture, ModelConfig]:
    """Return a config.json's model. Raise ValueError with field and value if it is unsupported."""
    known = {row.model_type: row for row in ARCHITECTURES}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        reason = f"{REFUSED[kind]}; " if isinstance(kind, str) and kind in REFUSED else ""
        raise ValueError(
            f"{FILE}: model_type is {kind!r:.60}: {reason}it can be {', '.join(known)}"
        )
    architecture = known[kind]
    named = config.get("architectures") or [architecture.name]
    right = isinstance(named, list) and not {
        architecture.name,
        architecture.without_head,
    }.isdisjoint(map(str, named))
    check(right, f"{FILE}: architectures is {named!r:.80}, and the block is {architecture.name}")
    check_fields(architecture, config)
    config = {**architecture.defaults, **config}
    for name, built in {**ONLY, **architecture.only}.items():
        given = config.get(name, built[0])
        check(
            given in built,
            f"{FILE}: {name} is {given!r:.80}, and the block computes {' or '.join(map(repr, built))}",
        )
    return architecture, architecture.read(config)


def architecture_of(model: ModelConfig, before: JsonObject) -> Architecture:
    """Return the original model's architecture, or else the first that fits."""
    fitting = [row for row in ARCHITECTURES if row.fits(model)]
    check(
        bool(fitting),
        f"no architecture of Hugging Face has this block: {', '.join(row.name for row in ARCHITECTURES)} do not",
    )
    return next((row for row in fitting if row.model_type == before.get("model_type")), fitting[0])


def carried_config(carried: Path | None) -> JsonObject:
    if carried is None or not (carried / FILE).exists():
        return {}
    config = read_json(carried / FILE)
    # The files were quantized, the weights read from them are not.
    if quant_method(config):
        del config["quantization_config"]
    return config


def config_of(
    architecture: Architecture, model: ModelConfig, dtypes: set[torch.dtype], before: JsonObject
) -> JsonObject:
    """Return a model's config.json. before: the original, whose other fields are kept."""
    if before.get("model_type") != architecture.model_type:
        before = {}
    config = dict(before)
    if not before or shape_values(read_config(before)[1]) != shape_values(model):
        config.pop(
            "rope_parameters", None
        )  # of transformers 5, which reads what is written as well
        config |= architecture.write(model)
        config |= {
            name: values[0]
            for name, values in architecture.only.items()
            if config.get(name) not in values
        }
    config |= {"architectures": [architecture.name], "model_type": architecture.model_type}
    if len(dtypes) == 1:
        names = [name for name in ("torch_dtype", "dtype") if name in before]
        (dtype,) = dtypes
        config |= dict.fromkeys(names or ["torch_dtype"], str(dtype).removeprefix("torch."))
    return config
