"""Load checkpoints into any parallel layout: each rank reads the byte ranges that it needs.

Every public function is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import agree, on_root, scatter_object
from ..comm.base import Comm
from ..text.named_files import JsonObject
from .manifest import (
    FOLDER_FILES,
    TRACKER,
    Directory,
    Files,
    Folders,
    file_name,
    iteration_path,
    join,
    latest_iteration,
    list_iterations,
    missing,
    read_folder,
    read_head,
    unsigned_note,
)
from .schema import Manifest
from .shards import Search, Shard, check_model, fill_shards, read_shards
from .trusted import refuse_suspect, suspects


@dataclass(frozen=True)
class Foreign:
    """Another program's checkpoint tensors.

    names: weights by name, other tensors by key
    read: see `fill_shards`
    """

    names: Collection[str]
    read: Callable[[str], Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint with a manifest that rank 0 read.

    head: manifest without shard records
    files: shard records on rank 0 if the checkpoint has no folders, else None
    node: directory of node copies; `files` are then this rank's
    flag: that made the node copies
    foreign: tensors in another program's format, in place of `files`
    """

    directory: Path
    path: Path
    iteration: int
    head: Manifest
    files: Files | None = field(default=None, repr=False)
    node: str | None = None
    flag: str = "--save-local"
    foreign: Foreign | None = field(default=None, repr=False)

    @property
    def state(self) -> JsonObject:
        state: JsonObject = self.head["state"]
        return state

    @property
    def config(self) -> JsonObject:
        config: JsonObject = self.head["config"]
        return config


def open_checkpoint(directory: Directory, comm: Comm, iteration: int | None = None) -> Checkpoint:
    """Open the latest checkpoint, or the one at `iteration`, without tensors. Collective."""
    directory = Path(directory)
    files = []
    prefix = f"--load {directory}: "
    iteration = on_root(comm, lambda: _iteration_to_load(directory, iteration), prefix)

    def read() -> tuple[Path, Manifest]:
        head = read_head(directory, iteration)
        files.append(head.pop("files", None))
        path = iteration_path(directory, iteration)
        if note := unsigned_note(head, path):
            print(note)
        return path, head

    path, head = on_root(comm, read, prefix, partial(_other_iterations, directory, iteration))
    return Checkpoint(directory, path, iteration, head, files[0] if files else None)


def load_shards(
    checkpoint: Checkpoint,
    shards: list[Shard],
    folders: Folders,
    model: JsonObject | None = None,
    padded: Collection[str] = (),
    converts: Collection[str] = (),
) -> int:
    """Fill `shards` in place and return the bytes read by this rank. Collective.

    model: values that the saved config's "model" must match
    padded, converts: see `Search`

    Raises ValueError on all ranks: before copying, if the model differs or a tensor is missing,
    incomplete or has another shape or dtype; later, if a file is missing, truncated or altered (the
    tensors are then undefined).
    """
    comm = folders.comm
    path = checkpoint.path
    head = checkpoint.head
    prefix, others = _messages(checkpoint)
    on_root(comm, lambda: check_model(head["config"].get("model", {}), model or {}, path), prefix)
    if checkpoint.foreign is not None:
        foreign = checkpoint.foreign
        agree(comm, lambda: fill_shards(shards, foreign.names, foreign.read), prefix)
        return 0
    search = Search(shards, padded, converts)
    own = checkpoint.files if checkpoint.node else _own_entry(checkpoint, folders, prefix, others)
    for name, entry in (own or {}).items():
        search.look(name, entry)
    if not checkpoint.node and comm.all_reduce(torch.tensor(int(not search.complete)), "max"):
        search = _search_all(checkpoint, comm, Search(shards, padded, converts), prefix, others)
    return _read(search, path, comm, prefix=prefix, others=others)


def _read(
    search: Search, path: Path, comm: Comm, prefix: str, others: Callable[[], str] | None = None
) -> int:
    """Read the pieces that were found, and return the bytes read by this rank. Collective."""
    plan = agree(comm, lambda: search.plan(path), prefix)
    return agree(
        comm,
        lambda: sum(read_shards(path / name, work) for name, work in plan.items()),
        prefix,
        others,
    )


def _messages(checkpoint: Checkpoint) -> tuple[str, Callable[[], str]]:
    if checkpoint.node:
        return (
            f"{checkpoint.flag} {checkpoint.node}: ",
            lambda: f". Omit {checkpoint.flag} once to continue from the shared directory",
        )
    others = partial(_other_iterations, checkpoint.directory, checkpoint.iteration)
    return f"--load {checkpoint.directory}: ", others


def _own_entry(checkpoint: Checkpoint, folders: Folders, prefix: str, others: Any) -> Files:
    """Return this rank's entry from the folder leader; {} if the rank count differs. Collective."""
    comm = folders.comm
    head = checkpoint.head
    if head.get("ranks", comm.size) != comm.size or ("folders" in head) != bool(folders.name):
        return {}

    def read() -> Files | None:
        if folders.leads and folders.name:
            return read_folder(checkpoint.path, folders.name, head)
        return checkpoint.files

    entries = agree(comm, read, prefix, others) or {}
    members = range(comm.rank, comm.rank + folders.members.size)
    names = [str(Path(folders.name, file_name(rank))) for rank in members]
    entry = scatter_object(
        folders.members, [entries.get(name) for name in names] if folders.leads else None
    )
    return {names[0]: entry} if entry else {}


def _search_all(
    checkpoint: Checkpoint, comm: Comm, search: Search, prefix: str, others: Any
) -> Search:
    """Pass all records to `search`, one folder at a time. Collective."""
    parts = _parts(checkpoint) if comm.rank == 0 else iter(())
    while (part := on_root(comm, lambda: next(parts, None), prefix, others)) is not None:
        for name, entry in part.items():
            search.look(name, entry)
    return search


def _parts(checkpoint: Checkpoint) -> Iterator[Files]:
    for folder in checkpoint.head.get("folders", ()):
        yield read_folder(checkpoint.path, folder, checkpoint.head)
    rest = iter((checkpoint.files or {}).items())
    while part := dict(islice(rest, FOLDER_FILES)):
        yield part


def _iteration_to_load(directory: Path, iteration: int | None) -> int:
    if iteration is not None:
        return iteration
    iteration = latest_iteration(directory)
    if iteration is None:
        raise ValueError(f"no checkpoint there: {directory / TRACKER} does not exist")
    if note := missing(directory, iteration):
        raise ValueError(note + _other_iterations(directory, iteration))
    refuse_suspect(directory, iteration)
    return iteration


def _other_iterations(directory: Path, damaged: int) -> str:
    excluded = {damaged, *suspects(directory)}
    others = [iteration for iteration in list_iterations(directory) if iteration not in excluded]
    if not others:
        return f". No other checkpoint in {directory} is complete"
    return f". Complete checkpoints: iterations {join(others)}. Use iteration {others[-1]}: --ckpt-step {others[-1]}"


def load_weights(
    directory: Directory,
    iteration: int,
    manifest: Manifest,
    targets: list[Shard],
    comm: Comm,
    padded: Collection[str] = (),
) -> None:
    """Fill `targets`, of any dtype, in place and verified. Collective.

    padded: see `Search`
    """
    path = iteration_path(Path(directory), iteration)
    prefix = f"--load {directory}: "
    search = Search(targets, padded, converts=("",))
    for name, entry in manifest["files"].items():
        search.look(name, entry)
    _read(search, path, comm, prefix=prefix)


def note_unsigned(directory: Directory, iteration: int, manifest: Manifest, comm: Comm) -> None:
    """Print a line on one rank if the manifest has no checksum."""
    note = unsigned_note(manifest, iteration_path(Path(directory), iteration))
    if comm.rank == 0 and note:
        print(note)
