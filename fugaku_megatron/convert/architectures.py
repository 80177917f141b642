"""The architectures of Hugging Face that the block can be: a row each, with what config.json and the tensors are called there.

A new architecture is a row of ARCHITECTURES. Left out: reading and writing files (hugging_face.py). Test: pytest
tests/test_convert_hf.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..run.model_config import ModelConfig
from .arrangements import Arrangement, conv_query_key_value, transposed, whole

REQUIRED = object()


@dataclass(frozen=True)
class Field:
    """A field of config.json that is one of ModelConfig's. default: what it means to leave it out; REQUIRED: a mistake."""

    theirs: str
    ours: str
    default: Any = REQUIRED


@dataclass(frozen=True)
class Architecture:
    """A row.

    name, model_type: as config.json has them. prefix: of all tensors but the head's; published files may lack it. fields: those
    that are one of ours. only: fields of theirs -> the values that the block computes, the first one written, which is what leaving
    the field out means. block: our values that are what this architecture is. places: our places -> names of theirs, without the
    prefix, and how they lie in ours. unused: tensors of published files that are no weights.
    """

    name: str
    model_type: str
    prefix: str
    fields: tuple[Field, ...]
    only: Mapping[str, tuple[Any, ...]]
    block: Mapping[str, Any]
    places: Mapping[str, tuple[tuple[str, ...], Arrangement]]
    unused: re.Pattern = field(default=re.compile("$^"))

    def fits(self, model: ModelConfig) -> bool:
        """Whether a model is of this architecture."""
        return all(getattr(model, name) == value for name, value in self.block.items())


_LAYER = "decoder.layers.{}."
GPT2 = Architecture(
    name="GPT2LMHeadModel", model_type="gpt2", prefix="transformer.",
    fields=(Field("n_layer", "num_layers"), Field("n_embd", "hidden_size"), Field("n_head", "num_attention_heads"),
            Field("n_inner", "ffn_hidden_size", None), Field("n_positions", "max_position_embeddings"),
            Field("vocab_size", "vocab_size"), Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
            Field("initializer_range", "init_method_std", 0.02), Field("resid_pdrop", "hidden_dropout", 0.1),
            Field("attn_pdrop", "attention_dropout", 0.1)),
    only={"activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "scale_attn_weights": (True,),
          "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,), "tie_word_embeddings": (True,)},
    block={"normalization": "LayerNorm", "disable_bias_linear": False},
    places={"embedding.word_embeddings": (("wte",), whole), "embedding.position_embeddings": (("wpe",), whole),
            _LAYER + "input_layernorm": (("h.{}.ln_1",), whole),
            _LAYER + "self_attention.linear_qkv": (("h.{}.attn.c_attn",), conv_query_key_value),
            _LAYER + "self_attention.linear_proj": (("h.{}.attn.c_proj",), transposed),
            _LAYER + "pre_mlp_layernorm": (("h.{}.ln_2",), whole),
            _LAYER + "mlp.linear_fc1": (("h.{}.mlp.c_fc",), transposed),
            _LAYER + "mlp.linear_fc2": (("h.{}.mlp.c_proj",), transposed),
            "decoder.final_layernorm": (("ln_f",), whole)},
    unused=re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"))  # causal masks

ARCHITECTURES = (GPT2,)
