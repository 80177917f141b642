"""Directories of safetensors: one file, or several with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint.tensor_files import (
    PlainFile,
    StoredTensor,
    UnsupportedFormat,
    read_header,
    write_tensors,
)
from ...comm.agreement import describe
from ...config.fields import check
from ...text.named_files import JsonObject

Tensors = dict[str, tuple[PlainFile, StoredTensor]]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of peft's adapters
SAVE_AS = "save the model in F32, BF16 or F16"
_PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class TensorDirectory:
    """Model directory of safetensors.

    tensors: name -> (file, stored tensor)
    computed: functions that compute the tensors which are stored in another form, by name
    """

    path: Path
    tensors: Tensors
    computed: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)

    @staticmethod
    def open(path: Path) -> TensorDirectory:
        """Read the headers. Raise ValueError for a missing, truncated or foreign file."""
        if (path / INDEX).exists():
            index = path / INDEX
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(
                isinstance(file, str) and Path(file).name == file for file in names.values()
            ):
                raise ValueError(
                    f"{index} has no weight_map of tensors and files in this directory"
                )
            return TensorDirectory(path, _indexed(path, names))
        pickled = [file.name for pattern in _PICKLED for file in sorted(path.glob(pattern))]
        also = ""
        if pickled:
            also = f", but {pickled[0]}, which is pickled, may hold code and is not read: save the model as safetensors"
        check((path / SINGLE).exists(), f"{path} holds neither {SINGLE} nor {INDEX}{also}")
        return TensorDirectory(path, header(path / SINGLE))

    def read(self, name: str) -> Tensor:
        if name in self.computed:
            return self.computed[name]()
        file, stored = self.tensors[name]
        return file.read_tensor(stored)


def in_bf16(shape: tuple[int, ...]) -> StoredTensor:
    """Return the description of a computed tensor."""
    return StoredTensor(torch.bfloat16, math.prod(shape), 0, shape)


def read_json(path: Path) -> JsonObject:
    check(path.is_file(), f"{path} is missing")
    try:
        contents: JsonObject = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {describe(error)}") from error
    check(isinstance(contents, dict), f"{path} holds {type(contents).__name__}, not an object")
    return contents


def write_json(path: Path, contents: JsonObject) -> None:
    path.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _indexed(path: Path, weight_map: dict[str, str]) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(set(weight_map.values())):
        check(
            (path / file).is_file(),
            f"{path / file} is missing, and {INDEX} names it: copy the whole directory again",
        )
        tensors |= header(path / file)
    for name, file in weight_map.items():
        check(
            name in tensors,
            f"{path / file} does not hold {name}, as {INDEX} says: copy the directory again",
        )
    return tensors


def header(path: Path) -> Tensors:
    file = PlainFile(path, path.stat().st_size)
    try:
        return {name: (file, stored) for name, stored in read_header(file).items()}
    except UnsupportedFormat as error:
        raise ValueError(f"{error}: {SAVE_AS}") from error


def write_tensor_files(
    directory: Path, like: Mapping[str, Tensor], values: Callable[[str], Tensor], max_bytes: int
) -> None:
    """Write files with at most `max_bytes`, or one tensor, and an index for several files.

    like: shapes and dtypes, also on the meta device
    values: computes a tensor when it is written
    """
    shards = list(_shards(like, max_bytes))
    files = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for file, shard in zip(files if len(shards) > 1 else [SINGLE], shards):
        write_tensors(directory / file, shard, values)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards) for name in shard}
        total = sum(tensor.nbytes for tensor in like.values())
        (directory / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            + "\n"
        )


def _shards(like: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in like.items():
        size += tensor.nbytes
        if shard and size > max_bytes:
            yield shard
            shard = {}
            size = tensor.nbytes
        shard[name] = tensor
    yield shard
