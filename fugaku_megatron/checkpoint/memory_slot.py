"""One rank's copy in its node's memory: its own training state, and parity of other ranks' states.

    /dev/shm/fugaku_megatron_memory_UID_RUN/rank_00003/iter_0000100/
        rank_00003.safetensors    state of rank 3; absent if it saves nothing
        parity                    XOR of segments of the states of the other ranks of its group
        neighbour.json            manifest of the rank before it in the group
        manifest.json             as in a copy of --save-local; written last

The files are mapped, and renamed for the next copy that overwrites them.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..start import environment
from ..text.named_files import JsonObject
from ..text.written_files import make_own, make_private, new_file
from .manifest import (
    MANIFEST,
    Description,
    Files,
    file_name,
    iteration_name,
    unfinished_path,
    write_manifest,
)
from .save import put_in_place
from .schema import BlockChecksums, Entry, verify_file
from .shards import Shard
from .tensor_files import FilePlan

Bytes = NDArray[np.uint8]
PARITY = "parity"
NEIGHBOUR = "neighbour.json"
MEMORY = "memory"  # field of the state in a manifest: `Protection`


class Protection(NamedTuple):
    """A copy's group, as a manifest records it.

    attempt: start of the program that made the copy
    group: ranks of the group
    sizes: bytes of the state of each
    parity: entry of this rank's file PARITY
    """

    attempt: int
    group: tuple[int, ...]
    sizes: tuple[int, ...]
    parity: Entry | None = None

    @classmethod
    def of(cls, head: JsonObject) -> Protection:
        """Read a manifest."""
        values = head["state"][MEMORY]
        return cls(
            values["attempt"], tuple(values["group"]), tuple(values["sizes"]), values[PARITY]
        )


class Segments(NamedTuple):
    """Division of each state of a group into one segment for each other rank, whose parity has it.

    A state shorter than its segments ends with zeros. sizes: bytes of each state, by place in the group
    """

    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes of a segment, and of parity."""
        return -(-max(self.sizes) // (len(self.sizes) - 1))

    def span(self, owner: int, keeper: int, start: int, end: int) -> tuple[int, int]:
        """Return the bytes of `owner`'s state in [start, end) of the segment that `keeper` protects; none if they are equal."""
        index = keeper if keeper < owner else keeper - 1
        size = self.sizes[owner]
        first = index * self.length
        return min(size, first + start), min(size, first + end)


def memory_folder(run: str) -> Path:
    """Return the folder of a run's copies on this node."""
    return Path(environment.SHARED_MEMORY) / f"fugaku_megatron_memory_{os.geteuid()}_{run[:16]}"


def make_copy_folder(own: Path) -> None:
    """Create a rank's folder, which only this user may enter."""
    make_private(own.parent)
    make_own(own)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's file system, with those of the folder's own files."""
    own = [path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()]
    return shutil.disk_usage(folder.parent).free + sum(own)


def keep_only(folder: Path, kept: Callable[[Path], bool]) -> None:
    """Remove the copies on this node, whole or not, that are not `kept`."""
    for own in list(folder.glob("rank_*")):
        for path in list(own.iterdir()):
            if not kept(path):
                shutil.rmtree(path, ignore_errors=True)
        if not any(own.iterdir()):
            own.rmdir()


def map_file(path: Path, size: int) -> Bytes:
    """Create a file and map it. OSError if memory is full: its pages are allocated here."""
    with open(path, "wb+", opener=new_file) as file:
        if not size:
            return np.empty(0, np.uint8)
        os.posix_fallocate(file.fileno(), 0, size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)


def entry_of(data: Bytes) -> Entry:
    """Return size and checksums of a file as in a manifest."""
    checksums = BlockChecksums()
    checksums.add(data.data)
    return checksums.record()


@dataclass
class Slot:
    """Mapped files of one copy, which later copies reuse. plan: of the state's file, None without shards"""

    own: Path
    rank: int
    plan: FilePlan | None
    parity_size: int

    def __post_init__(self) -> None:
        make_copy_folder(self.own)
        self.folder = unfinished_path(self.own, 0)
        self.folder.mkdir()
        self.state = np.empty(0, np.uint8)
        if self.plan is not None:
            self.state = map_file(self.folder / file_name(self.rank), self.plan.size)
            header = np.frombuffer(self.plan.header, np.uint8)
            self.state[: len(header)] = header
        self.parity = map_file(self.folder / PARITY, self.parity_size)

    def begin(self, iteration: int, shards: Sequence[Shard]) -> None:
        """Give up the older copy and copy the shards, of the sizes of `plan`."""
        aside = unfinished_path(self.own, iteration)
        self.folder.rename(aside)
        self.folder = aside
        (aside / MANIFEST).unlink(missing_ok=True)
        if self.plan is None:
            return
        state = torch.from_numpy(self.state)
        for shard in shards:
            start = self.plan.starts[shard.key]
            tensor = shard.tensor.detach().view(-1)
            place = state[start : start + tensor.nbytes]
            place.view(tensor.dtype).copy_(tensor)

    def seal(
        self, shards: Sequence[Shard], description: Description, protection: Protection
    ) -> str:
        """Write the manifest and return its text."""
        protection = protection._replace(parity=entry_of(self.parity))
        files: Files = {}
        if self.plan is not None:
            records = [shard.record() for shard in shards]
            files = {file_name(self.rank): {**entry_of(self.state), "shards": records}}
        state = {**description.state, MEMORY: protection._asdict()}
        write_manifest(self.folder, replace(description, state=state), files)
        return (self.folder / MANIFEST).read_text(encoding="utf-8")

    def publish(self, iteration: int) -> None:
        """Rename the folder, which is a complete copy from here on."""
        final = self.own / iteration_name(iteration)
        put_in_place(self.folder, final)
        shutil.rmtree(final.with_name(final.name + ".old"), ignore_errors=True)
        self.folder = final


def verify_copy(path: Path, head: JsonObject) -> bool:
    """Return True if the state and the parity of a copy, if it has one, have their checksums."""
    entries: dict[str, Any] = dict(head["files"])
    if (path / PARITY).exists():
        entries[PARITY] = head["state"][MEMORY][PARITY]
    try:
        for name, entry in entries.items():
            verify_file(path / name, entry)
    except (OSError, ValueError, KeyError):
        return False
    return True


def attempt_number() -> int:
    """Return a number that grows from start to start."""
    return time.time_ns()
