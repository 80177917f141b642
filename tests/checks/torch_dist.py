"""Checkpoints in the format torch_dist, restated: tests write them without megatron-core.

Sources: megatron/core/dist_checkpointing/strategies/torch.py (pieces, objects, flattened ranges before
megatron-core 0.14), serialization.py (common state), torch/distributed/checkpoint/filesystem.py (places).
"""

import io
import json
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

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


def append(file: Path, value: Any) -> _StorageInfo:
    """Append a piece or an object to a file."""
    buffer = io.BytesIO()
    torch.save(value.clone() if isinstance(value, torch.Tensor) else value, buffer)
    offset = file.stat().st_size if file.exists() else 0
    with open(file, "ab") as stream:
        stream.write(buffer.getvalue())
    return _StorageInfo(file.name, offset, len(buffer.getvalue()))


def write_iteration(
    directory: Path,
    iteration: int,
    tensors: Mapping[str, torch.Tensor],
    common: dict[str, Any],
    objects: Mapping[str, Any] | None = None,
    *,
    common_file: bool = False,
    flattened: Collection[str] = (),
) -> Path:
    """Write an iteration of two ranks, which have a half of each tensor's first dimension.

    objects: by key without place
    common_file: as before megatron-core 0.19
    flattened: prefixes of tensors that are saved as ranges of one flat block per layer
    """
    path = directory / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in tensors.items():
        stored = tensor
        cut = 0
        if key.startswith(tuple(flattened)):
            blocks = len(tensor) if ".layers." in key else 1
            ones = (1,) * (tensor.dim() - 1)
            stored = tensor.reshape(blocks, *ones, -1)
            cut = stored.dim() - 1
        entry = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), stored.shape, [])
        entries[key] = entry
        for layer in range(len(stored)) if cut else [None]:
            own = stored if layer is None else stored[layer : layer + 1]
            start = 0
            for rank, piece in enumerate(own.tensor_split([1 + own.shape[cut] // 2], cut)):
                offsets = [0] * stored.dim()
                offsets[0] = layer or 0
                offsets[cut] += start
                start += piece.shape[cut]
                if piece.numel():
                    place = torch.Size(offsets)
                    entry.chunks.append(ChunkStorageMetadata(place, piece.shape))
                    places[MetadataIndex(key, place)] = append(path / f"__{rank}_0.distcp", piece)
    saved = dict(objects or {})
    if common_file:
        torch.save(common, path / "common.pt")
    else:
        saved["common_state"] = common
    for name, value in saved.items():
        key = f"{name}/shard_0_1"
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = append(path / "__0_0.distcp", [value])
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return path
