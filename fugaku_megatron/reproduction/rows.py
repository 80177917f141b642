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


@dataclass(frozen=True)
class Record:
    """A CSV line: cells by column."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def expect(self, condition: bool, column: str, expected: str, value: str | None = None) -> None:
        shown = self.cells.get(column, "") if value is None else value
        check(
            condition,
            f"{self.path}, line {self.line}, column {column}: {shown!r}, expected {expected}",
        )

    def convert(
        self, column: str, parse: Callable[[str], Any], expected: str, value: str | None = None
    ) -> Any:
        try:
            return parse(self.cells[column] if value is None else value)
        except (ValueError, KeyError):  # no number or no match of a pattern, no key of a dictionary
            self.expect(False, column, expected, value)


def read_csv(
    path: Path, required: tuple[str, ...], allowed: tuple[str, ...] = ()
) -> Iterator[Record]:
    """Read records; the header has all `required`, only `allowed` columns."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); install the package again") from None
    lines = csv.reader(text.splitlines())
    header = next(lines, [])
    for column in required:
        check(
            column in header,
            f"{path}, line 1: column {column} is missing, the header is {','.join(header)!r}",
        )
    for column in header:
        check(
            column in required + allowed and header.count(column) == 1,
            f"{path}, line 1, column {column}: unknown or repeated, expected one each of {', '.join(required + allowed)}",
        )
    for cells in lines:
        check(
            len(cells) == len(header),
            f"{path}, line {lines.line_num}, column {header[min(len(cells), len(header) - 1)]}: "
            f"the row {','.join(cells)!r} has {len(cells)} cells, {len(header)} are expected ({','.join(header)})",
        )
        yield Record(path, lines.line_num, dict(zip(header, cells)))


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
    place: str  # file and line of this record

    def holds(self, table: str, line: int, cell: str) -> bool:
        return self.table == table and (
            line == self.line or self.line is None and self.printed in cell
        )

    def apply(self, cell: str) -> str:
        """Return the corrected cell; empty for a comment. ValueError if it does not match."""
        if self.line is None:
            return cell.replace(self.printed, self.corrected) if self.corrected else ""
        if cell != self.printed:
            raise ValueError(
                f"{self.place}, column printed: {self.printed!r}, expected {cell!r}: line {self.line}, "
                f"column {self.column} of table {self.table}"
            )
        return self.corrected


def _erratum(record: Record) -> Erratum:
    cells = record.cells
    record.expect(
        cells["id"][:1] in ("R", "S") and cells["id"][1:].isdigit(), "id", "R or S and a number"
    )
    record.expect(cells["column"] in PARSERS, "column", " or ".join(sorted(PARSERS)))
    record.expect(cells["unfit"] in ("", "time", "memory"), "unfit", "time, memory or nothing")
    record.expect(cells["why"] != "", "why", "a reason")
    line = None if cells["line"] == "*" else record.convert("line", int, "a line number or *")
    if line is not None:  # for every row it is only a part of the cell
        record.convert("corrected", *PARSERS[cells["column"]])
    place = f"{record.path}, line {record.line}"
    return Erratum(
        line=line, place=place, **{name: cell for name, cell in cells.items() if name != "line"}
    )


SEEDS = Path(__file__).parent / "seeds"
DOCUMENTS = {  # id -> (file of its rows, title)
    "000": ("a64fx_124m.csv", "124M model benchmarking results"),
    "001": ("a64fx_30b.csv", "30B model benchmarking results"),
    "002": ("a64fx_tcmalloc.csv", "Check for the performance of w/ or w/o tcmalloc"),
    "004": ("a100.csv", "Prequel: A100 experiments before a 176B run"),
    "005": ("a64fx_further.csv", "Further published runs of the project of 000 to 002, as a list"),
}
STATUSES = ("ran", "oom", "failed", "planned", "impossible")
RANKS_PER_NODE = {"a64fx": 1, "a100": 8}  # where no column says it
ABSENT = ("", "-", "- MiB", "GB", "OOM", "fail")  # cells without a value


def _match(pattern: str, cell: str) -> re.Match[str]:
    if (match := re.fullmatch(pattern, cell)) is None:
        raise ValueError(cell)
    return match


def _memory_mib(cell: str) -> float:
    number, unit = _match(r"([\d.]+) ?(MiB|GB)", cell).groups()
    # An A100 of "80GB" has 81920 MiB: the tables' GB are GiB.
    return float(number) * (1024 if unit == "GB" else 1)


def _ghz(cell: str) -> float:
    return float(_match(r"([\d.]+)GHz", cell)[1])


def _or_nothing(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda cell: None if cell in ABSENT else parse(cell)


def _one_of(*names: str) -> tuple[Callable[[str], str], str]:
    return {name: name for name in names}.__getitem__, " or ".join(names)


_POSITIVE = (lambda cell: int(_match(r"0*[1-9]\d*", cell)[0]), "a whole number above 0")
_NUMBER = (lambda cell: float(_match(r"(?=.*[1-9])\d+(\.\d+)?", cell)[0]), "a number above 0")
_TEXT = (str, "text")
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "machine": _one_of(*RANKS_PER_NODE),
    "software": _one_of(
        "torch1.7", "torch1.7+tcmalloc", "torch1.10", "torch1.10+tcmalloc", "megatron-a100"
    ),
    "precision": _one_of("fp32", "fp16", "bf16"),
    "formula": _one_of("hardware", "parameter"),
    **{
        name: _POSITIVE
        for name in (
            "seq",
            "vocabulary",
            "layers",
            "hidden",
            "heads",
            "gpus",
            "dp",
            "tp",
            "pp",
            "mbs",
            "gbs",
            "ranks_per_node",
        )
    },
    "nodes": (
        lambda cell: int(_match(r"(\d+)( +\([\d.]+GHz\))?", cell)[1]),
        "a number of nodes, or '512 (2.2GHz)'",
    ),
    "zero": ({"0": 0, "1": 1}.__getitem__, "0 or 1"),
    "ac": ({"Yes": True, "No": False}.__getitem__, "Yes or No"),
    "async": _one_of("yes", "no"),
    "freq": (_ghz, "a clock such as 2.0GHz"),
    "mem": (_memory_mib, "memory such as 7718.0 MiB or 67GB"),
    "seconds": _NUMBER,
    "tflops": _NUMBER,
    "petaflops": _NUMBER,
    "size": _TEXT,
    "notes": _TEXT,
}
# column -> (conversion of a corrected cell, None for an empty one; what is expected)
PARSERS = {name: (_or_nothing(parse), expected) for name, (parse, expected) in _PARSERS.items()}
ERRATUM_COLUMNS = ("id", "table", "line", "column", "printed", "corrected", "unfit", "why")
TABLE_COLUMNS = (
    "table",
    "document",
    "line",
    "title",
    "header",
    "machine",
    "software",
    "precision",
    "formula",
    "seq",
    "vocabulary",
    "layers",
    "hidden",
    "heads",
    "ac",
    "zero",
    "freq",
    "size",
    "tp",
    "pp",
    "mbs",
    "gbs",
    "assumed",
)
_FACTS = TABLE_COLUMNS[5:-1]
OPTIONAL = ("freq", "size")


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

    def identity(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in IDENTITY)


def known(value: float | None) -> float:
    assert value is not None
    return value


def load(documents: Sequence[str] = ()) -> tuple[Row, ...]:
    """Return the rows in `documents` (default: all). ValueError for unknown ones and wrong data."""
    for name in documents:
        check(name in DOCUMENTS, f"--document {name} is unknown: pass {' or '.join(DOCUMENTS)}")
    return tuple(row for row in read(SEEDS) if not documents or row.document in documents)


def read(folder: Path) -> tuple[Row, ...]:
    """Read the rows of all tables, with errata and duplicates. ValueError for wrong data."""
    records = tuple(map(_erratum, read_csv(folder / "errata.csv", ERRATUM_COLUMNS)))
    tables = {}
    for record in read_csv(folder / "tables.csv", TABLE_COLUMNS):
        table = _table(record)
        record.expect(table.id not in tables, "table", "an id of its own")
        tables[table.id] = table
    rows = [row for file, _ in DOCUMENTS.values() for row in _rows(folder / file, tables, records)]
    places = {(row.table.id, row.line) for row in rows}
    for erratum in records:
        check(
            erratum.table in tables
            and (erratum.line is None or (erratum.table, erratum.line) in places),
            f"{erratum.place}, column line: {erratum.line}, expected a row of table {erratum.table}",
        )
    return _mark_duplicates(rows)


def _rows(path: Path, tables: Mapping[str, Table], records: Sequence[Erratum]) -> Iterator[Row]:
    seen: set[int] = set()
    for record in read_csv(path, ("line", "table", "status"), tuple(PARSERS)):
        row = _row(record, tables, records)
        record.expect(row.line not in seen, "line", "a line of its own")
        seen.add(row.line)
        yield row


def _table(record: Record) -> Table:
    cells = record.cells
    record.expect(cells["document"] in DOCUMENTS, "document", " or ".join(DOCUMENTS))
    record.expect(
        cells["table"].startswith(cells["document"] + "."),
        "table",
        f"{cells['document']}. and a number",
    )
    header = tuple(cells["header"].split("|"))
    record.expect(
        all(name in HEADERS for name in header),
        "header",
        f"names out of {', '.join(HEADERS)} between |",
    )
    assumed = tuple(cells["assumed"].split())
    for name in assumed:
        record.expect(name in PARSERS, "assumed", "names of columns", name)
    line = record.convert("line", int, "a line number")
    return Table(
        id=cells["table"],
        document=cells["document"],
        line=line,
        title=cells["title"],
        header=header,
        facts={name: cells[name] for name in _FACTS},
        assumed=assumed,
    )


def _row(record: Record, tables: Mapping[str, Table], records: Sequence[Erratum]) -> Row:
    record.expect(record.cells["table"] in tables, "table", "a table of tables.csv")
    record.expect(record.cells["status"] in STATUSES, "status", " or ".join(STATUSES))
    table = tables[record.cells["table"]]
    record.expect(
        DOCUMENTS[table.document][0] == record.path.name, "table", "a table of this document"
    )
    line = record.convert("line", int, "a line number")
    for column, cell in record.cells.items():
        printed = column in table.columns or column in ("line", "table", "status")
        record.expect(
            printed or not cell, column, f"nothing, as table {table.id} has no such column,"
        )
    values = {name: table.facts.get(name, "") for name in PARSERS}
    values |= {name: record.cells[name] for name in table.columns if record.cells[name]}
    mine = tuple(e for e in records if e.holds(table.id, line, record.cells.get(e.column, "")))
    for erratum in mine:
        values[erratum.column] = (
            erratum.apply(record.cells.get(erratum.column, "")) or values[erratum.column]
        )
    cells = tuple(record.cells[name] for name in table.columns)
    return Row(
        table=table,
        line=line,
        cells=cells,
        status=record.cells["status"],
        errata=mine,
        **_facts(record, values),
    )


def _facts(record: Record, values: dict[str, str]) -> JsonObject:
    facts = {name: record.convert(name, *PARSERS[name], values[name]) for name in PARSERS}
    for name in _FACTS:
        record.expect(
            facts[name] is not None or name in OPTIONAL, name, PARSERS[name][1], values[name]
        )
    each = facts.pop("ranks_per_node") or RANKS_PER_NODE[facts["machine"]]
    gpus = facts.pop("gpus")
    record.expect(facts["nodes"] or gpus, "nodes", PARSERS["nodes"][1], values["nodes"])
    nodes = facts["nodes"] or gpus // each
    ranks = gpus or nodes * each
    clock = re.search(r"\(([\d.]+GHz)\)", values["nodes"])
    ghz = facts.pop("freq")
    renamed = {
        "ghz": _ghz(clock[1]) if clock else ghz,
        "recompute": facts.pop("ac"),
        "memory_mib": facts.pop("mem"),
        "synchronous": facts.pop("async") == "no",
    }
    # Not printed: what the other sizes leave.
    dp = facts["dp"] or ranks // (facts["tp"] * facts["pp"])
    found = {"nodes": nodes, "ranks": ranks, "dp": dp}
    texts = {name: facts[name] or "" for name in ("size", "notes")}
    return facts | renamed | found | texts


def _mark_duplicates(rows: Sequence[Row]) -> tuple[Row, ...]:
    first: dict[tuple[Any, ...], int] = {}
    marked = []
    for row in rows:
        if row.status == "ran" and row.seconds is not None:
            line = first.setdefault(row.identity(), row.line)
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
