"""Seconds per iteration, TFLOPs, memory and bubble of a run that pretrain_gpt.py's flags describe. All printed values are modelled.

    fugaku-megatron predict --machine a64fx --ghz 2.0 --software torch1.10 --nodes 192 --recipe 30b \
        --tensor-model-parallel-size 4 --pipeline-model-parallel-size 48 --checkpoint-activations --json

The data-parallel size is nodes x ranks per node / (TP x PP). Flags for optimizer, output and data but --mean-document-length are
accepted and change nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ..cli import arguments
from ..config.fields import check
from ..config.layout import Layout
from ..config.recipes import GPT2_VOCABULARY
from ..config.run_config import RunConfig
from ..text.named_files import JsonObject
from . import machine, micro_kernel, peak_memory, search, software
from .forward import Forward, forward
from .model import Prediction, predict
from .system import System

DEFAULT_SOFTWARE = {"a100": "megatron-a100", "a100-before-0225": "megatron-a100"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `fugaku-megatron predict`."""
    add_system_arguments(parser)
    group = parser.add_argument_group("instead of an iteration")
    group.add_argument(
        "--forward",
        action="store_true",
        help="parts of a forward pass of one micro-batch, each layer's experts divided over the nodes",
    )
    group.add_argument(
        "--matmul",
        type=int,
        nargs=3,
        metavar=("M", "N", "K"),
        help="an INT8 matmul on the threads of a rank, without quantization and packing",
    )


def add_system_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of machine, software and job, and the training flags."""
    group = parser.add_argument_group("system")
    add = group.add_argument
    add(
        "--machine",
        default="a64fx",
        help=f"{', '.join(machine.names())}, or a file of fugaku-megatron calibrate or report (default: a64fx)",
    )
    add("--ghz", type=float, help="clock (default: the machine's nominal one)")
    add(
        "--eco-state",
        type=int,
        default=0,
        choices=(0, 2),
        help="2: one floating-point pipe (A64FX)",
    )
    add(
        "--software",
        help=f"{', '.join(software.names())} (default: {software.THIS_PROJECT}, on a100 "
        "megatron-a100)",
    )
    add("--nodes", type=int, required=True, help="nodes of the job")
    add("--ranks-per-node", type=int, help="default: 1 on a64fx, 8 on a100")
    add("--json", action="store_true", help="print JSON alone")
    arguments.add_train_flags(parser)


def run_of(
    args: argparse.Namespace,
    system: System,
    defaults: JsonObject | None = None,
) -> RunConfig:
    """Return the run that pretrain_gpt.py's flags among `args` describe. Raise ValueError for
    contradictions.
    """
    values = vars(args)
    if values.get("recipe") is None:
        values = {**(defaults or {}), **values}
    world_size = values["world_size"]
    check(
        world_size is None or world_size == system.world_size,
        f"--world-size {world_size} is not --nodes {system.nodes} x "
        f"--ranks-per-node {system.ranks_per_node} = {system.world_size}: leave it out",
    )
    run = arguments.interpret({**values, "world_size": None}).run
    if run.model.vocab_size is None:
        run = replace(run, model=replace(run.model, vocab_size=GPT2_VOCABULARY))
    return run


def system_of(args: argparse.Namespace) -> System:
    code = args.software or DEFAULT_SOFTWARE.get(args.machine, software.THIS_PROJECT)
    return System.from_names(
        args.machine, code, args.nodes, args.ranks_per_node, args.ghz, args.eco_state == 2
    )


# pairs of parallel sizes that a mistake proposes, and the largest size
PROPOSED = 3
MOST = 128


def as_json(prediction: Prediction) -> JsonObject:
    """Return rounded figures: seconds, TFLOPs per node, MiB of the fullest rank, shares from 0 to 1."""
    found = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in prediction._asdict().items()
    }
    return {
        "seconds_per_iteration": found.pop("seconds"),
        **found,
        "memory_mib_max": round(prediction.memory_mib_max, 1),
        "breakdown": {name: round(value, 6) for name, value in prediction.breakdown.items()},
    }


def describe(run: RunConfig, system: System) -> str:
    layout = Layout.from_run(run, system.world_size)
    size = layout.global_batch_size(run)
    return (
        f"{system.nodes} nodes of {system.machine.name} at {system.machine.ghz} GHz x {system.ranks_per_node} ranks, "
        f"{system.software.name}: {layout}, MBS {run.batch.micro_batch_size}, "
        f"GBS {size}, {layout.microbatches(run, size)} micro-batches"
    )


def text(run: RunConfig, system: System, p: Prediction) -> str:
    """Return the prediction in words, with seconds by cause and warnings."""
    lines = [
        describe(run, system),
        f"{p.seconds:.4g} s per iteration (model; nine of ten runs: {p.lower:.4g} to {p.upper:.4g}), "
        f"{p.tflops_per_node:.3f} TFLOPs per node, bubble {p.bubble_fraction:.1%} (mean over the stages)",
        f"{p.memory_mib_max:.0f} MiB on the fullest rank" + (": OUT OF MEMORY" if p.oom else ""),
    ]
    if p.slow_network > p.seconds:
        lines.append(
            f"{p.slow_network:.4g} s if large all-reduces reach only {system.machine.slow_reduce_gbs:.3g} GB/s a link"
        )
    lines += [
        f"  {name:<22}{seconds:>10.4g} s {seconds / p.seconds:>7.1%}"
        for name, seconds in p.breakdown.items()
        if seconds
    ]
    return "\n".join(lines + [f"warning: {w}" for w in p.warnings])


def layout_of(run: RunConfig, system: System) -> Layout:
    """Return the run's layout. ValueError proposes sizes that divide the ranks and fit in memory."""
    try:
        return Layout.from_run(run, system.world_size)
    except ValueError as error:
        pairs = [f"{layout.tp} x {layout.pp}" for layout in islice(fitting(run, system), PROPOSED)]
        if not pairs:
            raise
        what, _, remedy = str(error).partition(": ")
        shown = " or ".join(filter(None, (", ".join(pairs[:-1]), pairs[-1])))
        raise ValueError(
            f"{what}: pass --tensor- x --pipeline-model-parallel-size {shown}, which fit on these nodes "
            f"(plan finds the fastest), or {remedy}"
        ) from None


def fitting(run: RunConfig, system: System) -> Iterator[Layout]:
    """Iterate over layouts that fit in memory, from the nearest sizes to the requested sizes."""
    asked = run.parallel
    world = system.world_size
    sizes = [size for size in range(1, min(world, MOST) + 1) if world % size == 0]
    own = run.tp, run.pp

    def distance(pair: tuple[int, ...]) -> float:
        return sum(abs(math.log(size / given)) for size, given in zip(pair, own, strict=True))

    for tp, pp in sorted(
        ((tp, pp) for tp in sizes for pp in sizes if world % (tp * pp) == 0), key=distance
    ):
        try:
            other = replace(
                run,
                parallel=replace(
                    asked, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
                ),
            )
            layout = Layout.from_run(other, world)
            used = peak_memory.peak_mib(other, layout, system)
        except ValueError:
            continue
        if used <= system.limit_mib:
            yield layout


def matmul_json(shape: Sequence[int], system: System) -> JsonObject:
    """Return the rounded time and share of an INT8 matmul. shape: (m, n, k)"""
    check(min(shape) > 0, f"--matmul {' '.join(map(str, shape))}: pass three numbers above 0")
    m, n, k = shape
    threads = system.machine.threads // system.ranks_per_node
    found = micro_kernel.int8_matmul(system.machine, (m, n, k), threads)
    return {
        "microseconds": round(found.seconds * 1e6, 2),
        "share_of_int8_peak": round(found.share, 4),
        "lower": round(found.low, 4),
        "upper": round(found.high, 4),
        "threads": threads,
    }


def forward_json(found: Forward) -> JsonObject:
    """Return the rounded seconds of a forward pass, and seconds and share of each part with bounds."""
    parts = {}
    for name, seconds in found.seconds.items():
        low, high = found.bounds(name)
        parts[name] = {
            "seconds": round(seconds, 6),
            "share": round(found.share(name), 4),
            "lower": round(low, 4),
            "upper": round(high, 4),
        }
    low, high = found.total_bounds
    return {
        "seconds_of_forward": round(found.total, 6),
        "lower": round(low, 6),
        "upper": round(high, 6),
        "parts": parts,
    }


def forward_text(found: JsonObject) -> str:
    lines = [
        f"{found['seconds_of_forward']:.4g} s for a forward pass (model; nine of ten runs: {found['lower']:.4g} to "
        f"{found['upper']:.4g})"
    ]
    lines += [
        f"  {name:<22}{part['seconds']:>10.4g} s {part['share']:>7.1%}  ({part['lower']:.1%} to {part['upper']:.1%})"
        for name, part in found["parts"].items()
    ]
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Print the prediction of a run, of a forward pass or of a matmul."""
    system = system_of(args)
    if args.matmul:
        found = matmul_json(args.matmul, system)
        m, n, k = args.matmul
        said = (
            f"INT8 matmul ({m}, {k}) x ({k}, {n}) on {found['threads']} threads: {found['microseconds']} us, "
            f"{found['share_of_int8_peak']:.2f} of the peak (model; {found['lower']:.2f} to {found['upper']:.2f})"
        )
        print(json.dumps(found) if args.json else said)
        return 0
    if args.forward:
        found = forward_json(forward(run_of(args, system), system))
        print(json.dumps(found) if args.json else forward_text(found))
        return 0
    run = system.software.cut(run_of(args, system))
    run, _ = search.resolve(run, layout_of(run, system), system)
    prediction = predict(run, system)
    print(json.dumps(as_json(prediction)) if args.json else text(run, system, prediction))
    return 0
