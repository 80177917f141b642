"""Checkpoints on node-local disks, copied to the shared directory while training continues.

    LOCAL/rank_00003/iter_0000100/manifest.json            entry of this rank's file
    LOCAL/rank_00003/iter_0000100/rank_00003.safetensors
    SAVE/.run                                              id of the run that owns the copies

Only the newest complete iteration is kept. Copies serve a restart with the same ranks, nodes and
layout; any other start reads the shared directory.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ..comm.agreement import agree, on_root
from ..comm.base import Comm
from ..text.written_files import make_folder, write_text
from .load import Checkpoint
from .manifest import (
    Description,
    Directory,
    Folders,
    entries,
    iteration_name,
    list_iterations,
    read_head,
    unfinished_path,
    write_manifest,
)
from .save import CheckLock, Steps, Written, put_in_place, run_steps, save_steps, write_shards
from .schema import Manifest
from .shards import Shard
from .tensor_files import copy_verified

RUN = ".run"
_NAME_LENGTH = 64


def run_name(save: Directory, comm: Comm, make: bool = False) -> str | None:
    """Return the run id in `save`, if any. Collective."""
    path = Path(save) / RUN

    def read() -> str | None:
        if make and not path.exists():
            make_folder(path.parent)
            write_text(path, uuid.uuid4().hex)
        if not path.is_file():
            return None
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_NAME_LENGTH)

    return on_root(comm, read)


def rank_folder(local: Directory, rank: int) -> Path:
    return Path(local) / f"rank_{rank:05d}"


def node_first_steps(
    local: Directory,
    directory: Directory,
    shards: list[Shard],
    description: Description,
    folders: Folders,
    check_lock: CheckLock,
    wait: bool,
) -> Steps:
    """Write to the node's disk, then copy to the shared `directory`.

    wait: finish the local write before the first yield
    """
    comm = folders.comm
    iteration = description.iteration
    on_root(comm, check_lock)
    name = run_name(directory, comm, make=True)
    first = local_steps(local, shards, description, name, comm, check_lock)
    written = run_steps(first) if wait else (yield from first)
    return (
        yield from save_steps(
            directory,
            partial(copy_written, local, comm, iteration, written),
            description,
            folders,
            check_lock,
        )
    )


def local_steps(
    local: Directory,
    shards: list[Shard],
    description: Description,
    name: str | None,
    comm: Comm,
    check_lock: CheckLock,
) -> Steps:
    """Write this rank's copy, remove older ones once all ranks have theirs, and return `Written`."""
    own = rank_folder(local, comm.rank)
    iteration = description.iteration
    prefix = f"--save-local {local}: iteration {iteration} is not saved: "
    description = replace(description, state={**description.state, "run": name})
    aside = unfinished_path(own, iteration)
    outcome = yield partial(_write, aside, comm.rank, shards, description)
    written = agree(comm, outcome, prefix, _remedy)
    on_root(comm, check_lock)
    agree(comm, partial(put_in_place, aside, own / iteration_name(iteration)), prefix, _remedy)
    outcome = yield partial(_remove_others, own, iteration)
    agree(comm, outcome, prefix, _remedy)
    return written


def _remedy() -> str:
    return ". Checkpoints in --save are untouched. If the disk is full or read-only, pass another --save-local"


def _write(aside: Path, rank: int, shards: list[Shard], description: Description) -> Written:
    make_folder(aside.parent)
    aside.mkdir()
    written = write_shards(rank, shards, aside)
    write_manifest(aside, description, files=dict([written] if written else []))
    return written


def _remove_others(own: Path, iteration: int) -> None:
    for _, _, path in entries(own):
        if path.name != iteration_name(iteration):
            shutil.rmtree(path)


def copy_written(
    local: Directory, comm: Comm, iteration: int, written: Written, folder: Path
) -> Written:
    """Copy this rank's file into a shared folder, verifying every block."""
    if written:
        name, entry = written
        copy_verified(
            rank_folder(local, comm.rank) / iteration_name(iteration) / name, entry, folder / name
        )
    return written


def newest_everywhere(local: Directory, comm: Comm, fits: Callable[[Manifest], bool]) -> int:
    """Return the newest iteration with complete copies on every rank, or 0. Collective.

    fits: True for a manifest head from this run and layout
    """
    own = rank_folder(local, comm.rank)
    held = [number for number in list_iterations(own) if fits(read_head(own, number))]

    def lowest(bound: int) -> int:
        newest = max((number for number in held if number <= bound), default=0)
        return int(comm.all_reduce(torch.tensor(newest), "min"))

    found = lowest(max(held, default=0))
    while (lower := lowest(found)) != found:
        found = lower
    return found


def open_copy(
    local: Directory, comm: Comm, iteration: int, flag: str = "--save-local"
) -> Checkpoint:
    own = rank_folder(local, comm.rank)
    head = read_head(own, iteration)
    path = own / iteration_name(iteration)
    return Checkpoint(
        own, path, iteration, head, files=head.pop("files"), node=str(local), flag=flag
    )
