"""Datasets of a run, and how many samples it needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..comm.agreement import Nodes, everywhere
from ..comm.base import Comm
from ..comm.grid import Groups
from ..config import batches
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..data.dataset import NEW_ORDER, DataOrder, Dataset, MockDataset, TokenArrays, ValidationSets
from ..data.index_cache import IN_MEMORY, IndexCache
from ..data.marks import mark
from ..data.sampler import ReaderGroup, build_reader_group
from ..host.allocator import node_bytes
from ..training.micro_batches import datasets_of, reads_data
from ..training.trainer import Progress
from .tokenizer import end_of_document

Data = tuple[
    Dataset | None, Dataset | None
]  # training and validation samples, where this rank reads them


def evaluations(run: RunConfig, iterations: int) -> int:
    """How many evaluations a run of `iterations` makes: every --eval-interval, and one at the end. With --skip-train it is one."""
    training = run.training
    left_out = max(0, -(-(training.start_eval_at_iter or 0) // training.eval_interval) - 1)
    count = (
        1 if training.skip_train else max(0, iterations // training.eval_interval + 1 - left_out)
    )
    return count if training.eval_iters else 0


def samples_to_validate(run: RunConfig, layout: Layout, count: int) -> int | None:
    """Samples of the validation data of so many evaluations; None: all there are. Random ones have no end, so that they are as many
    as one evaluation takes."""
    full = run.training.full_validation
    batches_needed = (1 if full else count) * run.training.eval_iters
    return None if full and not run.data.mock_data else batches_needed * layout.eval_batch_size(run)


def valid_sizes(
    run: RunConfig, layout: Layout, valid: Dataset | None, world: Comm
) -> tuple[int, ...]:
    """Samples of each validation set, on every rank; none without validation data. Collective.

    Raises ValueError on every rank for a set that --full-validation cannot make a batch of.
    """
    mine = (
        []
        if valid is None
        else [*map(len, valid.datasets)]
        if isinstance(valid, ValidationSets)
        else [len(valid)]
    )
    sizes = max(world.all_gather_object(tuple(mine)), key=len)
    with everywhere():
        layout.evaluated(run, sizes, 0)
    return sizes


def run_length(run: RunConfig, layout: Layout, progress: Progress) -> tuple[int, int]:
    """(iterations, samples) at the end of a run that stands at `progress`."""
    return batches.run_length(
        run, layout.global_batch_size(run), progress.iteration, progress.consumed_samples
    )


def find_reader_group(run: RunConfig, groups: Groups, nodes: Nodes) -> ReaderGroup | None:
    """Who reads the data for this rank; None where it needs none, and where no file is read. Collective."""
    return (
        None
        if run.data.mock_data
        else build_reader_group(groups.world, nodes, groups.data_rank, reads_data(run, groups))
    )


def samples_needed(run: RunConfig, layout: Layout, progress: Progress) -> tuple[int, int | None]:
    """Return the samples of training and validation data of a run that stands at `progress`, as of `open_data`."""
    size = layout.global_batch_size(run)
    iterations, end = run_length(run, layout, progress)
    valid_samples = samples_to_validate(run, layout, evaluations(run, iterations))
    return batches.requested_samples(run, size, end), valid_samples


def build_data(
    run: RunConfig,
    groups: Groups,
    layout: Layout,
    progress: Progress | None = None,
    readers: ReaderGroup | None = None,
    tokenizer: dict[str, Any] | None = None,
    order: DataOrder = NEW_ORDER,
) -> Data:
    """Training and validation samples on the ranks that read data, (None, None) elsewhere. Collective.

    progress: where a resumed run stands. readers: of this rank; without them every rank that needs data reads it. tokenizer:
    what is known of the run's (`data.tokenizer.identity`). order: that a resumed run began with.
    """
    needed = samples_needed(run, layout, progress or Progress())
    if run.training.skip_train:  # whose validation data has the order of one evaluation
        order = order._replace(valid=None)
    return open_data(run, groups, needed, readers, tokenizer=tokenizer, order=order)


def open_data(
    run: RunConfig,
    groups: Groups,
    samples: tuple[int, int | None],
    readers: ReaderGroup | None = None,
    arrays: Mapping[str, TokenArrays] | None = None,
    tokenizer: dict[str, Any] | None = None,
    order: DataOrder = NEW_ORDER,
) -> Data:
    """`build_data` for these numbers of training and validation samples; a data set of 0 samples is None.

    None: every validation sample once.

    arrays: documents that are in no files, by the names that the run's data flags have for them.
    """
    train, valid = _open(run, groups, samples, readers, arrays or {}, order)
    if not run.data.marks_documents:
        return train, valid
    eod, masks_loss = end_of_document(run.data, tokenizer), run.data.eod_mask_loss
    return mark(train, eod, masks_loss), mark(valid, eod, masks_loss)


def _open(
    run: RunConfig,
    groups: Groups,
    samples: tuple[int, int | None],
    readers: ReaderGroup | None,
    arrays: Mapping[str, TokenArrays],
    order: DataOrder,
) -> Data:
    """`open_data` without marks."""
    reads = readers.reads if readers else reads_data(run, groups)
    reading = groups.world.split(0 if reads else 1, groups.world.rank)
    if not reads:
        return None, None
    if run.data.mock_data:
        model, seed = run.model, run.training.seed
        assert model.vocab_size is not None, "with_vocabulary has settled it"
        train, valid = (
            MockDataset(model.vocab_size, model.seq_length, count, seed + number) if count else None
            for number, count in enumerate(samples)
        )
        return train, valid
    cache = IndexCache(
        run.data.data_cache_path, sys.maxsize if arrays else IN_MEMORY
    )  # no file to keep an index next to
    begun = (*order, None)
    return datasets_of(run, (*samples, 0), reading, node_bytes(), cache, arrays, begun)[:2]


def no_evaluation_note(run: RunConfig) -> str:
    """Why a run that asks for evaluations has no validation data."""
    why = (
        f"--split {run.data.split} leaves none of the documents to validation"
        if run.data.data_path
        else "no --valid-data-path"
    )
    return f"note: no evaluation: {why}"
