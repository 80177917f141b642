"""Detect changed data files, while a run reads them and against its checkpoint.

Each rank checks the files that it opened, one rank a node. `files.ReadFile` checks every read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..text.named_files import JsonObject
from .dataset import Dataset
from .indexed import IndexedDataset

Record = JsonObject  # what a checkpoint says of the files of a prefix: `IndexedDataset.record`


def _sources(dataset: Any) -> Iterator[IndexedDataset]:
    if (parts := getattr(dataset, "datasets", None)) is not None:
        for part in parts:
            yield from _sources(part)
    elif isinstance(files := getattr(dataset, "indexed", None), IndexedDataset):
        yield files


def sources(datasets: Iterable[Dataset | None]) -> list[IndexedDataset]:
    """Return all files, each once."""
    found = (files for dataset in datasets for files in _sources(dataset))
    return list({id(files): files for files in found}.values())


def check_unchanged(datasets: Iterable[Dataset | None]) -> None:
    for files in sources(datasets):
        files.check()


def records(datasets: Iterable[Dataset | None]) -> list[Record]:
    return list({files.prefix: files.record() for files in sources(datasets)}.values())


def _counts(record: Record) -> str:
    return f"{record['documents']:,} documents with {record['tokens']:,} tokens"


def _files(record: Record) -> str:
    path: str = record["path"]
    return path if path.endswith(".bin") else f"{path}.bin and .idx"


def other_files(saved: Sequence[Record], now: Sequence[Record]) -> list[str]:
    """Return a line for each prefix with other contents than in the checkpoint."""
    before = {record["path"]: record for record in saved}
    lines = []
    for record in now:
        old = before.get(record["path"], record)
        if all(old.get(name) == record[name] for name in ("documents", "tokens", "crc32")):
            continue
        lines.append(
            f"note: {_files(record)} are not the files that the checkpoint was trained on: {_counts(record)}, "
            f"had {_counts(old)}: the loss curve changes from here on"
        )
    return lines
