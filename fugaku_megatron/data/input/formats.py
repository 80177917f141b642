"""Formats of input files, by name and first bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ...text.input_errors import AGAIN, reading
from ...text.optional_packages import optional_package
from .compressed_text import BLOCK, head_of
from .json_values import LINE_LAYOUT, LONG_HEAD, UNKNOWN, VALUE_LAYOUT, json_layout
from .tables import Columns, choose_columns, open_table

PACKED = {
    ".gz": (b"\x1f\x8b", "gzip"),
    ".zst": (b"\x28\xb5\x2f\xfd", "Zstandard"),
}  # suffix -> first bytes, name
TABLES = {".parquet": (b"PAR1", "Parquet"), ".arrow": (b"", "Arrow")}
# First bytes of compressed files that are not read.
OTHER_PACKED = re.compile(
    rb"(?P<bzip2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\0)|(?P<zip>PK\x03\x04)|(?P<lz4>\x04\x22\x4d\x18)"
)
MAGIC_OF_A_TABLE = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}  # of a file with another name


class Form(NamedTuple):
    """File format. content: JSON's LINES or VALUES, TEXT_FILE, or a key in TABLES; packed: a key in
    PACKED, or "".
    """

    content: str
    packed: str = ""


LINES = "lines"
VALUES = "values"
TEXT_FILE = "text"


def form_of(path: str, columns: Columns) -> Form:
    """Return a file's form, by its name (case-insensitive) or else its first bytes.

    columns: JSON keys that distinguish JSON from other text
    """
    with open(path, "rb") as file:
        begin = file.read(BLOCK)
    name = Path(path.lower())
    is_packed = name.suffix in PACKED
    suffix = name.with_suffix("").suffix if is_packed else name.suffix
    packed = name.suffix if is_packed else ""
    if suffix in TABLES:
        return Form(suffix, packed)
    if not is_packed:
        for magic, table in MAGIC_OF_A_TABLE.items():
            if begin.startswith(magic):
                return Form(table)
        starts = [ending for ending, (magic, _) in PACKED.items() if begin.startswith(magic)]
        packed = starts[0] if starts else ""
    more = len(begin) == BLOCK
    if packed:
        _check_magic(path, packed, begin)
        begin, more = head_of(path, packed)
    layout = json_layout(begin, more, suffix, columns.names)
    if layout == UNKNOWN:
        begin, more = head_of(path, packed, LONG_HEAD)
        layout = json_layout(begin, more, suffix, columns.names)
    contents = {None: TEXT_FILE, LINE_LAYOUT: LINES, VALUE_LAYOUT: VALUES}
    return Form(contents[layout], packed)


def check_table(path: str, form: Form, begin: bytes, columns: Columns) -> None:
    if form.packed:
        raise ValueError(f"--input {path}: is a compressed table: unpack it first")
    _check_magic(path, form.content, begin)
    with reading(path):
        choose_columns(path, open_table(path, form.content)[0], columns)


def _check_magic(path: str, suffix: str, begin: bytes) -> None:
    magic, name = {**PACKED, **TABLES}[suffix]
    if suffix == ".zst":
        optional_package("zstandard", "data", f"--input {path}")
        magic = (
            magic if begin[1:4] != b"\x2a\x4d\x18" else b""
        )  # a frame that says something to other programs comes first
    if not begin.startswith(magic):
        raise ValueError(
            f"--input {path}: is not a {name} file (it begins with {begin[:4]!r}): {AGAIN}, or rename it"
        )
