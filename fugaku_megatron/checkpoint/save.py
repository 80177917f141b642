"""Writing sharded checkpoints: a safetensors file per rank and manifests (manifest.py shows the directory). No pickled code.

A save writes into iter_0000100.tmp and renames it at the end, so an interrupted save leaves the previous checkpoint loadable.
Every public function is collective, and fails on all ranks or on none. Left out: asynchronous saves.
Test: pytest tests/test_checkpoint.py
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..comm.agreement import agree, describe, on_root
from ..comm.base import Comm
from .folders import Folders, all_folders, file_name
from .manifest import (
    TRACKER,
    crc32,
    entries,
    fsync,
    iteration_name,
    join,
    list_iterations,
    read_head,
    write_folder,
    write_manifest,
    write_text,
)
from .shards import Shard, place


def save_checkpoint(directory: str | os.PathLike, iteration: int, shards: list[Shard], state: dict[str, Any], comm: Comm,
         layout: dict[str, int], config: dict[str, Any], keep: int | None = None, folders: Folders | None = None) -> Path:
    """Write the checkpoint of `iteration` and return its directory. Collective.

    When several ranks hold a shard, only one of them passes it. `state` and `config` are JSON values (tuples come back as
    lists). With `keep`, only the newest `keep` checkpoints up to this iteration remain. folders: those of `comm`, where they are
    made already. Raises ValueError on all ranks if any rank fails; earlier checkpoints stay loadable.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"the number of checkpoints to keep must be at least 1, got {keep}")
    directory, folders = Path(directory), folders or Folders(comm)
    aside = directory / (iteration_name(iteration) + ".tmp")
    prefix = f"--save {directory}: iteration {iteration} is not saved: "
    on_root(comm, lambda: _prepare(directory, iteration, aside), prefix, _untouched)
    try:
        files = _write(aside, folders, shards, prefix)
        ranks = comm.size if folders.name else None
        on_root(comm, lambda: _seal(aside, iteration, layout, config, state, files, ranks), prefix, _untouched)
    except ValueError:
        if comm.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    on_root(comm, lambda: _publish(directory, iteration, aside), prefix)
    _remove(on_root(comm, lambda: _set_aside(directory, iteration, keep)), folders)
    return directory / iteration_name(iteration)


def _write(aside: Path, folders: Folders, shards: list[Shard], prefix: str) -> dict[str, Any]:
    """Write every rank's file, and the manifests of folders. Returns what the checkpoint's manifest names, on rank 0. Collective.

    A rank knows the records of its own folder only, and only if it leads it.
    """
    comm, folder = folders.comm, aside / folders.name
    if folders.name:
        agree(comm, lambda: folder.mkdir(parents=True, exist_ok=True) if folders.leads else None, prefix, _untouched)
    own = agree(comm, lambda: _write_shards(folder, comm.rank, shards), prefix, _untouched)
    written = folders.members.gather_object(own) or []
    files = agree(comm, lambda: _unite(written), prefix, _untouched, name_rank=False)
    if not folders.name:
        return files
    entry = agree(comm, lambda: write_folder(folder, files) if folders.leads else None, prefix, _untouched)
    summaries = folders.leaders.gather_object(entry)
    return dict(zip(all_folders(comm.size), summaries, strict=True)) if comm.rank == 0 else {}


def _unite(written: list[Any]) -> dict[str, Any]:
    """File name -> entry of the ranks that wrote one."""
    files = dict(entry for entry in written if entry)
    owners: dict[tuple, str] = {}
    for name, entry in files.items():
        for record in entry["shards"]:
            first = owners.setdefault((record["key"], *place(record)), name)
            assert first == name, f"{record['key']} is given by two ranks, in {first} and {name}"
    return files


def check_writable(directory: str | os.PathLike, comm: Comm, name: str = "--save",
                   ranks: Collection[int] | None = None) -> None:
    """Create `directory` and write a small file from every rank, or from `ranks`, so that it fails before training. Collective."""
    directory = Path(directory)
    prefix = f"{name} {directory} is not writable: "
    ranks = range(comm.size) if ranks is None else ranks

    def probe() -> None:
        directory.mkdir(parents=True, exist_ok=True)  # on every rank: it may be on a disk of the node
        _write_probe(directory / f".write_probe_rank_{comm.rank:05d}")

    agree(comm, lambda: probe() if comm.rank in ranks else None, prefix, lambda: f". Give another {name} or change the permissions")


def check_replaces(save: str | os.PathLike, load: str | os.PathLike | None, loaded: int | None, comm: Comm) -> None:
    """Refuse, before training, a --save whose checkpoints this run would replace without having loaded one of them. Collective.

    `loaded`: the iteration from which --load `load` resumes. If `load` and `save` are one directory, later checkpoints of this
    program may be replaced.
    """
    on_root(comm, lambda: _check_replaces(Path(save), load, loaded or 0))


def _check_replaces(save: Path, load: str | os.PathLike | None, loaded: int) -> None:
    present = sorted({number for number, suffix, _ in entries(save) if suffix != ".tmp"})
    if load is not None and Path(load).resolve() == save.resolve():
        for number in present:
            if number > loaded:
                _check_ours(save, number)
    elif present:
        raise ValueError(f"--save {save} holds checkpoints of iterations {join(present)}, which this run would replace, and --load "
                         f"is {load}: give --load {save} to go on from them, or another --save")


def _untouched() -> str:
    return ". Earlier checkpoints there are untouched. If the disk is full or read-only, give another --save"


def _prepare(directory: Path, iteration: int, aside: Path) -> None:
    """Remove what an interrupted save left, refuse to replace what is no checkpoint, and make the directory to write in."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, suffix, path in entries(directory):
        current = directory / iteration_name(number)
        if suffix == ".old" and not current.exists():
            path.rename(current)
        elif suffix:
            shutil.rmtree(path)
    if (directory / iteration_name(iteration)).exists():
        _check_ours(directory, iteration)
    aside.mkdir()


def _check_ours(directory: Path, iteration: int) -> None:
    try:
        read_head(directory, iteration)
    except ValueError as error:
        final = directory / iteration_name(iteration)
        raise ValueError(f"{final} exists and is not a whole checkpoint ({error}); move it away") from error


def _write_shards(folder: Path, rank: int, shards: list[Shard]) -> tuple[str, dict[str, Any]] | None:
    """Write this rank's file; returns its name and manifest entry, or None if the rank owns nothing."""
    tensors = {shard.key: shard.tensor.detach() for shard in shards}
    assert len(tensors) == len(shards), "a rank gives two shards of one key"
    if not shards:
        return None
    path = folder / file_name(rank)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except Exception as error:
        raise ValueError(f"{path}: {error}") from error
    path.chmod(folder.stat().st_mode & 0o666)  # the library writes mode 0600, which a group could not share
    fsync(path)
    entry = {"size": path.stat().st_size, "crc32": crc32(path), "shards": [shard.record() for shard in shards]}
    return path.name, entry


def _seal(aside: Path, iteration: int, layout: dict[str, int], config: dict[str, Any], state: dict[str, Any],
          files: dict[str, Any], ranks: int | None) -> None:
    """Write the manifest: the directory is then a whole checkpoint under a temporary name."""
    write_manifest(aside, iteration, layout, config, state, files, ranks)
    fsync(aside)


def _publish(directory: Path, iteration: int, aside: Path) -> None:
    """Put the new directory in the place of an older one of its name, then move the tracker."""
    final = directory / iteration_name(iteration)
    if final.exists():
        final.rename(final.with_name(final.name + ".old"))  # readers use this one until the next line
    aside.rename(final)
    fsync(directory)
    tracker = directory / (TRACKER + ".tmp")
    write_text(tracker, f"{iteration}\n")
    tracker.replace(directory / TRACKER)
    fsync(directory)


def _set_aside(directory: Path, iteration: int, keep: int | None) -> list[Path]:
    """Rename the checkpoint just replaced and those beyond `keep`: a partly removed one is never read. A failure only warns."""
    replaced = directory / (iteration_name(iteration) + ".old")
    obsolete = [replaced] if replaced.exists() else []
    if keep is not None:
        older = [number for number in list_iterations(directory) if number <= iteration]
        obsolete += [directory / iteration_name(number) for number in older[:-keep]]
    aside = []
    for path in obsolete:
        with _warning(path):
            aside.append(path.rename(path.with_suffix(".tmp")))
    return aside


def _remove(obsolete: list[Path], folders: Folders) -> None:
    """Remove checkpoints that were set aside; every leader removes the folder of its own name. A failure only warns. Collective."""
    for path in obsolete:
        if folders.name:
            if folders.leads:
                shutil.rmtree(path / folders.name, ignore_errors=True)  # another layout may have had other folders
            folders.comm.barrier()
        if folders.comm.rank == 0:
            with _warning(path.with_suffix("")):
                shutil.rmtree(path)


@contextmanager
def _warning(path: Path) -> Iterator[None]:
    """The new checkpoint is safe: an old one that stays is no error."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"old checkpoint {path} could not be removed: {describe(error)}", stacklevel=3)


def _write_probe(path: Path) -> None:
    write_text(path, "probe\n")
    path.unlink()
