"""Read tokenizers in llama.cpp's form, and find differences.

llama.cpp implements byte-level BPE ("gpt2") and SentencePiece BPE ("llama"), without normalization
and with named pre-tokenizers. A tokenizer that differs for most texts is refused; for a few texts
the user may allow it. The reference is transformers, or else SentencePiece. Sources: llama.cpp's
src/llama-vocab.cpp and conversion/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config.fields import check
from ...text.named_files import JsonObject, read_text
from ...text.optional_packages import optional_package
from ...tokenizers.byte_level_bpe import bytes_to_unicode
from ...tokenizers.hugging_face import (
    CHAT_TEMPLATE,
    PIECES,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    HuggingFaceTokenizer,
    has_tokenizer,
)
from ..hugging_face.tensor_directory import read_json
from .sentencepiece import check_bytes, halves, of_pieces
from .tokens import (
    BYTE,
    BYTE_PIECES,
    CONTROL,
    NORMAL,
    SPACE,
    SPECIAL_BY_NAME,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER,
    GgufTokenizer,
    Merges,
    Split,
    Token,
    overlaps,
    unused,
)

INEXACT = "--gguf-inexact-tokenizer"
NFC = {"type": "NFC"}

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
    others = (TOKENIZER_JSON, TOKENIZER_CONFIG, "vocab.json", "vocab.txt")
    if (folder / PIECES).is_file() and not any((folder / name).is_file() for name in others):
        found = of_pieces(folder / PIECES)
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
    differences = _unknown_fields(folder)
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
    normalizer = parts["normalizer"]
    steps = _normalizer_steps(normalizer)
    check(
        all(step == NFC for step in steps),
        f"{where} normalizes a text by {json.dumps(normalizer)[:150]}, and llama.cpp does not: pass --to-hf",
    )
    differences = (
        ["it normalizes a text to NFC (normalizer), and llama.cpp does not"] if steps else []
    )
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
    check_bytes(tokens, where)
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
        for pair in halves(text):
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
    return [*found[:3], *overlaps([*groups[False], *groups[True]])]


def _unknown_fields(folder: Path) -> list[str]:
    found = []
    if (folder / TOKENIZER_CONFIG).is_file():
        for name in read_json(folder / TOKENIZER_CONFIG):
            known = name in KNOWN_SWITCHES or re.fullmatch(r"(?!add_)\w+_token(_id|s)?", name)
            if not known:
                found.append(f"{TOKENIZER_CONFIG} has the unknown switch {name!r:.60}")
    if (folder / TOKENIZER_JSON).is_file():
        tokenizers = optional_package("tokenizers", "demo", "--to-gguf")
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
