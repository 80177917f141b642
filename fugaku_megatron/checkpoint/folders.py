"""Where a rank's file lies in a checkpoint, and which ranks share a folder: no directory holds more than 128 entries.

    iter_0000100/rank_00003.safetensors                              up to 127 ranks
    iter_0000100/ranks_000254/rank_00300.safetensors                 up to 127 folders of 127 ranks, named after their first rank
    iter_0000100/ranks_016129/ranks_016256/rank_16300.safetensors    above that

A folder of ranks has a manifest of its own, which its first rank writes from the records of the others, so no rank ever holds the
records of all. Left out: the files themselves (save.py, load.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..comm.base import Comm
from ..comm.grid import subgroup

FOLDER_FILES = 127  # files of ranks, or folders, in a directory; a manifest is one more. Records of 127 ranks take about 5 MiB


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def folder_of(rank: int, ranks: int) -> str:
    """The folder of a rank's file among `ranks`, relative to the checkpoint; "" for the checkpoint itself."""
    names, span = [], FOLDER_FILES
    while span < ranks:
        names.append(f"ranks_{rank // span * span:06d}")
        span *= FOLDER_FILES
    return "/".join(reversed(names))


def all_folders(ranks: int) -> Iterator[str]:
    """The folders of a checkpoint of `ranks` ranks, in order."""
    return (folder_of(first, ranks) for first in range(0, ranks, FOLDER_FILES))


class Folders:
    """The ranks of `comm`, by the folder that holds their files. Made once for a run, since it splits `comm`. Collective.

    name: this rank's folder. members: the ranks of it, of which the first one leads. leaders: the leaders of all folders, in
    order; a communicator of this rank alone elsewhere.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm, self.name = comm, folder_of(comm.rank, comm.size)
        self.members, self.leaders = comm, None
        if self.name:
            first, starts = comm.rank // FOLDER_FILES * FOLDER_FILES, range(0, comm.size, FOLDER_FILES)
            self.members = subgroup(comm, range(first, min(first + FOLDER_FILES, comm.size)))
            self.leaders = subgroup(comm, starts if comm.rank in starts else [comm.rank])

    @property
    def leads(self) -> bool:
        """Whether this rank reads and writes the folder's manifest."""
        return self.members.rank == 0
