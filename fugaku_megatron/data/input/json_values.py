"""JSON files: an object a line, or objects over several lines, also as array elements.

Arrays and objects over lines are streamed, so a file may exceed memory.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...text.named_files import JsonObject
from .compressed_text import LARGEST_DOCUMENT, check_size

LINE_LAYOUT = "a line each"
VALUE_LAYOUT = "over lines"
UNKNOWN = "more bytes are needed"
SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonlines")
LONG_HEAD = 2**24  # bytes of a first line that are looked at
LINES_TRIED = 100  # of a file that is JSON lines by its content alone
NEAR_THE_END = 16  # characters: a literal or an escape that the end of a block has cut
PARTS = re.compile(r"(?:part|shard|chunk|split)?[-_.]?\d+([-_.]of[-_.]\d+)?", re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode


def json_layout(head: bytes, more: bool, suffix: str, names: Sequence[str]) -> str | None:
    """Return the layout, or None for a text that is not JSON.

    more: the file continues

    Files named as JSON lines are JSON. Others are if their first lines are objects, or if the first
    object has a wanted key or the suffix is empty or a number: a notebook stays a text.
    """
    text = head.decode("utf-8-sig", "replace").lstrip()
    is_json = suffix in SUFFIXES
    otherwise = LINE_LAYOUT if is_json else None
    if text[:1] not in ("{", "["):
        return otherwise
    lines = [line for line in text.split("\n")[: LINES_TRIED + 1] if line.strip()]
    if more and len(lines) <= LINES_TRIED:
        lines.pop()  # its end is not known
    objects = [_object(line) for line in lines[:LINES_TRIED]]
    if not objects and len(head) < LONG_HEAD:
        return UNKNOWN if more else otherwise
    if objects and objects[0] is not None:
        is_wanted = any(name in objects[0] for name in names) or len(objects) > 1
        is_lines = is_json or (None not in objects and (is_wanted or _has_no_kind(suffix)))
        return LINE_LAYOUT if is_lines else None
    first = _first_element(text)
    if first is None and more and text[0] == "{" and len(head) < LONG_HEAD:
        return UNKNOWN
    if is_json:
        return VALUE_LAYOUT if first is not None or text[0] == "[" else otherwise
    if isinstance(first, dict) and (any(name in first for name in names) or _has_no_kind(suffix)):
        return VALUE_LAYOUT
    return None


def _has_no_kind(suffix: str) -> bool:
    return not suffix or PARTS.fullmatch(suffix[1:]) is not None


def _object(line: str) -> JsonObject | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _first_element(text: str) -> Any:
    is_array = text[0] == "["
    try:
        found, end = _decode(text, _skip_space(text, 1) if is_array else 0)
    except (ValueError, RecursionError):
        return None
    return found if is_array or "\n" in text[:end] else None


def _skip_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def values(
    path: str, blocks: Iterable[tuple[bytes, int]], largest: int = LARGEST_DOCUMENT
) -> Iterator[tuple[int, bytes, int]]:
    """Yield (number from 1, JSON, file bytes read) for each value or array element."""
    stream = _Stream(path, blocks, largest)
    number = 0
    while (begin := stream.peek()) != "":
        if begin == "[":
            for raw in stream.elements():
                number += 1
                yield number, raw, stream.read
        else:
            number += 1
            yield number, stream.value(), stream.read


class _Stream:
    def __init__(self, path: str, blocks: Iterable[tuple[bytes, int]], largest: int):
        self.path = path
        self._largest = largest
        self.read = 0
        self._blocks = iter(blocks)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._place = 0
        self._line = 1  # of the beginning of `_text`
        self._ended = False

    def peek(self) -> str:
        while True:
            self._place = _skip_space(self._text, self._place)
            if self._place < len(self._text):
                return self._text[self._place]
            if not self._more():
                return ""

    def elements(self) -> Iterator[bytes]:
        self._place += 1
        if self.peek() == "]":
            self._place += 1
            return
        while True:
            if self.peek() == "]":
                raise self._mistake("a comma before ]", self._place)
            yield self.value()
            separator = self.peek()
            if separator not in (",", "]"):
                found = repr(separator) if separator else "the end of the file"
                raise self._mistake(f"expected , or ] after an element, found {found}", self._place)
            self._place += 1
            if separator == "]":
                return

    def value(self) -> bytes:
        self.peek()
        while True:
            try:
                end = _decode(self._text, self._place)[1]
            except RecursionError:
                raise self._mistake("it is nested too deeply", self._place) from None
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string")
                is_cut = is_cut or error.pos >= len(self._text) - NEAR_THE_END
                place = error.pos - self._place  # `_more` drops what is before the value
                if is_cut:
                    self._check_size(len(self._text))
                if is_cut and self._more(len(self._text) - self._place):
                    continue
                place += self._place
                raise self._mistake(error.msg, place) from None
            self._check_size(end)
            if end == len(self._text) and self._more():  # a number may go on
                continue
            raw = self._text[self._place : end].encode("utf-8", "surrogatepass")
            self._place = end
            return raw

    def _check_size(self, end: int) -> None:
        size = end - self._place
        if size > self._largest:  # the line costs a pass over the text
            where = f"a JSON object at line {self._line_at(self._place)} is "
            check_size(self.path, where, size, self._largest)

    def _line_at(self, place: int) -> int:
        return self._line + self._text.count("\n", 0, place)

    def _more(self, size: int = 0) -> bool:
        self._line += self._text.count("\n", 0, self._place)
        pieces = [self._text[self._place :]]
        self._place = 0
        added = 0
        while not self._ended and added <= size:
            block, self.read = next(self._blocks, (b"", self.read))
            self._ended = not block
            try:
                pieces.append(self._decoder.decode(block, self._ended))
            except UnicodeDecodeError as error:
                self._text = "".join(pieces)
                raise self._mistake(f"it is not UTF-8 ({error.reason})", len(self._text)) from None
            added += len(pieces[-1])
        self._text = "".join(pieces)
        return added > 0

    def _mistake(self, reason: str, place: int) -> ValueError:
        return ValueError(f"{self.path}:{self._line_at(place)}: not JSON: {reason}")
