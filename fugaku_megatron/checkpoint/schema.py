"""What a manifest must look like: its own checksum, and the type and range of every field, so that no edit loads unnoticed.

The checksum finds changes by accident or by hand in everything that was written. Types and ranges are also checked where there is
no checksum, in manifests of format version 1. Left out: reading the file (manifest.py).
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable
from typing import Any

CHECKSUM = "crc32"
RECORD_FIELDS = ("global_shape", "offset", "slice_shape")
RUN_STATE = ("progress", "scaler", "optimizer_steps")  # what a run cannot go on without
MAX_BLOCK_BYTES = 1 << 30
_HEXADECIMAL = "0123456789abcdef"
_CRC32 = re.compile(r"[0-9a-f]{8}")
_FOLDER = re.compile(r"ranks_[0-9]{6,}(/ranks_[0-9]{6,})*")


def checksum(manifest: dict[str, Any]) -> str:
    """CRC-32 of the manifest without its own checksum, as JSON with sorted keys and no spaces."""
    rest = {name: value for name, value in manifest.items() if name != CHECKSUM}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True, separators=(',', ':')).encode()):08x}"


def check_contents(manifest: dict[str, Any]) -> None:
    """Raises ValueError naming the first field that is missing, of another type or out of range.

    The records of a checkpoint in folders are checked with their folder (`check_files`).
    """
    _check(manifest, "iteration", is_count, "a whole number from 0")
    for name in ("layout", "config", "state"):
        _check(manifest, name, is_object, "an object")
    for name in manifest["layout"]:
        _check(manifest["layout"], name, _is_size, "a whole number above 0 or a string", "layout.")
    if "model" in manifest["config"]:
        _check(manifest["config"], "model", is_object, "an object", "config.")
        _check_state(manifest["state"], manifest["iteration"])
    check_folders(manifest) if "folders" in manifest else check_files(manifest)


def check_files(owner: dict[str, Any]) -> None:
    """The entries of the files in one directory."""
    _check(owner, "files", is_object, "an object")
    for name, entry in owner["files"].items():
        _require(bool(name) and "/" not in name and name not in (".", ".."), f"files.{name!r} is not a file's name")
        _check(owner["files"], name, is_object, "an object", "files.")
        _check_file(entry, f"files.{name}.")
        _check_shards(entry, f"files.{name}.")


def check_folders(manifest: dict[str, Any]) -> None:
    """The folders of a checkpoint of many ranks, each with a manifest of its own."""
    _check(manifest, "ranks", lambda value: is_count(value) and value > 0, "a whole number above 0")
    _check(manifest, "folders", is_object, "an object")
    for name in manifest["folders"]:
        _require(_FOLDER.fullmatch(name), f"folders.{name!r} is not a folder's name")
        _check(manifest["folders"], name, is_object, "an object", "folders.")
        _check_file(manifest["folders"][name], f"folders.{name}.")


def _check_state(state: dict[str, Any], iteration: int) -> None:
    """The state of a training run: its counters, and that they agree with each other."""
    for name in RUN_STATE:
        _require(name in state, f"state.{name} is missing")
    _check(state, "progress", is_object, "an object", "state.")
    _check(state, "scaler", is_object, "an object", "state.")
    _check(state, "optimizer_steps", is_count, "a whole number from 0", "state.")
    progress = state["progress"]
    for name in {"iteration": 0, "consumed_samples": 0, **progress}:
        _check(progress, name, is_count, "a whole number from 0", "state.progress.")
    _require(progress["iteration"] == iteration, f"state.progress.iteration is {progress['iteration']}, iteration is {iteration}")
    steps = state["optimizer_steps"]
    _require(steps <= iteration, f"state.optimizer_steps is {steps}, above the {iteration} iterations")
    rng, samples = state.get("rng"), progress["consumed_samples"]
    if rng is not None:
        _check(state, "rng", is_object, "an object", "state.")
        _require(rng.get("sample") == samples, f"state.rng.sample is {rng.get('sample')!r}, consumed_samples is {samples}")


def _check_file(entry: dict[str, Any], where: str) -> None:
    _check(entry, "size", is_count, "a whole number from 0", where)
    _check(entry, "crc32", lambda value: isinstance(value, str) and _CRC32.fullmatch(value), "8 hexadecimal digits", where)
    if "blocks" not in entry:
        return
    _check(entry, "block_size", lambda value: is_count(value) and 0 < value <= MAX_BLOCK_BYTES, "a number of bytes", where)
    count = -(-entry["size"] // entry["block_size"])
    _check(entry, "blocks", lambda value: isinstance(value, str) and len(value) == 8 * count and not value.strip(_HEXADECIMAL),
           f"8 hexadecimal digits for each of {count:.6g} blocks", where)


def _check_shards(entry: dict[str, Any], where: str) -> None:
    _check(entry, "shards", lambda value: isinstance(value, list), "a list", where)
    for number, record in enumerate(entry["shards"]):
        _require(is_object(record), f"{where}shards[{number}] is {record!r:.60}, not an object")
        _check_record(record, f"{where}shards[{number}].")


def _check_record(record: dict[str, Any], where: str) -> None:
    """A shard's place lies inside its global tensor."""
    for name in ("key", "dtype"):
        _check(record, name, lambda value: isinstance(value, str), "a string", where)
    for name in RECORD_FIELDS:
        _check(record, name, lambda value: isinstance(value, list) and all(map(is_count, value)), "a list of whole numbers", where)
    for name in ("flat_start", "numel"):
        _check(record, name, is_count, "a whole number from 0", where)
    full, offset, part = (record[name] for name in RECORD_FIELDS)
    inside = len(full) == len(offset) == len(part) and all(o + p <= f for o, p, f in zip(offset, part, full))
    _require(inside, f"{where}offset {offset} and slice_shape {part} reach beyond global_shape {full}")
    _require(record["flat_start"] + record["numel"] <= math.prod(part),
             f"{where}flat_start {record['flat_start']} + numel {record['numel']} is beyond slice_shape {part}")


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_size(value: Any) -> bool:
    return isinstance(value, str) or is_count(value) and value > 0  # a text: the layers of each pipeline stage


def _check(owner: dict[str, Any], name: str, test: Callable[[Any], Any], kind: str, where: str = "") -> None:
    _require(name in owner, f"{where}{name} is missing")
    _require(test(owner[name]), f"{where}{name} is {owner[name]!r:.60}, not {kind}")


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)
