"""Check of a layout: the small run as laid out and on one rank, compared tensor by tensor."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..comm.agreement import on_root
from ..comm.base import Comm, SoloComm
from ..config.run_config import RunConfig
from ..costs.plan import Plan
from ..data.dataset import Dataset, MockDataset
from ..data.marks import COUNTED, FIRST, PADDED
from ..optim.buckets import BucketShard
from ..optim.muon import Muon
from ..training.trainer import Trainer
from .compare import Comparison, Difference, Tolerance
from .points import CHECKPOINT, LOADED, Point
from .recorder import (
    LOADING,
    Piece,
    Recorder,
    assembled,
    check_against,
    check_record,
    pieces_of,
    read_record,
    scalar,
    state_of,
    write_record,
)
from .shrink import (
    ITERATIONS,
    SAVED,
    formats,
    left_out,
    on_one_rank,
    shrink,
    small_runs,
    with_other_kernels,
)

DOCUMENT = 8  # mean tokens of a document
UNCOUNTED = 0.3  # share of labels that the loss leaves out
TRIES = 64  # small runs of which one with every path is sought
COLUMNS = f"  {'tensors':<30} {'number':>7}  {'error':>8}  {'allowed':>8}  largest error"


# Build an unobserved trainer on a plan's ranks, with training and validation samples. Collective.
Build = Callable[[Plan, Comm, tuple[Dataset, Dataset]], Trainer]


@dataclass(frozen=True)
class MarkedSamples:
    """Random tokens in random documents, int64 (2, s + 1).

    masks_loss: some labels do not count
    pads: the last tokens are padding, as in a sample of chats
    """

    tokens: MockDataset
    masks_loss: bool
    pads: bool

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = self.tokens[index]
        rng = np.random.default_rng([self.tokens.seed, index])
        marks = np.full_like(tokens, COUNTED)
        if self.masks_loss:
            marks[rng.random(len(marks)) < UNCOUNTED] = 0
        marks[rng.random(len(marks)) < 1 / DOCUMENT] |= FIRST
        if self.pads:
            marks[-1 - len(marks) // DOCUMENT :] = PADDED
        return np.stack([tokens, marks])


def samples_of(run: RunConfig, count: int) -> Dataset:
    model = run.model
    assert model.vocab_size is not None, "shrink sets it"
    tokens = MockDataset(model.vocab_size, model.seq_length, count, run.training.seed)
    if not run.data.marked:
        return tokens
    data = run.data
    return MarkedSamples(tokens, data.sft or data.eod_mask_loss, data.sft)


class OptimizerPath(NamedTuple):
    """A path of the optimizer. runs: True on a rank whose shards execute it"""

    name: str
    needed: Callable[[RunConfig], bool]
    runs: Callable[[Sequence[BucketShard]], bool]


PATHS = (
    OptimizerPath(
        "updates of matrices by Muon",
        lambda run: run.optimizer.muon,
        lambda shards: any(shard.orthogonal for shard in shards),
    ),
    OptimizerPath(
        "scales of 8-bit moments that ZeRO-1 shards share",
        lambda run: run.optimizer.exp_avg_dtype == "int8",
        lambda shards: any(shard.shared_blocks() for shard in shards),
    ),
)


def lacking_paths(trainer: Trainer, world: Comm) -> list[str]:
    """Return each path that ranks with data-parallel peers lack, with these ranks. Collective."""
    shards = trainer.optimizer.shards
    peers = trainer.groups.dp.size > 1
    own = [
        path.name for path in PATHS if peers and path.needed(trainer.run) and not path.runs(shards)
    ]
    everyone = world.all_gather_object(own)
    lacking = []
    for path in PATHS:
        ranks = [str(rank) for rank, names in enumerate(everyone) if path.name in names]
        if ranks:
            lacking.append(f"{path.name}, on rank {' '.join(ranks)}")
    return lacking


class Files(NamedTuple):
    """Files of a check.

    folder: for a temporary checkpoint, which all ranks see; None: the system's
    record: directory for the layout's tensors, or None
    against: directory with the tensors to compare with; None: one rank's
    """

    folder: Path | None = None
    record: Path | None = None
    against: Path | None = None

    @property
    def reference(self) -> str:
        return str(self.against or "one rank")


NO_FILES = Files()


@dataclass
class Report:
    """Result of a check, the same on every rank. formats: of the runs that were compared"""

    lines: list[str] = field(default_factory=list)
    first: Difference | None = None
    problem: str | None = None

    @property
    def agrees(self) -> bool:
        return self.first is None and self.problem is None


def check_layout(plan: Plan, world: Comm, build: Build, files: Files = NO_FILES) -> Report:
    """Train small copies of a run in its layout and on one rank, and compare them. Collective.

    Raise ValueError for a run that cannot be made small, or a record that cannot be read or written.
    """
    started = time.perf_counter()
    on_root(world, lambda: _check_files(files))
    small = shrink(plan)
    checked = world.rank < small.layout.world_size
    comm = world.split(int(not checked), world.rank)
    report = Report()
    unchecked = left_out(plan.config, small.config)
    if checked:
        small, lacking = _with_most_paths(plan, comm, build)
        unchecked += lacking
        for each in formats(small.config):
            lines = report.lines
            report = _compared(Plan(each, small.layout), comm, build, files)
            # The ranks may share one report.
            report = replace(report, lines=lines + report.lines)
            if not report.agrees:
                break
    seconds = time.perf_counter() - started
    model = small.config.model
    lines = [
        (
            f"check of the layout {small.layout} of {small.layout.world_size} of {world.size} ranks with {model.num_layers} layers of "
            f"width {model.hidden_size}, {ITERATIONS} iterations, against {files.reference}"
        ),
        *report.lines,
        *(f"not checked, because the copy has none: {path}" for path in unchecked),
        _result(report, seconds, files),
    ]
    shared: Report = world.broadcast_object(replace(report, lines=lines))
    return shared


def _with_most_paths(plan: Plan, comm: Comm, build: Build) -> tuple[Plan, list[str]]:
    """Return the first small run in which every rank has every path, or the first one, and the paths that ranks lack. Collective."""
    first = shrink(plan)
    run = plan.config
    if not (run.parallel.zero_stage and any(path.needed(run) for path in PATHS)):
        return first, []
    lacking: list[str] = []
    for small in islice(small_runs(plan), TRIES):
        with contextlib.closing(_trainer(small, comm, build)) as trainer:
            found = lacking_paths(trainer, comm)
        if not found:
            return small, []
        lacking = lacking or found
    return first, lacking


def _check_files(files: Files) -> None:
    if files.record is not None:
        check_record(files.record)
    if files.against is not None:
        check_against(files.against)


def _result(report: Report, seconds: float, files: Files) -> str:
    if report.problem is not None:
        return report.problem
    if report.first is not None:
        return report.first.line()
    return f"the layout trains as {files.reference} ({seconds:.1f} s)"


def _compared(small: Plan, comm: Comm, build: Build, files: Files) -> Report:
    """Compare one number format. Collective."""
    report = Report()
    name = _format(small.config)
    with _shared_folder(comm, files.folder) as directory:
        pieces, unloadable = _record(small, comm, build, directory)
        ranks = comm.gather_object(pieces)
        if record := files.record:
            on_root(comm, lambda: write_record(record, name, ranks or []))
        against: dict[Point, Tensor] = {}
        if directory_of_tensors := files.against:
            against = on_root(comm, lambda: read_record(directory_of_tensors, name))
        if ranks is not None:
            comparison = Comparison(Tolerance.of(small.config))
            if files.against is None:
                report.problem = _compare_alone(small, ranks, comparison, build, directory)
                if comparison.first is None:
                    report.problem = report.problem or unloadable
            else:
                comparison.add(ranks, against)
                if not comparison.kinds:
                    report.problem = (
                        f"--against {files.against} has no tensor of this run in {name}"
                    )
            report.first = comparison.first
            report.lines = [f"in {name.upper().replace('_', ' ')}:", COLUMNS, *comparison.rows()]
        shared: Report = comm.broadcast_object(report)
    return shared


def _format(run: RunConfig) -> str:
    """Return the name of a run's number format in FORMATS."""
    if run.system.int8:
        return "int8"
    if run.precision.name == "fp32" and run.optimizer.exp_avg_dtype == "int8":
        return "int8_moments"
    return run.precision.name


def _compare_alone(
    small: Plan,
    ranks: list[list[Piece]],
    comparison: Comparison,
    build: Build,
    directory: Path,
) -> str | None:
    """Train on one rank and compare. Return the reason if the layout's checkpoint does not load."""
    run = on_one_rank(small.config)
    alone = Plan.of(run, 1)
    with contextlib.closing(
        _trainer(Plan(with_other_kernels(run), alone.layout), SoloComm(), build)
    ) as trainer:
        if isinstance(trainer.optimizer.matrices, Muon):
            layout = small.layout
            trainer.optimizer.matrices.update_as(layout.tp, layout.etp or layout.tp)
        recorder = Recorder(trainer)
        recorder.train(SAVED)
        saved = assembled(_checkpoint_pieces(trainer, CHECKPOINT))
        loaded = _loaded_pieces(trainer)
        recorder.train(ITERATIONS - SAVED)
        reference = assembled([*recorder.pieces, *loaded])
    comparison.add(ranks, reference)
    comparison.check_complete(reference)
    first = comparison.first
    if first is None or first.point.order > Point(SAVED, CHECKPOINT, "").order:
        try:
            comparison.add([_loaded(alone, build, directory)], saved)
        except ValueError as error:
            return f"the checkpoint of the layout does not load on one rank: {error}"
    return None


def _loaded(alone: Plan, build: Build, directory: Path) -> list[Piece]:
    with contextlib.closing(_trainer(alone, SoloComm(), build)) as trainer:
        trainer.load(str(directory))
        return _checkpoint_pieces(trainer, CHECKPOINT)


def _checkpoint_pieces(trainer: Trainer, kind: str) -> list[Piece]:
    pieces: list[Piece] = []
    for shard in trainer.optimizer.checkpoint_shards():
        pieces += pieces_of(shard, Point(SAVED, kind, shard.key), LOADING)
    return pieces


def _loaded_pieces(trainer: Trainer) -> list[Piece]:
    states = [
        scalar(Point(SAVED, LOADED, name), value, LOADING)
        for name, value in state_of(trainer).items()
    ]
    return states + _checkpoint_pieces(trainer, LOADED)


def _trainer(small: Plan, world: Comm, build: Build) -> Trainer:
    samples = samples_of(small.config, (ITERATIONS + 1) * small.global_batch_size)
    return build(small, world, (samples, samples))


def _record(
    small: Plan, comm: Comm, build: Build, directory: Path
) -> tuple[list[Piece], str | None]:
    """Return this rank's tensors of the small run, saved and continued, or the reason if it does not load. Collective."""
    with contextlib.closing(_trainer(small, comm, build)) as trainer:
        recorder = Recorder(trainer)
        recorder.train(SAVED)
        trainer.save(str(directory))
    pieces = recorder.pieces
    with contextlib.closing(_trainer(small, comm, build)) as trainer:
        try:
            trainer.load(str(directory))
        except ValueError as error:
            return pieces, f"the checkpoint of the layout does not load on its own ranks: {error}"
        pieces += _loaded_pieces(trainer)
        recorder = Recorder(trainer)
        recorder.train(ITERATIONS - SAVED)
    return pieces + recorder.pieces, None


@contextlib.contextmanager
def _shared_folder(comm: Comm, folder: Path | None) -> Iterator[Path]:
    """Make a temporary folder that every rank sees. Collective."""
    path = Path(on_root(comm, lambda: tempfile.mkdtemp(prefix=".check-layout-", dir=folder)))
    try:
        yield path
    finally:
        if comm.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
