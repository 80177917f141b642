"""Files and folders of --input."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path

from ...text.input_errors import NeverSkipped
from ...text.named_files import FIRST_BYTES, POINTER, unreadable
from ...text.numbers import say
from .compressed_text import LARGEST_DOCUMENT, LARGEST_FLAG, head_of
from .documents import CONVERT, SKIP, Skipped
from .formats import OTHER_PACKED, TABLES, TEXT_FILE, Form, check_table, form_of
from .tables import Columns, saved_files

UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # how a text in UTF-16 begins
LOOKED_AT = 4096  # bytes at the beginning of a file, of which none may be zero
UNFINISHED = ".unfinished"  # ends the name of a folder in which preprocess keeps tokens, which may lie in that of the input


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of input text, shared by preprocessing and vocabulary training."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="plain text files of one document each, JSON lines (.jsonl, .ndjson, .jsonlines, or any name), .json files "
        "of an array of objects, these also as .gz and .zst, .parquet files, folders of these, and folders of Hugging "
        "Face's save_to_disk",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys of the JSON objects, or columns of the tables, that hold text (default: text)",
    )
    parser.add_argument(
        LARGEST_FLAG,
        type=int,
        default=LARGEST_DOCUMENT,
        help="limit of a document, because a small compressed file can have a line that fills the memory (default: %(default)s)",
    )
    parser.add_argument(
        SKIP,
        action="store_true",
        help="leave out files that are not text, and lines, rows and chats that cannot be read, and say how many; without it "
        "the first of them ends the command",
    )


def input_files(
    inputs: Sequence[str],
    json_keys: Sequence[str],
    columns: Columns | None = None,
    skipped: Skipped | None = None,
) -> list[str]:
    """Return the --input files in order; folders recursively by name, without hidden files.

    skipped: takes files that are not text

    Raises ValueError, before any work, for unreadable or unsupported inputs, missing columns and
    packages, and json_keys other than text for plain text.
    """
    if len(set(json_keys)) < len(json_keys):
        raise ValueError(f"--json-keys {' '.join(json_keys)}: a key is named twice")
    wanted = columns or Columns(tuple(json_keys))
    forms: dict[str, Form] = {}
    files = []
    for name in inputs:
        folder = os.path.isdir(name)
        found = []
        for path in map(_readable, _folder_files(name) if folder else [name]):
            try:
                forms[path] = _checked_form(path, name, wanted)
                found.append(path)
            except NeverSkipped:
                raise
            except ValueError as error:
                if skipped is None:
                    raise
                skipped.add_file(error)
        if folder and not wanted.needed:  # chats, and perhaps a README.md
            found = _preferred(
                name,
                found,
                lambda path: forms[path].content != TEXT_FILE,
                kinds=("JSON or tables", "plain text"),
            )
        files += found
    plain = [path for path in files if forms[path].content == TEXT_FILE]
    if plain and list(json_keys) != ["text"]:
        raise ValueError(
            f"--input {plain[0]} is plain text, but --json-keys asks for {', '.join(json_keys)}; leave it out"
        )
    return files


def _checked_form(path: str, name: str, columns: Columns) -> Form:
    with open(path, "rb") as stream:
        begin = stream.read(LOOKED_AT)
    if begin.startswith(FIRST_BYTES):
        raise ValueError(f"--input {path}: {POINTER}")
    if other := OTHER_PACKED.match(begin):
        raise ValueError(
            f"--input {path}: is compressed by {other.lastgroup}: unpack it, or use gzip or zstd"
        )
    form = form_of(path, columns)
    if form.content in TABLES:
        check_table(path, form, begin, columns)
        return form
    head = head_of(path, form.packed, LOOKED_AT)[0][:LOOKED_AT] if form.packed else begin
    if head.startswith(UTF_16):
        raise ValueError(f"--input {path}: is text in UTF-16: {CONVERT}")
    if b"\0" in head and path != name:
        raise ValueError(f"--input {name}: {path} is not text (it holds a zero byte): move it away")
    if b"\0" in head:
        raise ValueError(f"--input {path}: is not text (it holds a zero byte): {CONVERT}")
    return form


def _preferred(
    folder: str, files: list[str], is_preferred: Callable[[str], bool], kinds: tuple[str, str]
) -> list[str]:
    chosen = [path for path in files if is_preferred(path)]
    others = [path for path in files if not is_preferred(path)]
    if chosen and others:
        say(
            f"note: --input {folder} has {kinds[0]}, so {len(others)} {kinds[1]} files in it are not read, such as "
            f"{others[0]}"
        )
    return chosen or files


def _readable(path: str) -> str:
    reason = unreadable(path)
    if reason and reason != POINTER:  # a pointer is left out as other files that are not text are
        raise ValueError(
            f"--input {path}: "
            + (f"cannot be read: {reason}" if os.path.lexists(path) else "no such file")
        )
    return path


def _folder_files(folder: str) -> list[str]:
    found: list[tuple[tuple[str, ...], str]] = []  # names to sort by, path
    for place, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not name.endswith(UNFINISHED)
        ]
        saved = saved_files(place, names)  # in an order of their own
        found += [
            ((*Path(place).parts, "" if saved else name), os.path.join(place, name))
            for name in saved or names
            if not name.startswith(".")
        ]
    files = [path for _, path in sorted(found, key=itemgetter(0))]
    if not files:
        raise ValueError(f"--input {folder}: no file in this folder")
    return _preferred(
        folder,
        files,
        lambda path: Path(path).suffix.lower() in TABLES,
        kinds=("tables", "other"),
    )


def _raise(error: OSError) -> None:
    raise ValueError(f"--input {error.filename}: cannot be read: {error.strerror}") from None
