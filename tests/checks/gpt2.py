"""Weights in transformers' GPT-2."""

import torch

from fugaku_megatron.config.run_config import ModelConfig
from fugaku_megatron.convert.hugging_face.architectures import GPT2
from fugaku_megatron.convert.hugging_face.tensor_mapping import (
    in_their_shape,
    tensor_mappings,
)


def to_theirs(name: str, ours: dict[str, torch.Tensor], model: ModelConfig) -> torch.Tensor:
    """Return the tensor for transformers' name, in transformers' shape."""
    part = tensor_mappings(GPT2, model)[name]
    return in_their_shape(ours[part.ours], part, model)
