"""The weights alone of a checkpoint, in any dtype, put together from whatever pieces the run that saved them had.

Left out: optimizer state (load.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..comm.agreement import agree
from ..comm.base import Comm
from .manifest import iteration_path, unsigned_note
from .shards import Search, Shard, read_shards


def load_weights(directory: str | os.PathLike, iteration: int, manifest: dict[str, Any], targets: list[Shard], comm: Comm,
                 padded: Collection[str] = ()) -> None:
    """Fill the tensors of `targets`, of any dtype, in place. Collective.

    manifest: of this iteration. padded: see `Search`. Everything that is read is verified. Raises ValueError on all ranks when a
    tensor is missing, has another shape or is not wholly there, and when a file is damaged.
    """
    path, prefix = iteration_path(Path(directory), iteration), f"--load {directory}: "
    if comm.rank == 0 and (note := unsigned_note(manifest, path)):
        print(note)
    search = Search(targets, padded, converts=("",))
    for name, entry in manifest["files"].items():
        search.look(name, entry)
    plan = agree(comm, lambda: search.plan(path), prefix)
    agree(comm, lambda: [read_shards(path / name, work) for name, work in plan.items()] and None, prefix)
