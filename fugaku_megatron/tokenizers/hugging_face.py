"""Tokenizers of SentencePiece models and of Hugging Face folders, whose code is never run.

Token ids, vocabulary size and end-of-document id equal Megatron-core's. A folder's tokenizer runs with a limit on time: its
file may have a regular expression that never ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ..text.foreign_models import hub_note
from ..text.input_errors import NeverSkipped
from ..text.named_files import unreadable
from ..text.optional_packages import optional_package
from .vocabulary import MODEL_REMEDY, check_range, clean

TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def pieces_kind(path: Path) -> str | None:
    """Detect the program that wrote a tokenizer.model; None if unknown."""
    with open(path, "rb") as file:
        begin = file.read(512)
    if begin.startswith(b"\n"):  # the tag of the first field of a SentencePiece model, a piece
        return "SentencePiece"
    return "tiktoken" if TIKTOKEN_LINE.match(begin) else None


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
                f"--tokenizer-model {path}: cannot be read ({reason}); pass the path of an existing model{hub_note(path)}"
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

    def token_id(self, token: str) -> int | None:
        """Return a token's number from its text, or None."""
        found = int(self._processor.piece_to_id(token))
        return None if self._processor.is_unknown(found) else found

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


T = TypeVar("T")
SECONDS = 10.0  # of the process's CPU time for any text, and
SIZE_PER_SECOND = 10_000  # characters more in a second; published tokenizers take 1,000,000
# Characters without a thread: the library of expressions has a limit of its own for one place of a text.
SHORT = 64
PANIC = (
    "PanicException"  # of the package tokenizers, for a limit of its library of regular expressions
)


_STDERR = 2
_redirecting = threading.Lock()


@contextlib.contextmanager
def _native_errors() -> Iterator[Callable[[], object]]:
    """Collect what native code writes to standard error, and write it there at the end of the block.

    Yields a function that discards the text: Rust prints some 50 lines of a panic, which is an exception in Python.
    """
    with _redirecting, contextlib.ExitStack() as undo:
        try:
            stderr = os.dup(_STDERR)
        except OSError:  # closed
            yield int
            return
        undo.callback(os.close, stderr)
        collected = undo.enter_context(os.fdopen(os.memfd_create("stderr"), "r+b"))
        os.dup2(collected.fileno(), _STDERR)
        try:
            yield lambda: collected.truncate(0)
        finally:
            os.dup2(stderr, _STDERR)
            collected.seek(0)
            with os.fdopen(stderr, "wb", closefd=False) as rest:
                shutil.copyfileobj(collected, rest)


class TokenizerLimit(NeverSkipped):
    """Error of a tokenizer that exceeds its limits: other texts would take as long."""


def limited(where: str, size: int, work: Callable[[], T]) -> T:
    """Return work(). Raise TokenizerLimit if that takes too long for `size` characters, and leave the thread behind."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    limit = SECONDS + size / SIZE_PER_SECOND
    thread = threading.Thread(target=run, name="tokenizer", daemon=True)
    with _native_errors() as discard:
        begin = time.process_time()
        if size <= SHORT:
            run()
        else:
            thread.start()
            thread.join(limit)
            # while other programs have the CPU
            while thread.is_alive() and time.process_time() < begin + limit:
                thread.join(1.0)
        panicked = any(type(error).__name__ == PANIC for error in errors)
        if panicked:
            discard()
    if results:
        return results[0]
    if not errors:
        raise TokenizerLimit(
            f"{where}: did not tokenize {size} characters within {limit:.0f} s; its tokenizer.json may have a regular "
            "expression that never ends: pass another tokenizer"
        )
    if panicked:
        raise TokenizerLimit(f"{where}: {errors[0]}: pass another tokenizer") from None
    raise errors[0]


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


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in HUGGING_FACE_FILES)


def is_described(folder: Path) -> bool:
    """Return True if a file names the tokenizer's class or has the whole tokenizer."""
    names = ("config.json", TOKENIZER_JSON, TOKENIZER_CONFIG)
    return any((folder / name).is_file() for name in names)


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
        found.__class__ = _limited_class(type(found), where)
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


def _limited_class(kind: Any, where: str) -> Any:
    """Return a subclass that tokenizes with a limit on time."""

    def call(self: Any, text: Any, **options: Any) -> Any:
        texts = [text] if isinstance(text, str) else text
        return limited(where, sum(map(len, texts)), lambda: kind.__call__(self, text, **options))

    def decode(self: Any, ids: Any, **options: Any) -> Any:
        return limited(where, len(ids), lambda: kind.decode(self, ids, **options))

    methods: dict[str, Any] = {"__call__": call, "decode": decode}
    return type(kind.__name__, (kind,), methods)


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
                f"of a model or tokenizer in Hugging Face's form{hub_note(folder)}"
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

    def token_id(self, token: str) -> int | None:
        """Return a token's number from its text, or None."""
        found: int | None = self.library.get_vocab().get(token)
        return found

    def count_bytes(self, ids: Iterable[int]) -> int:
        """Count the text's UTF-8 bytes without special tokens."""
        return len(self.library.decode(list(map(int, ids)), skip_special_tokens=True).encode())
