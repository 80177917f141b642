"""Long sequences: a step of one rank with all threads, and of ranks that share its sequence or its matrices, in turn.

    python -m benchmarks sequences                                        s 65,536
    python -m benchmarks sequences --seq-length 131072 --recompute --machine host.json

Each row is a real `mpiexec ... pretrain_gpt.py` with one sequence in an iteration; ranks share this host's threads. The ranks have
context parallelism, one row for each --cp-comm-type, or tensor parallelism with --sequence-parallel. With --machine, the file of
`fugaku-megatron calibrate`, the model's seconds and memory stand next to the measured ones. Left out: starting jobs (jobs.py).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from fugaku_megatron.config.parallel import A2A, CP_COMM_TYPES, P2P
from fugaku_megatron.planner import machine, model, software
from fugaku_megatron.text.table import Column

from . import core, jobs, shapes
from .jobs import Cell

ALONE = "one rank"
COLUMNS: tuple[Column, ...] = (
    ("layout", "<16", "layout"),
    ("threads", ">7", "threads"),
    ("s", ">9.3f", "seconds"),
    ("x one rank", ">10.3f", "ratio"),
    ("MiB", ">7", "peak_memory_mib"),
)
MODELLED: tuple[Column, ...] = (
    ("model s", ">9.3f", "model_seconds"),
    ("model MiB", ">9.0f", "model_memory_mib"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    parser.add_argument("--recipe", default="demo", choices=shapes.RECIPES)
    parser.add_argument(
        "--num-layers", type=int, default=2, help="of the recipe's model (default: %(default)s)"
    )
    parser.add_argument(
        "--seq-length", type=int, default=65536, help="tokens of a sample (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument(
        "--ranks", type=int, default=2, help="that share the sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--cp-comm-type",
        nargs="+",
        default=[A2A, P2P],
        choices=CP_COMM_TYPES,
        metavar="TYPE",
        help=f"of {', '.join(CP_COMM_TYPES)} (default: {A2A} {P2P})",
    )
    parser.add_argument(
        "--recompute", action="store_true", help="compute all layers again in backward"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="jobs of each layout, in turn (default: %(default)s)"
    )
    jobs.add_threads(parser)
    parser.add_argument(
        "--machine", metavar="FILE", help="show the model's figures for this machine as well"
    )


def cells(options: argparse.Namespace) -> dict[str, Cell]:
    """The layouts by their names."""
    ranks = options.ranks
    common = (("num_layers", options.num_layers), ("position_embedding_type", "rope"))
    alone = Cell(seq=options.seq_length, recompute=options.recompute, schedule=common)
    shared = {
        f"CP {ranks} {way}": (*common, ("context_parallel_size", ranks), ("cp_comm_type", (way,)))
        for way in options.cp_comm_type
    }
    return {
        ALONE: alone,
        **{name: replace(alone, ranks=ranks, schedule=fields) for name, fields in shared.items()},
        f"TP {ranks}": replace(
            alone, ranks=ranks, tp=ranks, schedule=(*common, ("sequence_parallel", True))
        ),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row for each layout. ValueError for sizes that do not divide and an unknown machine, RuntimeError when a job fails."""
    modelled = predicted(options) if options.machine else {}
    planned = {name: jobs.job(options, cell, 1, 1) for name, cell in cells(options).items()}
    done = jobs.in_turn(planned, options.rounds)
    rows = [
        {
            "layout": name,
            "threads": planned[name].threads,
            **jobs.summary(measured),
            **modelled.get(name, {}),
        }
        for name, measured in done.items()
    ]
    for row in rows:
        row["ratio"] = rows[0]["seconds"] / row["seconds"]
    return {"rows": rows, "seq_length": options.seq_length}


def predicted(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The model's figures of each layout."""
    found = {}
    for name, cell in cells(options).items():
        system = model.System(
            machine=machine.load(options.machine),
            nodes=1,
            ranks_per_node=cell.ranks,
            software=software.load(software.THIS_PROJECT),
        )
        run = shapes.run_of(
            argparse.Namespace(recipe=options.recipe, micro_batch_size=1), **cell.fields(1)
        )
        prediction = model.predict(run, system, with_band=False)
        found[name] = {
            "model_seconds": prediction.seconds,
            "model_memory_mib": prediction.memory_mib_max,
        }
    return found


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """The table."""
    columns = COLUMNS + MODELLED if options.machine else COLUMNS
    return f"{core.table(columns, result['rows'])}\ns {result['seq_length']}, {options.dtype}, {result['cpu']}, measured"
