"""A run's tokenizer, and the resulting vocabulary size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..checkpoint.manifest import CARRIED, existing_iteration, own_checkpoint, read_head
from ..comm.agreement import everywhere, on_root
from ..comm.base import Comm
from ..config.data import DataConfig
from ..config.fields import check
from ..config.recipes import GPT2_VOCABULARY
from ..config.run_config import RunConfig
from ..data.data_flags import parse_data_path
from ..text.named_files import JsonObject
from ..tokenizers.tokenizer import (
    TokenizerFlags,
    identity,
    mismatch,
    model_tokenizer,
    read_identity,
)


def resolve_vocabulary(run: RunConfig, world: Comm) -> tuple[RunConfig, JsonObject | None]:
    """Return the run with its vocabulary size, and its tokenizer's identity. Collective."""
    with everywhere():
        tokenizer = read_tokenizer(run, world)
        return with_vocabulary(run, tokenizer), tokenizer


def read_tokenizer(run: RunConfig, world: Comm) -> JsonObject | None:
    """Return the run's tokenizer identity (`tokenizers.tokenizer.identity`).

    None without a tokenizer flag, if the run needs none or starts from a model without one.
    Collective: one rank reads the files. ValueError if that fails.
    """

    def read() -> JsonObject | None:
        needed = run.model.vocab_size is None or bool(run.data.marks_documents)
        if run.data.has_tokenizer or (needed and not run.data.mock_data):
            found = find_tokenizer(run)
            return identity(found.build()) if found else None
        return None

    return on_root(world, read)


def find_tokenizer(run: RunConfig) -> TokenizerFlags | None:
    """Return the flags' tokenizer, or else the model's that the run starts from."""
    flags = TokenizerFlags.of(run.data, run.model.vocab_size)
    if flags.named:
        return flags
    output = run.output
    starts = ((output.load, output.ckpt_step), (output.pretrained_checkpoint, None))
    for directory, iteration in starts:
        if directory and (found := _tokenizer_in(directory, iteration, run.model.vocab_size)):
            return found
    return None


def _tokenizer_in(directory: str, iteration: int | None, size: int | None) -> TokenizerFlags | None:
    own = own_checkpoint(directory, iteration)
    if own is None:
        places = (Path(directory) / CARRIED, Path(directory))
        return next(filter(None, (model_tokenizer({}, place, size) for place in places)), None)
    step = existing_iteration(own[0]) if own[1] is None else own[1]
    config = {} if step is None else read_head(own[0], step)["config"]
    size = size or config.get("model", {}).get("vocab_size")
    return model_tokenizer(config.get("data", {}), Path(own[0]) / CARRIED, size)


def with_vocabulary(run: RunConfig, tokenizer: JsonObject | None) -> RunConfig:
    """Return the run with its vocabulary size: --vocab-size, the tokenizer's, or GPT-2's with --mock-data.

    Raise ValueError if no size is known, if the tokenizer has more tokens than --vocab-size, or if flags need an unknown
    end-of-document token.
    """
    data = run.data
    if data.marks_documents:
        end_of_document(data, tokenizer)
    vocab_size = run.model.vocab_size
    if tokenizer:
        size = tokenizer["vocab_size"]
        named = "the tokenizer of the model that the run starts from"
        if data.tokenizer_model:
            named = f"--tokenizer-model {data.tokenizer_model}"
        elif data.vocab_file:
            named = f"--vocab-file {data.vocab_file}"
        check(
            vocab_size is None or vocab_size >= size,
            f"--vocab-size {vocab_size} is below the {size} tokens of {named}: pass at "
            f"least {size}, or leave it out",
        )
    else:
        check(
            vocab_size is not None or data.mock_data,
            "the vocabulary size is unknown: pass --vocab-file and --merge-file, "
            "--tokenizer-type and --tokenizer-model, --vocab-size, or a model with a tokenizer as "
            "--pretrained-checkpoint",
        )
        size = GPT2_VOCABULARY
    if vocab_size is not None:
        return run
    return replace(run, model=replace(run.model, vocab_size=size))


def end_of_document(data: DataConfig, tokenizer: JsonObject | None) -> int:
    """Return the token that ends a document. ValueError if no tokenizer names the token."""
    check(
        bool(tokenizer),
        f"{data.marks_documents}: the token that ends a document is not known: name the tokenizer of the data, "
        "with --vocab-file and --merge-file or with --tokenizer-type and --tokenizer-model",
    )
    eod = (tokenizer or {}).get("eod")
    if eod is None:
        raise ValueError(
            f"{data.marks_documents}: --tokenizer-type {data.tokenizer_type} has no token that ends a document: leave "
            "it out, or pass another tokenizer"
        )
    return int(eod)


def tokenizer_notes(
    run: RunConfig, tokenizer: JsonObject | None, saved: JsonObject | None, world: Comm
) -> list[str]:
    """Return lines about data and a checkpoint with another tokenizer. Collective."""
    notes = on_root(world, lambda: [*_data_notes(run, tokenizer)])
    if other := mismatch(tokenizer, saved):
        notes.append(
            f"note: the checkpoint in --load was trained with {other}: their tokens mean different texts"
        )
    return notes


def _data_notes(run: RunConfig, tokenizer: JsonObject | None) -> Iterable[str]:
    prefixes = (prefix for path in run.data.paths.values() for prefix in parse_data_path(path)[0])
    for prefix in dict.fromkeys(prefixes):
        if other := mismatch(tokenizer, read_identity(prefix)):
            yield f"note: {prefix} was tokenized with {other}: pass the tokenizer that preprocess has used"
