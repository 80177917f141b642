"""Writing sharded checkpoints: a safetensors file per rank and manifests. No pickled code.

A save writes into *.iter_0000100.tmp and renames it at the end, so an interrupted save leaves the
previous checkpoint loadable. It is a generator of steps, which may overlap with training. Every
public function is collective.
"""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..comm.agreement import agree, describe, on_root
from ..comm.base import Comm
from ..text.written_files import make_folder, write_text
from .manifest import (
    TRACKER,
    Description,
    Directory,
    Files,
    Folders,
    all_folders,
    entries,
    file_name,
    fsync,
    iteration_name,
    join,
    list_iterations,
    read_head,
    saved_iterations,
    unfinished_path,
    write_folder,
    write_manifest,
)
from .schema import Entry
from .shards import Shard, record_piece
from .tensor_files import write_tensors
from .trusted import forgive, kept_for_trust

# a file's name and its manifest entry; None for a rank that saves nothing
Written = tuple[str, Entry] | None
WriteFile = Callable[[Path], Written]  # of a rank, into a folder
CheckLock = Callable[[], object]  # see `lock.hold`
Steps = Generator[Callable[[], Any], Callable[[], Any], Any]
# the mask of the process before its main thread is pinned: a thread inherits its creator's mask
_CPUS = os.sched_getaffinity(0)


def run_steps(steps: Steps) -> Any:
    try:
        work = next(steps)
        while True:
            work = steps.send(work)
    except StopIteration as end:
        return end.value


def save_steps(
    directory: Directory,
    write: WriteFile,
    description: Description,
    folders: Folders,
    check_lock: CheckLock = bool,
) -> Steps:
    """Write a checkpoint and return its directory.

    Generator: yields work and receives its outcome, or a function returning it. Work operates on
        large files and never communicates; code between two yields is collective.

    write: writes this rank's file, such as `write_shards` of its shards
    check_lock: raises ValueError on rank 0 if another job writes into `directory` by now

    Raises ValueError on all ranks if any rank fails; earlier checkpoints stay loadable.
    """
    comm = folders.comm
    directory = Path(directory)
    iteration = description.iteration
    prefix = f"--save {directory}: iteration {iteration} is not saved: "
    on_root(comm, check_lock)
    aside, replaces = on_root(
        comm, lambda: _prepare(directory, iteration, check_lock), prefix, _untouched
    )
    folder = aside / folders.name
    try:
        if folders.name:
            agree(
                comm,
                lambda: make_folder(folder) if folders.leads else None,
                prefix,
                _untouched,
            )
        written = yield partial(write, folder)
        files = _record(aside, folders, agree(comm, written, prefix, _untouched), prefix)
        on_root(
            comm,
            lambda: write_manifest(
                aside, description, files=files, ranks=comm.size if folders.name else None
            ),
            prefix,
            _untouched,
        )
        on_root(comm, lambda: _publish(directory, iteration, aside, replaces, check_lock), prefix)
    except ValueError:
        if comm.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        on_root(comm, check_lock)  # the job that took it over may have removed this save's files
        raise
    expire = partial(_set_aside, directory, description, check_lock)
    obsolete = yield expire if comm.rank == 0 else list
    yield from _remove(on_root(comm, obsolete), folders, check_lock)
    return directory / iteration_name(iteration)


def save_alone(directory: Path, write: Callable[[Path], Files], description: Description) -> Path:
    """Write a checkpoint into a new directory from this process alone and return its path.

    write: writes files into a folder and returns their entries by name, with shards

    Nobody may read the directory before the return.
    """
    path = directory / iteration_name(description.iteration)
    path.mkdir(parents=True)
    write_manifest(path, description, files=write(path))
    write_text(directory / TRACKER, f"{description.iteration}\n")
    fsync(directory)
    return path


def _record(aside: Path, folders: Folders, own: Written, prefix: str) -> Files:
    """Write the folder manifests and return, on rank 0, the checkpoint manifest's entries.
    Collective.
    """
    comm = folders.comm
    folder = aside / folders.name
    written = folders.members.gather_object(own) or []
    files = agree(comm, lambda: _unite(written), prefix, _untouched, name_rank=False)
    if not folders.name:
        return files
    entry = agree(
        comm, lambda: write_folder(folder, files) if folders.leads else None, prefix, _untouched
    )
    summaries = folders.leaders.gather_object(entry) if folders.leaders else None
    return dict(zip(all_folders(comm.size), summaries or [], strict=True)) if comm.rank == 0 else {}


def _unite(written: list[Any]) -> Files:
    files = dict(entry for entry in written if entry)
    owners: dict[tuple[Any, ...], str] = {}
    for name, entry in files.items():
        for record in entry["shards"]:
            first = owners.setdefault((record["key"], record_piece(record)), name)
            assert first == name, f"{record['key']} is saved by two ranks, in {first} and {name}"
    return files


def check_writable(
    directory: Directory,
    comm: Comm,
    name: str = "--save",
    ranks: Collection[int] | None = None,
) -> None:
    """Create `directory` and write a small file from every rank, or from `ranks`, to fail before
    training. Collective.
    """
    directory = Path(directory)
    prefix = f"{name} {directory} is not writable: "
    ranks = range(comm.size) if ranks is None else ranks

    def probe() -> None:
        make_folder(directory)  # on every rank: it may be on a disk of the node
        file = directory / f".write_probe_rank_{comm.rank:05d}"
        write_text(file, "probe\n")
        file.unlink()

    agree(
        comm,
        lambda: probe() if comm.rank in ranks else None,
        prefix,
        lambda: f". Pass another {name} or change the permissions",
    )


def check_replaces(
    save: Directory,
    load: Directory | None,
    loaded: int | None,
    comm: Comm,
) -> None:
    """Refuse a --save that would replace checkpoints from which this run did not resume.
    Collective.

    loaded: iteration resumed from `load`; if `load` is `save`, later ones may be replaced
    """
    save = Path(save)

    def check() -> None:
        present = saved_iterations(save)
        if load is not None and Path(load).resolve() == save.resolve():
            for number in present:
                if number > (loaded or 0):
                    _check_ours(save, number)
        elif present:
            raise ValueError(
                f"--save {save} holds checkpoints of iterations {join(present)}, which this run would replace, and --load "
                f"is {load}: pass --load {save} to continue from them, or another --save"
            )

    on_root(comm, check)


def _untouched() -> str:
    return ". Earlier checkpoints there are untouched. If the disk is full or read-only, pass another --save"


def _prepare(directory: Path, iteration: int, check_lock: CheckLock) -> tuple[Path, bool]:
    """Remove what unfinished saves left; return a new folder, and whether it will replace a checkpoint."""
    make_folder(directory)
    for number, suffix, path in entries(directory):
        check_lock()
        current = directory / iteration_name(number)
        if suffix == ".old" and not current.exists():
            path.rename(current)
        elif suffix:
            shutil.rmtree(path, ignore_errors=True)
    replaces = (directory / iteration_name(iteration)).exists()
    if replaces:
        _check_ours(directory, iteration)
    aside = unfinished_path(directory, iteration)
    aside.mkdir()
    return aside, replaces


def _check_ours(directory: Path, iteration: int) -> None:
    try:
        read_head(directory, iteration)
    except ValueError as error:
        final = directory / iteration_name(iteration)
        raise ValueError(
            f"{final} exists and is not a whole checkpoint ({error}); move it away"
        ) from error


def write_shards(rank: int, shards: list[Shard], folder: Path) -> Written:
    """Write a rank's file; return its name and manifest entry, or None without shards.

    shards: each replicated shard on one rank only
    """
    tensors = {shard.key: shard.tensor.detach() for shard in shards}
    assert len(tensors) == len(shards), "a rank saves two shards of one key"
    if not shards:
        return None
    path = folder / file_name(rank)
    entry = write_tensors(path, tensors)
    return path.name, {**entry, "shards": [shard.record() for shard in shards]}


def put_in_place(aside: Path, final: Path, replaces: bool = True) -> None:
    """Rename a checkpoint to its final name, and one of an earlier run to .old, which readers use in between.

    replaces: False: raise OSError if there is one.
    """
    if replaces and final.exists():
        final.rename(final.with_name(final.name + ".old"))
    aside.rename(final)
    fsync(final.parent)


def _publish(
    directory: Path, iteration: int, aside: Path, replaces: bool, check_lock: CheckLock
) -> None:
    check_lock()
    # A job that has just taken over may have saved this iteration.
    put_in_place(aside, directory / iteration_name(iteration), replaces)
    tracker = directory / (TRACKER + ".tmp")
    check_lock()
    write_text(tracker, f"{iteration}\n")
    check_lock()  # a job may stand still while it waits for the disk
    tracker.replace(directory / TRACKER)
    forgive(directory, iteration)
    fsync(directory)


def _set_aside(directory: Path, description: Description, check_lock: CheckLock) -> list[Path]:
    """Rename replaced and expired checkpoints, so that none is read half removed. Failures only
    warn.
    """
    replaced = directory / (iteration_name(description.iteration) + ".old")
    numbers = [number for number in list_iterations(directory) if number <= description.iteration]
    older = numbers[: -description.keep] if description.keep else []
    if description.retain:
        older = [number for number in numbers[:-1] if number % description.retain]
    if older:
        trusted = kept_for_trust(directory, description.state, numbers)
        older = [number for number in older if number != trusted]
    obsolete = [directory / iteration_name(number) for number in older]
    if replaced.exists():
        obsolete.insert(0, replaced)
    aside = []
    for path in obsolete:
        check_lock()
        with _warning(path):
            aside.append(path.rename(path.with_suffix(".tmp")))
    return aside


def _remove(obsolete: list[Path], folders: Folders, check_lock: CheckLock) -> Steps:
    """Remove renamed checkpoints, each folder by its leader. Failures only warn."""
    for path in obsolete:
        if folders.name:
            # another layout may have had other folders
            remove = partial(shutil.rmtree, path / folders.name, ignore_errors=True)
            removed = yield remove if folders.leads else list
            removed()
            folders.comm.barrier()
        remove = partial(_remove_rest, path, check_lock)
        removed = yield remove if folders.comm.rank == 0 else list
        on_root(folders.comm, removed)


def _remove_rest(path: Path, check_lock: CheckLock) -> None:
    check_lock()
    with _warning(path.with_suffix("")):
        shutil.rmtree(path)


@contextmanager
def _warning(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"old checkpoint {path} could not be removed: {describe(error)}", stacklevel=3
        )


class Snapshot:
    """Preallocated shard copies; pages are touched once, so that copying causes no page faults."""

    def __init__(self, shards: list[Shard]) -> None:
        self._copies = [
            torch.empty(shard.tensor.numel(), dtype=shard.tensor.dtype).fill_(0) for shard in shards
        ]

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    def take(self, shards: list[Shard]) -> list[Shard]:
        """Copy tensors, valid until the next call. Sizes must match the constructor's."""
        return [
            replace(shard, tensor=copy.copy_(shard.tensor.detach().view(-1)))
            for shard, copy in zip(shards, self._copies, strict=True)
        ]


class BackgroundSave:
    """Save that overlaps training: a thread does the work of its steps.

    The thread never communicates. The caller detects by its own collective that all ranks are done.
    All methods but `done` are collective and raise the steps' ValueErrors.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._work = self._start(next(steps))

    @staticmethod
    def _start(work: Callable[[], Any]) -> Future[Any]:
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                os.sched_setaffinity(0, _CPUS)
                outcome.set_result(work())
            except BaseException as error:  # of any kind: the steps raise it on all ranks
                outcome.set_exception(error)

        threading.Thread(target=run, name="save", daemon=True).start()
        return outcome

    @property
    def done(self) -> bool:
        return self._work.done()

    def advance(self) -> bool:
        """Wait for the current work and start the next; return True if there is none."""
        try:
            self._work = self._start(self._steps.send(self._work.result))
        except StopIteration:
            return True
        return False

    def finish(self) -> None:
        while not self.advance():
            pass
