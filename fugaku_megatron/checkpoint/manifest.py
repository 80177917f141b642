"""Checkpoint directory, as one process sees it: names, the manifest, and complete files.

DIR/latest_checkpointed_iteration.txt     the tracker (Megatron's name), moved last by a save
DIR/iter_0000100/manifest.json            layout, config, state, every shard's place
DIR/iter_0000100/rank_00003.safetensors   shards that rank 3 owns
DIR/iter_0000100/ranks_000127/...         files of ranks 127 to 253, with a manifest
DIR/hugging_face/                         tokenizer and configurations of a converted model
DIR/1a2b3c4d.iter_0000100.tmp             unfinished save, of a name that no other job uses: never read
DIR/iter_0000100.tmp                      unfinished removal: never read
DIR/iter_0000100.old                      checkpoint that is being replaced
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text.named_files import JsonObject, StrPath
from ..text.written_files import write_text
from . import schema
from .schema import Entry, Manifest, crc32, verify_file

if TYPE_CHECKING:
    from ..comm.base import Comm

Files = dict[str, Entry]  # by name, relative to the checkpoint
Directory = StrPath  # of --save, --load or --save-local

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
CARRIED = "hugging_face"
FORMAT = "fugaku_megatron checkpoint"
FORMAT_VERSION = 2
# shards are recorded in a manifest of each folder, the manifest itself names the folders
FOLDERS_VERSION = 3
UNSIGNED_VERSION = 1  # without a checksum of the manifest; still read
_REMEDY = "restore the file from a copy, or choose another iteration by --ckpt-step"
_ITERATION_NAME = re.compile(r"(?:[0-9a-f]{8}\.(?=.*\.tmp))?iter_(\d{7,})(\.tmp|\.old)?")
_TRACKER_DIGITS = 18
RELEASE = "release"  # directory of weights alone, which its converters write
TORCH_DIST = ".metadata"  # of Megatron-LM's checkpoints in the format torch_dist
TORCH_DIST_COMMON = "common.pt"
MEGATRON_LEGACY = "mp_rank_*"  # of its legacy checkpoints
MEGATRON_FILES = (MEGATRON_LEGACY, TORCH_DIST, TORCH_DIST_COMMON)
FOLDER_FILES = 127  # files of ranks, or folders, in a directory; a manifest is one more. Records of 127 ranks take about 5 MiB


def latest_iteration(directory: Directory) -> int | None:
    """Return the tracker's iteration, or None without a checkpoint.

    A single checkpoint without a tracker is an interrupted first save. Raises ValueError if the
    tracker is unreadable, truncated, or missing next to several checkpoints: a run must not restart
    and replace them by accident.
    """
    tracker = Path(directory) / TRACKER
    if tracker.exists():
        if not tracker.is_file():
            raise ValueError(
                f"{tracker} is not a regular file: remove it and choose an iteration by --ckpt-step"
            )
        with open(tracker, encoding="utf-8", errors="replace") as file:
            line = file.read(100)
        text = line.strip()
        if text == RELEASE:
            _refuse_megatron(Path(directory) / text)
        if not text.isdecimal() or len(text) > _TRACKER_DIGITS:
            raise ValueError(
                f"{tracker} should hold an iteration, it holds {text[:40]!r}; choose one by --ckpt-step"
            )
        # 1 of 12
        if not line.endswith("\n") and (newer := list_iterations(directory, after=int(text))):
            raise ValueError(
                f"{tracker} holds {text!r} without an end of line and may be cut: checkpoints of iterations "
                f"{join(newer)} are newer; choose one by --ckpt-step"
            )
        return int(text)
    present = list_iterations(directory)
    if len(present) > 1:
        raise ValueError(
            f"{tracker} is missing next to checkpoints of iterations {join(present)}; choose one by"
            " --ckpt-step or pass an empty directory"
        )
    return present[0] if present else None


def missing(directory: Directory, iteration: int) -> str | None:
    if iteration_path(Path(directory), iteration).is_dir():
        return None
    return (
        f"{Path(directory) / TRACKER} names iteration {iteration}, and {iteration_name(iteration)} is missing: correct the "
        "number in that file, or choose an iteration by --ckpt-step"
    )


def existing_iteration(directory: Directory) -> int | None:
    """Return `latest_iteration`. Raises ValueError if its folder is missing."""
    iteration = latest_iteration(directory)
    if iteration is not None and (note := missing(directory, iteration)):
        raise ValueError(note)
    return iteration


def own_checkpoint(directory: str, iteration: int | None = None) -> tuple[str, int | None] | None:
    """Return this program's checkpoint directory and iteration, given either path, or None."""
    path = Path(directory)
    if (
        iteration is None
        and (path / MANIFEST).is_file()
        and path.name.removeprefix("iter_").isdecimal()
    ):
        return str(path.absolute().parent), int(path.name.removeprefix("iter_"))
    return (directory, iteration) if any(path.glob(f"iter_*/{MANIFEST}")) else None


def holds_megatron(directory: str) -> bool:
    """Return True for a directory that Megatron-LM's --save wrote, without a checkpoint of this program."""
    path = Path(directory)
    found = any(any(path.glob(f"*/{name}")) for name in MEGATRON_FILES)
    return found and own_checkpoint(directory) is None


def torch_dist_iteration(directory: Directory, iteration: int | None) -> int | None:
    """Return an iteration that Megatron-LM saved in the format torch_dist, None if it is no such iteration.

    iteration: None: the latest one
    """
    path = Path(directory)
    found = iteration
    if found is None and any(path.glob(f"iter_*/{TORCH_DIST}")):
        found = latest_iteration(path)
    if found is None or not (iteration_path(path, found) / TORCH_DIST).is_file():
        return None
    return found


def release_path(directory: Directory) -> Path | None:
    """Return the weights that Megatron-LM's converters wrote in the format torch_dist, None if they are not the latest."""
    path = Path(directory) / RELEASE
    tracker = Path(directory) / TRACKER
    if not tracker.is_file() or not (path / TORCH_DIST).is_file():
        return None
    with open(tracker, encoding="utf-8", errors="replace") as file:
        return path if file.read(100).strip() == RELEASE else None


def list_iterations(directory: Directory, after: int = -1) -> list[int]:
    """Return iterations above `after`, ascending, with a readable manifest and the recorded file
    sizes.

    In folders, which may have 100,000 files, only folder manifests are checked.
    """
    present = (iteration for iteration in saved_iterations(Path(directory)) if iteration > after)
    return [iteration for iteration in present if _is_complete(Path(directory), iteration)]


def saved_iterations(directory: Path) -> list[int]:
    return sorted({iteration for iteration, suffix, _ in entries(directory) if suffix != ".tmp"})


def read_manifest(directory: Directory, iteration: int) -> Manifest:
    """Return the manifest with all file records; names are relative to the checkpoint."""
    head = read_head(directory, iteration)
    if "folders" not in head:
        return head
    path = iteration_path(Path(directory), iteration)
    files: Files = {}
    for folder in head["folders"]:
        files |= read_folder(path, folder, head)
    return {**head, "files": files}


def read_folder(path: Path, folder: str, head: Manifest) -> Files:
    """Return the files of a folder. Raise ValueError if its manifest is missing or damaged."""
    place = path / folder / MANIFEST
    verify_file(place, head["folders"][folder])
    contents: dict[str, Files] = _read_json(place)
    try:
        schema.check_files(contents)
    except ValueError as error:
        raise ValueError(f"{place} is damaged: {error}: {_REMEDY}") from error
    return {f"{folder}/{name}": entry for name, entry in contents["files"].items()}


def write_folder(path: Path, files: Files) -> Entry:
    write_text(path / MANIFEST, json.dumps({"files": files}, separators=(",", ":")))
    fsync(path)
    return {"size": (path / MANIFEST).stat().st_size, "crc32": crc32(path / MANIFEST)}


def read_head(directory: Directory, iteration: int) -> Manifest:
    """Return the stored manifest, with "files", or with "folders" that have manifests.

    Raises ValueError if it is missing, damaged, changed, or from another program or version.
    """
    path = iteration_path(Path(directory), iteration) / MANIFEST
    _refuse_megatron(path.parent)
    manifest: Manifest = _read_json(path)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{path} is not the manifest of a {FORMAT} (format {found!r:.60}, expected {FORMAT!r}): pass a directory "
            "that train or convert wrote"
        )
    version = manifest.get("format_version")
    if version not in (FORMAT_VERSION, FOLDERS_VERSION, UNSIGNED_VERSION):
        raise ValueError(
            f"{path} has format version {version}, and this program reads versions {UNSIGNED_VERSION} to "
            f"{FOLDERS_VERSION}"
        )
    try:
        _check_checksum(manifest)
        schema.check_contents(manifest)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}: {_REMEDY}") from error
    if manifest["iteration"] != iteration:
        saved = manifest["iteration"]
        raise ValueError(
            f"{path} is of iteration {saved}, its folder says {iteration}: rename the folder to "
            f"{iteration_name(saved)}, or choose another iteration by --ckpt-step"
        )
    return manifest


def _refuse_megatron(path: Path) -> None:
    found = next((file.name for name in MEGATRON_FILES for file in path.glob(name)), None)
    if found and not (path / MANIFEST).exists():
        raise ValueError(
            f"{path} is a checkpoint of Megatron-LM (it holds {found}), whose files are converted first: "
            f"fugaku-megatron convert --from-megatron {path.parent} --save DIR"
        )


def _read_json(path: Path) -> Any:
    if not path.exists():
        raise ValueError(f"{path} is missing")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: {_REMEDY}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is damaged: brackets are nested too deeply: {_REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}: {_REMEDY}") from error


def _check_checksum(manifest: Manifest) -> None:
    saved = manifest.get(schema.CHECKSUM)
    if saved is None and manifest["format_version"] == UNSIGNED_VERSION:
        return
    actual = schema.checksum(manifest)
    if saved != actual:
        raise ValueError(
            f"its contents have CRC-32 {actual}, its field crc32 says {saved}; it was altered after the save"
        )


def unsigned_note(manifest: Manifest, path: Path) -> str:
    if schema.CHECKSUM in manifest:
        return ""
    return (
        f"note: {path / MANIFEST} was written before manifests had a checksum, so a change in it would not be noticed; "
        "the next save has one"
    )


@dataclass(frozen=True)
class Description:
    """Checkpoint metadata. config and state are JSON values (tuples are loaded as lists).

    keep: newest checkpoints to keep; None: all
    retain: keep older checkpoints only if divisible by this; None: all

    The newest checkpoint with agreeing replicas is always kept (`trusted`).
    """

    iteration: int
    layout: dict[str, int | str]
    config: JsonObject
    state: JsonObject
    keep: int | None = None
    retain: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(
                f"the number of checkpoints to keep must be at least 1, got {self.keep}"
            )


def write_manifest(
    path: Path, description: Description, files: Files, ranks: int | None = None
) -> None:
    """Write folder `path`'s manifest.

    files: name -> {"size", "crc32", "shards": records}; with `ranks` (rank count): folder ->
        {"size", "crc32"}
    """
    where = {"files": files} if ranks is None else {"ranks": ranks, "folders": files}
    version = FORMAT_VERSION if ranks is None else FOLDERS_VERSION
    manifest = {
        "format": FORMAT,
        "format_version": version,
        "iteration": description.iteration,
        "layout": description.layout,
        "config": description.config,
        "state": description.state,
        **where,
    }
    # The checksum is a reader's: JSON makes lists of tuples, and text of keys.
    manifest = json.loads(json.dumps(manifest))
    manifest[schema.CHECKSUM] = schema.checksum(manifest)
    write_text(path / MANIFEST, json.dumps(manifest, separators=(",", ":")))
    fsync(path)


def _is_complete(directory: Path, iteration: int) -> bool:
    path = iteration_path(directory, iteration)
    try:
        head = read_head(directory, iteration)
        files = head.get("files") or {
            f"{folder}/{MANIFEST}": entry for folder, entry in head.get("folders", {}).items()
        }
        return all((path / name).stat().st_size == entry["size"] for name, entry in files.items())
    except (OSError, ValueError):
        return False


def entries(directory: Path) -> list[tuple[int, str, Path]]:
    """Return (iteration, "" | ".tmp" | ".old", path) for every iteration."""
    if not directory.is_dir():
        return []
    names = ((_ITERATION_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return [(int(name[1]), name[2] or "", path) for name, path in names if name]


def iteration_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def unfinished_path(directory: Path, iteration: int) -> Path:
    """Return a new name for a save: a job that stood still must not write into another job's."""
    return directory / f"{uuid.uuid4().hex[:8]}.{iteration_name(iteration)}.tmp"


def iteration_path(directory: Path, iteration: int) -> Path:
    """Return the path to read: .old if a save stopped between its two renames."""
    path = directory / iteration_name(iteration)
    old = path.with_name(path.name + ".old")
    return old if old.exists() and not path.exists() else path


def join(iterations: list[int]) -> str:
    return ", ".join(map(str, iterations))


def fsync(path: Path) -> None:
    """Wait until the file, or the directory's renames, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some parallel file systems cannot sync a directory
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def folder_of(rank: int, ranks: int) -> str:
    """Return the folder for a rank's file; "" for the checkpoint itself."""
    names = []
    span = FOLDER_FILES
    while span < ranks:
        names.append(f"ranks_{rank // span * span:06d}")
        span *= FOLDER_FILES
    return "/".join(reversed(names))


def all_folders(ranks: int) -> Iterator[str]:
    return (folder_of(first, ranks) for first in range(0, ranks, FOLDER_FILES))


class Folders:
    """Ranks grouped by checkpoint folder. Splits `comm`, so construct it once a run. Collective.

    members: ranks that share this rank's folder `name`, led by the first
    leaders: all folders' leaders in order; on other ranks, this rank alone
    """

    def __init__(self, comm: Comm) -> None:
        # imports torch, which a supervisor that reads manifests does without
        from ..comm.grid import subgroup

        self.comm = comm
        self.name = folder_of(comm.rank, comm.size)
        self.members = comm
        self.leaders: Comm | None = None
        if self.name:
            first = comm.rank // FOLDER_FILES * FOLDER_FILES
            starts = range(0, comm.size, FOLDER_FILES)
            self.members = subgroup(comm, range(first, min(first + FOLDER_FILES, comm.size)))
            self.leaders = subgroup(comm, starts if comm.rank in starts else [comm.rank])

    @property
    def leads(self) -> bool:
        return self.members.rank == 0
