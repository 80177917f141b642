"""Input formats by name and first bytes; compressed text; table rows as JSON objects.

.arrow files that Hugging Face's `datasets` saves are read without that package. zstandard and
pyarrow come with the extra [data].
"""

from __future__ import annotations

import importlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .json_values import LINE_LAYOUT, LONG_HEAD, SUFFIXES, UNKNOWN, VALUE_LAYOUT, json_layout

PACKED = {
    ".gz": (b"\x1f\x8b", "gzip"),
    ".zst": (b"\x28\xb5\x2f\xfd", "Zstandard"),
}  # suffix -> first bytes, name
TABLES = {".parquet": (b"PAR1", "Parquet"), ".arrow": (b"", "Arrow")}
MAGIC_OF_A_TABLE = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}  # of a file with another name
# of a table, and bytes of a compressed file, that are read at a time
ROWS = 1024
BLOCK = 2**16
MAX_WINDOW = 2**31  # of Zstandard: zstd --long=31 writes such files
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow
AGAIN = "copy or download it again"

Record = tuple[
    int, bytes, int
]  # number from 1, content, bytes of the file that were read up to its end


class NeverSkipped(ValueError):
    """Error that --skip-invalid does not skip, because every document would have it."""


class MissingPackage(NeverSkipped):
    pass


class Columns(NamedTuple):
    """Table columns. needed: require all, with text; else read the existing ones, without null
    fields.
    """

    names: tuple[str, ...] = ("text",)
    needed: bool = True


TEXT = Columns()
CHAT = Columns(
    ("messages", "prompt", "completion", "tools", "chat_template_kwargs"), needed=False
)  # what chats.py reads of a line


def library(name: str, extra: str, user: str) -> ModuleType:
    """Import an optional package. Raises ValueError naming the extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise MissingPackage(
            f"{user} needs the Python package {package} ({error}): pip install {package}, or this package with its "
            f"extra [{extra}]"
        ) from None


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
    if not is_packed and suffix not in SUFFIXES:
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


def head_of(path: str, packed: str, size: int = BLOCK) -> tuple[bytes, bool]:
    """Return at least the first `size` bytes, or all, and True if there are more."""
    head = b""
    for block, _ in text_blocks(path, packed):
        head += block
        if len(head) >= size:
            return head, True
    return head, False


def text_blocks(path: str, packed: str) -> Iterator[tuple[bytes, int]]:
    """Yield text, decompressed if needed, and the file bytes read."""
    if packed:
        yield from blocks(path, packed)
        return
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            yield block, file.tell()


def check_table(path: str, form: Form, begin: bytes, columns: Columns) -> None:
    if form.packed:
        raise ValueError(f"--input {path}: is a compressed table: unpack it first")
    _check_magic(path, form.content, begin)
    with _reading(path):
        _choose(path, _open(path, form.content)[0], columns)


def _check_magic(path: str, suffix: str, begin: bytes) -> None:
    magic, name = {**PACKED, **TABLES}[suffix]
    if suffix == ".zst":
        library("zstandard", "data", f"--input {path}")
        magic = (
            magic if begin[1:4] != b"\x2a\x4d\x18" else b""
        )  # a frame that says something to other programs comes first
    if not begin.startswith(magic):
        raise ValueError(
            f"--input {path}: is not a {name} file (it begins with {begin[:4]!r}): {AGAIN}, or rename it"
        )


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        library = type(error).__module__.split(".")[0] in ("pyarrow", "zstandard")
        if not library and not isinstance(
            error, OSError | EOFError | UnicodeDecodeError | zlib.error
        ):
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--input {path}: was cut off or is damaged ({reason:.150}): {AGAIN}"
        ) from None


# Compressed text -----------------------------------------------------------------------------------------------------------------


def blocks(path: str, packed: str) -> Iterator[tuple[bytes, int]]:
    start: Callable[[], Any] = partial(zlib.decompressobj, zlib.MAX_WBITS | 16)
    if packed == ".zst":
        zstandard = library("zstandard", "data", f"--input {path}")
        start = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj
    with _reading(path), open(path, "rb") as file:
        frame = start()
        begun = False
        while data := file.read(BLOCK):
            while data:
                block = frame.decompress(data)
                begun = True
                yield block, file.tell()
                data = frame.unused_data if frame.eof else b""
                if frame.eof:
                    # gzip may pad with zeros
                    frame = start()
                    begun = False
                    data = data.lstrip(b"\0")
        if begun:
            raise EOFError("its compressed data has no end")


def lines(path: str, packed: str) -> Iterator[Record]:
    """Yield lines, with or without line feeds."""
    if not packed:
        read = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                read += len(line)
                yield number, line, read
        return
    number = 0
    rest = [b""]
    read = 0
    for block, read in blocks(path, packed):
        first, *others = block.split(b"\n")
        rest.append(first)
        for line in others:
            number += 1
            yield number, b"".join(rest), read
            rest = [line]
    yield number + 1, b"".join(rest), read


# Tables --------------------------------------------------------------------------------------------------------------------------


def rows(path: str, kind: str, columns: Columns, skip: int) -> Iterator[Record]:
    with _reading(path):
        schema, batches = _open(path, kind)
        for first, batch, read in batches(_choose(path, schema, columns), skip):
            records = batch.slice(max(0, skip - first)).to_pylist()
            for number, record in enumerate(records, start=max(first, skip) + 1):
                if not columns.needed:
                    record = _without_null(record)
                yield number, json.dumps(record, ensure_ascii=False).encode(), read


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_null(field) for name, field in value.items() if field is not None}
    return [_without_null(field) for field in value] if isinstance(value, list) else value


Batches = Callable[
    [list[str], int], Iterator[tuple[int, Any, int]]
]  # columns, rows to skip -> (first row, batch, bytes read)


def _open(path: str, kind: str) -> tuple[Any, Batches]:
    library("pyarrow", "data", f"--input {path}")
    size = os.stat(path).st_size
    return _open_parquet(path, size) if kind == ".parquet" else _open_arrow(path, size)


def _open_parquet(path: str, size: int) -> tuple[Any, Batches]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]

    def batches(names: list[str], skip: int) -> Iterator[tuple[int, Any, int]]:
        for group, count in enumerate(groups):
            first = sum(groups[:group])
            if first + count > skip:
                for batch in file.iter_batches(
                    ROWS, row_groups=[group], columns=names, use_threads=False
                ):
                    yield first, batch, size * (first + batch.num_rows) // sum(groups)
                    first += batch.num_rows

    return file.schema_arrow, batches


def _open_arrow(path: str, size: int) -> tuple[Any, Batches]:
    import pyarrow

    source = pyarrow.memory_map(path)
    found: Any
    if source.read(6) == b"ARROW1":
        file = pyarrow.ipc.open_file(source)
        found = map(file.get_batch, range(file.num_record_batches))
    else:
        source.seek(max(0, size - len(END_OF_STREAM)))
        if source.read() != END_OF_STREAM:
            raise EOFError("it has no end of stream")
        source.seek(0)
        found = file = pyarrow.ipc.open_stream(source)

    def batches(names: list[str], skip: int) -> Iterator[tuple[int, Any, int]]:
        first = 0
        for batch in found:
            yield first, batch.select(names), source.tell()
            first += batch.num_rows

    return file.schema, batches


def _choose(path: str, schema: Any, columns: Columns) -> list[str]:
    from pyarrow import types

    known = f"its columns are {', '.join(schema.names)}"
    if not columns.needed:
        names = [name for name in columns.names if name in schema.names]
        if not names:
            raise ValueError(
                f"--input {path}: has no column messages, or prompt and completion; {known}"
            )
        return names
    for name in columns.names:
        if name not in schema.names:
            raise ValueError(f"--input {path}: has no column {name!r} (--json-keys); {known}")
        kind = schema.field(name).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise ValueError(
                f"--input {path}: column {name!r} (--json-keys) is of type {kind}, not text; {known}"
            )
    return list(columns.names)


def saved_files(place: str, names: list[str]) -> list[str] | None:
    """Return a saved `datasets` folder's .arrow files; None for other folders."""
    if "dataset_dict.json" in names:
        splits = json.loads(Path(place, "dataset_dict.json").read_text(encoding="utf-8")).get(
            "splits", []
        )
        raise ValueError(
            f"--input {place}: is a data set with the splits {', '.join(map(str, splits))}: pass the folder of one, "
            f"such as {Path(place, str(splits[0])) if splits else place}"
        )
    if "state.json" not in names or not any(name.endswith(".arrow") for name in names):
        return None
    files = json.loads(Path(place, "state.json").read_text(encoding="utf-8")).get("_data_files", [])
    return [str(file["filename"]) for file in files]
