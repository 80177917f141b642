"""Checkpoints of Megatron-LM in the format torch_dist: pieces of global tensors, as torch.distributed.checkpoint stores them.

    DIR/iter_0000100/common.pt            arguments, counters
    DIR/iter_0000100/.metadata            every tensor's shape and pieces, and where each piece lies
    DIR/iter_0000100/__0_0.distcp ...     the pieces, each written by torch.save

Layers that are alike are one tensor with the layer as its first dimension. Left out: optimizer states, whose pieces are not read;
experts.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ..config.checks import check
from ..nn.model import OUTPUT, VOCABULARY, WORD_EMBEDDINGS
from ..nn.parameter import ParameterSpec
from .megatron_files import load_metadata, load_pickled, model_of, our_name
from .weights import Weights, check_elements, check_rest, layer_of, place_of, specs, widest

COMMON = "common.pt"


def open_dist(file: Path, vocab_size: int | None) -> Weights:
    """The weights of one iteration, whose metadata are in `file`. ValueError, one line, for what is missing or damaged."""
    path = file.parent
    metadata, common = load_metadata(file), load_pickled(path / COMMON)
    check("args" in common, f"{path / COMMON} holds no arguments of Megatron-LM")
    tensors = {key: value for key, value in metadata.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)}
    stored = {name: key for key in tensors if "optimizer" not in key and (name := our_name(key))}
    check(WORD_EMBEDDINGS in stored, f"{path} holds no {WORD_EMBEDDINGS}")
    try:
        model = model_of(common["args"], tensors[stored[WORD_EMBEDDINGS]].size[0], vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    reader = _Reader(path, metadata.storage_data, tensors, specs(model), stored)
    reader.check({OUTPUT} if model.tied else set())
    return Weights(model, {name: reader.dtype(name) for name in reader.specs}, reader)


@dataclass(frozen=True)
class _Reader:
    """Puts global tensors together. places, tensors: of the metadata. stored: our names, of stacked layers without a number, to
    their keys.
    """

    path: Path
    places: dict[MetadataIndex, Any]
    tensors: dict[str, TensorStorageMetadata]
    specs: dict[str, ParameterSpec]
    stored: dict[str, str]

    def _places(self, name: str) -> list[tuple[str, int | None]]:
        """(key, its layer where layers are stacked) of the tensors that make ours: one, or gate and value."""
        stacked = place_of(name)[0].replace("layers.{}.", "layers.") + name[name.rindex(".") :]
        for own, layer in ((name, None), (stacked, layer_of(name))):
            for names in ((own,), (own + "_w", own + "_v")):
                if all(part in self.stored for part in names):
                    return [(self.stored[part], layer) for part in names]
        raise ValueError(f"{self.path} holds no {name}")

    def check(self, unused: set[str]) -> None:
        """ValueError for a weight that is missing or of another size, and for a tensor that is none of the model's."""
        read = set()
        for name, spec in self.specs.items():
            places = self._places(name)
            check_elements(self.path, spec, sum(torch.Size(self._shape(*place)).numel() for place in places))
            read |= {key for key, _ in places}
        check_rest(self.path, {key for name, key in self.stored.items() if key not in read and name not in unused})

    def _shape(self, key: str, layer: int | None) -> tuple[int, ...]:
        size = tuple(self.tensors[key].size)
        return size if layer is None else size[1:]

    def dtype(self, name: str) -> torch.dtype:
        """Of one of our tensors: the widest of theirs."""
        return widest(self.tensors[key].properties.dtype for key, _ in self._places(name))

    def __call__(self, name: str) -> Tensor:
        spec, parts = self.specs[name], [self._global(key, layer) for key, layer in self._places(name)]
        whole = parts[0] if len(parts) == 1 else torch.stack([part.to(self.dtype(name)) for part in parts])
        return whole[: spec.shape[0]].contiguous() if name in VOCABULARY else whole.view(spec.shape)

    def _global(self, key: str, layer: int | None) -> Tensor:
        """A global tensor, or one layer of it, from its pieces."""
        shape = self._shape(key, layer)
        whole, filled = torch.empty(shape, dtype=self.tensors[key].properties.dtype), 0
        for offsets, piece in self._pieces(key, layer):
            whole[tuple(slice(first, first + length) for first, length in zip(offsets, piece.shape))] = piece
            filled += piece.numel()
        check(filled == whole.numel(), f"{self.path}: the pieces of {key} hold {filled} of its {whole.numel()} elements")
        return whole

    def _pieces(self, key: str, layer: int | None) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        for chunk in self.tensors[key].chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if layer is None:
                yield offsets, self._piece(key, chunk.offsets).view(sizes)
            elif offsets[0] <= layer < offsets[0] + sizes[0]:
                yield offsets[1:], self._piece(key, chunk.offsets).view(sizes)[layer - offsets[0]]

    def _piece(self, key: str, offsets: torch.Size) -> Tensor:
        """What torch.save wrote of a piece."""
        place = self.places.get(MetadataIndex(key, offsets))
        if place is None:
            raise ValueError(f"the metadata in {self.path} do not say where {key} at {list(offsets)} lies")
        file = self.path / place.relative_path
        check(Path(place.relative_path).name == place.relative_path and file.is_file(), f"{file} is missing")
        with open(file, "rb") as stream:
            stream.seek(place.offset)
            data = stream.read(place.length)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{file} is damaged at byte {place.offset}, where a piece of {key} should be") from error
