"""The tokenizer of a checkpoint's model: the named one, else the training run's, else the model's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.schema import Manifest
from ..config.fields import check
from ..tokenizers.tokenizer import (
    TOKENIZERS,
    Tokenizer,
    TokenizerFlags,
    identity,
    mismatch,
    model_tokenizer,
)


def choose_tokenizer(
    named: TokenizerFlags, saved: Mapping[str, Any], carried: Path, size: int, where: str
) -> Tokenizer:
    """Open the named tokenizer, else the training run's, else the model's.

    saved: data flags of that run
    carried: directory with Hugging Face files

    Raises ValueError if it is missing, unreadable, or has more tokens than the model.
    """
    flags = named._replace(vocab_size=size)
    if not flags.named:
        flags = model_tokenizer(saved, carried, size) or flags
    _check_passed_type(named, flags, where)
    check(
        flags.named,
        f"the tokenizer is unknown, the checkpoint in {where} was trained without one: pass "
        "--vocab-file and --merge-file, or --tokenizer-type and --tokenizer-model",
    )
    tokenizer = flags.build()
    given = (
        f"--tokenizer-model {flags.tokenizer_model}"
        if flags.tokenizer_model
        else f"--vocab-file {flags.vocab_file}"
    )
    check(
        tokenizer.vocab_size <= size,
        f"{given} has {tokenizer.vocab_size} tokens, the model of {where} {size}: "
        "pass the files it was trained with",
    )
    return tokenizer


def _check_passed_type(named: TokenizerFlags, flags: TokenizerFlags, where: str) -> None:
    passed = named.tokenizer_type
    if named.named or passed == TokenizerFlags().tokenizer_type:
        return
    if passed not in TOKENIZERS:
        named.build()
    comes = flags.named and TOKENIZERS.get(flags.tokenizer_type) is TOKENIZERS[passed]
    found = f"with {flags.tokenizer_type}" if flags.named else "without a tokenizer"
    check(
        comes,
        f"--tokenizer-type {passed} needs --tokenizer-model: {where} was trained {found}",
    )


def tokenizer_note(tokenizer: Tokenizer, manifest: Manifest) -> str:
    other = mismatch(identity(tokenizer), manifest["state"].get("tokenizer"))
    return (
        f"note: the model was trained with {other}: its tokens mean different texts"
        if other
        else ""
    )
