"""Pickled files of other programs, of which no code runs: classes that are not known to be harmless are refused by name.

What Megatron-LM saves beside tensors (its enumerations, numpy's random state) becomes an object that does nothing.
"""

from __future__ import annotations

import argparse
import collections
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ..comm.agreement import describe
from ..config.checks import check

_NAMESPACE = "argparse.Namespace"
_IGNORED = ("megatron.", "numpy.", "signal.")  # modules whose classes and functions become Nothing
_METADATA = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
             "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
_VALUES = (torch.dtype, torch.memory_format, torch.layout)


class Nothing:
    """Stands for an object of a class that is not imported: takes any arguments and state, and keeps none."""

    def __new__(cls, *arguments: Any, **named: Any) -> Nothing:
        return object.__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load(path: Path) -> dict[str, Any]:
    """What torch.save wrote, its tensors mapped from the file. ValueError where it is damaged, or asks for what could run code."""
    check(path.is_file(), f"{path} is missing")
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (ValueError, RuntimeError, OSError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} is not a file of torch.save, or torch before 1.6 wrote it: {_first_line(error)}") from error
    others = [name for name in names if name != _NAMESPACE and not name.startswith(_IGNORED)]
    check(not others, f"{path} asks for {others[:1]}, which could run code: only tensors, numbers, texts and {_NAMESPACE} are read")
    nothings = [(Nothing, name) for name in names if name != _NAMESPACE]
    try:
        with torch.serialization.safe_globals([argparse.Namespace, *nothings]):
            contents = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (ValueError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {_first_line(error)}") from error
    check(isinstance(contents, dict), f"{path} holds {type(contents).__name__}, not a dictionary")
    return contents


def _first_line(error: Exception) -> str:
    return describe(error).splitlines()[0][:200]


class _MetadataReader(pickle.Unpickler):
    """Unpickles the metadata of torch.distributed.checkpoint, and nothing else; torch's own reader would run any code in it."""

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in _METADATA:
            return getattr(metadata, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), _VALUES)):
            return getattr(torch, name)
        known = {("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
                 ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
                 ("collections", "OrderedDict"): collections.OrderedDict}
        if (module, name) in known:
            return known[module, name]
        check(f"{module}.".startswith(_IGNORED), f"it asks for {module}.{name}, which could run code")
        return Nothing


def load_metadata(path: Path) -> metadata.Metadata:
    """The metadata of a checkpoint of torch.distributed.checkpoint. ValueError as in `load`."""
    check(path.is_file(), f"{path} is missing")
    try:
        with open(path, "rb") as file:
            contents = _MetadataReader(file).load()
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged, or is not metadata of torch.distributed.checkpoint: {_first_line(error)}") from error
    check(isinstance(contents, metadata.Metadata), f"{path} holds {type(contents).__name__}, not Metadata")
    return contents
