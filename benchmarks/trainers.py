"""Programs that people run on PyTorch, with the torch backend and without: trl, sentence-transformers, generate.

    python -m benchmarks trainers --dtype bf16
    python -m benchmarks trainers --only sft dpo --steps 50

Both sides are processes of their own (trainer_side.py), with tcmalloc if the system has it and with MKL at the width of --mkl, and
take their steps in turn, from the same weights, tokens and seeds. Models have random weights and the shapes of published ones, with
few layers. Memory is the largest of a process. Left out: operators (gemm.py, rowwise.py), our own trainer (step.py).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.text.table import Column

from . import child, core, preloads
from .disturbance import OTHERS, Watch

PROGRAMS = ("sft", "dpo", "delta-sft", "experts", "embedding", "generate")
SIDES = ("torch", "ours")
ALLOCATOR = "tcmalloc"
# Steps that are not timed: "auto" tries the kernels on eight calls of a shape, of which a model of one layer has one a step.
WARM_UP = {"experts": 8}
FEWEST_WARM_UP = 2
QUICK = {"steps": 2, "layers": 1, "length": 64, "batch": 2, "vocabulary": 512}
COLUMNS: tuple[Column, ...] = (
    ("program", "<10", "program"),
    ("torch s", ">8.3f", "torch"),
    ("ours s", ">8.3f", "ours"),
    ("ratio", ">6.2f", "ratio"),
    ("torch MiB", ">9.0f", "torch_mib"),
    ("ours MiB", ">9.0f", "ours_mib"),
    ("loss", ">9.5f", "loss"),
    ("largest difference", ">18.1e", "difference"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    parser.add_argument("--only", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=8, help="timed steps (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="samples (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, help="instead of the model's")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    preloads.add_mkl(parser, "both sides'")
    parser.add_argument("--quick", action="store_true", help="small models, two steps")


def _compare(order: dict[str, Any], environment: dict[str, str], steps: int) -> dict[str, Any]:
    """Take the steps of both sides in turn, after some that are not timed."""
    warm_up = WARM_UP.get(order["program"], FEWEST_WARM_UP)
    order = {**order, "steps": warm_up + steps}
    sides = {
        side: child.Child(child.python("trainer_side", {**order, "side": side}), environment, side)
        for side in SIDES
    }
    answers: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    watch = Watch(order["threads"])
    try:
        for each in sides.values():
            each.answer()
        for number in range(warm_up + steps):
            for side in SIDES if number % 2 else reversed(SIDES):
                answers[side].append(sides[side].ask("step"))
    finally:
        for each in sides.values():
            each.__exit__()
    seconds = {
        side: statistics.median(step["seconds"] for step in taken[warm_up:])
        for side, taken in answers.items()
    }
    losses = [[step["loss"] for step in answers[side]] for side in SIDES]
    return {
        "program": order["program"],
        **seconds,
        "ratio": seconds["torch"] / seconds["ours"],
        **{f"{side}_mib": taken[-1]["peak_mib"] for side, taken in answers.items()},
        "loss": losses[0][-1],
        "difference": max(abs(a - b) for a, b in zip(*losses)),
        "losses": losses,
        "busy": watch.others() > OTHERS,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare every program. ratio: seconds of torch over ours."""
    core.apply_quick(options, QUICK)
    check(options.steps > 0, f"--steps {options.steps}: pass 1 or more")
    absent = preloads.missing(ALLOCATOR)
    if absent:
        print(f"without {absent}")
    allocator = [] if absent else [preloads.resolve(ALLOCATOR)]
    environment = {
        **preloads.environment(*allocator, *preloads.mkl_preload(options.mkl)),
        "OMP_NUM_THREADS": str(options.threads),
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
    names = ("dtype", "layers", "length", "batch", "vocabulary", "threads", "steps")
    order = {name: getattr(options, name) for name in names}
    rows = [
        _compare({**order, "program": name}, environment, options.steps) for name in options.only
    ]
    return {**order, "rows": rows, "mkl": options.mkl, "torch": torch.__version__}


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table."""
    title = (
        f"{result['dtype']}, {result['layers']} layers, {result['batch']} x {result['length']} tokens, {result['threads']} threads: "
        f"medians of {result['steps']} steps in turn, {result['cpu']}, PyTorch {result['torch']}, MKL {result['mkl']}"
    )
    return f"{title}\n{core.table(COLUMNS, result['rows'])}"
