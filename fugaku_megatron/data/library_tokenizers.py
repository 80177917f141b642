"""Tokenizers from other libraries under Megatron-LM's names.

Token ids, vocabulary size and end-of-document id equal Megatron-core's. The libraries are optional
and imported on use. Code in a tokenizer's folder is never run.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import regex

from ..text.named_files import unreadable
from .optional_packages import optional_package

TOKENIZER_CONFIG = "tokenizer_config.json"
CONFIG = "config.json"  # of the model
TOKENIZER_JSON = "tokenizer.json"
PIECES = "tokenizer.model"
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # the folder of the templates that have names
HUGGING_FACE_FILES = (TOKENIZER_CONFIG, TOKENIZER_JSON, PIECES, "vocab.json", "vocab.txt")
OTHER_FILES = (  # which transformers reads as well
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    CHAT_TEMPLATE,
)
PROBE = "a A 0 . é я 日本語"  # a text of which every vocabulary has a character
MODEL_REMEDY = "is this --tokenizer-model the model's?"
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def clean(text: str | bytes) -> str:
    """Replace bytes that are not UTF-8, and lone surrogates, by U+FFFD."""
    if isinstance(text, str):
        text = text.encode("utf-16-le", "surrogatepass")
        return text.decode("utf-16-le", "replace")
    return text.decode("utf-8", "replace")


def pieces_kind(path: Path) -> str | None:
    """Detect the program that wrote a tokenizer.model; None if unknown."""
    with open(path, "rb") as file:
        begin = file.read(512)
    if begin.startswith(b"\n"):  # the tag of the first field of a SentencePiece model, a piece
        return "SentencePiece"
    return "tiktoken" if TIKTOKEN_LINE.match(begin) else None


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in HUGGING_FACE_FILES)


def _auto_tokenizer(folder: Path, where: str) -> Any:
    """Load `AutoTokenizer` without running the folder's code."""
    transformers = optional_package(
        "transformers", "huggingface", "--tokenizer-type HuggingFaceTokenizer"
    )
    _check_files(folder, where)
    code = _named_code(folder)
    verbosity = transformers.logging.get_verbosity()
    if code:
        transformers.logging.set_verbosity_error()  # the refusal below says it in one line
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            os.fspath(folder), local_files_only=True, trust_remote_code=False
        )
        # Documents are longer than a model's sequence, and that is not a warning.
        found.model_max_length = sys.maxsize
        no_tokens = not found(PROBE, add_special_tokens=False).input_ids
    except Exception as error:  # depends on what is wrong with the files
        if code and "trust_remote_code" in str(error):
            raise ValueError(
                f"{where}: its auto_map asks for {code}, code in the folder, which is never run, and "
                "transformers has no class of its own for it: save the tokenizer as tokenizer.json, "
                "and remove auto_map"
            ) from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{where}: cannot be read as a tokenizer ({reason:.200})") from None
    finally:
        transformers.logging.set_verbosity(verbosity)
    if no_tokens:
        raise ValueError(
            f"{where}: {type(found).__name__} makes no token of the text {PROBE!r}: its vocabulary is "
            f"missing or of another kind: pass a folder with {TOKENIZER_JSON}"
        )
    return found


def _check_files(folder: Path, where: str) -> None:
    for name in (*HUGGING_FACE_FILES, *OTHER_FILES):
        if os.path.lexists(folder / name):
            _check_readable(folder, name, where)
            if name.endswith(".json"):
                _check_json(folder / name, where)
    config = folder / CONFIG  # transformers reads it as well
    if os.path.lexists(config) and not config.is_file():
        raise ValueError(f"{where}: {CONFIG} cannot be read ({unreadable(config)})")
    for path in sorted((folder / TEMPLATES).glob("*")):
        _check_readable(folder, f"{TEMPLATES}/{path.name}", where)
    model = folder / PIECES
    if model.is_file() and not (folder / TOKENIZER_JSON).is_file():
        kind = pieces_kind(model)
        if kind == "SentencePiece":
            load_pieces(model, "--tokenizer-type HuggingFaceTokenizer")
        if kind is None:
            raise ValueError(
                f"{where}: {PIECES} is neither a SentencePiece model nor a file of tiktoken: copy it "
                f"again, or pass a folder with {TOKENIZER_JSON}"
            )


def _check_readable(folder: Path, name: str, where: str) -> None:
    if reason := unreadable(folder / name):
        raise ValueError(f"{where}: {name} cannot be read ({reason})")


def _check_json(path: Path, where: str) -> None:
    reason = ""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(contents, dict):
            reason = f"holds a {type(contents).__name__}, not an object"
        elif path.name == TOKENIZER_JSON and not isinstance(contents.get("model"), dict):
            reason = "has no object named model, so that the package tokenizers did not write it"
    except (OSError, ValueError, RecursionError) as error:
        reason = f"is not JSON ({error})"
    if reason:
        raise ValueError(f"{where}: {path.name} {reason}: copy it again, or pass the right file")


def _named_code(folder: Path) -> str | None:
    for name in (TOKENIZER_CONFIG, CONFIG):
        try:
            contents = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        named = contents.get("auto_map") if isinstance(contents, dict) else None
        if isinstance(named, dict):
            named = named.get("AutoTokenizer") or named.get("AutoConfig")
        if isinstance(named, list | tuple):
            named = next((one for one in named if one), None)
        if named:
            return f"{named!s:.80}"
    return None


class HuggingFaceTokenizer:
    """Folder loaded by `AutoTokenizer`, offline, special tokens around a text included as in
    Megatron-LM.

    vocab_size: len(tokenizer) with added tokens, or the largest id plus 1 if ids are missing

    Source: megatron/core/tokenizers/text/libraries/huggingface_tokenizer.py.
    """

    name = "HuggingFaceTokenizer"
    needs = ("tokenizer_model",)  # of the flags
    options: tuple[str, ...] = ()

    def __init__(self, folder: str | Path):
        path = Path(folder)
        if not has_tokenizer(path):
            raise ValueError(
                f"--tokenizer-model {folder}: no folder with {' or '.join(HUGGING_FACE_FILES)} in it: pass the folder "
                "of a model or tokenizer in Hugging Face's form"
            )
        self.library = _auto_tokenizer(path, f"--tokenizer-model {folder}")
        vocabulary = self.library.get_vocab()
        self.vocab_size = max(len(self.library), 1 + max(vocabulary.values()))
        eos = self.library.eos_token_id
        sep = self.library.sep_token_id
        self.eod: int | None = sep if eos is None else eos
        self.checksum = zlib.crc32(json.dumps(sorted(vocabulary.items())).encode())

    def encode(self, text: str | bytes) -> list[int]:
        return list(self.library(clean(text)).input_ids)

    def encode_many(self, texts: Sequence[str | bytes]) -> list[list[int]]:
        cleaned = [clean(text) for text in texts]
        return list(self.library(cleaned, return_attention_mask=False).input_ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.library.decode(list(map(int, ids))))

    def count_bytes(self, ids: Iterable[int]) -> int:
        """Count the text's UTF-8 bytes without special tokens."""
        return len(self.library.decode(list(map(int, ids)), skip_special_tokens=True).encode())


def load_pieces(path: str | Path, user: str) -> tuple[Any, bytes]:
    """Return a SentencePiece processor, and the file's bytes."""
    package = optional_package("sentencepiece", "sentencepiece", user)
    where = f"--tokenizer-model {path}"
    if reason := unreadable(path):
        raise ValueError(f"{where}: cannot be read ({reason}); pass a .model file")
    kind = pieces_kind(Path(path))
    model = Path(path).read_bytes()
    if kind == "SentencePiece":
        with suppress(RuntimeError):
            processor = package.SentencePieceProcessor(model_proto=model)
            if len(processor):
                return processor, model
    found = ", but a file of tiktoken" if kind == "tiktoken" else ""
    raise ValueError(
        f"{where}: not a SentencePiece model{found}; pass the .model file that its training wrote"
    )


class SentencePieceTokenizer:
    """SentencePiece model. `vocab_size` is its number of pieces, `eod` its end of sentence.

    `eod` is None without an end of sentence (Megatron-core uses -1, not a token id).
    Sources: sentencepiece_tokenizer.py and, for `eod`, abstract_tokenizer.py in Megatron-LM's
        megatron/core/tokenizers/text/libraries.
    """

    name = "SentencePieceTokenizer"
    needs = ("tokenizer_model",)
    options: tuple[str, ...] = ()

    def __init__(self, path: str | Path):
        if reason := unreadable(path):
            raise ValueError(
                f"--tokenizer-model {path}: cannot be read ({reason}); pass the path of an existing model"
            )
        self._processor, model = load_pieces(path, f"--tokenizer-type {self.name}")
        self.vocab_size = len(self._processor)
        end = self._processor.eos_id()
        self.eod: int | None = end if end >= 0 else None
        self.checksum = zlib.crc32(model)

    def encode(self, text: str | bytes) -> list[int]:
        """Tokenize. Models may normalize white space."""
        return list(self._processor.encode(clean(text)))

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(map(int, ids))
        check_range(ids, self.vocab_size, MODEL_REMEDY)
        return str(self._processor.decode(ids))

    def count_bytes(self, ids: Iterable[int]) -> int:
        return len(self.decode(ids).encode())


class JapaneseSentencePiece(SentencePieceTokenizer):
    """SentencePiece model with piece "</s>" at the end of documents, and lines that end with a line
    feed alone.

    Source: megatron/tokenizer/tokenizer.py of Fugaku-LLM/DeepSpeedFugaku.
    """

    name = "JapaneseSentencePiece"

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.eod = self._processor.piece_to_id("</s>")

    def encode(self, text: str | bytes) -> list[int]:
        return super().encode(clean(text).replace("\r\n", "\n"))


class NullTokenizer:
    """Space-separated numbers, for data tokenized elsewhere. `eod` is vocab_size - 1.

    Source: megatron/core/tokenizers/text/libraries/null_tokenizer.py.
    """

    name = "NullTokenizer"
    needs = ("vocab_size",)
    options: tuple[str, ...] = ()
    checksum = 0  # every one of a size is the same

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str | bytes) -> list[int]:
        words = clean(text).split()
        wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
        if wrong is not None:
            raise ValueError(
                f"--tokenizer-type NullTokenizer reads texts of numbers, and {wrong[:40]!r} is not one: pass another "
                "type"
            )
        ids = [int(word[:20]) for word in words]
        check_range(ids, self.vocab_size, "pass a larger --vocab-size")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def count_bytes(self, ids: Iterable[int]) -> int:
        return len(self.decode(ids))


def check_range(ids: list[int], vocab_size: int, remedy: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size}: {remedy}")


CACHE_ENTRIES = 2**17  # pieces (words) whose tokens are cached ...
CACHE_PIECE = 64  # ... if they have at most this many characters, which limits the bytes too


class ByteLevelBPE:
    """Base of byte-level BPE: a text is cut at special tokens, then into pieces, whose bytes are
    merged.

    token_bytes: by id; none for a token that stands for no text
    """

    options: tuple[str, ...] = ()
    remedy = MODEL_REMEDY

    def __init__(self, token_bytes: list[bytes], special: Mapping[str, int], pieces: regex.Pattern):
        self.vocab_size = len(token_bytes)
        self._token_bytes = token_bytes
        self._special = special
        self._special_in_text = regex.compile("|".join(map(regex.escape, special)))
        self._pieces = pieces
        self._cached_merge = lru_cache(CACHE_ENTRIES)(self._merge)

    def encode(self, text: str | bytes) -> list[int]:
        text = self._text(text)
        ids: list[int] = []
        end = 0
        for match in self._special_in_text.finditer(text):
            ids += [*self._encode_part(text[end : match.start()]), self._special[match[0]]]
            end = match.end()
        return ids + self._encode_part(text[end:])

    def _encode_part(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pieces.findall(text):
            ids += self._cached_merge(piece) if len(piece) <= CACHE_PIECE else self._merge(piece)
        return ids

    def _text(self, text: str | bytes) -> str:
        return clean(text)

    def _merge(self, piece: str) -> tuple[int, ...]:
        raise NotImplementedError

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode to the exact bytes. Raises ValueError for an invalid id."""
        ids = list(map(int, ids))
        check_range(ids, self.vocab_size, self.remedy)
        return b"".join(map(self._token_bytes.__getitem__, ids))

    def count_bytes(self, ids: Iterable[int]) -> int:
        return len(self.decode_bytes(ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode, with U+FFFD for incomplete UTF-8 characters (as GPT-2's decoder)."""
        return self.decode_bytes(ids).decode("utf-8", "replace")
