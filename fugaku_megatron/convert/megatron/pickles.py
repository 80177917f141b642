"""Pickled files in Megatron-LM's checkpoints.

No pickled code runs: unknown classes are refused by name; harmless ones (enumerations, numpy's
random state) become inert objects.
"""

from __future__ import annotations

import argparse
import collections
import gc
import io
import pickle
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ...comm.agreement import describe
from ...config.fields import FieldValues, check

_NAMESPACES = {"argparse.Namespace": argparse.Namespace, "types.SimpleNamespace": SimpleNamespace}
# Modules and names that become Nothing: what megatron-core itself allows in these files, and how enumerations are pickled by
# Python 3.11.0 to 3.11.3.
_IGNORED = (
    "megatron.",
    "numpy.",
    "signal.",
    "pathlib.",
    "_io.BytesIO",
    "torch._C.Generator",
    "builtins.getattr",
    "__builtin__.getattr",
)
# The same in `.metadata`, into which megatron-core has pickled its save plan since 0.11.
_IGNORED_IN_METADATA = (*_IGNORED, "torch.distributed.checkpoint.")
_METADATA = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_VALUES = (torch.dtype, torch.memory_format, torch.layout)
# What pickle and torch raise for damaged files.
UNREADABLE = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    EOFError,
    ImportError,
    OSError,
    RuntimeError,
    struct.error,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    MemoryError,
)
_ZIP = b"PK\x03\x04"


class Nothing:
    """Placeholder for an object whose class is not imported."""

    def __new__(cls, *arguments: Any, **named: Any) -> Nothing:
        return object.__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load_pickled(path: Path) -> FieldValues:
    """Load a torch.save file with mapped tensors. Raise ValueError if it is damaged or could run
    code.
    """
    check(path.is_file(), f"{path} is missing")
    foreign = f"{path} is not a file of torch.save, or torch before 1.6 wrote it"
    with open(path, "rb") as stream:
        check_uncompressed(stream, path.stat().st_size, foreign)
    contents = _load(path, str(path), foreign, f"{path} is damaged")
    check(isinstance(contents, dict), f"{path} holds {type(contents).__name__}, not a dictionary")
    state: FieldValues = contents
    return state


def check_uncompressed(stream: BinaryIO, size: int, damaged: str) -> None:
    """Raise ValueError if a torch.save file expands in memory beyond its `size` in bytes.

    torch.save never compresses. damaged: beginning of a message
    """
    begin = stream.read(len(_ZIP))
    stream.seek(0)
    if begin != _ZIP:
        return
    try:
        with zipfile.ZipFile(stream) as archive:
            expanded = sum(record.file_size for record in archive.infolist())
    except UNREADABLE as error:
        raise ValueError(f"{damaged}: {_first_line(error)}") from error
    check(
        expanded <= size,
        f"{damaged}: its {size} bytes expand to {expanded}, and torch.save never compresses",
    )


def save_pickled(value: Any, stream: BinaryIO) -> None:
    """Write as torch.save. Raise the stream's OSError, which torch hides behind an error of its own."""
    try:
        torch.save(value, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def load_object(data: bytes, name: str, damaged: str) -> Any:
    """Load a torch.save file in memory, as `load_pickled`. name: of its file. damaged: beginning of a message"""
    return _load(io.BytesIO(data), name, damaged, damaged)


def _load(source: Path | io.BytesIO, name: str, foreign: str, damaged: str) -> Any:
    """Load what torch.save wrote. foreign, damaged: beginnings of messages"""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except UNREADABLE as error:
        raise ValueError(f"{foreign}: {_first_line(error)}") from error
    others = [name for name in names if name not in _NAMESPACES and not name.startswith(_IGNORED)]
    check(
        not others,
        f"{name} asks for {others[:1]}, which could run code: "
        f"only tensors, numbers, texts and {' or '.join(_NAMESPACES)} are read",
    )
    nothings = [(Nothing, name) for name in names if name not in _NAMESPACES]
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with torch.serialization.safe_globals([*_NAMESPACES.values(), *nothings]):
            return torch.load(
                source, map_location="cpu", mmap=isinstance(source, Path), weights_only=True
            )
    except UNREADABLE as error:
        raise ValueError(f"{damaged}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return describe(error).splitlines()[0][:200]


def _member(kind: Any, name: str) -> Any:
    return kind[name] if kind is metadata._MEM_FORMAT_ENCODING else Nothing()


class _MetadataReader(pickle.Unpickler):
    """Unpickler for torch.distributed.checkpoint's metadata; torch's own would run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in _METADATA:
            return getattr(metadata, name)
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), _VALUES)
        ):
            return getattr(torch, name)
        known = {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
            ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): (
                metadata.Metadata  # whose subclass it is in megatron-core 0.15
            ),
            ("builtins", "getattr"): _member,
        }
        if (module, name) in known:
            return known[module, name]
        check(
            f"{module}.{name}".startswith(_IGNORED_IN_METADATA),
            f"it asks for {module}.{name}, which could run code",
        )
        return Nothing


def load_metadata(path: Path) -> metadata.Metadata:
    """Read metadata of torch.distributed.checkpoint without running code from the file."""
    check(path.is_file(), f"{path} is missing")
    collects = gc.isenabled()
    gc.disable()  # it would scan the growing table again and again: 100,000 pieces take 1.5 s instead of 2.6 s
    try:
        with open(path, "rb") as file:
            contents: metadata.Metadata = _MetadataReader(file).load()
    except UNREADABLE as error:
        raise ValueError(
            f"{path} is damaged, or is not metadata of torch.distributed.checkpoint: {_first_line(error)}"
        ) from error
    finally:
        if collects:
            gc.enable()
    check(
        isinstance(contents, metadata.Metadata),
        f"{path} holds {type(contents).__name__}, not Metadata",
    )
    return contents
