"""Report sections that train 124M on 1, 2, 4 ... ranks, and save and load its checkpoint.

Data are random tokens. A step is repeated as the time allows.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cli.arguments import make_run
from ..comm.base import Comm
from ..config.run_config import RunConfig
from ..costs.flops import model_flops
from ..costs.plan import Plan
from ..data.dataset import MockDataset
from ..host.cgroup import read_text
from ..host.timing import seconds
from ..planner import machine, model, software
from ..planner.system import System
from ..run.assemble import build_trainer
from ..text.named_files import JsonObject
from ..training.trainer import Trainer
from .context import Context

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
USABLE = 0.7  # share of the free memory that a measurement may take
MOST_ROUNDS = 5
LEAST_STEPS = 2  # that must fit into the time: the first one warms up
MOST_MICRO_BATCHES = 4


def gpt2(context: Context, **changes: Any) -> RunConfig:
    return make_run("124m", {**PLAIN, "vocab_size": 50257, **changes, **context.scale.model})


def make_trainer(run: RunConfig, comm: Comm) -> Trainer:
    """Build a trainer on random tokens over all ranks, with native kernels. Collective."""
    shape = run.model
    assert shape.vocab_size is not None
    train = MockDataset(shape.vocab_size, shape.seq_length, 1 << 16, 1)
    return build_trainer(Plan.of(run, comm.size), comm, (train, None))


def rank_bytes(run: RunConfig, ranks: int) -> float:
    return Plan.of(run, ranks).memory[0].total


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


def training_section(context: Context) -> JsonObject:
    """Measure data-parallel steps of 124M with equal micro-batches per rank. Collective."""
    world = context.world
    rows = []
    powers = [1 << power for power in range(world.size.bit_length()) if 1 << power < world.size]
    counts = [*powers, world.size]
    micro_batches = context.agreed(affordable_batches(context, len(counts)))
    for index, count in enumerate(counts):
        run = gpt2(context, global_batch_size=micro_batches * count)
        seconds = context.agreed(context.left / (len(counts) - index))
        step = model_flops(run, micro_batches) / context.training_flops
        fits = context.agreed(
            rank_bytes(run, count) * min(count, context.nodes.ranks.size) < USABLE * context.free
        )
        if not fits or context.agreed(seconds < LEAST_STEPS * step):
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
    step = model_flops(gpt2(context, global_batch_size=1), 1) / context.training_flops
    return max(1, min(MOST_MICRO_BATCHES, int(context.seconds / counts / LEAST_STEPS / step)))


def step_row(context: Context, run: RunConfig, comm: Comm, seconds: float) -> JsonObject:
    """Measure a step, next to the model's. Collective over `comm`."""
    with contextlib.closing(make_trainer(run, comm)) as trainer:
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
        "tflops": model_flops(run, batch) / step / 1e12,
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


def storage_section(context: Context) -> JsonObject:
    """Measure GB/s of a checkpoint: all ranks in --save, or one node's in a temporary directory."""
    shared = context.save is not None
    comm = context.world if shared else context.nodes.ranks
    result = saved(context, comm) if shared or context.nodes.number == 0 else None
    agreed: JsonObject = context.agreed(result)
    return agreed


def saved(context: Context, comm: Comm) -> JsonObject:
    """Save twice, replacing the first, and load. Collective over `comm`."""
    run = gpt2(
        context,
        num_layers=2,  # with these tokens 250 MB in a checkpoint
        vocab_size=8192,
        global_batch_size=comm.size,
        seq_length=32,
        keep_last=1,
    )
    with contextlib.ExitStack() as stack:
        folder = None
        if comm.rank == 0:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="report-", dir=context.save)
            )
        folder = comm.broadcast_object(folder)
        trainer = stack.enter_context(
            contextlib.closing(
                make_trainer(replace(run, output=replace(run.output, save=folder)), comm)
            )
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
