"""A file for the textfile collector of Prometheus' node_exporter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ...text.written_files import write_text
from ..log.iteration_metrics import IterationMetrics
from .figures import COUNTER, FIGURES, HISTOGRAM, NAMESPACE, Figure

# Kind of a figure -> type in the file, if another. A histogram's sum and count are a summary without quantiles.
TYPES = {HISTOGRAM: "summary"}


class Textfile:
    """Figures of the latest log interval; counters and sums are of this process."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._label = self.path.stem.replace("\\", r"\\").replace('"', r"\"")
        self._latest: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def write(self, metrics: IterationMetrics) -> None:
        """Update all figures, and replace the file at once. Raises OSError if not possible."""
        for figure in FIGURES:
            value = figure.value(metrics)
            if value is not None:
                self._latest[figure.name] = value
                self._totals[figure.name] = self._totals.get(figure.name, 0.0) + value
                self._counts[figure.name] = self._counts.get(figure.name, 0) + 1
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            write_text(aside, "".join(f"{line}\n" for line in self._lines()))
            aside.replace(self.path)
        finally:
            aside.unlink(missing_ok=True)

    def _lines(self) -> Iterator[str]:
        for figure in FIGURES:
            if figure.name in self._latest:
                name = f"{NAMESPACE}.{figure.name}".replace(".", "_")
                if figure.kind == COUNTER:
                    name += "_total"
                yield f"# HELP {name} {figure.description}"
                yield f"# TYPE {name} {TYPES.get(figure.kind, figure.kind)}"
                yield from self._samples(name, figure)

    def _samples(self, name: str, figure: Figure) -> Iterator[str]:
        label = f'{{run="{self._label}"}}'
        if figure.kind == HISTOGRAM:
            yield f"{name}_sum{label} {self._totals[figure.name]!r}"
            yield f"{name}_count{label} {self._counts[figure.name]}"
        else:
            values = self._totals if figure.kind == COUNTER else self._latest
            yield f"{name}{label} {values[figure.name]!r}"
