"""A model's safetensors files as Hugging Face lays them out: one file, or several with an index. Tensors are read one at a time.

    model.safetensors
    model-00001-of-00002.safetensors ... and model.safetensors.index.json, which names the file of every tensor

Left out: the names of tensors (architectures.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tensor_files import StoredTensor, UnsupportedFormat, as_bytes, fill, read_header, write_tensors
from ..comm.agreement import describe
from ..config.checks import check

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SAVE_AS = "save the model in F32, BF16 or F16"
_PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass
class PlainFile:
    """A file without checksums, a `checkpoint.tensor_files.Readable`."""

    path: Path
    size: int

    def read(self, start: int, end: int) -> bytearray:
        """Bytes [start, end)."""
        data = bytearray(end - start)
        self.read_into(memoryview(data), start)
        return data

    def read_into(self, data: memoryview, start: int) -> None:
        """Fill `data` with the bytes from `start` on."""
        with open(self.path, "rb", buffering=0) as file:
            file.seek(start)
            end = start + len(data)
            check(fill(file, data) == len(data), f"{self.path} ends within its bytes {start} to {end}: it was truncated")


@dataclass(frozen=True)
class TensorDirectory:
    """The tensors of a directory by their names there: the file and place of each."""

    path: Path
    tensors: dict[str, tuple[PlainFile, StoredTensor]]

    @staticmethod
    def open(path: Path) -> TensorDirectory:
        """Reads headers only. ValueError for a missing file, and one that is truncated or no safetensors file."""
        if (path / INDEX).exists():
            return TensorDirectory(path, _indexed(path, _weight_map(path / INDEX)))
        pickled = next((file.name for pattern in _PICKLED for file in sorted(path.glob(pattern))), None)
        also = f", but {pickled}, which is pickled, may hold code and is not read: save the model as safetensors"
        check((path / SINGLE).exists(), f"{path} holds neither {SINGLE} nor {INDEX}{also if pickled else ''}")
        return TensorDirectory(path, _header(path / SINGLE))

    def read(self, name: str) -> Tensor:
        """One tensor, of its stored dtype, any shape."""
        file, stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        file.read_into(as_bytes(tensor), stored.start)
        return tensor


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. ValueError, one line, where the file is missing or holds something else."""
    check(path.is_file(), f"{path} is missing")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {describe(error)}") from error
    check(isinstance(contents, dict), f"{path} holds {type(contents).__name__}, not an object")
    return contents


def _weight_map(index: Path) -> dict[str, str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) and Path(file).name == file for file in names.values()):
        raise ValueError(f"{index} has no weight_map of tensors and files in this directory")
    return names


def _indexed(path: Path, weight_map: dict[str, str]) -> dict[str, tuple[PlainFile, StoredTensor]]:
    tensors: dict[str, tuple[PlainFile, StoredTensor]] = {}
    for file in sorted(set(weight_map.values())):
        check((path / file).is_file(), f"{path / file} is missing, and {INDEX} names it: copy the whole directory again")
        tensors |= _header(path / file)
    for name, file in weight_map.items():
        check(name in tensors, f"{path / file} does not hold {name}, as {INDEX} says: copy the directory again")
    return tensors


def _header(path: Path) -> dict[str, tuple[PlainFile, StoredTensor]]:
    file = PlainFile(path, path.stat().st_size)
    try:
        return {name: (file, stored) for name, stored in read_header(file).items()}
    except UnsupportedFormat as error:
        raise ValueError(f"{error}: {SAVE_AS}") from error


def write(directory: Path, like: Mapping[str, Tensor], values: Callable[[str], Tensor], max_bytes: int) -> None:
    """Write tensors in files of at most `max_bytes`, or of one tensor, with an index where they are several.

    like: any shapes and dtypes, which may be on the meta device. values: makes a tensor when it is its turn.
    """
    parts = list(_parts(like, max_bytes))
    files = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for file, part in zip(files if len(parts) > 1 else [SINGLE], parts):
        write_tensors(directory / file, part, values)
    if len(parts) > 1:
        weight_map = {name: file for file, part in zip(files, parts) for name in part}
        total = sum(map(_size, like.values()))
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _parts(like: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    for name, tensor in like.items():
        if part and sum(map(_size, part.values())) + _size(tensor) > max_bytes:
            yield part
            part = {}
        part[name] = tensor
    yield part


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
