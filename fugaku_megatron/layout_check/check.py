"""Check of a layout: the small run as laid out and on one rank, compared tensor by tensor."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ..comm.agreement import on_root
from ..comm.base import Comm, SoloComm
from ..comm.grid import Groups
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..nn.ops import Ops
from ..training.trainer import Trainer
from .compare import Comparison, Difference, Tolerance
from .points import CHECKPOINT, Point
from .recorder import Piece, Recorder, assembled, pieces_of
from .samples import samples_of
from .shrink import ITERATIONS, Small, in_fp32, on_one_rank, shrink

COLUMNS = f"  {'tensors':<30} {'number':>7}  {'error':>8}  {'allowed':>8}  largest error"


class Tools(NamedTuple):
    """Parts of a run that the machine decides: its operations and its communicators."""

    build_ops: Callable[[RunConfig], Ops]
    connect: Callable[[Layout, Comm], Groups]


@dataclass
class Report:
    """Result of a check, the same on every rank. formats: of the runs that were compared"""

    lines: list[str] = field(default_factory=list)
    first: Difference | None = None
    problem: str | None = None

    @property
    def agrees(self) -> bool:
        return self.first is None and self.problem is None


def check_layout(
    run: RunConfig, layout: Layout, world: Comm, tools: Tools, folder: Path | None = None
) -> Report:
    """Train small copies of a run in its layout and on one rank, and compare them. Collective.

    folder: for a temporary checkpoint, which all ranks see; None: the system's
    """
    started = time.perf_counter()
    small = shrink(run, layout)
    checked = world.rank < small.layout.world_size
    comm = world.split(int(not checked), world.rank)
    report = Report()
    if checked:
        exact = in_fp32(small.run)
        report = _compared(Small(exact, small.layout), comm, tools, folder)
        if report.agrees and small.run != exact:
            lines = report.lines
            report = _compared(small, comm, tools, folder)
            report = replace(report, lines=lines + report.lines)
    seconds = time.perf_counter() - started
    lines = [_title(small, world.size), *report.lines, _result(report, small, seconds)]
    shared: Report = world.broadcast_object(replace(report, lines=lines))
    return shared


def _title(small: Small, ranks: int) -> str:
    model = small.run.model
    return (
        f"check of the layout {small.layout} of {small.layout.world_size} of {ranks} ranks with {model.num_layers} layers of "
        f"width {model.hidden_size}, {ITERATIONS} iterations, against one rank"
    )


def _result(report: Report, small: Small, seconds: float) -> str:
    if report.problem is not None:
        return report.problem
    if report.first is not None:
        return report.first.line(small.run.model.num_layers)
    return f"the layout trains as one rank ({seconds:.1f} s)"


def _compared(small: Small, comm: Comm, tools: Tools, folder: Path | None) -> Report:
    """Compare one number format. Collective."""
    report = Report()
    with _shared_folder(comm, folder) as directory:
        pieces = _record(small, comm, tools, directory)
        ranks = comm.gather_object(pieces)
        if ranks is not None:
            _compare_ranks(report, small, ranks, tools=tools, directory=directory)
        shared: Report = comm.broadcast_object(report)
    return shared


def _compare_ranks(
    report: Report, small: Small, ranks: list[list[Piece]], tools: Tools, directory: Path
) -> None:
    alone = on_one_rank(small.run)
    one = Layout.from_run(alone, 1)
    with contextlib.closing(_trainer(Small(alone, one), SoloComm(), tools)) as trainer:
        recorder = Recorder(trainer)
        recorder.train(ITERATIONS)
        reference = assembled(recorder.pieces)
        reference |= assembled(_checkpoint_pieces(trainer))
    comparison = Comparison(Tolerance.of(small.run))
    comparison.add(ranks, reference)
    report.first = comparison.first
    if report.first is None:
        try:
            comparison.add([_loaded(Small(alone, one), tools, directory)], reference)
        except ValueError as error:
            report.problem = f"the checkpoint of the layout does not load on one rank: {error}"
        report.first = comparison.first
    name = "int8" if small.run.system.int8 else small.run.precision.name
    report.lines += [f"in {name.upper()}:", COLUMNS, *comparison.rows()]


def _loaded(alone: Small, tools: Tools, directory: Path) -> list[Piece]:
    with contextlib.closing(_trainer(alone, SoloComm(), tools)) as trainer:
        trainer.load(str(directory))
        return _checkpoint_pieces(trainer)


def _checkpoint_pieces(trainer: Trainer) -> list[Piece]:
    pieces: list[Piece] = []
    for shard in trainer.optimizer.checkpoint_shards():
        pieces += pieces_of(shard, Point(ITERATIONS, CHECKPOINT, shard.key))
    return pieces


def _trainer(small: Small, world: Comm, tools: Tools) -> Trainer:
    run, layout = small
    samples = samples_of(run, (ITERATIONS + 1) * layout.global_batch_size(run))
    groups = tools.connect(layout, world)
    return Trainer(run, layout, world, groups, samples, samples, ops=tools.build_ops(run))


def _record(small: Small, comm: Comm, tools: Tools, directory: Path) -> list[Piece]:
    """Return this rank's tensors of the small run, and save its checkpoint. Collective."""
    with contextlib.closing(_trainer(small, comm, tools)) as trainer:
        recorder = Recorder(trainer)
        recorder.train(ITERATIONS)
        trainer.save(str(directory))
    return recorder.pieces


@contextlib.contextmanager
def _shared_folder(comm: Comm, folder: Path | None) -> Iterator[Path]:
    """Make a temporary folder that every rank sees. Collective."""
    path = Path(on_root(comm, lambda: tempfile.mkdtemp(prefix=".check-layout-", dir=folder)))
    try:
        yield path
    finally:
        if comm.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
