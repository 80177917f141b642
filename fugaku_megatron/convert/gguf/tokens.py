"""A tokenizer in llama.cpp's form: its tokens, how a text is split, and what differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Kinds of tokens in llama.cpp.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER = 4
UNUSED = 5
BYTE = 6
BPE = 2  # sentencepiece_model.proto, TrainerSpec.ModelType
MODEL_TYPES = {1: "unigram", 3: "word", 4: "char"}  # the others
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # U+2581, SentencePiece's space
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
MISSING_SCORE = -10000.0

# How a text is split into pieces, as regular expressions.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN35 = (
    _CONTRACTIONS
    + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (("Split", _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST),)


@dataclass(frozen=True)
class Split:
    """A row in SPLITS. whole_pieces: do not merge pieces that are tokens (`ignore_merges`)."""

    name: str
    steps: tuple[tuple[str, str], ...]
    whole_pieces: bool = False


SPLITS = (
    Split("gpt-2", (("ByteLevel", ""),)),
    Split("gpt-2", (("Split", _GPT2),)),
    Split("smollm", (("Digits", ""), ("ByteLevel", ""))),
    Split("llama-bpe", _LLAMA3, whole_pieces=True),
    Split("dbrx", _LLAMA3),
    Split("qwen2", (("Split", _CONTRACTIONS + _WORDS + r"\p{N}" + _REST),)),
    Split("qwen35", (("Split", _QWEN35),)),
)

# Tokens that llama.cpp finds in a text by their names, whatever the file says of them.
SPECIAL_BY_NAME = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "<｜end▁of▁sentence｜> <end_of_utterance> <|eom_id|> <|fim_prefix|> <fim-prefix> <fim_prefix> "
    "<｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> "
    "<｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> "
    "<｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] "
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|> <|return|> <|call|> <|flush|> "
    "<|calls|> </s> [EOS] <eos> <turn|> <|tool_response> [e~[ <|channel|> <|message|> <|start|> "
    "<|constrain|>".split()
)


class Token(NamedTuple):
    """Token with GGUF's kind (NORMAL, CONTROL, ...) and SentencePiece's score."""

    text: str
    kind: int
    score: float


def unused(token: int) -> Token:
    return Token(f"[PAD{token}]", UNUSED, MISSING_SCORE)


Merges = list[tuple[str, ...]]


@dataclass
class GgufTokenizer:
    """Tokenizer for a GGUF file.

    tokens: text, kind and score by id
    special: "bos", "eos", "unk", "sep", "pad" or "mask" -> id
    template: one, or each by name
    differences: texts that llama.cpp tokenizes differently
    """

    algorithm: str
    split: str
    tokens: list[Token]
    merges: list[str] | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool | None = None
    special: dict[str, int] = field(default_factory=dict)
    template: str | dict[str, str] | None = None
    differences: list[str] = field(default_factory=list)

    def write(self, writer: Any) -> None:
        """Write the tokenizer's keys with a `GGUFWriter`."""
        texts, kinds, scores = zip(*self.tokens)
        writer.add_tokenizer_model(self.algorithm)
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(texts)
        writer.add_token_types(kinds)
        if self.algorithm == "llama":
            writer.add_token_scores(scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.add_space_prefix is not None:
            writer.add_add_space_prefix(self.add_space_prefix)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        for name, token in self.special.items():
            getattr(writer, f"add_{name}_token_id")(token)
        if isinstance(self.template, dict):
            rows = [{"name": name, "template": text} for name, text in self.template.items()]
            writer.add_chat_template(rows)
        elif self.template is not None:
            writer.add_chat_template(self.template)


def overlaps(texts: Iterable[str]) -> list[str]:
    """Return a difference if added tokens can overlap: the first in a text wins, or the longer one."""
    texts = [text for text in texts if text]
    ends: dict[str, str] = {}
    for text in texts:
        if len({*text}) > 1:
            for cut in range(1, len(text)):
                ends.setdefault(text[cut:], text)
    for text in texts:
        if len({*text}) == 1:
            continue
        for size in range(1, len(text)):
            other = ends.get(text[:size])
            if other is not None and other != text and text not in other:
                return [
                    f"added tokens {other!r:.40} and {text!r:.40} may overlap, and llama.cpp takes the longer one"
                ]
    return []
