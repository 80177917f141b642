"""Tensors of Hugging Face files, and the tensor of this program that each is a view of."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...config.fields import check
from ...config.model import ModelConfig
from ..weights import as_layer, layer_of, place_of, shapes
from .architectures import EMBEDDING_COPY, HEAD_COPY, OUTPUT, Architecture
from .tensor_views import Arrangement


@dataclass(frozen=True)
class TensorMapping:
    """Tensor in their files: piece `number` in our tensor `ours`, and its arrangement."""

    ours: str
    number: int
    arranged: Arrangement


def tensor_mappings(architecture: Architecture, model: ModelConfig) -> dict[str, TensorMapping]:
    """Return all mappings by their names, in the order of our tensors."""
    found = {}
    for ours in shapes(model):
        name = as_layer(ours, model.num_layers)
        place, kind = place_of(name)
        ending = f".{kind}"
        if f"{place}.{kind}" in architecture.places:  # a name of its own, without weight or bias
            place = f"{place}.{kind}"
            ending = ""
        check(place in architecture.places, f"{architecture.name} has no place for {ours}")
        names, arranged = architecture.places[place]
        prefix = "" if place == OUTPUT else architecture.prefix
        experts = range(model.num_experts or 1) if "{expert}" in names[0] else (0,)
        for number, (expert, each) in enumerate(itertools.product(experts, names)):
            theirs = each.format(layer_of(name), expert=expert)
            found[f"{prefix}{theirs}{ending}"] = TensorMapping(ours, number, arranged)
    return found


def copies(architecture: Architecture, model: ModelConfig) -> dict[str, str]:
    """Return the names of each MTP module's word embedding and head, and the names of the model's."""
    head = architecture.embedding if model.tied else architecture.head
    originals = {EMBEDDING_COPY: architecture.embedding, HEAD_COPY: head}
    return {
        f"{architecture.prefix}{name.format(model.num_layers + module)}": original
        for module in range(model.predictions)
        for name, original in originals.items()
    }


def constants(architecture: Architecture, model: ModelConfig) -> dict[str, float]:
    return {
        f"{architecture.prefix}{name.format(layer)}": value
        for layer in range(model.num_layers)
        for name, value in architecture.constants.items()
    }


def copy_flat(theirs: Tensor, views: list[Tensor]) -> None:
    """Fill views of ours, one after another, with the elements of their tensor."""
    elements = theirs.flatten().split([view.numel() for view in views])
    for view, values in zip(views, elements, strict=True):
        view.copy_(values.view(view.shape))


def in_their_shape(ours: Tensor, mapping: TensorMapping, model: ModelConfig) -> Tensor:
    views, shape = mapping.arranged(ours, mapping.number, model)
    joined = views[0] if len(views) == 1 else torch.cat([view.flatten() for view in views])
    return joined.reshape(shape).contiguous()
