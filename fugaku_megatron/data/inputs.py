"""Text as a user has it: plain text files (a document a file), .jsonl files (a JSON object a line), and folders of both.

Left out: compressed input.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .files import unreadable

JSON_SUFFIXES = (".jsonl", ".json")
LOOKED_AT = 4096  # bytes at the beginning of a file, of which none may be zero
CONVERT = "pass text in UTF-8, as iconv -t UTF-8 writes it"
NAMED = 5  # files that a warning names


@dataclass(frozen=True)
class Document:
    """Raw bytes of one document, and where they stand (`line` from 1; 0: the whole file is the text)."""

    path: str
    line: int
    raw: bytes


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """--input and --json-keys."""
    parser.add_argument("--input", nargs="+", required=True,
                        help="plain text files of one document each, .jsonl files of one JSON object a line, or folders of both")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys of the JSON objects that hold text (default: text)")


def input_files(inputs: Sequence[str], json_keys: Sequence[str]) -> list[str]:
    """The files of --input, in its order; those of a folder, and of folders in it, by name and without hidden ones.

    Raises ValueError, before any work, for an input that cannot be read or is not text, and for plain text with other --json-keys
    than text.
    """
    if len(set(json_keys)) < len(json_keys):
        raise ValueError(f"--json-keys {' '.join(json_keys)}: a key is named twice")
    files = [path for name in inputs for path in (_folder_files(name) if os.path.isdir(name) else [_one_file(name)])]
    plain = [path for path in files if Path(path).suffix not in JSON_SUFFIXES]
    if plain and list(json_keys) != ["text"]:
        raise ValueError(f"--input {plain[0]} is plain text, but --json-keys asks for {', '.join(json_keys)}; leave it out")
    return files


def _one_file(path: str) -> str:
    """A file that the command line names. Raises ValueError where it cannot be read or does not begin as text."""
    if _has_zero_byte(_readable(path)) and Path(path).suffix not in JSON_SUFFIXES:
        raise ValueError(f"--input {path}: is not text (it holds a zero byte): {CONVERT}")
    return path


def _readable(path: str) -> str:
    reason = unreadable(path)
    if reason:
        raise ValueError(f"--input {path}: " + (f"cannot be read: {reason}" if os.path.lexists(path) else "no such file"))
    return path


def _has_zero_byte(path: str) -> bool:
    with open(path, "rb") as stream:
        return b"\0" in stream.read(LOOKED_AT)


def _folder_files(folder: str) -> list[str]:
    files = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [os.path.join(place, name) for name in sorted(names) if not name.startswith(".")]
    if not files:
        raise ValueError(f"--input {folder}: no file in this folder")
    for path in map(_readable, files):
        if _has_zero_byte(path):
            raise ValueError(f"--input {folder}: {path} is not text (it holds a zero byte): move it away, or name the files")
    return files


def _raise(error: OSError) -> None:
    raise ValueError(f"--input {error.filename}: cannot be read: {error.strerror}") from None


def read_documents(paths: Iterable[str]) -> Iterator[Document]:
    """Documents of all files in order. Lines of white space only are skipped.

    Raises ValueError for plain text with a zero byte; at the end a warning on stderr names the plain text that is not UTF-8.
    """
    foreign: dict[str, int] = {}  # path -> bytes that are not UTF-8
    for path in paths:
        with open(path, "rb") as stream:
            if Path(path).suffix not in JSON_SUFFIXES:
                raw = stream.read()
                if count := _foreign_bytes(path, raw):
                    foreign[path] = count
                yield Document(path, 0, raw)
                continue
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield Document(path, number, line)
    if foreign:
        print(_warning(foreign), file=sys.stderr, flush=True)


def _foreign_bytes(path: str, raw: bytes) -> int:
    """How many bytes of a plain text are not UTF-8. Raises ValueError for one that is zero, which no text has."""
    place = raw.find(b"\0")
    if place >= 0:
        raise ValueError(f"--input {path}: is not text (byte {place} is zero): {CONVERT}")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return len(re.findall("[\udc80-\udcff]", raw.decode(errors="surrogateescape")))
    return 0


def _warning(foreign: dict[str, int]) -> str:
    """The line about files that are not UTF-8: path -> how many of their bytes."""
    shown = [f"{path}: {count} byte{'s' * (count > 1)}" for path, count in foreign.items()]
    files = f"{len(foreign)} plain text files are" if len(foreign) > 1 else "1 plain text file is"
    return (f"warning: {files} not UTF-8 ({', '.join(shown[:NAMED])}{', ...' * (len(shown) > NAMED)}): these bytes are tokenized "
            "one by one or become U+FFFD; convert the files first, as with iconv -f LATIN1 -t UTF-8")


def document_texts(document: Document, keys: Sequence[str]) -> list[str | bytes]:
    """The text under every key, or the whole of a plain text file. Raises ValueError, with file and line, for other JSON."""
    if document.line == 0:
        return [document.raw]
    where = f"{document.path}:{document.line}"
    try:
        record = json.loads(document.raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object with the keys of --json-keys, found {type(record).__name__}")
    for key in keys:
        if not isinstance(record.get(key), str):
            content = type(record[key]).__name__ if key in record else f"only keys {', '.join(record)}"
            raise ValueError(f"{where}: expected text under key {key!r} (--json-keys), found {content[:200]}")
    return [record[key] for key in keys]
