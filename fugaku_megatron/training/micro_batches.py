"""A rank's micro-batches: the datasets it reads, and a window of samples read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..comm.base import Comm, SoloComm
from ..comm.grid import Groups
from ..config.data import DataConfig
from ..config.run_config import RunConfig
from ..data import marks
from ..data.build import Builder, Datasets, build_datasets, build_separate_datasets
from ..data.dataset import Dataset
from ..data.index_cache import IndexCache
from ..data.marks import TokenCounts, document_starts, padding
from ..data.prefetcher import Prefetcher
from ..data.reader_group import ReaderBatches, ReaderGroup
from ..data.sampler import BatchSizes, StepSamples, consecutive, first_sample, micro_batches
from ..data.token_arrays import TokenArrays
from ..nn.attention.context_parallel import own_segments, positions
from ..nn.forward_context import PackedDocuments, Prediction


@dataclass(frozen=True)
class MicroBatch:
    """One data-parallel rank's micro-batch.

    index: number in the iteration.
    samples: (s + 1, b) on the first and the last stage, and with marks on all stages.
    first_sample: global index, which selects dropout masks.
    marks: (s + 1, b), see `data.marks`.
    rows: this rank's rows of the sequence, (rows,); None for all.
    apart: MTP modules read no token of another document.
    """

    index: int
    samples: Tensor | None
    first_sample: int
    marks: Tensor | None = None
    documents: PackedDocuments = PackedDocuments()
    rows: Tensor | None = None
    apart: bool = False

    def _own(self, whole: Tensor) -> Tensor:
        return whole if self.rows is None else whole[self.rows]

    @property
    def tokens(self) -> Tensor | None:
        """Token ids, (rows, b)."""
        return None if self.samples is None else self._own(self.samples[:-1])

    @property
    def labels(self) -> Tensor | None:
        """Each token's next token, (rows, b); -1 if it does not count in the loss."""
        if self.samples is None:
            return None
        if self.marks is None:
            return self._own(self.samples[1:])
        return self._own(marks.labels(self.samples, self.marks))

    def prediction(self, depth: int, divisor: float) -> Prediction:
        """Return an MTP module's input and labels. depth: from 1; divisor: of the summed losses"""
        assert self.samples is not None, "the last stage has samples"
        tokens, labels = marks.predicted(self.samples, self.marks, depth, self.apart)
        return Prediction(self._own(tokens), self._own(labels), divisor)


class MicroBatchWindow:
    """Micro-batches fetched by number from a source in data order; early ones are kept.

    uses: this rank's model chunks; after as many fetches a micro-batch is dropped.
    """

    def __init__(self, source: Iterator[MicroBatch], uses: int = 1) -> None:
        self._source = source
        self._uses = uses
        self._held: dict[int, tuple[MicroBatch, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def fetch(self, index: int) -> MicroBatch:
        """Return a micro-batch. KeyError if the iteration has no such number, or every chunk has fetched it."""
        while index not in self._held:
            batch = next(self._source, None)
            if batch is None:
                raise KeyError(
                    f"micro-batch {index} is not in this iteration, or was fetched before"
                )
            self._held[batch.index] = (batch, self._uses)
        batch, left = self._held.pop(index)
        if left > 1:
            self._held[index] = (batch, left - 1)
        return batch


def needs_data(run: RunConfig, groups: Groups) -> bool:
    """Return True if this rank's stage uses samples: the first, the last, and with marks all stages."""
    placement = run.placement
    return run.data.marked or groups.pp.rank in (placement.owner(0)[0], placement.last_stage)


def reads_data(run: RunConfig, groups: Groups) -> bool:
    return groups.tp.rank == 0 and needs_data(run, groups)


def datasets_of(
    run: RunConfig,
    num_samples: Sequence[int | None],
    comm: Comm | None = None,
    max_bytes: int | None = None,
    cache: IndexCache | None = None,
    arrays: Mapping[str, TokenArrays] | None = None,
    begun: Sequence[int | None] = (None, None, None),
) -> Datasets:
    """Open the run's (train, valid, test) data sets, `num_samples` of each. Collective."""
    data = run.data
    separate = run.training.multiple_validation_sets
    builder = Builder(
        run.model.seq_length,
        run.training.seed,
        vocab_size=run.model.vocab_size,
        comm=comm,
        max_bytes=max_bytes,
        cache=cache,
        arrays=arrays or {},
        separate_sets=separate,
        cuts_chats=data.cuts_chats,
        inter_document_masking=data.dataloader_inter_document_masking,
        begun=begun,
    )
    if data.train_data_path:
        paths = (data.train_data_path, data.valid_data_path, None)
        return build_separate_datasets(paths, num_samples, builder)
    assert data.data_path is not None, "check_early asks for data"
    return build_datasets(data.data_path, data.split, num_samples, builder, data.legacy_split)


class SampleRange(NamedTuple):
    """Samples that a reader reads.

    first: consumed samples before. sizes: global batch size, by consumed samples.
    numbers: sample numbers of an iteration, see `data.sampler`.
    shift: rank r computes the samples of data-parallel rank r + shift.
    """

    dataset: Dataset | None
    first: int
    sizes: BatchSizes
    numbers: StepSamples = consecutive
    shift: int = 0


class BatchReader:
    """One data-parallel rank's micro-batches from a sample on, read ahead until `close`.

    readers: ranks that share samples; None: this rank reads its own.
    waiting: context around every fetch of samples.
    """

    def __init__(
        self,
        run: RunConfig,
        groups: Groups,
        samples: SampleRange,
        readers: ReaderGroup | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.run = run
        self._groups = groups
        self._waiting = waiting
        self._dp_rank = (groups.data_rank + samples.shift) % groups.data_size
        self._source: Prefetcher[np.ndarray] | ReaderBatches | None = None
        if reads_data(run, groups):
            self._source = self._open(samples, readers)

    def _open(
        self, samples: SampleRange, readers: ReaderGroup | None
    ) -> Prefetcher[np.ndarray] | ReaderBatches:
        groups = self._groups
        dataset, first, sizes, numbers, shift = samples
        micro_batch_size = self.run.batch.micro_batch_size
        readers = readers or ReaderGroup(SoloComm(), (groups.data_rank,))
        dp_ranks = tuple((rank + shift) % groups.data_size for rank in readers.dp_ranks)
        readers = replace(readers, dp_ranks=dp_ranks)
        if readers.comm.size > 1 or self.run.data.marked:
            return ReaderBatches(
                readers, dataset, first, sizes, micro_batch_size, groups.data_size, numbers
            )
        assert dataset is not None, "a rank that reads its own samples has the dataset"
        return Prefetcher(
            micro_batches(
                dataset, first, sizes, micro_batch_size, self._dp_rank, groups.data_size, numbers
            )
        )

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def begin(self) -> TokenCounts | None:
        """Begin an iteration or an evaluation batch; return a marked batch's work. Collective."""
        source = self._source
        if isinstance(source, ReaderBatches):
            with self._waiting():
                source.begin()
        if not self.run.data.marked:
            return None
        run = self.run
        predictions = run.model.predictions
        own = TokenCounts(0, 0, 0, predicted=(0,) * predictions)
        if isinstance(source, ReaderBatches):
            own = TokenCounts.of(source.samples, predictions, run.data.separates_documents)
        groups = self._groups
        sums = [own.counted, own.squares, own.samples, own.padded, *own.predicted]
        numbers = groups.tp.broadcast(torch.tensor(sums))
        mine = int(numbers[1])
        # Over all ranks, because weights may still be gathered on the data-parallel communicator.
        copies = groups.tp.size * groups.pp.size * groups.cp.size
        totals = (groups.world.all_reduce(numbers) // copies).tolist()
        counted, squares, samples, padded, *predicted = totals
        share = mine * groups.data_size / max(squares, 1)
        return TokenCounts(counted, squares, samples, share, padded, tuple(predicted))

    def micro_batches(self, consumed: int, count: int) -> Iterator[MicroBatch]:
        """Iterate over `count` micro-batches from sample `consumed` on; unused samples are None."""
        groups = self._groups
        data = self.run.data
        has_data = needs_data(self.run, groups)
        rows = None
        if groups.cp.size > 1:
            rows = positions(own_segments(self.run.model.seq_length // groups.cp.size, groups.cp))
        for index in range(count):
            samples = self._next() if has_data else None
            size = self.run.batch.micro_batch_size
            first = first_sample(consumed, index, size, self._dp_rank, groups.data_size)
            if samples is not None and data.marked:
                documents = documents_of(samples[1], data)
                yield MicroBatch(
                    index,
                    samples[0],
                    first,
                    samples[1],
                    documents,
                    rows,
                    apart=data.separates_documents,
                )
            else:
                yield MicroBatch(index, samples, first, rows=rows)

    def _next(self) -> Tensor:
        """Broadcast a micro-batch to tensor-parallel ranks: int64 (s + 1, b), with marks (2, s + 1, b)."""
        shape: tuple[int, ...] = (
            self.run.model.seq_length + 1,
            self.run.batch.micro_batch_size,
        )
        if self.run.data.marked:
            shape = (2, *shape)
        with self._waiting():
            if self._source:
                samples = torch.from_numpy(next(self._source))
            else:
                samples = torch.empty(shape, dtype=torch.int64)
            return self._groups.tp.broadcast(samples)


def documents_of(marks: Tensor, data: DataConfig) -> PackedDocuments:
    """Return document starts, positions and padding from marks (s + 1, b), as the data flags ask."""
    padded = padding(marks)
    if not (data.masks_attention or data.restarts_positions):
        return PackedDocuments(padding=padded)
    starts = document_starts(marks)
    positions = (
        torch.arange(starts.shape[1], dtype=torch.int32).unsqueeze(1) - starts.t().contiguous()
    )
    return PackedDocuments(
        starts=starts if data.masks_attention else None,
        positions=positions if data.restarts_positions else None,
        padding=padded,
    )
