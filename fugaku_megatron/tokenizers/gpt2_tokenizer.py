"""GPT-2's byte-level BPE from vocab.json and merges.txt: equals GPT-2's encoder on any text.

"<|endoftext|>" in a text is the end-of-document token, as in Megatron-core
(megatron/core/tokenizers/text/libraries/megatron_hf_tokenizer.py) and Hugging Face.
"""

from __future__ import annotations

import heapq
import json
import re
import zlib
from pathlib import Path

import regex

from ..text.named_files import read_text
from .byte_level_bpe import ByteLevelBPE

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
