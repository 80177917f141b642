"""Report sections that train: 124M on 1, 2, 4 ... ranks, two layers of larger models, and a
checkpoint.

Data are random tokens. A step is repeated as the time allows. Every tensor-parallel group of a node
trains two layers at the same time, without data-parallel sums; whole models are extrapolated.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ..cli.arguments import make_run
from ..comm.base import Comm
from ..comm.grid import Grid
from ..comm.node import share_groups
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import accounting, memory, run_schedule
from ..data.dataset import MockDataset
from ..host import kernels
from ..host.cgroup import read_text
from ..host.timing import seconds
from ..nn.ops import Ops
from ..planner import machine, model, software
from ..planner.system import System
from ..text.named_files import JsonObject
from ..training.trainer import Trainer
from .context import Context
from .record import LABEL, rows_of

# What every measured run has: random tokens, no dropout, no evaluation, a constant learning rate.
PLAIN = {
    "mock_data": True,
    "micro_batch_size": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "eval_iters": 0,
    "train_iters": 10_000,
    "lr_decay_style": "constant",
    "lr_warmup_fraction": None,
    "make_vocab_size_divisible_by": 8,
}
VOCABULARY = 1024  # of two layers: their head costs nothing
SHAPES = {"1B": "llama-3.2-1b", "8B": "llama-3.1-8b"}
TENSOR_PARALLEL = (1, 2, 4, 8)
USABLE = 0.7  # share of the free memory that a measurement may take
MOST_ROUNDS = 5
MOST_MICRO_BATCHES = 4
SAVED = {"num_layers": 2, "vocab_size": 8192}  # of 124M: 250 MB in a checkpoint


def make_trainer(run: RunConfig, comm: Comm) -> Trainer:
    """Build a trainer on random tokens over all ranks, with native kernels. Collective."""
    parallel = run.parallel
    shape = run.model
    assert shape.vocab_size is not None
    groups = share_groups(
        Grid(comm.size, parallel.tensor_model_parallel_size, 1).groups(comm), kernels
    )
    return Trainer(
        run,
        Layout.from_run(run, comm.size),
        comm,
        groups,
        MockDataset(shape.vocab_size, shape.seq_length, 1 << 16, 1),
        None,
        ops=Ops.build("native"),
    )


@contextlib.contextmanager
def trainer_of(run: RunConfig, comm: Comm) -> Iterator[Trainer]:
    trainer = make_trainer(run, comm)
    try:
        yield trainer
    finally:
        trainer.close()


def rank_bytes(run: RunConfig, ranks: int) -> float:
    layout = Layout.from_run(run, ranks)
    in_flight = run_schedule.full_batch_schedule(run, layout).in_flight(0)
    return memory.stage_memory(run, layout, 0, in_flight).total


def repeated(comm: Comm, call: Callable[[], object], limit: float) -> tuple[float, int]:
    """Return (median seconds on the first rank, number of timings) after a warm-up call.
    Collective.

    Without time for a second call the first one counts, and the number is 0.
    """
    first = seconds(call)
    rounds = comm.broadcast_object(min(MOST_ROUNDS, int((limit - first) / max(first, 1e-9))))
    times = [seconds(call) for _ in range(rounds)] or [first]
    found: tuple[float, int] = comm.broadcast_object((statistics.median(times), max(0, rounds)))
    return found


# 124M on 1, 2, 4 ... ranks --------------------------------------------------------------------------------------------------------


def rank_counts(size: int) -> list[int]:
    powers = [1 << power for power in range(size.bit_length()) if 1 << power < size]
    return [*powers, size]


def training_section(context: Context) -> JsonObject:
    """Measure data-parallel steps of 124M with equal micro-batches per rank. Collective."""
    world = context.world
    rows = []
    counts = rank_counts(world.size)
    micro_batches = context.agreed(affordable_batches(context, len(counts)))
    for index, count in enumerate(counts):
        run = make_run(
            "124m",
            {
                **PLAIN,
                "vocab_size": 50257,
                **context.scale.model,
                "global_batch_size": micro_batches * count,
            },
        )
        seconds = context.agreed(context.left / (len(counts) - index))
        fits = context.agreed(
            rank_bytes(run, count) * min(count, context.nodes.ranks.size) < USABLE * context.free
        )
        if not fits or seconds <= 0:
            rows.append({"ranks": count, "left_out": "memory" if not fits else "time"})
            continue
        comm = world.split(int(world.rank < count), world.rank)
        measured = step_row(context, run, comm, seconds) if world.rank < count else None
        rows.append(context.agreed(measured))
    return {
        "model": "124M",
        "micro_batches": micro_batches,
        "seq_length": run.model.seq_length,
        "rows": rows,
    }


def affordable_batches(context: Context, counts: int) -> int:
    """Return a rank's micro-batches, so that two steps on each number of ranks fit into the time."""
    run = make_run(
        "124m", {**PLAIN, "vocab_size": 50257, **context.scale.model, "global_batch_size": 1}
    )
    step = accounting.model_flops(run, 1) / context.training_flops
    return max(1, min(MOST_MICRO_BATCHES, int(context.seconds / counts / 2 / step)))


def step_row(context: Context, run: RunConfig, comm: Comm, seconds: float) -> JsonObject:
    """Measure a step, next to the model's. Collective over `comm`."""
    with trainer_of(run, comm) as trainer:
        context.energy.joules()  # counted from here
        begin = time.perf_counter()
        step, rounds = repeated(comm, trainer.train_step, seconds)
        watts = watts_of(context, comm, time.perf_counter() - begin)
    batch = run.batch.global_batch_size or 1
    tokens = batch * run.model.seq_length / step
    return {
        "ranks": comm.size,
        "seconds": step,
        "rounds": rounds,
        "tokens_per_s": tokens,
        "tflops": accounting.model_flops(run, batch) / step / 1e12,
        "model_seconds": modelled_step(context, run, comm.size),
        "watts": watts,
        "tokens_per_joule": tokens / watts if watts else None,
    }


def watts_of(context: Context, comm: Comm, seconds: float) -> float | None:
    """Return the power of all nodes in the last `seconds`; None if one has no counter. Collective
    over `comm`.
    """
    own = context.energy.joules() if context.nodes.leads else 0.0
    everyone = comm.all_gather_object(own)
    return None if None in everyone else sum(everyone) / seconds


def modelled_step(context: Context, run: RunConfig, ranks: int) -> float | None:
    """Return modelled seconds; None if a node has idle threads."""
    per_node = context.nodes.ranks.size
    if context.machine is None or ranks % per_node:
        return None
    host = machine.from_data("here", context.machine)
    system = System(
        machine=host,
        software=software.load(software.THIS_PROJECT),
        nodes=ranks // per_node,
        ranks_per_node=per_node,
    )
    return model.predict(run, system).seconds


# Two layers -----------------------------------------------------------------------------------------------------------------------


def layers_section(context: Context) -> JsonObject:
    """Measure two layers of each shape. Collective."""
    rows = []
    for index, shape in enumerate(SHAPES):
        share = context.agreed(context.left / (len(SHAPES) - index))
        rows.append({"shape": shape, **context.agreed(layers_row(context, shape, share))})
    return {"rows": rows}


def two_layers(context: Context, shape: str, tp: int, s: int) -> RunConfig:
    return make_run(
        SHAPES[shape],
        {
            **PLAIN,
            "global_batch_size": 1,
            "vocab_size": VOCABULARY,
            **context.scale.layers,
            "num_layers": 2,
            "seq_length": s,
            "tensor_model_parallel_size": tp,
        },
    )


def chosen_layers(context: Context, shape: str, seconds: float) -> RunConfig | None:
    here = context.nodes.ranks.size
    least = USABLE * context.free / here
    sizes = [tp for tp in TENSOR_PARALLEL if here % tp == 0]
    for s, tp in itertools.product(context.scale.sequences, sizes):
        run = two_layers(context, shape, tp, s)
        quick = 4 * accounting.model_flops(run, 1) / (tp * context.training_flops) < seconds
        if quick and rank_bytes(run, tp) < least:
            return run
    return None


def layers_row(context: Context, shape: str, seconds: float) -> JsonObject:
    """Return seconds for a sample's gradients and for an update, mean of all groups at the same
    time. Collective.
    """
    run = context.agreed(chosen_layers(context, shape, seconds))
    if run is None:
        return {"left_out": "memory or time"}
    tp = run.parallel.tensor_model_parallel_size
    group = context.world.split(context.world.rank // tp, context.world.rank)
    with trainer_of(run, group) as trainer:
        whole, rounds = repeated(group, trainer.train_step, seconds / 2)
        gradients, _ = repeated(group, lambda: trainer.repeat(0, 1.0), seconds / 4)
    everyone = context.world.all_gather_object((whole, gradients))
    whole, gradients = map(statistics.fmean, zip(*everyone, strict=True))
    return {
        "tp": tp,
        "groups": context.world.size // tp,
        "seq_length": run.model.seq_length,
        "gradient_seconds": gradients,
        "update_seconds": max(0.0, whole - gradients),
        "rounds": rounds,
        "parameters": accounting.parameters(run),
        "flops": accounting.model_flops(run, 1),
    }


# Checkpoint -----------------------------------------------------------------------------------------------------------------------


def storage_section(context: Context) -> JsonObject:
    """Measure GB/s of a checkpoint: all ranks in --save, or one node's in a temporary directory."""
    shared = context.save is not None
    comm = context.world if shared else context.nodes.ranks
    result = saved(context, comm) if shared or context.nodes.number == 0 else None
    agreed: JsonObject = context.agreed(result)
    return agreed


def saved(context: Context, comm: Comm) -> JsonObject:
    """Save twice, replacing the first, and load. Collective over `comm`."""
    run = make_run(
        "124m",
        {
            **PLAIN,
            **SAVED,
            **context.scale.model,
            "global_batch_size": comm.size,
            "seq_length": 32,
            "keep_last": 1,
        },
    )
    with contextlib.ExitStack() as stack:
        folder = None
        if comm.rank == 0:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="report-", dir=context.save)
            )
        folder = comm.broadcast_object(folder)
        trainer = stack.enter_context(
            trainer_of(replace(run, output=replace(run.output, save=folder)), comm)
        )
        trainer.train_step()
        trainer.save(folder)
        trainer.train_step()
        comm.barrier()
        written = seconds(lambda: trainer.save(folder))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        read = seconds(lambda: trainer.load(folder))
        comm.barrier()
    return {
        "place": "--save" if context.save else "temporary folder",
        "file_system": file_system(context.save or Path(tempfile.gettempdir())),
        "ranks": comm.size,
        "bytes": size,
        "write_gbs": size / written / 1e9,
        "read_gbs": size / read / 1e9,
        "note": "what was just written may be read from the node's memory",
    }


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    longest = ""
    found = "unknown"
    for line in (read_text(mounts) or "").splitlines():
        point, kind = line.split()[1:3]
        if folder.resolve().is_relative_to(point) and len(point) > len(longest):
            longest = point
            found = kind
    return found


# Hours for 10 million tokens of whole models, from two measured layers (model) ----------------------------------------------------
#
# A sample takes as long as its FLOPs at the rate of the two layers; every tensor-parallel group works on samples of its own.
# An update comes every UPDATE_TOKENS tokens and takes as long as its parameters at the measured rate, and the all-reduce of the
# gradients in addition. Left out: pipelines, and recompute, which a model needs that barely fits.

TOKENS = 10_000_000
UPDATE_TOKENS = 1 << 19
BYTES = 16  # of a parameter: FP32 weights, gradients and both moments
MODEL_SHARE = 0.8  # share of a node's memory that these may take
LLAMA_3B = {
    "num_layers": 28,
    "hidden_size": 3072,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 24,
    "num_query_groups": 8,
    "kv_channels": 128,
}  # meta-llama/Llama-3.2-3B
# Model -> the measured shape whose rate it has, its recipe, what differs from that
MODELS: dict[str, tuple[str, str, JsonObject]] = {
    "0.6B": ("1B", "qwen3-0.6b", {}),
    "1B": ("1B", "llama-3.2-1b", {}),
    "3B": ("8B", "llama-3.2-1b", LLAMA_3B),
    "8B": ("8B", "llama-3.1-8b", {}),
}


def hours(sections: JsonObject) -> list[JsonObject]:
    """Return a row for each model, from its own shape's layers or else the other's."""
    measured = {
        row["shape"]: row for row in rows_of(sections, "layers") if "gradient_seconds" in row
    }
    if not measured:
        return []
    last = [*measured.values()][-1]
    return [
        whole_model(name, measured.get(shape, last), recipe, changes, sections)
        for name, (shape, recipe, changes) in MODELS.items()
    ]


def whole_model(
    name: str, row: JsonObject, recipe: str, changes: JsonObject, sections: JsonObject
) -> JsonObject:
    run = make_run(recipe, {**changes, "seq_length": row["seq_length"], "mock_data": True})
    parameters = accounting.parameters(run)
    tokens = row["seq_length"]
    sample = row["gradient_seconds"] * accounting.model_flops(run, 1) / row["flops"]
    update = row["update_seconds"] * parameters / row["parameters"]
    reduce_gbs = sections.get("communication", {}).get("all_reduce_gbs")
    if reduce_gbs and row["groups"] > 1:
        update += 4 * parameters / row["tp"] / reduce_gbs / 1e9
    seconds = TOKENS / (row["groups"] * tokens / sample) + TOKENS / UPDATE_TOKENS * update
    nodes = rows_of(sections, "host", "nodes")
    gib = sum(node["job_memory_gib"] for node in nodes)
    need = BYTES * parameters / 2**30
    return {
        "model": name,
        "parameters": parameters,
        "from": f"two layers of {row['shape']}",
        "label": LABEL,
        "seq_length": tokens,
        "tokens_per_s": TOKENS / seconds,
        "hours": seconds / 3600,
        "need_gib": need,
        "fits": need <= MODEL_SHARE * gib,
        "nodes_needed": math.ceil(need / (MODEL_SHARE * gib / len(nodes))) if gib else None,
    }
