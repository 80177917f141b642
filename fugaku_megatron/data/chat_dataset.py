"""Samples of chats: best fit decreasing packs whole chats into samples of seq_length + 1 tokens, and padding fills them up.

Chats go from the longest to the shortest, each into the sample with the least room left that holds it. Which lengths share a sample
therefore follows from the lengths alone; which chats of a length do is drawn anew in every epoch, and so is the order of the
samples. Each epoch has every chat once, and sample i is a function of the files, the seed and i.
Left out: dividing a chat over samples; a chat that is too long is refused, or cut.
Shapes: s = seq_length, n chats; a sample is int64 (2, s + 1) of token ids and marks (marks.py), of numpy. An epoch takes 4 bytes
per chat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm.agreement import on_root
from .chat_files import ChatFiles
from .dataset import RELEASE_EVERY, check_index, check_tokens
from .marks import COUNTED, FIRST

if TYPE_CHECKING:
    from ..comm.base import Comm

COUNTED_AT_ONCE = 2**12  # chats
PADDING = 0  # token id after the last chat of a sample, which every vocabulary has


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """int32 (n,): the sample of each of n chats, from 0. lengths: in decreasing order, from 1 to `size`, tokens of a sample.

    Chats of a length are placed together: the sample with the least room that is enough takes as many of them as fit. So there is
    a step for each length and amount of room, not for each chat.
    """
    samples, opened, placed = np.empty(len(lengths), np.int32), 0, 0
    rooms: dict[int, list[np.ndarray]] = {}  # room left -> samples with so much of it
    present = 0  # bit r is set where `rooms` has samples with room r
    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist()):
        end = placed + count
        while placed < end:
            beyond = present >> length
            room = length + (beyond & -beyond).bit_length() - 1 if beyond else size
            fit = room // length
            needed = -(-(end - placed) // fit)
            if beyond:
                bins = np.concatenate(rooms.pop(room))
                present ^= 1 << room
                bins, rest = bins[:needed], bins[needed:]
            else:
                bins, rest = np.arange(opened, opened + needed, dtype=np.int32), np.empty(0, np.int32)
                opened += needed
            taken = min(end - placed, fit * len(bins))
            samples[placed : placed + taken] = np.repeat(bins, fit)[:taken]
            placed += taken
            full = taken // fit
            for left, some in ((room, rest), (room - fit * length, bins[:full]), (room - taken % fit * length, bins[full:])):
                if len(some) and left:
                    rooms.setdefault(left, []).append(some)
                    present |= 1 << left
    return samples


@dataclass(frozen=True)
class Packing:
    """Which places of a list of chats, the longest first, share a sample. places (n,): sample by sample; ends: of each sample."""

    places: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, size: int) -> Packing:
        """lengths: in decreasing order."""
        samples = best_fit(lengths, size)
        return cls(np.argsort(samples, kind="stable").astype(np.int32), np.cumsum(np.bincount(samples)))

    def __len__(self) -> int:
        return len(self.ends)

    def of_sample(self, sample: int) -> np.ndarray:
        """The places of its chats."""
        return self.places[self.ends[sample - 1] if sample else 0 : self.ends[sample]]


@dataclass(frozen=True)
class _Epoch:
    """One epoch. chats: in the order of the packing's places. samples: of the packing, in the order in which they are read."""

    number: int
    chats: np.ndarray
    samples: np.ndarray


class ChatDataset:
    """At least `num_samples` samples, in whole epochs, of the chats `documents` (ids of sequences); None: one epoch.

    truncate: a chat of more than seq_length + 1 tokens is cut, and not refused. `name` and `comm` are those of
    `dataset.GPTDataset`. Raises ValueError on every rank where there are no chats, and for a chat that is too long.
    """

    def __init__(self, files: ChatFiles, name: str, documents: range, num_samples: int | None, seq_length: int, seed: int,
                 truncate: bool = False, vocab_size: int | None = None, comm: Comm | None = None):
        self.files, self.name, self.documents, self.size, self.seed = files, name, documents, seq_length + 1, seed
        self.vocab_size, self.num_documents, self._fetched = vocab_size, len(documents), 0
        lengths = files.read_lengths(documents.start, documents.stop)
        on_root(comm, lambda: self._check(lengths, truncate))
        self.lengths = np.minimum(lengths, self.size)
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self.chats_cut = int((lengths > self.size).sum())
        self.packing = Packing.of(-np.sort(-self.lengths), self.size)
        self.num_epochs = 1 if num_samples is None else -(-num_samples // len(self.packing))
        self._epoch: _Epoch | None = None

    def _check(self, lengths: np.ndarray, truncate: bool) -> None:
        if not len(lengths):
            raise ValueError(f"{self.name} data of {self.files.prefix}: it has no chats: pass more of them, or change --split")
        too_long = np.flatnonzero(lengths > self.size)
        if len(too_long) and not truncate:
            first, others = int(too_long[0]), f"{len(too_long)} of {len(lengths)} chats are too long"
            raise ValueError(f"{self.name} data of {self.files.prefix}: chat {self.documents[first]}, counted from 0, has "
                             f"{lengths[first]} tokens, and a sample takes --seq-length {self.size - 1} + 1; {others}, the longest "
                             f"has {lengths.max()}: raise --seq-length, or cut them with --sft-truncate")

    def __len__(self) -> int:
        return self.num_epochs * len(self.packing)

    def _epoch_of(self, number: int) -> _Epoch:
        epoch = self._epoch
        if epoch is None or epoch.number != number:
            rng = np.random.RandomState([self.seed, number])  # its stream is the same in every numpy
            chats = rng.permutation(len(self.lengths)).astype(np.int32)
            chats = chats[np.argsort(-self.lengths[chats], kind="stable")]
            epoch = self._epoch = _Epoch(number, chats, rng.permutation(len(self.packing)).astype(np.int32))
        return epoch

    def chats_of(self, index: int) -> list[int]:
        """The chats of a sample, as numbers of sequences, in its order."""
        check_index(index, self)
        number, place = divmod(index, len(self.packing))
        epoch = self._epoch_of(number)
        return (epoch.chats[self.packing.of_sample(int(epoch.samples[place]))] + self.documents.start).tolist()

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int64 (2, s + 1)."""
        sample, end = np.full((2, self.size), PADDING, np.int64), 0
        sample[1] = 0
        for tokens, trained in self._read(self.chats_of(index)):
            place = slice(end, end + len(tokens))
            sample[0, place], sample[1, place] = tokens, trained * COUNTED
            sample[1, end] = FIRST  # which nothing of its chat predicts
            end = place.stop
        if end < self.size:
            sample[1, end] = FIRST
        if self.vocab_size is not None:
            check_tokens(sample[0], self.vocab_size, self.files.prefix)
        self._fetched += 1
        if self._fetched % RELEASE_EVERY == 0:
            self.files.release()
        return sample

    def _read(self, chats: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for chat in chats:
            length = int(self.lengths[chat - self.documents.start])
            yield self.files.get(chat, 0, length), self.files.trained(chat, length)

    @cached_property
    def num_trained(self) -> int:
        """Tokens of an epoch that count in the loss, as all of the mask says."""
        first = self.documents.start
        return sum(self.files.count_trained(first + i, self.lengths[i : i + COUNTED_AT_ONCE])
                   for i in range(0, len(self.lengths), COUNTED_AT_ONCE))

    def description(self) -> str:
        """How full the samples are, in a line."""
        samples = len(self.packing)
        filled, counted = (number / (samples * self.size) for number in (self.num_tokens, self.num_trained))
        cut = f"; --sft-truncate cut {self.chats_cut:,} chats" * bool(self.chats_cut)
        return (f"{self.num_documents:,} chats of {self.num_tokens:,} tokens in {samples:,} samples of {self.size} an epoch: "
                f"{filled:.1%} is not padding, {counted:.1%} counts in the loss{cut}")


def packing_lines(dataset: Any) -> list[str]:
    """How full the samples of a data set, or of each part of a blend, are; nothing where they are not of chats."""
    return [f"{part.name} data of {part.files.prefix}: {part.description()}" for part in getattr(dataset, "datasets", [dataset])
            if isinstance(part, ChatDataset)]
