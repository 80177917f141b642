"""Draw the README's picture: measured steps against PyTorch, and the modelled steps from a published run to this program.

python -m benchmarks step --micro-batch-size 4 --json fp32.json ...
fugaku-megatron plan --recipe 30b --nodes 6144 ... --against torch1.10 --explain --json > plan.json
python -m tools.plot_result --output docs/figures/result.png --plan plan.json --printed 252 fp32.json bf16.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fugaku_megatron.cli import program
from fugaku_megatron.cli.output_files import check_file

NOT_BUILT = ("not taken", "not in the trainer")  # in the note of a change that no run has
OURS = "tab:blue"
BASELINE = "0.65"
MODEL = "tab:green"


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file. Raise ValueError, one line, for any other file."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}: pass a file that --json wrote") from None


def baseline_name(result: dict[str, Any]) -> str:
    """Return a baseline's label: "PyTorch, torch.compile, tcmalloc", and "MKL as shipped" if that MKL is narrower."""
    baseline = result["baseline"]
    name = {"plain": "PyTorch", "hf": "Hugging Face"}[baseline["name"]]
    return ", ".join(
        filter(
            None,
            (
                name,
                "torch.compile" if baseline["compiled"] else "",
                baseline["preload"],
                "MKL as shipped" if baseline.get("mkl") == "shipped" else "",
            ),
        )
    )


def bars(results: list[dict[str, Any]]) -> list[tuple[str, float, str]]:
    """Return (label, tokens/s, colour) of every side of every step, ours above each baseline.

    A label names the CPU if the steps were measured on several.
    """
    several = len({result["cpu"] for result in results}) > 1
    rows = []
    for result in results:
        kind = f"{result['dtype'].upper()}, micro-batch {result['micro_batch_size']}"
        if several:
            kind = f"{result['cpu']}, {kind}"
        rows.append(
            (
                f"{kind}: this program ({result['ratio']:.2f} x)",
                result["ours"]["tokens_per_s"],
                OURS,
            )
        )
        rows.append((baseline_name(result), result["baseline"]["tokens_per_s"], BASELINE))
    return rows


def steps(plan: dict[str, Any], printed: float | None) -> list[tuple[str, float, str]]:
    """Return (label, seconds, colour) of the published run and of every modelled change of this program."""
    published = [("published run, printed", printed, BASELINE)] if printed else []
    built = (
        change
        for change in plan["changes"]
        if not any(phrase in change["note"] for phrase in NOT_BUILT)
    )
    return published + [(change["name"], change["seconds"], MODEL) for change in built]


def draw(rows: list[tuple[str, float, str]], axes: Any, label: str, title: str) -> None:
    """Draw horizontal bars, the first on top, with their values."""
    names = [f"{n} {name}" for n, (name, *_) in enumerate(rows)]  # a name may stand twice
    axes.barh(
        names, [value for _, value, _ in rows], color=[color for *_, color in rows], height=0.7
    )
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=8)
    for row, (_, value, _) in enumerate(rows):
        axes.text(value, row, f" {value:.0f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(label, fontsize=9)
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def picture(
    results: list[dict[str, Any]], plan: dict[str, Any] | None, printed: float | None, output: Path
) -> None:
    """Draw measured steps, and next to them the modelled changes of a plan."""
    from matplotlib.figure import Figure  # opens no window, unlike pyplot's

    figure = Figure(
        figsize=(11 if plan else 6, 0.9 + 0.32 * 2 * len(results)), layout="constrained"
    )
    columns = 2 if plan else 1
    first = results[0]
    place = "" if len({result["cpu"] for result in results}) > 1 else f" on {first['cpu']}"
    title = f"GPT-2 {first['recipe'].upper()}, measured{place}, {first['threads']} threads"
    draw(
        bars(results),
        figure.add_subplot(1, columns, 1),
        "tokens per second, longer is better",
        title,
    )
    if plan:
        draw(
            steps(plan, printed),
            figure.add_subplot(1, columns, 2),
            "seconds per iteration, shorter is better",
            "30B on 6,144 A64FX nodes, model",
        )
    figure.savefig(output, dpi=110)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this tool."""
    parser.add_argument(
        "steps",
        nargs="+",
        type=Path,
        metavar="STEP_JSON",
        help="what python -m benchmarks step --json wrote",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="PLAN_JSON",
        help="what fugaku-megatron plan --explain --json printed",
    )
    parser.add_argument("--printed", type=float, metavar="SECONDS", help="the published run's time")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG")


def main(options: argparse.Namespace) -> int:
    """Read and draw. Raise ValueError, one line, for a user's mistake."""
    check_file("--output", options.output)
    results = [read_json(path) for path in options.steps]
    plan = read_json(options.plan) if options.plan else None
    try:
        picture(results, plan, options.printed, options.output)
    except (KeyError, TypeError) as error:
        files = " ".join(map(str, options.steps))
        raise ValueError(
            f"{files}: {error} is not there: pass STEP_JSON of python -m benchmarks step and --plan of "
            "fugaku-megatron plan --explain --against"
        ) from None
    return 0


if __name__ == "__main__":
    sys.exit(program.start("plot_result", sys.modules[__name__], sys.argv[1:]))
