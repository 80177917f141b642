"""Published benchmark tables, row by row: printed cells, their meaning, and corrections by errata.

seeds/tables.csv has a line per table, seeds/a64fx_*.csv and seeds/a100.csv a line per printed row,
seeds/errata.csv the corrections: R numbers correct a cell or, if `corrected` is empty, comment on
it; S numbers add facts printed elsewhere; line * replaces `printed` in every row. Fits exclude
failed, repeated and unfit rows. The clock's gain is at most 1.10: a larger one is noise (erratum
R13).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..config.fields import check
from ..config.layout import Layout
from ..config.model import ModelConfig
from ..config.parallel import ParallelConfig
from ..config.precision import PrecisionConfig
from ..config.run_config import RunConfig
from ..config.training import BatchConfig, TrainingConfig
from ..observe.log.iteration_metrics import HEADERS
from ..planner.model import Prediction, predict
from ..planner.system import System
from ..text.named_files import JsonObject


@dataclass(frozen=True, kw_only=True)
class Erratum:
    """Correction. line: None for all rows. printed: the cell, or part of it for all rows."""

    id: str
    table: str
    line: int | None
    column: str
    printed: str
    corrected: str
    unfit: str
    why: str

    def holds(self, table: str, line: int, cell: str) -> bool:
        return self.table == table and (
            line == self.line or self.line is None and self.printed in cell
        )

    def apply(self, cell: str) -> str:
        """Return the corrected cell; empty for a comment."""
        if self.line is None and self.corrected:
            return cell.replace(self.printed, self.corrected)
        return self.corrected


SEEDS = Path(__file__).parent / "seeds"
DOCUMENTS = {  # id -> (file of its rows, title)
    "000": ("a64fx_124m.csv", "124M model benchmarking results"),
    "001": ("a64fx_30b.csv", "30B model benchmarking results"),
    "002": ("a64fx_tcmalloc.csv", "Check for the performance of w/ or w/o tcmalloc"),
    "004": ("a100.csv", "Prequel: A100 experiments before a 176B run"),
    "005": ("a64fx_further.csv", "Further published runs of the project of 000 to 002, as a list"),
}
RANKS_PER_NODE = {"a64fx": 1, "a100": 8}  # where no column says it
ABSENT = ("", "-", "- MiB", "GB", "OOM", "fail")  # cells without a value


def _memory_mib(cell: str) -> float:
    if cell.endswith("GB"):
        # An A100 of "80GB" has 81920 MiB: the tables' GB are GiB.
        return float(cell.removesuffix("GB")) * 1024
    return float(cell.removesuffix("MiB"))


def _ghz(cell: str) -> float:
    return float(cell.removesuffix("GHz"))


_WORDS = ("machine", "software", "precision", "formula", "size", "notes")
_COUNTS = ("seq", "vocabulary", "layers", "hidden", "heads", "gpus", "ranks_per_node")
_LAYOUT = ("dp", "tp", "pp", "mbs", "gbs", "zero")
_NUMBERS = ("seconds", "tflops", "petaflops")
# column -> conversion of a corrected cell that has a value
PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_WORDS, str),
    **dict.fromkeys((*_COUNTS, *_LAYOUT), int),
    **dict.fromkeys(_NUMBERS, float),
    "nodes": lambda cell: int(cell.split()[0]),  # also "512 (2.2GHz)"
    "ac": "Yes".__eq__,
    "async": "no".__eq__,
    "freq": _ghz,
    "mem": _memory_mib,
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Printed table: id ("001.2": second in document 001), line and header.

    facts: cells that hold for all rows, by column
    assumed: facts that the document does not state
    """

    id: str
    document: str
    line: int
    title: str
    header: tuple[str, ...]
    facts: Mapping[str, str]
    assumed: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(HEADERS[name] for name in self.header)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Corrected row.

    ranks: MPI processes on A64FX, GPUs on A100
    tflops: per node on A64FX, per GPU on A100
    ghz: None on A100
    recompute: all layers
    formula: counts `tflops` (costs.flops.hardware_flops or parameter_flops)
    seconds, tflops, petaflops, memory_mib: None if not printed
    synchronous: CUDA_LAUNCH_BLOCKING=1
    duplicate_of: line with the run's first printing
    status: ran, oom, failed, planned (never run) or impossible (see `problem`)
    """

    table: Table
    line: int
    cells: tuple[str, ...]
    status: str
    machine: str
    software: str
    precision: str
    size: str
    nodes: int
    ranks: int
    ghz: float | None
    layers: int
    hidden: int
    heads: int
    seq: int
    vocabulary: int
    dp: int
    tp: int
    pp: int
    mbs: int
    gbs: int
    recompute: bool
    zero: int
    synchronous: bool
    formula: str
    seconds: float | None
    tflops: float | None
    petaflops: float | None
    memory_mib: float | None
    notes: str
    errata: tuple[Erratum, ...]
    duplicate_of: int | None = None

    @property
    def document(self) -> str:
        return self.table.document

    @property
    def devices(self) -> int:
        """Nodes on A64FX, GPUs on A100."""
        return self.nodes if self.machine == "a64fx" else self.ranks

    def cell(self, column: str) -> str:
        return self.cells[self.table.columns.index(column)] if column in self.table.columns else ""

    def corrected(self, column: str) -> str:
        return next(
            (e.corrected for e in self.errata if e.column == column and e.line and e.corrected),
            self.cell(column),
        )

    def unfit(self, purpose: str) -> bool:
        """Return True if an erratum excludes the row from `purpose`: "time" or "memory"."""
        return any(erratum.unfit == purpose for erratum in self.errata)

    @property
    def fit_time(self) -> bool:
        return self._fits("time", self.seconds)

    @property
    def fit_memory(self) -> bool:
        return self._fits("memory", self.memory_mib)

    def _fits(self, purpose: str, value: float | None) -> bool:
        measured = self.status == "ran" and value is not None
        return measured and self.duplicate_of is None and not self.unfit(purpose)

    def run(self) -> RunConfig:
        """Return the config of the published run, with an even pipeline split."""
        return RunConfig(
            model=ModelConfig(
                num_layers=self.layers,
                hidden_size=self.hidden,
                num_attention_heads=self.heads,
                seq_length=self.seq,
                vocab_size=self.vocabulary,
            ),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                pipeline_split="even",
                zero_stage=self.zero,
            ),
            batch=BatchConfig(micro_batch_size=self.mbs, global_batch_size=self.gbs),
            precision=PrecisionConfig(bf16=self.precision == "bf16", fp16=self.precision == "fp16"),
            training=TrainingConfig(recompute_granularity="full" if self.recompute else None),
        )

    def problem(self) -> str | None:
        needed = self.dp * self.tp * self.pp
        if needed != self.ranks:
            return f"DP {self.dp} x TP {self.tp} x PP {self.pp} = {needed} ranks, but the row has {self.ranks}"
        try:
            Layout.from_run(self.run(), self.ranks)
        except ValueError as error:
            return str(error)
        return None


def known(value: float | None) -> float:
    assert value is not None
    return value


def load(documents: Sequence[str] = ()) -> tuple[Row, ...]:
    """Return the rows in `documents` (default: all). ValueError for unknown ones and wrong data."""
    for name in documents:
        check(name in DOCUMENTS, f"--document {name} is unknown: pass {' or '.join(DOCUMENTS)}")
    errata = [
        Erratum(line=None if line == "*" else int(line), **cells)
        for line, cells in _records("errata.csv")
    ]
    tables = {}
    for line, cells in _records("tables.csv"):
        facts = {name: cells[name] for name in PARSERS if name in cells}
        tables[cells["table"]] = Table(
            id=cells["table"],
            document=cells["document"],
            line=int(line),
            title=cells["title"],
            header=tuple(cells["header"].split("|")),
            facts=facts,
            assumed=tuple(cells["assumed"].split()),
        )
    rows = [
        _row(int(line), cells, tables[cells["table"]], errata)
        for file, _ in DOCUMENTS.values()
        for line, cells in _records(file)
    ]
    return tuple(
        row for row in _mark_duplicates(rows) if not documents or row.document in documents
    )


def _records(file: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the line in the document, and the other cells by column."""
    with (SEEDS / file).open(encoding="utf-8", newline="") as text:
        for cells in csv.DictReader(text):
            yield cells.pop("line"), cells


def _row(line: int, cells: Mapping[str, str], table: Table, errata: Sequence[Erratum]) -> Row:
    values = {name: table.facts.get(name, "") for name in PARSERS}
    values |= {name: cells[name] for name in table.columns if cells[name]}
    mine = tuple(e for e in errata if e.holds(table.id, line, cells.get(e.column, "")))
    for erratum in mine:
        values[erratum.column] = (
            erratum.apply(cells.get(erratum.column, "")) or values[erratum.column]
        )
    facts: JsonObject = {
        name: None if values[name] in ABSENT else parse(values[name])
        for name, parse in PARSERS.items()
    }
    each = facts.pop("ranks_per_node") or RANKS_PER_NODE[facts["machine"]]
    gpus = facts.pop("gpus")
    nodes = facts["nodes"] or gpus // each
    ranks = gpus or nodes * each
    clock = re.search(r"\(([\d.]+GHz)\)", values["nodes"])
    ghz = facts.pop("freq")
    found = {
        "nodes": nodes,
        "ranks": ranks,
        "dp": facts["dp"] or ranks // (facts["tp"] * facts["pp"]),
        "ghz": _ghz(clock[1]) if clock else ghz,
        "recompute": facts.pop("ac"),
        "memory_mib": facts.pop("mem"),
        "synchronous": bool(facts.pop("async")),
        "size": facts["size"] or "",
        "notes": facts["notes"] or "",
    }
    return Row(
        table=table,
        line=line,
        cells=tuple(cells[name] for name in table.columns),
        status=cells["status"],
        errata=mine,
        **facts | found,
    )


# Values that repeated printings of a run share.
IDENTITY = (
    "machine",
    "software",
    "precision",
    "ranks",
    "ghz",
    "layers",
    "hidden",
    "heads",
    "seq",
    "dp",
    "tp",
    "pp",
    "mbs",
    "gbs",
    "recompute",
    "zero",
    "synchronous",
    "seconds",
    "tflops",
)


def _mark_duplicates(rows: Sequence[Row]) -> tuple[Row, ...]:
    first: dict[tuple[Any, ...], int] = {}
    marked = []
    for row in rows:
        if row.status == "ran" and row.seconds is not None:
            line = first.setdefault(attrgetter(*IDENTITY)(row), row.line)
            if line != row.line:
                row = replace(row, duplicate_of=line)
        marked.append(row)
    return tuple(marked)


def row_system(row: Row) -> System:
    before = row.machine == "a100" and row.notes < "02-25"
    return System.from_names(
        "a100-before-0225" if before else row.machine,
        row.software,
        row.nodes,
        max(1, row.ranks // row.nodes),
        row.ghz,
    )


def predict_row(row: Row) -> Prediction:
    if problem := row.problem():
        raise ValueError(problem)
    return predict(row.run(), row_system(row))
