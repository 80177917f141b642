"""The tokenizer of a loaded model: the one that the command line names, or else the one it was trained with or came with."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..checkpoint.manifest import CARRIED
from ..data.library_tokenizers import HuggingFaceTokenizer, has_tokenizer
from ..data.tokenizer import Tokenizer, build_tokenizer
from ..data.tokenizer_flags import TokenizerFlags, add_tokenizer_flags, identity, mismatch
from ..run.checks import check


def add_model_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a tokenizer, for commands with a --load."""
    add_tokenizer_flags(parser, "the tokenizer that the model of --load was trained with")


def open_tokenizer(options: argparse.Namespace, manifest: dict[str, Any]) -> Tokenizer:
    """The tokenizer of parsed flags, or where they name none, the checkpoint's: of the run that wrote it, or one that came along.

    Raises ValueError when neither names one, for unreadable files, and for more tokens than the model has.
    """
    saved, size = manifest["config"].get("data", {}), manifest["config"]["model"]["vocab_size"]
    flags = TokenizerFlags.of(options, size)
    if not flags.named:
        flags = TokenizerFlags.of(SimpleNamespace(**saved), size)
    if not flags.named and has_tokenizer(Path(options.load) / CARRIED):
        flags = TokenizerFlags(HuggingFaceTokenizer.name, tokenizer_model=str(Path(options.load) / CARRIED))
    check(flags.named, f"the tokenizer is unknown, the checkpoint in --load {options.load} was trained without one: give "
          "--vocab-file and --merge-file, or --tokenizer-type and --tokenizer-model")
    tokenizer = build_tokenizer(*flags)
    named = f"--tokenizer-model {flags.tokenizer_model}" if flags.tokenizer_model else f"--vocab-file {flags.vocab_file}"
    check(tokenizer.vocab_size <= size, f"{named} has {tokenizer.vocab_size} tokens, the model of --load {options.load} {size}: "
          "give the files it was trained with")
    return tokenizer


def tokenizer_note(tokenizer: Tokenizer, manifest: dict[str, Any]) -> str:
    """A line where the checkpoint was trained with another tokenizer; "" otherwise."""
    other = mismatch(identity(tokenizer), manifest["state"].get("tokenizer"))
    return f"note: the model was trained with {other}: its tokens mean different texts" if other else ""
