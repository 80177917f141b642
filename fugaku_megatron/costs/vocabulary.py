"""Padded vocabulary, and a rank's rows of it."""

from __future__ import annotations

from ..config.fields import check
from ..config.model import ModelConfig
from ..config.run_config import RunConfig


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_vocab_size(model: ModelConfig, tp: int) -> int:
    """Return --padded-vocab-size, or the vocabulary padded to --make-vocab-size-divisible-by x tensor-parallel size."""
    if model.padded_vocab_size:
        check(
            model.padded_vocab_size % tp == 0,
            f"--padded-vocab-size {model.padded_vocab_size} is not divisible by "
            f"--tensor-model-parallel-size {tp}: change one of them",
        )
        return model.padded_vocab_size
    if model.vocab_size is None:
        raise ValueError(
            "the vocabulary size is unknown: pass --vocab-size, or the files of a tokenizer"
        )
    return round_up(model.vocab_size, model.make_vocab_size_divisible_by * tp)


def vocabulary_rows(run: RunConfig) -> int:
    return padded_vocab_size(run.model, run.tp) // run.tp


def vocabulary_padding(run: RunConfig) -> int:
    """Return the rows of the padded vocabulary that are no tokens."""
    rows = padded_vocab_size(run.model, run.tp)
    return rows - (run.model.vocab_size or rows)


def vocabulary_text(run: RunConfig) -> str:
    text = f"padded vocabulary {padded_vocab_size(run.model, run.tp)}"
    if vocabulary_padding(run) and not run.model.masks_padding:
        text += ", padding counted in the loss"
    return text
