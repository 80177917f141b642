"""Draws where the time of a step goes: one bar per table that --profile wrote.

    python -m tools.plot_profile --output step.png "stock malloc=profile_stock/table_rank0.txt" "tuned=profile/table_rank0.txt"

A bar is as long as an iteration; its parts are the operations, the smaller ones summed. Left out: traces (ui.perfetto.dev).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from fugaku_megatron.cli import program
from fugaku_megatron.cli.output_files import check_file
from fugaku_megatron.config.fields import check

PARTS = 6  # operations with a colour of their own
_ROW = re.compile(r"^(?P<name>\S.*?)\s{2,}(?:(?P<calls>\d+)\s+)?(?P<seconds>\d+\.\d{4})\s")


def read_table(path: Path) -> dict[str, float]:
    """Operation -> seconds per iteration, of a table_rankN.txt. Raises ValueError when it holds none."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: pass a table that --profile wrote") from None
    rows = {match["name"]: float(match["seconds"]) for match in map(_ROW.match, lines) if match}
    if not rows:
        raise ValueError(
            f"{path}: no row of an operation in it: pass a table_rankN.txt that --profile wrote"
        )
    return rows


def largest(tables: list[dict[str, float]]) -> list[str]:
    """The operations that take most time over all tables, the largest first."""
    names = {name for table in tables for name in table}
    return sorted(names, key=lambda name: -sum(table.get(name, 0.0) for table in tables))[:PARTS]


def draw(tables: dict[str, dict[str, float]], output: Path) -> None:
    """One horizontal bar per table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = largest(list(tables.values()))
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.6 * len(tables)), layout="constrained")
    ends = dict.fromkeys(tables, 0.0)
    for part in [*parts, "everything else"]:
        widths = [
            t.get(part, 0.0) if part in parts else sum(s for n, s in t.items() if n not in parts)
            for t in tables.values()
        ]
        axes.barh(list(tables), widths, left=list(ends.values()), label=part, height=0.6)
        ends = {name: end + width for (name, end), width in zip(ends.items(), widths, strict=True)}
    for row, end in enumerate(ends.values()):
        axes.text(end, row, f" {end:.2f} s", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("seconds per iteration (measured)")
    figure.legend(loc="outside upper center", ncols=4, fontsize=7, frameon=False)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="+", metavar="LABEL=FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG")


def main(options: argparse.Namespace) -> int:
    """Read the tables and draw. Raises ValueError, one line, for a user's mistake."""
    check_file("--output", options.output)
    pairs = [text.partition("=") for text in options.tables]
    for (label, _, path), text in zip(pairs, options.tables, strict=True):
        check(label and path, f"{text}: pass LABEL=FILE")
    draw({label: read_table(Path(path)) for label, _, path in pairs}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(program.start("plot_profile", sys.modules[__name__], sys.argv[1:]))
