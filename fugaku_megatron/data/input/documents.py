"""Documents of text files, one after another.

Files are plain text (a document a file), JSON (an object a line, or over lines), both also
compressed, tables (a JSON object a row), and folders.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ...text.input_errors import NeverSkipped
from ...text.named_files import JsonObject
from ...text.numbers import plural, say
from .compressed_text import LARGEST_DOCUMENT, check_size, lines, text_blocks, whole
from .formats import LINES, TABLES, VALUES, Form, form_of
from .json_values import values
from .tables import TEXT, Columns, chat_note, rows

T = TypeVar("T")
CONVERT = "pass text in UTF-8, as iconv -t UTF-8 writes it"
SKIP = "--skip-invalid"
NAMED = 5  # files that a warning names


class Place(NamedTuple):
    """Position to resume reading: file number, and lines or rows read."""

    file: int = 0
    line: int = 0


BEGIN = Place()


class Document(NamedTuple):
    """Document's raw bytes and position.

    line: from 1; 0: the whole file
    read: file bytes up to the document's end
    over_lines: JSON value that may span lines; `line` is its number
    """

    path: str
    line: int
    raw: bytes
    number: int = 0
    read: int = 0
    over_lines: bool = False

    @property
    def where(self) -> str:
        if self.over_lines:
            return f"{self.path}: JSON object {self.line}"
        return f"{self.path}:{self.line}" if self.line else f"--input {self.path}"

    @property
    def after(self) -> Place:
        return Place(self.number, self.line) if self.line else Place(self.number + 1)


@dataclass
class Skipped:
    """Counts and first reasons for documents dropped by --skip-invalid."""

    enabled: bool
    files: int = 0
    records: int = 0
    reasons: list[str] = field(default_factory=list)

    def add_file(self, error: ValueError) -> None:
        if not self.enabled:
            raise ValueError(f"{error}; {SKIP} leaves such files out") from None
        self.files += 1
        self.add_reasons([str(error).removeprefix("--input ")])

    def read(
        self, documents: Iterable[Document], read: Callable[[Document], T], kind: str
    ) -> Iterator[T]:
        """Yield the contents of documents; count those that are invalid. Raises ValueError without
        the flag.
        """
        for document in documents:
            try:
                found = read(document)
            except NeverSkipped:
                raise
            except ValueError as error:
                if not self.enabled:
                    raise ValueError(f"{error}; {SKIP} leaves such {kind} out") from None
                self.records += 1
                self.add_reasons([str(error)])
            else:
                yield found

    def add_reasons(self, reasons: Sequence[str]) -> None:
        self.reasons += reasons[: max(0, NAMED - len(self.reasons))]

    def line(self, records: str) -> str:
        if not self.files + self.records:
            return ""
        numbers = {"files": self.files, records: self.records}
        counts = [f"{count} {word}" for word, count in numbers.items() if count]
        more = ", ..." if self.files + self.records > len(self.reasons) else ""
        return f"warning: {SKIP} left out {' and '.join(counts)} ({'; '.join(self.reasons)}{more})"


def read_documents(
    paths: Iterable[str],
    columns: Columns = TEXT,
    start: Place = BEGIN,
    skipped: Skipped | None = None,
    largest: int = LARGEST_DOCUMENT,
) -> Iterator[Document]:
    """Yield all documents in order from `start` on, without blank lines.

    skipped: takes files that are not text, and the rest after damage, instead of ValueError
    largest: limit of a document in bytes
    """
    foreign: dict[str, int] = {}  # path -> bytes that are not UTF-8
    for number, path in enumerate(paths):
        if number < start.file:
            continue
        try:
            form = form_of(path, columns)
            skip = start.line if number == start.file else 0
            for line, raw, read in _records(path, form, columns, skip, largest):
                if not line and (count := _foreign_bytes(path, raw)):
                    foreign[path] = count
                yield Document(path, line, raw, number, read, form.content == VALUES)
        except ValueError as error:
            if skipped is None:
                raise
            skipped.add_file(error)
    if foreign:
        say(_warning(foreign))


def _records(
    path: str, form: Form, columns: Columns, skip: int, largest: int
) -> Iterator[tuple[int, bytes, int]]:
    """Yield (line, row or object number, or 0 for plain text; content; bytes read)."""
    if form.content in TABLES:
        for number, raw, read in rows(path, form.content, columns, skip):
            check_size(path, f"row {number} is ", len(raw), largest)
            yield number, raw, read
    elif form.content == VALUES:
        blocks = text_blocks(path, form.packed)
        yield from (record for record in values(path, blocks, largest) if record[0] > skip)
    elif form.content == LINES:
        yield from (
            record
            for record in lines(path, form.packed, largest)
            if record[0] > skip and not record[1].isspace() and record[1]
        )
    else:
        text = whole(path, form.packed, largest).removeprefix(codecs.BOM_UTF8)
        yield 0, text, os.stat(path).st_size


def _foreign_bytes(path: str, raw: bytes) -> int:
    place = raw.find(b"\0")
    if place >= 0:
        raise ValueError(f"--input {path}: is not text (byte {place} is zero): {CONVERT}")
    return len(re.findall("[\udc80-\udcff]", raw.decode(errors="surrogateescape")))


def _warning(foreign: dict[str, int]) -> str:
    shown = [f"{path}: {plural(count, 'byte')}" for path, count in foreign.items()]
    if len(shown) > NAMED:
        shown[NAMED:] = ["..."]
    listed = ", ".join(shown)
    files = f"{len(foreign)} plain text files are" if len(foreign) > 1 else "1 plain text file is"
    return (
        f"warning: {files} not UTF-8 ({listed}): these bytes are tokenized "
        "one by one or become U+FFFD; convert the files first, as with iconv -f LATIN1 -t UTF-8"
    )


def read_record(document: Document, expected: str) -> tuple[str, JsonObject]:
    """Return (file and line, JSON object)."""
    where = document.where
    try:
        record = json.loads(document.raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: not a line of JSON: {reason}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected {expected}, found {type(record).__name__}")
    return where, record


def document_texts(document: Document, keys: Sequence[str]) -> list[str | bytes]:
    """Return a document's text for each key; a plain text file is one document, in bytes.

    Raises ValueError for a key without text.
    """
    if document.line == 0:
        return [document.raw]
    where, record = read_record(document, "a JSON object with the keys of --json-keys")
    for key in keys:
        if not isinstance(record.get(key), str):
            content = (
                type(record[key]).__name__ if key in record else f"only keys {', '.join(record)}"
            )
            raise ValueError(
                f"{where}: expected text under key {key!r} (--json-keys), found {content[:200]}{chat_note(record)}"
            )
    return [record[key] for key in keys]
