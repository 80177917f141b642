"""Tokenizers by their type's name, and the flags of a command that choose one."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from .gpt2_files import gpt2_package
from .gpt2_tokenizer import GPT2BPETokenizer
from .hugging_face_tokenizer import HuggingFaceTokenizer, has_tokenizer
from .null_tokenizer import NullTokenizer
from .sentencepiece_tokenizer import JapaneseSentencePiece, SentencePieceTokenizer
from .tiktoken import TikTokenizer

Tokenizer = (
    GPT2BPETokenizer | HuggingFaceTokenizer | SentencePieceTokenizer | TikTokenizer | NullTokenizer
)
TOKENIZERS: dict[str, type[Tokenizer]] = {
    **{
        kind.name: kind for kind in (GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer)
    },
    "GPTSentencePieceTokenizer": SentencePieceTokenizer,  # other names of Megatron-LM for it
    "Llama2Tokenizer": SentencePieceTokenizer,
    JapaneseSentencePiece.name: JapaneseSentencePiece,
    TikTokenizer.name: TikTokenizer,
    NullTokenizer.name: NullTokenizer,
}


class TokenizerFlags(NamedTuple):
    """Flags that name a tokenizer. vocab_size: --vocab-size, used by NullTokenizer."""

    tokenizer_type: str = GPT2BPETokenizer.name
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_num_special_tokens: int = 1000

    @classmethod
    def of(cls, owner: Any, vocab_size: int | None = None) -> TokenizerFlags:
        found = {name: getattr(owner, name, None) for name in cls._fields}
        values = {name: value for name, value in found.items() if value is not None}
        return cls(**{"vocab_size": vocab_size, **values})

    @property
    def named(self) -> bool:
        """True if the flags identify a tokenizer, not only its type."""
        return bool(
            self.vocab_file or self.tokenizer_model or self.tokenizer_type == NullTokenizer.name
        )

    def build(self) -> Tokenizer:
        """Build the tokenizer. Raises ValueError for an unknown type and missing or invalid files."""
        name = self.tokenizer_type
        if name not in TOKENIZERS:
            names = {known.lower(): known for known in TOKENIZERS}
            close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
            hint = (
                f"did you mean {names[close[0]]}?" if close else f"known: {', '.join(TOKENIZERS)}"
            )
            raise ValueError(f"--tokenizer-type {name}: unknown; {hint}")
        kind = TOKENIZERS[name]
        given = self._asdict()
        origin = ", as in Megatron-LM"
        if kind is GPT2BPETokenizer:
            origin = f"; GPT-2's own files come with {gpt2_package()}"
            if self.tokenizer_model:
                raise ValueError(
                    f"--tokenizer-model {self.tokenizer_model}, but --tokenizer-type is {name}: pass the type of that "
                    f"model, {HuggingFaceTokenizer.name} or {SentencePieceTokenizer.name}"
                )
        elif issubclass(kind, SentencePieceTokenizer):
            given["tokenizer_model"] = self.tokenizer_model or self.vocab_file
        for needed in kind.needs:
            if not given[needed]:
                raise ValueError(f"{name} needs --{needed.replace('_', '-')}{origin}")
        return kind(*(given[argument] for argument in (*kind.needs, *kind.options)))

    def words(self) -> str:
        return " ".join(
            f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
            for name, value in self._asdict().items()
            if value != self._field_defaults[name]
        )


def model_tokenizer(
    saved: Mapping[str, Any], carried: Path, size: int | None
) -> TokenizerFlags | None:
    """Return the tokenizer of the run that wrote a model, or one shipped with the model.

    saved: data flags of that run
    carried: directory with Hugging Face files
    """
    flags = TokenizerFlags.of(SimpleNamespace(**saved), size)
    if flags.named:
        return flags
    if has_tokenizer(carried):
        return TokenizerFlags(HuggingFaceTokenizer.name, tokenizer_model=str(carried))
    return None


def add_tokenizer_flags(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Add the tokenizer's flags. otherwise: the default of --vocab-file, in words"""
    add = parser.add_argument
    add(
        "--tokenizer-type",
        default=GPT2BPETokenizer.name,
        help=f"{', '.join(TOKENIZERS)} (default: %(default)s)",
    )
    add("--vocab-file", help=f"vocab.json of GPT2BPETokenizer; default: {otherwise}")
    add("--merge-file", help="merges.txt of the same vocabulary")
    add(
        "--tokenizer-model",
        help="folder of HuggingFaceTokenizer, .model file of SentencePiece, or .json file of TikTokenizer",
    )
    add(
        "--tiktoken-pattern",
        choices=("v1", "v2"),
        help="how TikTokenizer cuts a text into pieces (default: v2)",
    )
    add(
        "--tiktoken-num-special-tokens",
        type=int,
        help="tokens of TikTokenizer that stand for no text (default: 1000)",
    )
