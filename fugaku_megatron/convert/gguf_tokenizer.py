"""Read tokenizers in llama.cpp's form, and find differences.

llama.cpp implements byte-level BPE ("gpt2") and SentencePiece BPE ("llama"), without normalization
and with named pre-tokenizers. A tokenizer that differs for most texts is refused; for a few texts
the user may allow it. The reference is transformers, or else SentencePiece. Sources: llama.cpp's
src/llama-vocab.cpp and conversion/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..config.fields import check
from ..data.formats import library
from ..data.gpt2_tokenizer import bytes_to_unicode
from ..data.library_tokenizers import (
    CHAT_TEMPLATE,
    PIECES,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    HuggingFaceTokenizer,
    has_tokenizer,
    load_pieces,
)
from ..text.named_files import JsonObject, read_text
from .tensor_directory import read_json

INEXACT = "--gguf-inexact-tokenizer"
# kinds of tokens in llama.cpp
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
NFC = {"type": "NFC"}

# How a text is split ---------------------------------------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN35 = (
    _CONTRACTIONS
    + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Split:
    """A row in SPLITS. whole_pieces: do not merge pieces that are tokens (`ignore_merges`)."""

    name: str
    steps: tuple[tuple[str, str], ...]
    whole_pieces: bool = False


_LLAMA3 = (("Split", _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST),)
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

# Switches of tokenizer_config.json that transformers applies or that change no token. Others are a difference.
SWITCHES = {
    "read by transformers, which makes the tokenizer that is compared": (
        "add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens "
        "backend bos_token cls_token do_lower_case eos_token extra_special_tokens legacy mask_token "
        "model_specific_special_tokens pad_token sep_token split_special_tokens strip_accents "
        "tokenize_chinese_chars tokenizer_class unk_token fix_mistral_regex"
    ),
    "written for llama.cpp": "chat_template",
    "of batches": (
        "max_length model_max_length pad_to_multiple_of pad_token_type_id padding padding_side stride "
        "truncation truncation_side truncation_strategy model_input_names return_token_type_ids"
    ),
    "of decoding": "clean_up_tokenization_spaces errors spaces_between_special_tokens",
    "of tokenizers in Python, which are refused": "sp_model_kwargs from_slow use_fast",
    "about files and programs": (
        "_commit_hash _from_auto auto_map do_basic_tokenize is_local local_files_only merges_file name_or_path "
        "never_split processor_class special_tokens_map_file tokenizer_file transformers_version "
        "trust_remote_code vocab_file use_default_system_prompt response_schema"
    ),
}
KNOWN_SWITCHES = frozenset(name for names in SWITCHES.values() for name in names.split())
# Fields that older versions of the package tokenizers wrote, and that it reads as others.
OLDER_FIELDS = frozenset({"str_rep", "add_prefix_space", "max_input_chars_per_word"})


class Token(NamedTuple):
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


def read_tokenizer(
    folder: Path | None, rows: int, chat_template: str | None, inexact: bool
) -> GgufTokenizer:
    """Read a folder's tokenizer for llama.cpp.

    rows: embedding rows
    chat_template: replaces the folder's
    inexact: allow differences in a few texts

    Raise ValueError for a part that llama.cpp computes differently.
    """
    if folder is None or not has_tokenizer(folder):
        raise ValueError(
            f"--to-gguf needs the tokenizer, and {folder or 'the checkpoint'} has neither {TOKENIZER_JSON} nor {PIECES}: "
            "pass its folder with --hf-files"
        )
    if _only_pieces(folder):
        found = _of_pieces(folder / PIECES)
        template = folder / CHAT_TEMPLATE
        if template.is_file():
            found.template = read_text(template, "--hf-files")
    else:
        found = _of_library(folder)
    where = f"--to-gguf: the tokenizer in {folder}"
    check(
        len(found.tokens) <= rows,
        f"{where} has {len(found.tokens)} tokens, and the model {rows}: pass the model's with --hf-files",
    )
    for token in range(len(found.tokens), rows):
        found.tokens.append(unused(token))
    _check_texts(found, where)
    if chat_template is not None and isinstance(found.template, dict):
        found.template = {**found.template, "default": chat_template}
    elif chat_template is not None:
        found.template = chat_template
    if "eos" not in found.special:
        default = {"gpt2": 11, "llama": 2}[found.algorithm]
        found.differences.append(
            f"it has no eos_token, and llama.cpp then takes token {default} as the end of a text"
        )
    if "bos" not in found.special and "bos_token" in str(found.template):
        found.differences.append(
            "its chat template asks for bos_token, which it does not have, and llama.cpp takes another"
        )
    if found.differences and not inexact:
        raise ValueError(
            f"{where} is not quite what llama.cpp computes: {'; '.join(found.differences)}: pass "
            f"{INEXACT} to write it"
        )
    return found


def _only_pieces(folder: Path) -> bool:
    others = (TOKENIZER_JSON, TOKENIZER_CONFIG, "vocab.json", "vocab.txt")
    return (folder / PIECES).is_file() and not any((folder / name).is_file() for name in others)


def _check_texts(found: GgufTokenizer, where: str) -> None:
    """Raise ValueError for duplicate texts, which make llama.cpp abort; note texts with a built-in
    meaning.
    """
    seen: dict[str, int] = {}
    for token, (text, kind, _) in enumerate(found.tokens):
        if text == "":
            raise ValueError(
                f"{where}: the text of token {token} is empty, which llama.cpp replaces"
            )
        if text in seen:
            raise ValueError(
                f"{where}: tokens {seen[text]} and {token} are both {text!r:.60}, which llama.cpp cannot load"
            )
        seen[text] = token
        if kind == NORMAL and text in SPECIAL_BY_NAME:
            found.differences.append(
                f"token {token}, {text!r}, is ordinary text, and llama.cpp takes it as a special token"
            )


# SentencePiece ---------------------------------------------------------------------------------------------------------------


def _of_pieces(path: Path) -> GgufTokenizer:
    where = f"--to-gguf: {path}"
    try:
        processor, contents = load_pieces(path, "--to-gguf")
    except ValueError as error:
        raise ValueError(str(error).replace("--tokenizer-model", "--to-gguf:", 1)) from None
    protos: Any = library("sentencepiece.sentencepiece_model_pb2", "sentencepiece", "--to-gguf")
    proto = protos.ModelProto.FromString(contents)
    trainer = proto.trainer_spec
    normalizer = proto.normalizer_spec
    name = MODEL_TYPES.get(trainer.model_type, f"type {trainer.model_type}")
    check(
        trainer.model_type == BPE,
        f"{where} is a SentencePiece model of type {name}, and llama.cpp merges pieces as type bpe does: "
        "train the tokenizer with --model_type=bpe, or pass --to-hf",
    )
    kinds = {2: UNKNOWN, 3: CONTROL, 4: USER, 5: UNUSED, 6: BYTE}  # of sentencepiece_model.proto
    tokens = [
        Token(piece.piece, kinds.get(piece.type, NORMAL), piece.score) for piece in proto.pieces
    ]
    _check_bytes(tokens, where)
    check(
        normalizer.escape_whitespaces and not trainer.treat_whitespace_as_suffix,
        f"{where} does not put {SPACE} before a word (escape_whitespaces, treat_whitespace_as_suffix), and "
        "llama.cpp does",
    )
    check(
        all(token.kind != UNUSED for token in tokens),
        f"{where} has unused pieces, which llama.cpp uses: pass --to-hf",
    )
    check(
        not normalizer.precompiled_charsmap,
        f"{where} normalizes a text (normalization_rule_name {normalizer.name}), line feeds included, and llama.cpp "
        "does not: train the tokenizer with --normalization_rule_name=identity, or pass --to-hf",
    )
    differences = []
    if normalizer.remove_extra_whitespaces:
        differences.append(
            "it removes spaces at the ends of a text and after a space (remove_extra_whitespaces), and llama.cpp does not"
        )
    if proto.denormalizer_spec.precompiled_charsmap:
        differences.append("it changes a decoded text (denormalizer_spec), and llama.cpp does not")
    added = [token.text for token in tokens if token.kind == USER]
    if added and normalizer.add_dummy_prefix:
        differences.append(
            f"after a user-defined piece such as {added[0]!r} it puts no space (add_dummy_prefix), and llama.cpp does"
        )
    spaced = [text for text in added if SPACE in text or " " in text]
    if spaced:
        differences.append(
            f"its user-defined piece {spaced[0]!r} has a space, which llama.cpp does not find in a text"
        )
    differences += _overlaps(added)
    differences += _reached(tokens)
    ids = {key: getattr(processor, f"{key}_id")() for key in ("bos", "eos", "unk", "pad")}
    special = {key: token for key, token in ids.items() if token >= 0}
    return GgufTokenizer(
        "llama",
        "default",
        tokens,
        add_space_prefix=normalizer.add_dummy_prefix,
        special=special,
        differences=differences,
    )


def _check_bytes(tokens: list[Token], where: str) -> None:
    """Raise ValueError unless every byte is a piece: llama.cpp fails at other unknown characters."""
    found = {token.text for token in tokens if token.kind == BYTE}
    missing = [text for text in BYTE_PIECES if text not in found]
    check(
        not missing,
        f"{where} has no piece for {len(missing)} of the 256 bytes (byte_fallback), and llama.cpp needs them: "
        "train the tokenizer with --byte_fallback, or pass --to-hf",
    )


def _halves(text: str) -> Iterator[tuple[str, str]]:
    return ((text[:cut], text[cut:]) for cut in range(1, len(text)))


def _reached(tokens: list[Token]) -> list[str]:
    """Return a difference if llama.cpp merges to a control piece or a byte."""
    normal = {token.text for token in tokens if token.kind in (NORMAL, USER)}
    for text, kind, _ in tokens:
        if kind not in (CONTROL, BYTE, UNKNOWN):
            continue
        for pair in _halves(text):
            if all(len(half) == 1 or half in normal for half in pair):
                return [f"its pieces merge to {text!r} in llama.cpp, and not in SentencePiece"]
    return []


# transformers and the package tokenizers -----------------------------------------------------------------------------------


def _of_library(folder: Path) -> GgufTokenizer:
    where = f"--to-gguf: the tokenizer in {folder}"
    try:
        ours = HuggingFaceTokenizer(folder)
    except ValueError as error:
        raise ValueError(str(error).replace("--tokenizer-model", "--to-gguf:", 1)) from None
    backend: Any = getattr(ours.library, "backend_tokenizer", None)
    check(
        backend is not None,
        f"{where} is a {type(ours.library).__name__}, which is not one of the package tokenizers: pass --to-hf",
    )
    parts = json.loads(backend.to_str())
    differences = _unknown_fields(folder, where)
    model = parts["model"]
    kind = model.get("type")
    check(
        kind == "BPE",
        f"{where} is of type {kind}, and llama.cpp computes BPE: pass --to-hf, or --hf-files with a tokenizer of BPE",
    )
    check(model.get("dropout") in (None, 0), f"{where} drops merges at random (dropout)")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        check(
            not model.get(name), f"{where} has {name} {model.get(name)!r}, which llama.cpp does not"
        )
    check(
        not ours.library.split_special_tokens,
        f"{where} has split_special_tokens true, and llama.cpp reads special tokens in a text",
    )
    merges = [
        tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]
    ]
    check(
        len({*merges}) == len(merges),
        f"{where} has a merge twice, of which llama.cpp takes the first",
    )
    if model.get("byte_fallback"):
        found = _of_fallback(parts, merges, where)
    else:
        found = _of_byte_level(parts, merges, where)
    found.differences = [*differences, *found.differences, *_added_differences(parts)]
    _add_around(found, ours.library, where)
    for key in ("bos", "eos", "unk", "sep", "pad", "mask"):
        token = getattr(ours.library, f"{key}_token_id", None)
        if token is not None:
            found.special[key] = token
    found.template = getattr(ours.library, "chat_template", None)
    _add_eos_of_config(found, folder)
    return found


def _add_eos_of_config(found: GgufTokenizer, folder: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        if "eos" in found.special or not (folder / name).is_file():
            continue
        token = read_json(folder / name).get("eos_token_id")
        if isinstance(token, list) and token:
            token = token[0]
        if isinstance(token, int) and 0 <= token < len(found.tokens):
            found.special["eos"] = token


def _add_around(found: GgufTokenizer, theirs: Any, where: str) -> None:
    bare = theirs("a", add_special_tokens=False).input_ids
    whole = theirs("a").input_ids
    bos = theirs.bos_token_id
    eos = theirs.eos_token_id
    for before in ([], [bos]):
        for after in ([], [eos]):
            if whole == [*before, *bare, *after]:
                found.add_bos = bool(before)
                found.add_eos = bool(after)
                return
    raise ValueError(
        f"{where} puts tokens around a text that are not bos before it and eos after it (post_processor), and "
        "llama.cpp knows no others"
    )


def _tokens(
    parts: JsonObject, kinds: Mapping[str, int], scores: Mapping[str, float]
) -> list[Token]:
    """Return all tokens in id order; a missing id is an unused token."""
    tokens = {
        token: Token(text, kinds.get(text, NORMAL), scores.get(text, 0.0))
        for text, token in parts["model"]["vocab"].items()
    }
    for added in parts["added_tokens"]:
        _, kind, score = tokens.get(added["id"], Token("", NORMAL, -1000.0))
        if kind != UNKNOWN:
            kind = CONTROL if added["special"] else USER
        tokens[added["id"]] = Token(added["content"], kind, score)
    return [tokens.get(token) or unused(token) for token in range(max(tokens) + 1)]


def _of_byte_level(parts: JsonObject, merges: Merges, where: str) -> GgufTokenizer:
    vocabulary = parts["model"]["vocab"]
    missing = [byte for byte, letter in enumerate(bytes_to_unicode()) if letter not in vocabulary]
    check(
        not missing,
        f"{where} has no token for {len(missing)} of the 256 bytes, and llama.cpp leaves such bytes out: pass --to-hf",
    )
    differences = _normalizer_differences(parts["normalizer"], where)
    split = _split(parts, where)
    return GgufTokenizer(
        "gpt2",
        split.name,
        _tokens(parts, {}, {}),
        merges=[" ".join(pair) for pair in merges],
        differences=differences,
    )


def _normalizer_steps(normalizer: JsonObject | None) -> list[Any]:
    if normalizer is None:
        return []
    return normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]


def _normalizer_differences(normalizer: JsonObject | None, where: str) -> list[str]:
    """Return NFC's difference, in few texts. Raise ValueError for other normalizers."""
    steps = _normalizer_steps(normalizer)
    check(
        all(step == NFC for step in steps),
        f"{where} normalizes a text by {json.dumps(normalizer)[:150]}, and llama.cpp does not: pass --to-hf",
    )
    return ["it normalizes a text to NFC (normalizer), and llama.cpp does not"] if steps else []


def _split(parts: JsonObject, where: str) -> Split:
    before = parts["pre_tokenizer"] or {}
    steps = before.get("pretokenizers") or [before]
    refused = ValueError(
        f"{where} splits a text by {json.dumps(before)[:150]} (pre_tokenizer), which has no name in llama.cpp that "
        "this program knows: pass --to-hf, and llama.cpp's convert_hf_to_gguf.py may know it"
    )
    found = []
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            check(
                not step.get("add_prefix_space"),
                f"{where} puts a space before a text (pre_tokenizer ByteLevel, add_prefix_space), and llama.cpp does not "
                "for a byte-level tokenizer: pass --to-hf",
            )
            if step.get("use_regex", True):
                found.append(("ByteLevel", ""))
        elif kind == "Digits" and step.get("individual_digits"):
            found.append(("Digits", ""))
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            found.append(("Split", (step.get("pattern") or {}).get("Regex", "")))
        else:
            raise refused
    whole_pieces = bool(parts["model"].get("ignore_merges"))
    rows = [row for row in SPLITS if row.steps == tuple(found)]
    if not rows or steps[-1].get("type") != "ByteLevel":
        raise refused
    for row in rows:
        if row.whole_pieces == whole_pieces:
            return row
    raise ValueError(
        f"{where} has ignore_merges {str(whole_pieces).lower()}, and llama.cpp's split {rows[0].name} has not: pass --to-hf"
    )


# How a space becomes part of a token: (normalizer, pre_tokenizer) without fields that do not matter -> add_space_prefix, difference.
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}
_BEGINS = f"it puts no space before a text that begins with a space or {SPACE} (pre_tokenizer Metaspace), and llama.cpp does"
_FIRST = "and after a special token (prepend_scheme first)"


def _metaspace(scheme: str) -> JsonObject:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}


def _sequence(*steps: JsonObject) -> JsonObject:
    return {"type": "Sequence", "normalizers": list(steps)}


SPACES: tuple[tuple[Any, Any, bool, str | None], ...] = (
    (_sequence(_PREPEND, _REPLACE), None, True, None),
    (_sequence(_REPLACE), None, False, None),
    (_REPLACE, None, False, None),
    (None, _metaspace("never"), False, None),
    (None, _metaspace("always"), True, _BEGINS),
    (None, _metaspace("first"), True, f"{_BEGINS}; {_FIRST}"),
)


def _of_fallback(parts: JsonObject, merges: Merges, where: str) -> GgufTokenizer:
    model = parts["model"]
    check(
        not model.get("ignore_merges"), f"{where} has ignore_merges true, which llama.cpp has not"
    )
    row = next(
        (row for row in SPACES if row[:2] == (parts["normalizer"], parts["pre_tokenizer"])), None
    )
    if row is None:
        both = {name: parts[name] for name in ("normalizer", "pre_tokenizer")}
        raise ValueError(
            f"{where} prepares a text by {json.dumps(both)[:250]}, which llama.cpp does not for a BPE with byte_fallback: "
            "pass --to-hf"
        )
    ranks: dict[str, float] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), -float(rank))
    vocabulary = model["vocab"]
    kinds = {text: BYTE for text in BYTE_PIECES if text in vocabulary}
    if model.get("unk_token") is not None:
        kinds[model["unk_token"]] = UNKNOWN
    tokens = _tokens(parts, kinds, {text: ranks.get(text, -1e6) for text in vocabulary})
    _check_bytes(tokens, where)
    differences = [row[3]] if row[3] else []
    differences += _merge_differences(tokens, merges, ranks)
    return GgufTokenizer(
        "llama", "default", tokens, add_space_prefix=row[2], differences=differences
    )


def _merge_differences(
    tokens: list[Token],
    merges: Merges,
    ranks: Mapping[str, float],
) -> list[str]:
    """Return a difference if merges are limited to a list; llama.cpp merges any pair that forms a
    token.
    """
    listed = {*merges}
    texts = {token.text for token in tokens}
    for text, kind, _ in tokens:
        if kind in (USER, UNUSED):
            continue
        for pair in _halves(text):
            possible = all(len(half) == 1 or half in texts for half in pair)
            if possible and pair not in listed:
                return [
                    f"it does not merge {pair[0]!r} and {pair[1]!r} (merges), and llama.cpp makes {text!r} of them"
                ]
    order = ["".join(pair) for pair in merges]
    for rank, text in enumerate(order):
        if rank and order[rank - 1] != text and ranks[text] != -float(rank):
            return [
                f"its merges to {text!r} are not next to each other, and llama.cpp merges by token"
            ]
    return []


def _added_differences(parts: JsonObject) -> list[str]:
    """Return differences in added tokens, which llama.cpp searches longest first."""
    found = []
    normalizes = any(step != NFC for step in _normalizer_steps(parts["normalizer"]))
    groups: dict[bool, list[str]] = {False: [], True: []}
    for added in parts["added_tokens"]:
        text = added["content"]
        for name in ("single_word", "lstrip", "rstrip"):
            if added.get(name):
                found.append(f"added token {text!r:.40} has {name}, which llama.cpp does not know")
        if added.get("normalized") and normalizes:
            found.append(
                f"added token {text!r:.40} is normalized before it is sought, and not in llama.cpp"
            )
        groups[bool(added.get("normalized"))].append(text)
    for text in groups[True]:
        inner = next((other for other in groups[False] if other in text), None)
        if inner is not None and inner != text:
            found.append(
                f"added token {inner!r:.40} is sought before {text!r:.40}, which contains it"
            )
    return [*found[:3], *_overlaps([*groups[False], *groups[True]])]


def _overlaps(texts: Iterable[str]) -> list[str]:
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


def _unknown_fields(folder: Path, where: str) -> list[str]:
    found = []
    if (folder / TOKENIZER_CONFIG).is_file():
        for name in read_json(folder / TOKENIZER_CONFIG):
            known = name in KNOWN_SWITCHES or re.fullmatch(r"(?!add_)\w+_token(_id|s)?", name)
            if not known:
                found.append(f"{TOKENIZER_CONFIG} has the unknown switch {name!r:.60}")
    if (folder / TOKENIZER_JSON).is_file():
        tokenizers = library("tokenizers", "demo", "--to-gguf")
        raw = read_json(folder / TOKENIZER_JSON)
        again = json.loads(tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_JSON)).to_str())
        found += [
            f"{TOKENIZER_JSON} has the unknown field {path}" for path in _lost(raw, again, "")
        ]
    return found[:3]


def _lost(raw: Any, again: Any, path: str) -> list[str]:
    if path in (".model.vocab", ".model.merges"):
        return []
    if isinstance(raw, dict) and isinstance(again, dict):
        found = []
        for name, value in raw.items():
            if name not in again:
                if name not in OLDER_FIELDS and value is not None:
                    found.append(f"{path}.{name}".lstrip(".")[:60])
                continue
            found += _lost(value, again[name], f"{path}.{name}")
        return found
    if isinstance(raw, list) and isinstance(again, list) and len(raw) == len(again):
        return [lost for one, other in zip(raw, again) for lost in _lost(one, other, path)]
    return []
