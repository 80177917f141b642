"""Texts without bytes that are not UTF-8, and token ids within a vocabulary."""

from __future__ import annotations

import numpy as np

REMEDY = ": use the tokenizer that was passed to fugaku-megatron preprocess"
NULL_REMEDY = "pass a larger --vocab-size"
MODEL_REMEDY = "is this --tokenizer-model the model's?"


def check_tokens(tokens: np.ndarray, vocab_size: int, source: str, remedy: str = REMEDY) -> None:
    if len(tokens):
        _check(tokens.min(), tokens.max(), vocab_size, f"{source}: ", remedy)


def check_range(ids: list[int], vocab_size: int, remedy: str) -> None:
    if ids:
        _check(min(ids), max(ids), vocab_size, "", f": {remedy}")


def _check(lowest: int, highest: int, vocab_size: int, source: str, remedy: str) -> None:
    if not 0 <= lowest <= highest < vocab_size:
        wrong = lowest if lowest < 0 else highest
        if wrong == vocab_size and remedy in (REMEDY, f": {NULL_REMEDY}"):
            remedy += (
                f"; NullTokenizer of older versions of Megatron-LM adds token {wrong}, the end of a document, to its "
                f"--vocab-size: pass --vocab-size {wrong + 1} for its files"
            )
        raise ValueError(
            f"{source}token id {wrong} is outside the vocabulary of {vocab_size}{remedy}"
        )


def clean(text: str | bytes) -> str:
    """Replace bytes that are not UTF-8, and lone surrogates, by U+FFFD."""
    if isinstance(text, str):
        text = text.encode("utf-16-le", "surrogatepass")
        return text.decode("utf-16-le", "replace")
    return text.decode("utf-8", "replace")
