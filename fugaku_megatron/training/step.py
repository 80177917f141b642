"""One rank's part of an iteration: where its micro-batches come from, and what each instruction of a schedule does.

The first tensor-parallel rank reads samples, and its group gets them by broadcasts. Marked samples (`data.marks`) are read an
iteration at a time, since the labels of the whole global batch are counted before its first backward. Left out: which samples an
iteration takes (`data.sampler`), the schedules (`schedule`), reduction and update (`optim`).
Legend: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..comm.base import Comm, Handle, SoloComm
from ..comm.grid import Groups
from ..config.layout import placement
from ..config.run_config import DataConfig, RunConfig
from ..data import marks
from ..data.build import Datasets, build_datasets, build_separate_datasets
from ..data.dataset import Dataset, TokenArrays
from ..data.index_cache import IndexCache
from ..data.marks import Work, document_starts, padding
from ..data.sampler import (
    Prefetcher,
    ReaderBatches,
    ReaderGroup,
    consecutive,
    first_sample,
    micro_batches,
)
from ..nn.model import Stage
from ..nn.ops import backward
from ..nn.parameter import Waiting
from ..nn.passes import Documents, Pass
from ..nn.sequence_ranks import own_runs, positions
from ..pipeline import schedule
from ..pipeline.parts import Instruction, receives_ahead
from ..pipeline.schedule import Schedule


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one data-parallel rank.

    index: its number in the iteration. samples: (s + 1, b) on the first and the last stage, None on the stages between.
    first_sample: global index of its first sample, which selects dropout masks. marks: (s + 1, b), those of `data.marks`; with them
    all stages have samples. documents: what attention and positions see of them. rows: of the sequence that this rank has, (rows,),
    None for all.
    """

    index: int
    samples: Tensor | None
    first_sample: int
    marks: Tensor | None = None
    documents: Documents = Documents()
    rows: Tensor | None = None

    def _own(self, whole: Tensor) -> Tensor:
        return whole if self.rows is None else whole[self.rows]

    @property
    def tokens(self) -> Tensor | None:
        """(rows, b)."""
        return None if self.samples is None else self._own(self.samples[:-1])

    @property
    def labels(self) -> Tensor | None:
        """(rows, b): of each token the one that follows, -1 where that does not count."""
        if self.samples is None:
            return None
        return self._own(
            self.samples[1:] if self.marks is None else marks.labels(self.samples, self.marks)
        )


class MicroBatchWindow:
    """Micro-batches fetched by number from a source that delivers them in data order.

    What the source delivers before it is asked for is held until it is; a schedule decides how far it reads ahead. uses: how many
    chunks of this rank fetch each micro-batch; after the last of them it is dropped.
    """

    def __init__(self, source: Iterator[MicroBatch], uses: int = 1) -> None:
        self._source, self._uses = source, uses
        self._held: dict[int, tuple[MicroBatch, int]] = {}

    def __len__(self) -> int:
        """Micro-batches that are held."""
        return len(self._held)

    def fetch(self, index: int) -> MicroBatch:
        """The micro-batch of this number. KeyError when the iteration has none, or every chunk has fetched it."""
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


Key = tuple[int, int]  # chunk, micro-batch


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What the micro-batches of an iteration have in common.

    activation: (s, b, h) between stages, s being a part of the sequence with sequence parallelism. dtype: its element type.
    loss_factor: of the loss that backward begins with. training: False in evaluation. recompute, count, tokens: see `Pass`.
    """

    activation: tuple[int, int, int]
    dtype: torch.dtype
    loss_factor: float
    training: bool
    recompute: str | None
    count: float | None = None
    tokens: float | None = None


class StepExecutor:
    """Runs the instructions of one iteration on this rank's chunks of layers.

    Everything in flight is keyed by (chunk, micro-batch). stage: this rank's part of the model. pp: the pipeline. batches: this
    rank's micro-batches. watch: puts an observer between the schedule and this executor.
    """

    def __init__(
        self,
        stage: Stage,
        pp: Comm,
        batches: MicroBatchWindow,
        shape: StepShape,
        watch: Callable[[schedule.Executor], schedule.Executor] | None = None,
    ) -> None:
        self.stage, self.chunks, self.placement, self.pp = stage, stage.chunks, stage.placement, pp
        self.batches, self.shape = batches, shape
        self.watched = watch(self) if watch else self
        self.inputs: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        self.weight_work: dict[Key, Waiting] = {}
        self.losses: dict[int, Tensor] = {}
        self._to_receive: dict[tuple[str, int], deque[Instruction]] = {}
        self._receiving: dict[Instruction, tuple[Tensor, Handle]] = {}
        self._sending: deque[Handle] = deque()
        self._sends_under_way = 0

    def run(self, lists: Schedule) -> list[Tensor]:
        """Walk this rank's list; returns the losses () of the micro-batches in data order (last part; empty elsewhere)."""
        instructions = lists.instructions(self.pp.rank)
        self._sends_under_way = lists.send_queue(self.pp.rank)
        self._to_receive = {
            tag: deque(waiting) for tag, waiting in schedule.receives(instructions).items()
        }
        for tag in [*self._to_receive] * receives_ahead(lists.name):
            self._receive_ahead(tag)
        schedule.run(instructions, self.watched)
        while self._sending:
            self._sending.popleft().wait()
        return [self.losses[index] for index in sorted(self.losses)]

    # Computation ----------------------------------------------------------------------------------------------------------------

    def forward(self, instruction: Instruction) -> None:
        """Tokens or input (s, b, h) -> output (s, b, h), or the loss () of the last part."""
        key, chunk = _key(instruction), self.chunks[instruction.chunk]
        batch = self.batches.fetch(instruction.microbatch)
        x = batch.tokens if chunk.is_first else self.inputs[key]
        shape, labels = self.shape, batch.labels if chunk.is_last else None
        forward_pass = Pass(
            first_sample=batch.first_sample,
            training=shape.training,
            recompute=shape.recompute,
            documents=batch.documents,
            count=shape.count,
            tokens=shape.tokens,
            balance_factor=shape.loss_factor,
        )
        output = chunk(x, labels, forward_pass, shape.loss_factor)
        if not torch.is_grad_enabled():
            self.inputs.pop(key, None)
        if chunk.is_last:
            self.losses[instruction.microbatch] = output.detach()
            output = output * shape.loss_factor
        if torch.is_grad_enabled() or not chunk.is_last:
            self.outputs[key] = output
        if (following := self._own_neighbour(instruction, 1)) is not None:
            self.inputs[following] = self._take_output(key).requires_grad_(torch.is_grad_enabled())

    def backward(self, instruction: Instruction) -> None:
        """Gradient of the output (s, b, h) -> weight gradients, and gradient of the input (s, b, h)."""
        key = _key(instruction)
        backward(self.outputs.pop(key), self.gradients.pop(key, None))
        if not self.chunks[instruction.chunk].is_first:
            previous = self._own_neighbour(instruction, -1)
            gradient = self.inputs.pop(key).grad
            assert gradient is not None, "backward has reached the input"
            self.gradients[key if previous is None else previous] = gradient

    def backward_input(self, instruction: Instruction) -> None:
        """Gradient of the output (s, b, h) -> gradient of the input (s, b, h); what is left of backward waits."""
        with self.stage.ops.weight_gradients.put_off() as waiting:
            self.backward(instruction)
        self.weight_work[_key(instruction)] = waiting

    def backward_weight(self, instruction: Instruction) -> None:
        """The weight gradients that `backward_input` left out."""
        self.weight_work.pop(_key(instruction)).run()

    # Messages -------------------------------------------------------------------------------------------------------------------

    def recv_forward(self, instruction: Instruction) -> None:
        """The input (s, b, h), from the stage with the previous part."""
        self.inputs[_key(instruction)] = self._received(instruction).requires_grad_(
            torch.is_grad_enabled()
        )

    def send_forward(self, instruction: Instruction) -> None:
        """The output (s, b, h), to the stage with the next part."""
        self._send(self._take_output(_key(instruction)), instruction)

    def recv_backward(self, instruction: Instruction) -> None:
        """The gradient of the output (s, b, h), from the stage with the next part."""
        self.gradients[_key(instruction)] = self._received(instruction)

    def send_backward(self, instruction: Instruction) -> None:
        """The gradient of the input (s, b, h), to the stage with the previous part."""
        self._send(self.gradients.pop(_key(instruction)), instruction)

    def _take_output(self, key: Key) -> Tensor:
        """The values of an output, which backward does not read."""
        if not torch.is_grad_enabled():
            return self.outputs.pop(key)
        values = self.outputs[key].detach()
        self.outputs[key].data = values.new_empty(1)
        return values

    def _own_neighbour(self, instruction: Instruction, step: int) -> Key | None:
        """The key under which the next (1) or previous (-1) part has this micro-batch, if it is a chunk of this rank."""
        neighbour = self.placement.neighbour(self.pp.rank, instruction.chunk, step)
        return (
            (neighbour[1], instruction.microbatch)
            if neighbour and neighbour[0] == self.pp.rank
            else None
        )

    def _receive_ahead(self, tag: tuple[str, int]) -> None:
        """Post the next receive of an operation and chunk, which have one tag."""
        if self._to_receive[tag]:
            instruction = self._to_receive[tag].popleft()
            tensor = torch.empty(self.shape.activation, dtype=self.shape.dtype)
            self._receiving[instruction] = (
                tensor,
                self.pp.irecv(tensor, *self.placement.peer(self.pp.rank, instruction)),
            )

    def _received(self, instruction: Instruction) -> Tensor:
        tensor, handle = self._receiving.pop(instruction)
        self._receive_ahead((instruction.op, instruction.chunk))
        handle.wait()
        return tensor

    def _send(self, tensor: Tensor, instruction: Instruction) -> None:
        while self._sending and (
            len(self._sending) >= self._sends_under_way or self._sending[0].done()
        ):
            self._sending.popleft().wait()
        self._sending.append(
            self.pp.isend(tensor.contiguous(), *self.placement.peer(self.pp.rank, instruction))
        )


def _key(instruction: Instruction) -> Key:
    return instruction.chunk, instruction.microbatch


Source = Prefetcher[np.ndarray] | ReaderBatches  # of micro-batches


def needs_data(run: RunConfig, groups: Groups) -> bool:
    """Whether this rank's stage uses samples: the first and the last one, and with marks all of them."""
    parts = placement(run)
    return run.data.marked or groups.pp.rank in (parts.owner(0)[0], parts.last_stage)


def reads_data(run: RunConfig, groups: Groups) -> bool:
    """Whether this rank opens the data set."""
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
    """(train, valid, test) of the data flags of a run with files; the other arguments and errors are those of
    `data.build.build_datasets`."""
    data, separate = run.data, run.training.multiple_validation_sets
    common = (
        run.model.seq_length,
        num_samples,
        run.training.seed,
        run.model.vocab_size,
        comm,
        max_bytes,
        cache,
    )
    if data.train_data_path:
        return build_separate_datasets(
            (data.train_data_path, data.valid_data_path, None),
            *common,
            arrays=arrays,
            separate_sets=separate,
            cuts_chats=data.cuts_chats,
            begun=begun,
        )
    assert data.data_path is not None, "check_early asks for data"
    return build_datasets(
        data.data_path,
        data.split,
        *common,
        legacy_split=data.legacy_split,
        arrays=arrays,
        separate_sets=separate,
        cuts_chats=data.cuts_chats,
        begun=begun,
    )


@dataclass(frozen=True)
class RunBatches:
    """The batches of a run on one rank.

    readers: see `train.Trainer`. waiting: is entered around what fetches samples.

    shift: the rank gets the samples of the data-parallel rank so many places further on.
    """

    run: RunConfig
    groups: Groups
    readers: ReaderGroup | None
    waiting: Callable[[], AbstractContextManager[None]]
    shift: int = 0

    def _shifted(self, rank: int) -> int:
        return (rank + self.shift) % self.groups.data_size

    def open(
        self,
        dataset: Dataset | None,
        consumed: int,
        size: Callable[[int], int],
        samples: Callable[[int, int], Sequence[int]] = consecutive,
    ) -> Source | None:
        """This rank's micro-batches from `consumed` on; None where it does not read. Close it at the end."""
        if not reads_data(self.run, self.groups):
            return None
        micro_batch_size, groups = self.run.batch.micro_batch_size, self.groups
        readers = self.readers or ReaderGroup(SoloComm(), (groups.data_rank,))
        readers = replace(readers, dp_ranks=tuple(map(self._shifted, readers.dp_ranks)))
        if readers.comm.size > 1 or self.run.data.marked:
            return ReaderBatches(
                readers, dataset, consumed, size, micro_batch_size, groups.data_size, samples
            )
        assert dataset is not None, "a rank that reads its own samples has the dataset"
        return Prefetcher(
            micro_batches(
                dataset,
                consumed,
                size,
                micro_batch_size,
                self._shifted(groups.data_rank),
                groups.data_size,
                samples,
            )
        )

    def begin(self, source: Source | None) -> Work | None:
        """Before each iteration, and each batch of an evaluation: the work of the global batch, where it is marked. Collective."""
        if isinstance(source, ReaderBatches):
            with self.waiting():
                source.begin()
        if not self.run.data.marked:
            return None
        own = source.work if isinstance(source, ReaderBatches) else Work(0, 0, 0)
        groups = self.groups
        sums = [own.counted, own.squares, own.samples, own.padded]
        numbers = groups.tp.broadcast(torch.tensor(sums))
        mine = int(numbers[1])
        # Over all ranks, since gathers of weights may be under way on the communicator of the data-parallel ones.
        copies = groups.tp.size * groups.pp.size * groups.cp.size
        counted, squares, samples, padded = (groups.world.all_reduce(numbers) // copies).tolist()
        share = mine * groups.data_size / max(squares, 1)
        return Work(counted, squares, samples, share, padded)

    def micro_batches(
        self, source: Source | None, consumed: int, count: int
    ) -> Iterator[MicroBatch]:
        """The `count` micro-batches of the iteration that starts at `consumed` samples, in data order."""
        groups, has_data = self.groups, needs_data(self.run, self.groups)
        rows = (
            positions(own_runs(self.run.model.seq_length // groups.cp.size, groups.cp))
            if groups.cp.size > 1
            else None
        )
        for index in range(count):
            samples = self._next(source) if has_data else None
            first = first_sample(
                consumed,
                index,
                self.run.batch.micro_batch_size,
                self._shifted(groups.data_rank),
                groups.data_size,
            )
            if samples is not None and self.run.data.marked:
                yield MicroBatch(
                    index,
                    samples[0],
                    first,
                    samples[1],
                    documents_of(samples[1], self.run.data),
                    rows,
                )
            else:
                yield MicroBatch(index, samples, first, rows=rows)

    def _next(self, source: Source | None) -> Tensor:
        """A micro-batch, int64 (s + 1, b), with marks (2, s + 1, b), on every tensor-parallel rank, read by the first."""
        shape = (2,) * self.run.data.marked + (
            self.run.model.seq_length + 1,
            self.run.batch.micro_batch_size,
        )
        with self.waiting():
            samples = (
                torch.from_numpy(next(source)) if source else torch.empty(shape, dtype=torch.int64)
            )
            return self.groups.tp.broadcast(samples)


def documents_of(marks: Tensor, data: DataConfig) -> Documents:
    """What attention and positions of the run see of the documents that marks (s + 1, b) tell."""
    padded = padding(marks)
    if not (data.masks_attention or data.restarts_positions):
        return Documents(padding=padded)
    starts = document_starts(marks)
    positions = (
        torch.arange(starts.shape[1], dtype=torch.int32).unsqueeze(1) - starts.t().contiguous()
    )
    return Documents(
        starts=starts if data.masks_attention else None,
        positions=positions if data.restarts_positions else None,
        padding=padded,
    )
