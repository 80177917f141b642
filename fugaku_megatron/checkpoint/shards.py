"""What a shard of a checkpoint is, and which file holds each shard that a rank needs, or why no file does.

Left out: the files themselves (save.py, load.py, manifest.py). Test: pytest tests/test_checkpoint.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A local piece of a global tensor.

    `key` names the global tensor (ranks that hold different pieces of it use the same key), such as
    "decoder.layers.3.mlp.linear_fc1.weight/exp_avg". The tensor-parallel slice has the shape `slice_shape` and begins at
    `offset` in the tensor of shape `global_shape`. `tensor` (any shape, contiguous) holds the row-major range [flat_start,
    flat_start + numel) of that slice: all of it (flat_start 0), or this rank's part of it under ZeRO-1.
    """

    key: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    slice_shape: tuple[int, ...]
    flat_start: int = 0

    def __post_init__(self) -> None:
        assert self.tensor.is_contiguous(), self.key
        assert len(self.global_shape) == len(self.offset) == len(self.slice_shape), self.key
        extents = zip(self.offset, self.slice_shape, self.global_shape)
        assert all(0 <= start and start + length <= full for start, length, full in extents), self.key
        assert 0 <= self.flat_start <= math.prod(self.slice_shape) - self.tensor.numel(), self.key

    def record(self) -> dict[str, Any]:
        """The shard's entry in the manifest."""
        return {"key": self.key, "dtype": str(self.tensor.dtype).replace("torch.", ""),
                "global_shape": list(self.global_shape), "offset": list(self.offset),
                "slice_shape": list(self.slice_shape), "flat_start": self.flat_start, "numel": self.tensor.numel()}


def check_layout(saved: dict[str, int], current: dict[str, int], path: Path) -> None:
    """Raises ValueError naming every entry of the layout that differs, and the flags that start a run with the saved ones."""
    differing = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    if not differing:
        return
    flags = [_layout_flag(name, saved[name]) for name in differing if name in saved]
    both = ", ".join(f"{name} {saved.get(name)} (this run: {current.get(name)})" for name in differing)
    raise ValueError(f"{path} was saved with {both}; start with {' '.join(flags) or 'the layout of that time'}")


def _layout_flag(name: str, value: int) -> str:
    """The flag that starts a run with this entry of a layout."""
    if name == "zero_shards":
        return "--zero-stage 0" if value == 1 else f"--zero-stage 1 with data-parallel size {value}"
    return f"mpiexec -n {value}" if name == "world_size" else f"--{name.replace('_', '-')} {value}"


def check_model(saved: dict[str, Any], current: dict[str, Any], path: Path) -> None:
    """Raises ValueError naming every value of the model that differs."""
    differing = [name for name in current if name in saved and saved[name] != current[name]]
    if differing:
        both = ", ".join(f"--{name.replace('_', '-')} {saved[name]} (this run: {current[name]})" for name in differing)
        raise ValueError(f"{path} holds another model, with {both}; give its values, or another --load")


Plan = dict[str, list[tuple[Shard, int]]]  # file name -> shards to fill, and where in the file's tensor of that key each begins


def placed(files: dict[str, Any], shards: list[Shard]) -> bool:
    """Whether these files, name -> manifest entry, hold every shard at its place."""
    stored = {(record["key"], *place(record)) for entry in files.values() for record in entry["shards"]}
    return all((shard.key, *place(shard.record())) in stored for shard in shards)


def make_plan(files: dict[str, Any], shards: list[Shard], path: Path) -> Plan:
    """What to read from which file; a shard may lie in several, each with a range of it. files: name -> manifest entry.

    Raises ValueError for a shard that the files do not hold.
    """
    stored: dict[str, list[tuple[str, dict[str, Any]]]] = {shard.key: [] for shard in shards}
    for name, entry in files.items():
        for record in entry["shards"]:
            if record["key"] in stored:
                stored[record["key"]].append((name, record))
    plan: Plan = {}
    for shard in shards:
        for name, part, first in _find(stored[shard.key], shard, path):
            plan.setdefault(name, []).append((part, first))
    return plan


def _find(pieces: list[tuple[str, dict[str, Any]]], shard: Shard, path: Path) -> list[tuple[str, Shard, int]]:
    """The files that hold this shard, the part of it in each, and where that begins in the file's tensor."""
    needed = shard.record()
    if not pieces:
        raise ValueError(f"{path} has no {shard.key}; the model or the optimizer differs from the one that was saved")
    for what in ("global_shape", "dtype"):
        if pieces[0][1][what] != needed[what]:
            both = f"{pieces[0][1][what]} in {path}, {needed[what]} in this run"
            raise ValueError(f"{shard.key}: {what.replace('_', ' ')} is {both}")
    for name, record in pieces:
        if place(record) == place(needed):
            return [(name, shard, 0)]
    parts = _parts(pieces, shard, needed)
    if not parts:
        places = "; ".join([_show_place(record) for _, record in pieces[:4]] + ["..."] * (len(pieces) > 4))
        raise ValueError(f"{shard.key}: this run holds {_show_place(needed)}; {path} holds {places}")
    return parts


def _parts(pieces: list[tuple[str, dict[str, Any]]], shard: Shard, needed: dict[str, Any]) -> list[tuple[str, Shard, int]]:
    """The shard put together from ranges of the same slice, which ZeRO-1 cut elsewhere; nothing where they leave a gap."""
    parts, done, flat = [], shard.flat_start, shard.tensor.view(-1)
    end = done + flat.numel()
    same = [(name, r) for name, r in pieces if (r["offset"], r["slice_shape"]) == (needed["offset"], needed["slice_shape"])]
    for name, record in sorted(same, key=lambda piece: piece[1]["flat_start"]):
        first, last = record["flat_start"], record["flat_start"] + record["numel"]
        if first <= done < min(last, end):
            upto = min(last, end)
            values = flat[done - shard.flat_start : upto - shard.flat_start]
            parts.append((name, replace(shard, tensor=values, flat_start=done), done - first))
            done = upto
    return parts if done == end else []


def place(record: dict[str, Any]) -> tuple:
    """What distinguishes the pieces of one key."""
    return tuple(record["offset"]), tuple(record["slice_shape"]), record["flat_start"], record["numel"]


def _show_place(record: dict[str, Any]) -> str:
    end = record["flat_start"] + record["numel"]
    return f"elements [{record['flat_start']}, {end}) of the slice {record['slice_shape']} at {record['offset']}"
