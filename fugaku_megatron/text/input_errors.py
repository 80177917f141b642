"""Errors of input files of preprocess."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN = "copy or download it again"


class NeverSkipped(ValueError):
    """Error that --skip-invalid does not skip, because every document would have it."""


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn errors from damaged or truncated input into ValueError; other errors pass."""
    try:
        yield
    except Exception as error:
        is_reader_error = type(error).__module__.split(".")[0] in ("pyarrow", "zstandard")
        if not is_reader_error and not isinstance(
            error, OSError | EOFError | UnicodeDecodeError | zlib.error
        ):
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--input {path}: was cut off or is damaged ({reason:.150}): {AGAIN}"
        ) from None
