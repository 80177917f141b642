"""Rows of Parquet and Arrow files as JSON objects.

.arrow files that Hugging Face's `datasets` saves are read without that package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...text.input_errors import AGAIN, reading
from ...text.named_files import read_text
from ...text.optional_packages import optional_package
from .compressed_text import Record

ROWS = 1024  # that are read at a time
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow


class Columns(NamedTuple):
    """Table columns. needed: require all, with text; else read the existing ones, without null fields."""

    names: tuple[str, ...] = ("text",)
    needed: bool = True


TEXT = Columns()
# what chats.py and record_forms.py read of a line
CHAT = Columns(
    (
        *("messages", "prompt", "completion", "tools", "chat_template_kwargs"),
        *("conversations", "instruction", "input", "output", "history", "system"),
        *("images", "videos", "audios"),
    ),
    needed=False,
)


def chat_note(names: Collection[str]) -> str:
    """Return the end of a message about a record, or a table, of these names that lacks its text."""
    return ": pass --chat for chats" if {*CHAT.names} & {*names} else ""


def rows(path: str, kind: str, columns: Columns, skip: int) -> Iterator[Record]:
    with reading(path):
        schema, batches = open_table(path, kind)
        for first, batch, read in batches(choose_columns(path, schema, columns), skip):
            records = batch.slice(max(0, skip - first)).to_pylist()
            for number, record in enumerate(records, start=max(first, skip) + 1):
                if not columns.needed:
                    record = _without_null(record)
                yield number, json.dumps(record, ensure_ascii=False).encode(), read


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_null(field) for name, field in value.items() if field is not None}
    return [_without_null(field) for field in value] if isinstance(value, list) else value


# columns, rows to skip -> (first row, batch, bytes read)
Batches = Callable[[list[str], int], Iterator[tuple[int, Any, int]]]


def open_table(path: str, kind: str) -> tuple[Any, Batches]:
    optional_package("pyarrow", "data", f"--input {path}")
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


def choose_columns(path: str, schema: Any, columns: Columns) -> list[str]:
    """Return the columns to read. Raises ValueError if a needed column is missing or not text."""
    from pyarrow import types

    known = f"its columns are {', '.join(schema.names)}"
    if not columns.needed:
        names = [name for name in columns.names if name in schema.names]
        if not names:
            raise ValueError(
                f"--input {path}: has no column messages, prompt and completion, conversations, or instruction and output; {known}"
            )
        return names
    for name in columns.names:
        if name not in schema.names:
            raise ValueError(
                f"--input {path}: has no column {name!r} (--json-keys); {known}{chat_note(schema.names)}"
            )
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
        splits = _entry(Path(place, "dataset_dict.json"), "splits")
        raise ValueError(
            f"--input {place}: is a data set with the splits {', '.join(map(str, splits))}: pass the folder of one, "
            f"such as {Path(place, str(splits[0])) if splits else place}"
        )
    if "state.json" not in names or not any(name.endswith(".arrow") for name in names):
        return None
    state = Path(place, "state.json")
    files = []
    for entry in _entry(state, "_data_files"):
        name = entry.get("filename") if isinstance(entry, dict) else None
        if name not in names:
            raise ValueError(f"--input {state}: {name!r:.200} is no file in its folder: {AGAIN}")
        files.append(str(name))
    return files


def _entry(path: Path, key: str) -> list[Any]:
    """Return a list in the JSON object of a file that `datasets` writes."""
    try:
        contents = json.loads(read_text(path, "--input"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--input {path}: is not JSON ({error}): {AGAIN}") from None
    found = contents.get(key, []) if isinstance(contents, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"--input {path}: is not an object with a list {key!r}: {AGAIN}")
    return found
