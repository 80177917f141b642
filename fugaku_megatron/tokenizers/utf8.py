"""Texts without bytes that are not UTF-8."""

from __future__ import annotations


def clean(text: str | bytes) -> str:
    """Replace bytes that are not UTF-8, and lone surrogates, by U+FFFD."""
    if isinstance(text, str):
        text = text.encode("utf-16-le", "surrogatepass")
        return text.decode("utf-16-le", "replace")
    return text.decode("utf-8", "replace")
