"""Traces of several ranks in Chrome's format: one file of all of them, and the schedule that they ran.

Left out: what a rank records (`host.profiler`). Legend: times of a trace in microseconds, here in seconds.
Test: pytest tests/test_traces.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The events of a trace."""
    return json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]


def merge(paths: Sequence[Path], merged: Path) -> list[Path]:
    """Write the events of all traces into one file, a trace at a time in memory; returns the traces that are not there."""
    missing = [path for path in paths if not path.is_file()]
    with open(merged, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for path in paths:
            if path not in missing:
                for event in read(path):
                    file.write(separator + json.dumps(event))
                    separator = ",\n"
        file.write("\n]}\n")
    return missing
