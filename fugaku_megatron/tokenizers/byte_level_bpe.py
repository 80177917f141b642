"""Base of byte-level BPE tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import regex

from .token_range import MODEL_REMEDY, check_range
from .utf8 import clean

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
