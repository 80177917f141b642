"""`benchmarks alloc --from-logs A B ...`: the published table from logs of one run with several allocators, the first the baseline.

Left out: reading a log (fugaku_megatron/logs/run_log.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fugaku_megatron.config.checks import check
from fugaku_megatron.config.outputs import pipe_table
from fugaku_megatron.costs import accounting
from fugaku_megatron.logs.log_table import row_of, size_name
from fugaku_megatron.logs.run_log import LogSummary, read_log

from . import jobs, published

MAY_DIFFER = ("cpu_frequency",)  # values in which the runs may differ


def read(paths: Sequence[Path]) -> list[LogSummary]:
    """The logs. ValueError for a log that cannot be read, or that is of another run than the first."""
    check(len(paths) > 1, f"--from-logs {paths[0]}: give two logs or more, the first is what the others are compared with")
    logs = [read_log(path) for path in paths]
    first = _run(logs[0])
    for log in logs:
        check(log.job.run is not None, f"--from-logs {log.path}: has no 'run:' line; for logs of other programs use "
              "fugaku-megatron log with their flags")
        check(log.finished, f"--from-logs {log.path}: the run is not at its end, or was killed; wait for it or give another")
        for name in sorted(first.keys() | _run(log).keys()):
            expected, actual = first.get(name), _run(log).get(name)
            check(actual == expected,
                  f"--from-logs: {logs[0].path} has {name} {expected}, {log.path} {actual}: give logs of one run")
    return logs


def _run(log: LogSummary) -> dict[str, Any]:
    values = {name: value for name, value in log.job.values.items() if name not in MAY_DIFFER}
    return {**values, "nodes": log.job.nodes, "ranks": log.job.ranks}


def text(logs: Sequence[LogSummary]) -> str:
    """The table with its title; in the notes the allocator and what it costs, and beneath it where the rows are from."""
    run = logs[0].job.run
    title = published.title(size_name(accounting.parameters(run)), run.model.seq_length,
                            run.training.recompute_granularity == "full", f"{run.precision.name}, measured")
    rows = [row_of(log, _notes(logs[0], log)).cells() for log in logs]
    basis = [f"{log.path}: medians over {len(log.counted)} iterations; {log.machine}" for log in logs]
    return "\n".join([f"### {title}", *pipe_table([published.header(), *rows]), "", *basis])


def _notes(first: LogSummary, log: LogSummary) -> str:
    parts = [jobs.allocator(log.machine)]
    if log is not first:
        parts.append(f"{first.seconds / log.seconds:.2f} x {jobs.allocator(first.machine)}")
    for name, form, unit in (("minor_faults", ".0f", "minor faults"), ("system_seconds", ".2f", "s system time")):
        if values := [value for i in log.counted if (value := getattr(i, name)) is not None]:
            parts.append(f"{statistics.median(values):{form}} {unit}")
    return ", ".join(parts)
