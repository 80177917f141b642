"""The tokenizer of a run, of which training needs the number of tokens alone, and whether data and checkpoint have the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..comm.agreement import on_root
from ..comm.base import Comm
from ..config.checks import check
from ..config.recipes import GPT2_VOCABULARY
from ..config.run_config import RunConfig
from ..data.data_path import parse_data_path
from ..data.tokenizer import build_tokenizer
from ..data.tokenizer_flags import TokenizerFlags, identity, mismatch, read_identity


def read_tokenizer(run: RunConfig, world: Comm) -> dict[str, Any] | None:
    """What tells the run's tokenizer from others (`data.tokenizer_flags.identity`); None where no flag names one.

    Collective: one rank reads the files. ValueError on every rank where that fails.
    """
    flags = TokenizerFlags.of(run.data, run.model.vocab_size)
    return on_root(world, lambda: identity(build_tokenizer(*flags))) if flags.named else None


def with_vocabulary(run: RunConfig, tokenizer: dict[str, Any] | None) -> RunConfig:
    """The run with its vocabulary size known: --vocab-size, the tokenizer's (`read_tokenizer`), or with --mock-data GPT-2's.

    Raises ValueError when none of them is known or the tokenizer has more tokens than --vocab-size.
    """
    data, vocab_size = run.data, run.model.vocab_size
    if tokenizer:
        size = tokenizer["vocab_size"]
        named = f"--tokenizer-model {data.tokenizer_model}" if data.tokenizer_model else f"--vocab-file {data.vocab_file}"
        check(vocab_size is None or vocab_size >= size, f"--vocab-size {vocab_size} is below the {size} tokens of {named}: pass at "
              f"least {size}, or leave it out")
    else:
        check(vocab_size is not None or data.mock_data, "the vocabulary size is unknown: pass --vocab-file and --merge-file, "
              "--tokenizer-type and --tokenizer-model, or --vocab-size")
        size = GPT2_VOCABULARY
    return replace(run, model=replace(run.model, vocab_size=vocab_size or size))


def tokenizer_notes(run: RunConfig, tokenizer: dict[str, Any] | None, saved: dict[str, Any] | None, world: Comm) -> list[str]:
    """Lines about data, or a checkpoint whose state has `saved`, that come from another tokenizer. Collective."""
    notes = on_root(world, lambda: [*_data_notes(run, tokenizer)])
    other = mismatch(tokenizer, saved)
    return notes + [f"note: the checkpoint in --load was trained with {other}: their tokens mean different texts"] * bool(other)


def _data_notes(run: RunConfig, tokenizer: dict[str, Any] | None) -> Iterable[str]:
    for prefix in dict.fromkeys(prefix for path in run.data.paths.values() for prefix in parse_data_path(path)[0]):
        if other := mismatch(tokenizer, read_identity(prefix)):
            yield f"note: {prefix} was tokenized with {other}: pass the tokenizer that preprocess has used"
