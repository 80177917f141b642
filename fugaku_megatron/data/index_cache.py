"""Files of index arrays, with Megatron-core's names, or the arrays in memory.

One process builds the arrays blockwise and every reader maps them; node-local data is indexed on
its node.

    PREFIX/cache/GPTDataset_indices/<MD5>-GPTDataset-train-description.txt
    PREFIX/cache/GPTDataset_indices/<MD5>-GPTDataset-train-document_index.npy
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..comm.agreement import agree, describe, on_root
from ..comm.base import Comm
from ..text.named_files import JsonObject
from ..text.written_files import make_folder, new_file
from .files import MappedFile

IN_MEMORY = 64 << 20  # bytes of an index that need no file
ABANDONED = 3600.0  # s after which an unfinished file belongs to a builder that was killed


class ArrayBlocks(NamedTuple):
    """Index array to store, built in consecutive blocks."""

    name: str
    dtype: np.dtype[Any] | type
    shape: tuple[int, ...]
    blocks: Iterable[np.ndarray]


Store = Callable[[ArrayBlocks], np.ndarray]  # returns the stored array
Build = Callable[[Store], None]


class IndexRequest(NamedTuple):
    """Needed index.

    prefix: data next to which the files are by default
    size: bytes in all arrays
    """

    prefix: str
    kind: str
    split: str
    description: JsonObject
    arrays: tuple[str, ...]
    size: int


class IndexCache(NamedTuple):
    """Index location. path: --data-cache-path; None: next to the data. in_memory: bytes kept
    without a file.
    """

    path: str | None = None
    in_memory: int = IN_MEMORY

    def folder(self, request: IndexRequest) -> Path:
        if self.path:
            return Path(self.path)
        return Path(request.prefix) / "cache" / f"{request.kind}_indices"


class Index(NamedTuple):
    """Index arrays by name, and the mapped files behind them."""

    arrays: dict[str, np.ndarray]
    files: tuple[MappedFile, ...] = ()

    def release(self) -> None:
        for file in self.files:
            file.release()

    def check(self) -> None:
        for file in self.files:
            file.check()


class _Files:
    def __init__(self, folder: Path, request: IndexRequest) -> None:
        self.folder = folder
        self.arrays = request.arrays
        self.text = json.dumps(request.description, indent=4)
        digest = hashlib.md5(self.text.encode(), usedforsecurity=False).hexdigest()
        self.base = f"{digest}-{request.kind}-{request.split}"
        self.mapped: list[MappedFile] = []

    def path(self, name: str) -> Path:
        return self.folder / f"{self.base}-{name}"

    def open(self) -> Index:
        if self.path("description.txt").read_text() != self.text:
            raise ValueError(f"{self.path('description.txt')} describes another index")
        files = {name: MappedFile(self.path(f"{name}.npy")) for name in self.arrays}
        return Index({name: file.array for name, file in files.items()}, tuple(files.values()))

    def build(self, build: Build) -> None:
        """Write all arrays, then the description, which validates them. Raises OSError."""
        make_folder(self.folder)
        for aside in self.folder.glob(f"{self.base}-*.tmp"):
            with suppress(OSError):  # another builder may be removing it
                if time.time() - aside.stat().st_mtime > ABANDONED:
                    aside.unlink()
        build(self.store)
        self._write("description.txt", [self.text.encode()])

    def store(self, array: ArrayBlocks) -> np.ndarray:
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(array.dtype)),
            "fortran_order": False,
            "shape": array.shape,
        }

        def content() -> Iterable[np.ndarray]:
            for block in array.blocks:
                yield np.ascontiguousarray(block, array.dtype)
                for file in self.mapped:
                    file.release()

        self._write(f"{array.name}.npy", content(), header)
        file = MappedFile(self.path(f"{array.name}.npy"))
        self.mapped.append(file)
        return file.array

    def _write(self, name: str, blocks: Iterable[Any], header: JsonObject | None = None) -> None:
        path = self.path(name)
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(aside, "wb", opener=new_file) as file:
                if header:
                    np.lib.format.write_array_header_1_0(file, header)
                for block in blocks:
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def provide(
    cache: IndexCache | None, request: IndexRequest, build: Build, comm: Comm | None
) -> Index:
    """Return an index, built by `build` on rank 0 unless cached. Collective.

    Raises ValueError if its files cannot be written.
    """
    cache = cache or IndexCache()
    small = request.size <= cache.in_memory
    if small and cache.path is None:
        return on_root(comm, lambda: _in_memory(build))
    files = _Files(cache.folder(request), request)
    reason = on_root(comm, lambda: _ensure(files, build))
    if reason and small:
        if comm is None or comm.rank == 0:
            print(
                f"note: --data-cache-path {cache.path}: {reason}: the index of the {request.split} data is kept in memory",
                flush=True,
            )
        return on_root(comm, lambda: _in_memory(build))

    def check(reason: str | None) -> None:
        if reason:
            raise ValueError(
                f"the index of {request.prefix}, {request.size / 2**20:.0f} MiB, cannot be written ({reason}): pass "
                "another folder with --data-cache-path"
            )

    def open_or_build() -> Index:
        check(_ensure(files, build))
        return files.open()

    check(reason)
    return open_or_build() if comm is None else agree(comm, open_or_build)


def _in_memory(build: Build) -> Index:
    arrays: dict[str, np.ndarray] = {}

    def store(array: ArrayBlocks) -> np.ndarray:
        parts = [np.asarray(block, array.dtype) for block in array.blocks]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        arrays[array.name] = whole.reshape(array.shape)
        return arrays[array.name]

    build(store)
    return Index(arrays)


def _ensure(files: _Files, build: Build) -> str | None:
    try:
        files.open()
    except (OSError, ValueError):
        try:
            files.build(build)
        except OSError as error:
            return describe(error)
    return None
