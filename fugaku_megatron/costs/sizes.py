"""Sizes of the vocabulary and of a micro-batch's activations on one rank.

Between matmuls every rank has whole activations (s, b, h), or with --sequence-parallel 1/t of the sequence (Korthikanti et al.
2022, arXiv:2205.05198). Legend: as in `layers`.
"""

from __future__ import annotations

from ..config.fields import check
from ..config.layout import group_copies
from ..config.model import ModelConfig
from ..config.parallel import A2A
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


FP32_BYTES = 4
BF16_BYTES = 2


def qkv_bytes(run: RunConfig, cp_comm_type: str | None = None) -> int:
    """Return the bytes for this rank's queries, keys and values, copied groups included."""
    model = run.model
    groups = run.model.query_groups // run.tp
    cp = run.cp
    copies = 1
    if cp > 1 and (cp_comm_type or run.typical_cp_comm_type) == A2A:
        copies = group_copies(groups, cp)
    queries = model.num_attention_heads // run.tp * model.kv_channels
    width = queries + groups * copies * model.key_value_size
    return run.tokens_per_microbatch * width * run.element_bytes


def context_bytes(run: RunConfig) -> int:
    return run.tokens_per_microbatch * run.model.context_width * run.element_bytes // run.tp
