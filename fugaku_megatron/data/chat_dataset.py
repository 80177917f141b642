r"""Chat files, and samples packed from whole chats.

PREFIX.bin and .idx have one sequence a chat; PREFIX.mask marks trained tokens. .mask,
little-endian: b"FMMASK\0\0", version u64 = 1, tokens u64, CRC-32 u32 of the sequence lengths, the
first HEAD bytes of .bin, and the bits; then a bit a token, lowest bit first, 1 if trained. Best fit
decreasing packs chats into samples of seq_length + 1 tokens, by lengths alone; each epoch shuffles
chats of equal length and samples. Shapes: s = seq_length, n chats; int64 (2, s + 1) samples.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..comm.agreement import on_root
from ..text.named_files import StrPath, unreadable
from .dataset import RELEASE_EVERY, DatasetConfig, check_index
from .files import ReadFile
from .indexed import IndexedDataset, IndexedDatasetWriter
from .marks import COUNTED, FIRST, PADDED
from .token_arrays import TokenArrays
from .token_range import check_tokens

if TYPE_CHECKING:
    from ..comm.base import Comm

SUFFIX = ".mask"
MAGIC = b"FMMASK\0\0"
VERSION = 1
HEADER = struct.Struct(
    "<8sQQIII"
)  # magic, version, tokens, CRC-32 of the lengths, of the head of .bin, of the bits
HEAD = 2**26  # bytes of .bin that its CRC-32 covers
BLOCK = 2**20  # bytes of .mask that are read at a time
REMEDY = "write the three files again with fugaku-megatron preprocess --chat, or copy them again"


def signed(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return int32 (n,): token ids, complemented if trained."""
    return np.where(trained, ~ids, ids).astype(np.int32)


def unsigned(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Invert `signed`: (token ids, trained), each (n,)."""
    return np.where(tokens < 0, ~tokens, tokens), tokens < 0


class ChatWriter(IndexedDatasetWriter):
    """Writer for .bin, .idx and .mask, fed by `signed`; .idx is renamed last."""

    SUFFIXES = (SUFFIX, *IndexedDatasetWriter.SUFFIXES)

    def __init__(
        self,
        prefix: StrPath,
        dtype: np.dtype | str | type,
        folder: StrPath | None = None,
    ):
        super().__init__(prefix, dtype, folder)
        self.trained = 0
        self.longest = 0
        self._rest = np.empty(0, bool)  # of the bits, those that fill no byte
        self._crc_bits = 0
        self._crc_head = 0
        self._head = 0
        self._files[SUFFIX].write(bytes(HEADER.size))

    def _append(self, tokens: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> None:
        ids, trained = unsigned(tokens)
        super()._append(ids, lengths, ends)
        head = np.ascontiguousarray(ids, self.dtype).tobytes()[: HEAD - self._head]
        self._head += len(head)
        self._crc_head = zlib.crc32(head, self._crc_head)
        bits = np.concatenate([self._rest, trained])
        whole = len(bits) // 8 * 8
        self._write_bits(bits[:whole])
        self._rest = bits[whole:]
        self.trained += int(trained.sum())
        self.longest = max([self.longest, *lengths.tolist()])

    def _write_bits(self, bits: np.ndarray) -> None:
        packed = np.packbits(bits, bitorder="little").tobytes()
        self._crc_bits = zlib.crc32(packed, self._crc_bits)
        with self.writing():
            self._files[SUFFIX].write(packed)

    def summary(self) -> str:
        return (
            f"wrote {self.prefix}.bin, .idx and .mask: {self.num_documents} chats, {self.num_tokens} tokens, {self.trained} of "
            f"them trained ({self.trained / self.num_tokens:.1%}); the longest chat has {self.longest} tokens"
        )

    def finish_parts(self) -> None:
        self._write_bits(self._rest)
        lengths = zlib.crc32(np.asarray(self._lengths, "<i4").data)
        mask = self._files[SUFFIX]
        mask.seek(0)
        mask.write(
            HEADER.pack(MAGIC, VERSION, self.num_tokens, lengths, self._crc_head, self._crc_bits)
        )


class ChatFiles(IndexedDataset):
    """`IndexedDataset` with trained tokens.

    Raises ValueError on every rank, also if .mask is missing, damaged or belongs to other files.
    """

    def __init__(self, prefix: StrPath, comm: Comm | None = None):
        super().__init__(prefix, comm)
        on_root(comm, self._check)

    @property
    def _path(self) -> str:
        return self.prefix + SUFFIX

    def _check(self) -> None:
        check_mask_file(self.prefix)
        self._keep(self._path)
        with open(self._path, "rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or not header.startswith(MAGIC):
                raise ValueError(
                    f"{self._path}: begins with {header[:8]!r}, not with {MAGIC!r}: not a mask of chats; {REMEDY}"
                )
            _, version, tokens, lengths, head, bits = HEADER.unpack(header)
            if version != VERSION:
                raise ValueError(
                    f"{self._path}: version {version}, and version {VERSION} is known; {REMEDY}"
                )
            if tokens != self.num_tokens:
                raise ValueError(
                    f"{self._path}: it is the mask of {tokens} tokens, and {self.prefix}.bin has {self.num_tokens}; "
                    f"{REMEDY}"
                )
            own = 0
            for start in range(0, HEAD // self.dtype.itemsize, BLOCK):
                own = zlib.crc32(self.read_tokens(start, BLOCK).data, own)
            if f"{lengths:08x}" != self.header.lengths_crc32 or head != own:
                raise ValueError(
                    f"{self._path}: it belongs to another {self.prefix}.bin of as many tokens; {REMEDY}"
                )
            size = 0
            crc = 0
            while block := file.read(BLOCK):
                size += len(block)
                crc = zlib.crc32(block, crc)
        if size != -(-tokens // 8) or crc != bits:
            raise ValueError(
                f"{self._path}: {size} bytes of bits with CRC-32 {crc:08x}, but its header announces "
                f"{-(-tokens // 8)} with {bits:08x}: damaged; {REMEDY}"
            )

    @cached_property
    def _bits(self) -> ReadFile:
        check_mask_file(self.prefix)  # this node's copy may be missing, or another one
        file = self._open(self._path)
        size = -(-self.num_tokens // 8)
        if file.size != HEADER.size + size:
            raise ValueError(
                f"{self._path}: {file.size} bytes, but {HEADER.size + size} where rank 0 read it; {REMEDY}"
            )
        return file

    def probe(self) -> bytes:
        return super().probe() + self._bits.read("u1", 0, HEADER.size).tobytes()

    def trained(self, index: int, length: int) -> np.ndarray:
        """Return bool (length,): True for trained tokens among chat `index`'s first ones."""
        index = int(index)
        start = int(self.read_pointers(index, index + 1)[0]) // self.dtype.itemsize
        return self._unpacked(start, start + length).astype(bool)

    def count_trained(self, index: int, lengths: np.ndarray) -> np.ndarray:
        """Count trained tokens, int64 (n,), in chats from `index` on, among the first `lengths`
        without token 0.
        """
        starts = self.read_pointers(index, index + len(lengths)) // self.dtype.itemsize
        before = np.cumsum(
            np.append(0, self._unpacked(int(starts[0]), int(starts[-1]) + int(lengths[-1])))
        )
        starts = starts - starts[0]
        counts: np.ndarray = before[starts + lengths] - before[starts + 1]
        return counts

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        first = start // 8
        end = -(-stop // 8)
        packed = self._bits.read("u1", HEADER.size + first, end - first)
        return np.unpackbits(packed, bitorder="little")[start % 8 : start % 8 + stop - start]


class ChatArrays(TokenArrays):
    """In-memory chats with `ChatFiles`'s interface. documents: `signed`, (n,)"""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        return unsigned(super().get(index, offset, length))[0]

    def trained(self, index: int, length: int) -> np.ndarray:
        return unsigned(super().get(index, 0, length))[1]

    def count_trained(self, index: int, lengths: np.ndarray) -> np.ndarray:
        counts = [self.trained(index + i, int(n))[1:].sum() for i, n in enumerate(lengths)]
        return np.array(counts, np.int64)


def check_mask_file(prefix: str) -> None:
    """Raise ValueError if PREFIX.mask is unreadable, without checking its contents."""
    if reason := unreadable(prefix + SUFFIX):
        raise ValueError(
            f"{prefix}{SUFFIX}: cannot be read ({reason}); chats are a .bin, an .idx and a .mask file, which "
            "fugaku-megatron preprocess --chat writes"
        )


def check_not_chats(prefix: str) -> None:
    if os.path.exists(prefix + SUFFIX):
        raise ValueError(
            f"{prefix}{SUFFIX} says which tokens of these chats are trained, and a run without --sft trains all of "
            "them: pass --sft, or move this file away"
        )


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


@dataclass(frozen=True)
class _Epoch:
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
        files: ChatFiles | ChatArrays,
        name: str,
        documents: range,
        num_samples: int | None,
        config: DatasetConfig,
        truncate: bool = False,
    ):
        self.files = files
        self.name = name
        self.documents = documents
        self.size = config.seq_length + 1
        self.config = config
        self.num_documents = len(documents)
        self._fetched = 0
        lengths = files.read_lengths(documents.start, documents.stop)
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
                f"{self.name} data of {self.files.prefix}: it has no chats: pass more of them, or change --split"
            )
        too_long = np.flatnonzero(lengths > self.size)
        if len(too_long) and not truncate:
            first = int(too_long[0])
            others = f"{len(too_long)} of {len(lengths)} chats are too long"
            raise ValueError(
                f"{self.name} data of {self.files.prefix}: chat {self.documents[first]}, counted from 0, has "
                f"{lengths[first]} tokens, and a sample takes --seq-length {self.size - 1} + 1; {others}, the longest "
                f"has {lengths.max()}: raise --seq-length, or cut them with --sft-truncate"
            )

    @property
    def indexed(self) -> ChatFiles | ChatArrays:
        return self.files

    def _count(self) -> tuple[int, int]:
        trained = 0
        lost = 0
        for first in range(0, len(self.lengths), COUNTED_AT_ONCE):
            lengths = self.lengths[first : first + COUNTED_AT_ONCE]
            counts = self.files.count_trained(self.documents.start + first, lengths)
            trained += int(counts.sum())
            lost += int((counts == 0).sum())
        if not trained:
            where = f"{self.name} data of {self.files.prefix}: none of its {self.num_tokens:,} tokens is trained"
            if self.chats_cut:
                raise ValueError(
                    f"{where}: --sft-truncate cut the answers of {self.chats_cut:,} of {len(self.lengths):,} chats away: "
                    f"raise --seq-length, which is {self.size - 1}"
                )
            if isinstance(self.files, ChatArrays):
                raise ValueError(f"{where}: pass chats that have answers")
            raise ValueError(
                f"{where}, as its {SUFFIX} file says: write the data again, with chats that have answers"
            )
        return trained, lost

    def __len__(self) -> int:
        return self.num_epochs * len(self.packing)

    def _epoch_of(self, number: int) -> _Epoch:
        epoch = self._epoch
        if epoch is None or epoch.number != number:
            # its stream is the same in every numpy
            rng = np.random.RandomState([self.config.seed, number])
            chats = rng.permutation(len(self.lengths)).astype(np.int32)
            chats = chats[np.argsort(-self.lengths[chats], kind="stable")]
            epoch = _Epoch(number, chats, rng.permutation(len(self.packing)).astype(np.int32))
            self._epoch = epoch
        return epoch

    def chats_of(self, index: int) -> list[int]:
        check_index(index, self)
        number, place = divmod(index, len(self.packing))
        epoch = self._epoch_of(number)
        places = self.packing.of_sample(int(epoch.samples[place]))
        return [int(chat) for chat in epoch.chats[places] + self.documents.start]

    def __getitem__(self, index: int) -> np.ndarray:
        sample = np.full((2, self.size), PADDING, np.int64)
        end = 0
        sample[1] = 0
        for chat in self.chats_of(index):
            length = int(self.lengths[chat - self.documents.start])
            place = slice(end, end + length)
            sample[0, place] = self.files.get(chat, 0, length)
            sample[1, place] = self.files.trained(chat, length) * COUNTED
            sample[1, end] = FIRST  # which nothing of its chat predicts
            end += length
            sample[1, end - 1] |= PADDED  # from which nothing of its chat is predicted
        sample[1, end:] = PADDED
        if end < self.size:
            sample[1, end] |= FIRST
        if self.config.vocab_size is not None:
            check_tokens(sample[0], self.config.vocab_size, f"{self.files.prefix}.bin")
        self._fetched += 1
        if self._fetched % RELEASE_EVERY == 0:
            self.files.check_open()
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
        f"{chats.name} data of {chats.files.prefix}: {chats.description()}"
        for chats in _chat_datasets(dataset)
    ]


def lost_lines(*datasets: object) -> list[str]:
    return [
        f"warning: {chats.name} data of {chats.files.prefix}: {chats.chats_lost:,} of {chats.num_documents:,} chats have no "
        f"trained token in their first {chats.size} tokens, so nothing is learned from them"
        + (": raise --seq-length" if chats.chats_cut else "")
        for dataset in datasets
        for chats in _chat_datasets(dataset)
        if chats.chats_lost
    ]
