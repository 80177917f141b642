"""Samples packed from whole chats.

Best fit decreasing packs chats into samples of seq_length + 1 tokens, by lengths alone; each epoch
shuffles chats of equal length and samples. Shapes: s = seq_length, n chats; int64 (2, s + 1) samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...comm.agreement import on_root
from ...tokenizers.vocabulary import check_tokens
from ..dataset import RELEASE_EVERY, DatasetConfig, check_index
from ..marks import COUNTED, FIRST, PADDED
from .chat_files import SUFFIX, ChatArrays, ChatFiles

COUNTED_AT_ONCE = 2**12  # chats
PADDING = 0  # token id after the last chat of a sample, which every vocabulary has


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Return int32 (n,): each chat's sample index.

    lengths: decreasing, from 1 to `size` tokens

    The fullest sample with enough room takes as many equal chats as fit: one step per length and
    room, not per chat.
    """
    samples = np.empty(len(lengths), np.int32)
    opened = 0
    placed = 0
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
                bins = np.arange(opened, opened + needed, dtype=np.int32)
                rest = np.empty(0, np.int32)
                opened += needed
            taken = min(end - placed, fit * len(bins))
            samples[placed : placed + taken] = np.repeat(bins, fit)[:taken]
            placed += taken
            full = taken // fit
            for left, some in (
                (room, rest),
                (room - fit * length, bins[:full]),
                (room - taken % fit * length, bins[full:]),
            ):
                if len(some) and left:
                    rooms.setdefault(left, []).append(some)
                    present |= 1 << left
    return samples


@dataclass(frozen=True)
class Packing:
    """Packed chats, the longest first. places (n,): sample by sample; ends: each sample's."""

    places: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, size: int) -> Packing:
        samples = best_fit(lengths, size)
        return cls(
            np.argsort(samples, kind="stable").astype(np.int32), np.cumsum(np.bincount(samples))
        )

    def __len__(self) -> int:
        return len(self.ends)

    def of_sample(self, sample: int) -> np.ndarray:
        return self.places[self.ends[sample - 1] if sample else 0 : self.ends[sample]]


class _Epoch(NamedTuple):
    number: int
    chats: np.ndarray
    samples: np.ndarray


class ChatDataset:
    """At least `num_samples` samples, in whole epochs, from the chats `documents` (sequence ids);
    None: one epoch.

    Raises ValueError on every rank without chats or trained tokens, and for a chat that is too
    long.
    """

    def __init__(
        self,
        indexed: ChatFiles | ChatArrays,
        name: str,
        documents: range,
        num_samples: int | None,
        config: DatasetConfig,
        truncate: bool = False,
    ):
        self.indexed = indexed
        self.name = name
        self.documents = documents
        self.size = config.seq_length + 1
        self.config = config
        self.num_documents = len(documents)
        self._fetched = 0
        lengths = indexed.read_lengths(documents.start, documents.stop)
        on_root(config.comm, lambda: self._check(lengths, truncate))
        self.lengths = np.minimum(lengths, self.size)
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self.chats_cut = int((lengths > self.size).sum())
        # num_trained: tokens of an epoch that count in the loss. chats_lost: chats without any.
        self.num_trained, self.chats_lost = on_root(config.comm, self._count)
        self.packing = Packing.of(-np.sort(-self.lengths), self.size)
        self.num_epochs = 1 if num_samples is None else -(-num_samples // len(self.packing))
        self._epoch: _Epoch | None = None

    def _check(self, lengths: np.ndarray, truncate: bool) -> None:
        if not len(lengths):
            raise ValueError(
                f"{self.name} data of {self.indexed.prefix}: it has no chats: pass more of them, or change --split"
            )
        too_long = np.flatnonzero(lengths > self.size)
        if len(too_long) and not truncate:
            first = int(too_long[0])
            others = f"{len(too_long)} of {len(lengths)} chats are too long"
            raise ValueError(
                f"{self.name} data of {self.indexed.prefix}: chat {self.documents[first]}, counted from 0, has "
                f"{lengths[first]} tokens, and a sample takes --seq-length {self.size - 1} + 1; {others}, the longest "
                f"has {lengths.max()}: raise --seq-length, or cut them with --sft-truncate"
            )

    def _count(self) -> tuple[int, int]:
        trained = 0
        lost = 0
        for first in range(0, len(self.lengths), COUNTED_AT_ONCE):
            lengths = self.lengths[first : first + COUNTED_AT_ONCE]
            counts = self.indexed.count_trained(self.documents.start + first, lengths)
            trained += int(counts.sum())
            lost += int((counts == 0).sum())
        if not trained:
            where = f"{self.name} data of {self.indexed.prefix}: none of its {self.num_tokens:,} tokens is trained"
            if self.chats_cut:
                raise ValueError(
                    f"{where}: --sft-truncate cut the answers of {self.chats_cut:,} of {len(self.lengths):,} chats away: "
                    f"raise --seq-length, which is {self.size - 1}"
                )
            if isinstance(self.indexed, ChatArrays):
                raise ValueError(f"{where}: pass chats that have answers")
            raise ValueError(
                f"{where}, as its {SUFFIX} file says: write the data again, with chats that have answers"
            )
        return trained, lost

    def __len__(self) -> int:
        return self.num_epochs * len(self.packing)

    def chats_of(self, index: int) -> list[int]:
        """Return the numbers of a sample's chats, in the order of its epoch."""
        check_index(index, self)
        number, place = divmod(index, len(self.packing))
        epoch = self._epoch
        if epoch is None or epoch.number != number:
            # its stream is the same in every numpy
            rng = np.random.RandomState([self.config.seed, number])
            chats = rng.permutation(len(self.lengths)).astype(np.int32)
            chats = chats[np.argsort(-self.lengths[chats], kind="stable")]
            epoch = _Epoch(number, chats, rng.permutation(len(self.packing)).astype(np.int32))
            self._epoch = epoch
        places = self.packing.of_sample(int(epoch.samples[place]))
        return [int(chat) for chat in epoch.chats[places] + self.documents.start]

    def __getitem__(self, index: int) -> np.ndarray:
        sample = np.full((2, self.size), PADDING, np.int64)
        end = 0
        sample[1] = 0
        for chat in self.chats_of(index):
            length = int(self.lengths[chat - self.documents.start])
            place = slice(end, end + length)
            sample[0, place] = self.indexed.get(chat, 0, length)
            sample[1, place] = self.indexed.trained(chat, length) * COUNTED
            sample[1, end] = FIRST  # which nothing of its chat predicts
            end += length
            sample[1, end - 1] |= PADDED  # from which nothing of its chat is predicted
        sample[1, end:] = PADDED
        if end < self.size:
            sample[1, end] |= FIRST
        if self.config.vocab_size is not None:
            check_tokens(sample[0], self.config.vocab_size, f"{self.indexed.prefix}.bin")
        self._fetched += 1
        if self._fetched % RELEASE_EVERY == 0:
            self.indexed.check_open()
        return sample

    def description(self) -> str:
        samples = len(self.packing)
        filled, counted = (
            number / (samples * self.size) for number in (self.num_tokens, self.num_trained)
        )
        cut = f"; --sft-truncate cut {self.chats_cut:,} chats" if self.chats_cut else ""
        return (
            f"{self.num_documents:,} chats of {self.num_tokens:,} tokens in {samples:,} samples of {self.size} an epoch: "
            f"{filled:.1%} is not padding, {counted:.1%} counts in the loss{cut}"
        )


def _chat_datasets(dataset: object) -> Iterator[ChatDataset]:
    for each in getattr(dataset, "datasets", [dataset]):
        if isinstance(each, ChatDataset):
            yield each


def packing_lines(dataset: object) -> list[str]:
    return [
        f"{chats.name} data of {chats.indexed.prefix}: {chats.description()}"
        for chats in _chat_datasets(dataset)
    ]


def lost_lines(*datasets: object) -> list[str]:
    return [
        f"warning: {chats.name} data of {chats.indexed.prefix}: {chats.chats_lost:,} of {chats.num_documents:,} chats have no "
        f"trained token in their first {chats.size} tokens, so nothing is learned from them"
        + (": raise --seq-length" if chats.chats_cut else "")
        for dataset in datasets
        for chats in _chat_datasets(dataset)
        if chats.chats_lost
    ]
