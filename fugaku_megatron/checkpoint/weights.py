"""The weights alone of a checkpoint, put together from whatever pieces the run that saved them had.

A tensor-parallel slice, or the flat range of it that a ZeRO-1 shard holds, is cut into boxes of the global tensor; where a box
meets the slice that this process needs, it is copied. So any layout can be loaded on one rank. Left out: optimizer state (load.py).
Test: pytest tests/test_checkpoint_weights.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ..comm.agreement import agree
from ..comm.base import Comm
from .manifest import iteration_path, unsigned_note, verify_file
from .shards import Shard

Place = tuple[int, ...]  # an index, or an extent, in each dimension
Record = dict[str, Any]  # of a shard, in the manifest
Plan = dict[str, list[tuple[Shard, Record]]]  # file name -> the targets and the records whose values they take


def load_weights(directory: str | os.PathLike, iteration: int, manifest: dict[str, Any], targets: list[Shard], comm: Comm,
                 padded: Collection[str] = ()) -> None:
    """Fill the tensors of `targets`, whole slices of any dtype, in place. Collective.

    manifest: of this iteration. padded: keys whose first dimension is rounded up to a multiple that depends on the layout; rows
    that the checkpoint does not have stay as they are. Every file that is read is verified first. Raises ValueError on all ranks
    when a tensor is missing, has another shape or is not wholly there, and when a file is damaged.
    """
    path, prefix = iteration_path(Path(directory), iteration), f"--load {directory}: "
    if comm.rank == 0 and (note := unsigned_note(manifest, path)):
        print(note)
    plan: Plan = {}
    agree(comm, lambda: plan.update(_plan(manifest, targets, path, padded)), prefix)
    agree(comm, lambda: [verify_file(path / name, manifest["files"][name]) for name in plan], prefix)
    agree(comm, lambda: [_fill(path / name, plan[name]) for name in plan], prefix)


def _plan(manifest: dict[str, Any], targets: list[Shard], path: Path, padded: Collection[str]) -> Plan:
    """What to copy from which file. Raises ValueError where the pieces do not fit or suffice."""
    by_key = {target.key: target for target in targets}
    records: dict[str, list[Record]] = {key: [] for key in by_key}
    plan: Plan = {}
    for name, entry in manifest["files"].items():
        for record in entry["shards"]:
            target = by_key.get(record["key"])
            if target:
                records[target.key].append(record)
                if any(_overlap(*box, target) for box in record_boxes(record)):
                    plan.setdefault(name, []).append((target, record))
    for target in targets:
        _check_shapes(target, records[target.key], path, target.key in padded)
        _check_coverage(target, records[target.key], path)
    return plan


def _check_shapes(target: Shard, records: list[Record], path: Path, padded: bool) -> None:
    if not records:
        raise ValueError(f"{path} has no {target.key}; the model differs from the one that was saved")
    first = 1 if padded else 0
    for record in records:
        saved = tuple(record["global_shape"])
        if len(saved) != len(target.global_shape) or saved[first:] != target.global_shape[first:]:
            raise ValueError(f"{target.key}: global shape is {list(saved)} in {path}, {list(target.global_shape)} in this run")


def _check_coverage(target: Shard, records: list[Record], path: Path) -> None:
    """Raises ValueError unless the records hold every element of the target that the saved tensor has."""
    shape = records[0]["global_shape"]
    needed = [max(0, min(start + length, full) - start)
              for start, length, full in zip(target.offset, target.slice_shape, shape, strict=True)]
    covered = sum(math.prod(high - low for low, high in shared) for record in records
                  for box in record_boxes(record) if (shared := _overlap(*box, target)))
    if covered != math.prod(needed):
        raise ValueError(f"{target.key}: the files of {path} hold {covered} elements of the slice {list(target.slice_shape)} at "
                         f"{list(target.offset)}, which has {math.prod(needed)}")


def boxes(shape: Place, start: int, end: int) -> Iterator[tuple[Place, Place]]:
    """(begin, extent) of boxes that are the row-major range [start, end) of a tensor of this shape, in order."""
    if len(shape) <= 1:
        if start < end:
            yield (start,) * len(shape), (end - start,) * len(shape)
        return
    inner, rest = math.prod(shape[1:]), (0,) * (len(shape) - 1)
    row, whole = start // inner, end // inner
    if start % inner:
        stop = min(end, (row + 1) * inner)
        yield from (((row, *begin), (1, *extent)) for begin, extent in boxes(shape[1:], start % inner, stop - row * inner))
        row += 1
    if row < whole:
        yield (row, *rest), (whole - row, *shape[1:])
    if row <= whole and end % inner:
        yield from (((whole, *begin), (1, *extent)) for begin, extent in boxes(shape[1:], 0, end % inner))


def record_boxes(record: Record) -> Iterator[tuple[Place, Place]]:
    """(begin in the global tensor, extent) of the boxes that a record of the manifest holds, in the order of its values."""
    end = record["flat_start"] + record["numel"]
    for begin, extent in boxes(tuple(record["slice_shape"]), record["flat_start"], end):
        yield tuple(offset + start for offset, start in zip(record["offset"], begin, strict=True)), extent


def _overlap(begin: Place, extent: Place, target: Shard) -> list[tuple[int, int]] | None:
    """[low, high) in each dimension of the global tensor where a box meets the target's slice; None where it does not."""
    bounds = [(max(a, b), min(a + n, b + m))
              for a, n, b, m in zip(begin, extent, target.offset, target.slice_shape, strict=True)]
    return None if any(low >= high for low, high in bounds) else bounds


def _fill(path: Path, work: list[tuple[Shard, Record]]) -> None:
    """Copy what one file holds."""
    with safe_open(path, framework="pt") as stored:
        for target, record in work:
            _copy(stored.get_tensor(target.key), record, target)


def _copy(values: Tensor, record: Record, target: Shard) -> None:
    """Copy into the target what of a piece's values belongs there."""
    slice_, flat, used = target.tensor.detach().view(target.slice_shape), values.flatten(), 0
    for begin, extent in record_boxes(record):
        count, bounds = math.prod(extent), _overlap(begin, extent, target)
        if bounds:
            box = flat[used : used + count].view(extent)
            within = tuple(slice(low - a, high - a) for (low, high), a in zip(bounds, begin, strict=True))
            there = tuple(slice(low - a, high - a) for (low, high), a in zip(bounds, target.offset, strict=True))
            slice_[there].copy_(box[within])
        used += count
