"""Manifest schema and checksums, so that no edit and no damage loads unnoticed.

The manifest has a checksum of itself; types and ranges are also checked, for version 1 manifests
without checksum. Every file block has a CRC-32, combined into the file's. A CRC detects accidents,
not attacks.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..text.named_files import JsonObject

Manifest = JsonObject  # or the part of it that a folder has
Entry = JsonObject  # of a file or a folder, in a manifest
Record = JsonObject  # of a shard, in an entry

CHECKSUM = "crc32"
RECORD_FIELDS = ("global_shape", "offset", "slice_shape")
DATA_ORDER = ("train", "valid")  # data sets whose first number of samples is kept
MAX_BLOCK_BYTES = 1 << 30
_HEXADECIMAL = "0123456789abcdef"
_CRC32 = re.compile(r"[0-9a-f]{8}")
_FOLDER = re.compile(r"ranks_[0-9]{6,}(/ranks_[0-9]{6,})*")
BLOCK_BYTES = 1 << 20  # what is read at least to verify a byte; a manifest has 8 digits for each
DIGITS = 8
# reflected: the highest bit is x^0; x^8
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_BYTE = 1 << 23


def checksum(manifest: Manifest) -> str:
    """Return the manifest's CRC-32 without its checksum, as JSON with sorted keys and no spaces."""
    rest = {name: value for name, value in manifest.items() if name != CHECKSUM}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True, separators=(',', ':')).encode()):08x}"


class FieldType(NamedTuple):
    """Values that a field may have. words: for an error message"""

    holds: Callable[[Any], Any]
    words: str


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


OBJECT = FieldType(is_object, "an object")
LIST = FieldType(lambda value: isinstance(value, list), "a list")
TEXT = FieldType(is_text, "a string")
COUNT = FieldType(is_count, "a whole number from 0")
POSITIVE = FieldType(lambda value: is_count(value) and value > 0, "a whole number above 0")
COUNTS = FieldType(
    lambda value: isinstance(value, list) and all(map(is_count, value)), "a list of whole numbers"
)
SIZE = FieldType(  # a text: the layers of each pipeline stage
    lambda value: is_text(value) or POSITIVE.holds(value), "a whole number above 0 or a string"
)
CRC32 = FieldType(lambda value: is_text(value) and _CRC32.fullmatch(value), "8 hexadecimal digits")
BLOCK_SIZE = FieldType(
    lambda value: POSITIVE.holds(value) and value <= MAX_BLOCK_BYTES, "a number of bytes"
)
RECORD = {
    **dict.fromkeys(("key", "dtype"), TEXT),
    **dict.fromkeys(RECORD_FIELDS, COUNTS),
    **dict.fromkeys(("flat_start", "numel"), COUNT),
}


def check_contents(manifest: Manifest) -> None:
    """Raise ValueError naming the first field that is missing, mistyped or out of range."""
    _check(manifest, {"iteration": COUNT, "layout": OBJECT, "config": OBJECT, "state": OBJECT})
    _check(manifest["layout"], dict.fromkeys(manifest["layout"], SIZE), "layout.")
    if "model" in manifest["config"]:
        _check(manifest["config"], {"model": OBJECT}, "config.")
        _check_state(manifest["state"], manifest["iteration"])
    if "folders" not in manifest:
        check_files(manifest)
        return
    _check(manifest, {"ranks": POSITIVE, "folders": OBJECT})
    for name, entry in manifest["folders"].items():
        _require(_FOLDER.fullmatch(name), f"folders.{name!r} is not a folder's name")
        _check(manifest["folders"], {name: OBJECT}, "folders.")
        _check_file(entry, f"folders.{name}.")


def check_files(owner: Manifest) -> None:
    """Raise ValueError unless all file entries and shard records have valid fields."""
    _check(owner, {"files": OBJECT})
    for name, entry in owner["files"].items():
        _require(
            bool(name) and "/" not in name and name not in (".", ".."),
            f"files.{name!r} is not a file's name",
        )
        _check(owner["files"], {name: OBJECT}, "files.")
        where = f"files.{name}."
        _check_file(entry, where)
        _check(entry, {"shards": LIST}, where)
        for number, record in enumerate(entry["shards"]):
            place = f"{where}shards[{number}]"
            _require(is_object(record), f"{place} is {record!r:.60}, not an object")
            _check_record(record, f"{place}.")


def _check_state(state: JsonObject, iteration: int) -> None:
    _check(state, {"progress": OBJECT, "scaler": OBJECT, "optimizer_steps": COUNT}, "state.")
    progress = state["progress"]
    counts = dict.fromkeys(("iteration", "consumed_samples", *progress), COUNT)
    _check(progress, counts, "state.progress.")
    _require(
        progress["iteration"] == iteration,
        f"state.progress.iteration is {progress['iteration']}, iteration is {iteration}",
    )
    steps = state["optimizer_steps"]
    _require(
        steps <= iteration, f"state.optimizer_steps is {steps}, above the {iteration} iterations"
    )
    if state.get("data_order") is not None:
        _check(state, {"data_order": OBJECT}, "state.")
        for name, count in state["data_order"].items():
            _require(name in DATA_ORDER, f"state.data_order.{name} is unknown")
            _require(
                count is None or is_count(count),
                f"state.data_order.{name} is {count!r}: expected a whole number from 0",
            )
    files = state.get("data_files") or []
    _require(
        isinstance(files, list) and all(map(_is_data_file, files)),
        "state.data_files is not a list of files with path, documents and tokens",
    )
    if state.get("rng") is not None:
        _check(state, {"rng": OBJECT}, "state.")
        sample = state["rng"].get("sample")
        samples = progress["consumed_samples"]
        _require(
            sample == samples, f"state.rng.sample is {sample!r}, consumed_samples is {samples}"
        )


def _is_data_file(value: Any) -> bool:
    return (
        is_object(value)
        and is_text(value.get("path"))
        and is_count(value.get("documents"))
        and is_count(value.get("tokens"))
    )


def _check_file(entry: Entry, where: str) -> None:
    _check(entry, {"size": COUNT, "crc32": CRC32}, where)
    if "blocks" not in entry:
        return
    _check(entry, {"block_size": BLOCK_SIZE}, where)
    count = -(-entry["size"] // entry["block_size"])
    blocks = FieldType(
        lambda value: (
            is_text(value) and len(value) == DIGITS * count and not value.strip(_HEXADECIMAL)
        ),
        f"8 hexadecimal digits for each of {count:.6g} blocks",
    )
    _check(entry, {"blocks": blocks}, where)


def _check_record(record: Record, where: str) -> None:
    _check(record, RECORD, where)
    full, offset, part = (record[name] for name in RECORD_FIELDS)
    inside = len(full) == len(offset) == len(part) and all(
        o + p <= f for o, p, f in zip(offset, part, full)
    )
    _require(
        inside, f"{where}offset {offset} and slice_shape {part} reach beyond global_shape {full}"
    )
    _require(
        record["flat_start"] + record["numel"] <= math.prod(part),
        f"{where}flat_start {record['flat_start']} + numel {record['numel']} is beyond slice_shape {part}",
    )


def _check(owner: JsonObject, fields: Mapping[str, FieldType], where: str = "") -> None:
    for name, kind in fields.items():
        _require(name in owner, f"{where}{name} is missing")
        _require(kind.holds(owner[name]), f"{where}{name} is {owner[name]!r:.60}, not {kind.words}")


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


class BlockChecksums:
    """CRC-32 of every block; the last may be shorter."""

    def __init__(self) -> None:
        self.size = 0
        self._open = 0
        self._closed: list[int] = []

    def add(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            part = data[done : done + BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._open = zlib.crc32(part, self._open)
            done = done + len(part)
            self.size = self.size + len(part)
            if self.size % BLOCK_BYTES == 0:
                self._closed.append(self._open)
                self._open = 0

    def record(self) -> dict[str, str | int]:
        """Return size and checksums as in a manifest: "crc32" of all bytes, "blocks" concatenated."""
        rest = self.size % BLOCK_BYTES
        whole = 0
        for crc in self._closed:
            whole = combine(whole, crc, BLOCK_BYTES)
        blocks = [*self._closed, *([self._open] if rest else [])]
        whole = combine(whole, self._open, rest) if rest else whole
        return {
            "size": self.size,
            "crc32": digits(whole),
            "block_size": BLOCK_BYTES,
            "blocks": "".join(map(digits, blocks)),
        }


def digits(crc: int) -> str:
    return f"{crc:0{DIGITS}x}"


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated byte strings, as zlib's crc32_combine."""
    return _multiply(_zeros(length), first) ^ second


@cache
def _zeros(length: int) -> int:
    """Return x^(8 length) modulo the polynomial, the CRC factor of `length` zero bytes."""
    power = _ONE
    square = _BYTE
    while length:
        if length & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        length = length >> 1
    return power


def _multiply(a: int, b: int) -> int:
    """Return a b modulo the CRC-32 polynomial, all reflected."""
    result = 0
    bit = _ONE
    while bit:
        if a & bit:
            result ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return result


def check_size(path: Path, entry: Entry) -> None:
    if not path.exists():
        raise ValueError(f"{path} is missing")
    size = path.stat().st_size
    if size != entry["size"]:
        raise ValueError(f"{path} has {size} bytes, the manifest says {entry['size']}")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")


def verify_file(path: Path, entry: Entry) -> None:
    check_size(path, entry)
    crc = crc32(path)
    if crc != entry["crc32"]:
        raise ValueError(
            f"{path} has CRC-32 {crc}, the manifest says {entry['crc32']}: its contents were altered"
        )


def crc32(path: Path) -> str:
    crc = 0
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return digits(crc)
