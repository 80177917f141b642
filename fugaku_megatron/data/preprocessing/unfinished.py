"""Resumable state of preprocess in the folder PREFIX.unfinished.

Token ids and document lengths are appended to two files a JSON key, in input order. journal.json
records valid sizes and the input position, replaced after the files are synced. A run with the same
tokenizer, flags and input truncates the files to these sizes and resumes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...text.numbers import say
from ...text.written_files import make_own, new_file, no_link, write_text
from ..indexed import IndexedDatasetWriter, writing
from ..input.documents import Place
from ..input.input_files import UNFINISHED
from .document_order import DocumentTokens, in_order, pile_count, shuffled

JOURNAL_SECONDS = 5.0  # between two records
JOURNAL = "journal.json"
LOCK = "lock"


@dataclass(frozen=True)
class Journal:
    """Valid state. place: input position; tokens: per JSON key; size: bytes of text; inputs:
    checksum of files so far; skipped: documents.
    """

    made_with: Any
    inputs: int = 0
    place: Place = field(default_factory=Place)
    documents: int = 0
    tokens: tuple[int, ...] = ()
    size: int = 0
    skipped: int = 0


class TokenFiles:
    """Token ids and document lengths of one JSON key, in two files to append to."""

    def __init__(self, path: Path, dtype: np.dtype, documents: int, tokens: int):
        """Truncate the files to the valid sizes. Raises OSError if they are shorter."""
        self.dtype = dtype
        self._paths = (path.with_suffix(".tokens"), path.with_suffix(".lengths"))
        self._files = []
        for name, size in zip(self._paths, (tokens * dtype.itemsize, documents * 4), strict=True):
            opener = no_link if size else new_file
            file = open(name, "r+b" if size else "wb", opener=opener)  # closed by close
            self._files.append(file)
            if os.fstat(file.fileno()).st_size < size:
                raise OSError(f"{name} has less than {size} bytes")
            file.truncate(size)
            file.seek(size)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self._files[0].write(np.ascontiguousarray(tokens, self.dtype).data)
        self._files[1].write(lengths.astype("<i4").tobytes())

    def sync(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def contents(self) -> DocumentTokens:
        tokens, lengths = self._paths
        size = tokens.stat().st_size
        ids = np.memmap(tokens, self.dtype, "r") if size else np.empty(0, self.dtype)
        return ids, np.fromfile(lengths, "<i4")

    def close(self) -> None:
        for file in self._files:
            with suppress(OSError):  # what was not written does not fit the disk
                file.close()


class Unfinished:
    """Folder of one command. `journal` is the state to resume from.

    The folder is removed at the block's end, also if it fails before the first record.

    made_with: JSON of all that tokens depend on besides the files

    Raises ValueError if nothing can be written, and while another process uses the folder.
    """

    def __init__(
        self, prefix: str, made_with: Any, files: Sequence[str], outputs: int, dtype: np.dtype
    ):
        self.prefix = prefix
        self.folder = Path(prefix + UNFINISHED)
        self._made_with = json.loads(json.dumps(made_with))
        self._stats = [(path, (stat := os.stat(path)).st_size, stat.st_mtime_ns) for path in files]
        self._starts = [0, *accumulate(size for _, size, _ in self._stats)]
        self._due = time.monotonic() + JOURNAL_SECONDS
        with self._writing():
            make_own(self.folder)
            self._lock = open(self.folder / LOCK, "w", opener=no_link)  # closed by __exit__
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"--output-prefix {self.prefix}: another preprocess is writing it: wait for its end, or pass another "
                "one"
            ) from None
        except OSError:  # a file system without locks
            pass
        self.journal = self._found(outputs) or self._empty(outputs)
        self._recorded = self.journal.documents > 0
        with self._writing():
            self._files = self._opened(dtype)
        for path in self.folder.glob(
            "*.tmp*"
        ):  # of a run that was killed while it wrote the data sets
            path.unlink()

    def _empty(self, outputs: int) -> Journal:
        return Journal(self._made_with, tokens=tuple(0 for _ in range(outputs)))

    def _writing(self) -> AbstractContextManager[None]:
        return writing(str(self.folder))

    def _checksum(self, place: Place) -> int:
        return zlib.crc32(repr(self._stats[: place.file + (place.line > 0)]).encode())

    def _found(self, outputs: int) -> Journal | None:
        try:
            found = json.loads((self.folder / JOURNAL).read_text(encoding="utf-8"))
            journal = Journal(
                **{**found, "place": Place(*found["place"]), "tokens": tuple(found["tokens"])}
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None
        same = journal.made_with == self._made_with and len(journal.tokens) == outputs
        if same and self._checksum(journal.place) == journal.inputs:
            say(f"resuming after the {journal.documents} documents in {self.folder}")
            return journal
        reason = "it was made with another tokenizer or other flags"
        if same:
            reason = "its input files have changed"
        say(f"note: {self.folder} is begun anew: {reason}")
        return None

    def _opened(self, dtype: np.dtype) -> list[TokenFiles]:
        def opened() -> list[TokenFiles]:
            return [
                TokenFiles(self.folder / str(number), dtype, self.journal.documents, tokens)
                for number, tokens in enumerate(self.journal.tokens)
            ]

        try:
            return opened()
        except OSError as error:
            if not self._recorded:
                raise
            say(f"note: {self.folder} is begun anew: {error}")
            self.journal = self._empty(len(self.journal.tokens))
            self._recorded = False
            return opened()

    def bytes_read(self, place: Place, read: int = 0) -> int:
        return self._starts[place.file] + (read if place.line else 0)

    def add(
        self,
        texts: Sequence[DocumentTokens],
        place: Place,
        size: int,
        skipped: int = 0,
    ) -> None:
        """Append documents of every JSON key that end at `place`. size: bytes of text."""
        with self._writing():
            for file, (tokens, lengths) in zip(self._files, texts, strict=True):
                file.add(tokens, lengths)
        old = self.journal
        self.journal = replace(
            old,
            place=place,
            documents=old.documents + len(texts[0][1]),
            tokens=tuple(n + len(tokens) for n, (tokens, _) in zip(old.tokens, texts)),
            size=old.size + size,
            skipped=old.skipped + skipped,
        )
        if time.monotonic() >= self._due:
            self.record()

    def record(self) -> None:
        """Sync the token files, then replace the journal, from which the next run resumes."""
        with self._writing():
            for file in self._files:
                file.sync()
            aside = self.folder / f"{JOURNAL}.new"
            journal = {**asdict(self.journal), "inputs": self._checksum(self.journal.place)}
            write_text(aside, json.dumps(journal))
            os.replace(aside, self.folder / JOURNAL)
        self._recorded = True
        self._due = time.monotonic() + JOURNAL_SECONDS

    def finish(self, writers: Sequence[IndexedDatasetWriter], shuffle: bool) -> None:
        self.record()
        largest = max(
            tokens * file.dtype.itemsize for file, tokens in zip(self._files, self.journal.tokens)
        )
        for file, writer in zip(self._files, writers, strict=True):
            documents = in_order(*file.contents())
            if shuffle:
                documents = shuffled(*file.contents(), pile_count(largest), self.folder)
            for tokens, lengths in documents:
                writer.add_documents(tokens, lengths)

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        for file in self._files:
            file.close()
        if error is None or not self._recorded:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
        if isinstance(error, ValueError) and self._recorded:
            raise ValueError(
                f"{error}; run the same command again to resume after the documents in {self.folder}"
            ) from None
        if error is not None and self._recorded:
            say(f"interrupted; run the same command again to resume from {self.folder}")
