"""One side of `benchmarks step` in a process of its own: trains a step on request and reports its time, loss and memory.

    python -m benchmarks.contestant '{"side": "ours", ...}'        started by Contestant, see `Task`

Its first answer is {"allocator": ...}. Left out: the pipes (child.py), the order of the sides' turns (step.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import jobs, preloads
from .child import Child, answer, answers, python

SIDES = ("ours", "baseline")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a contestant trains. values: fields of the run that replace the recipe's.

    baseline, compiled: which baseline, and whether torch.compile is applied to it; without meaning for our side. preload:
    libraries.
    """

    side: str
    recipe: str
    values: dict[str, Any]
    threads: int
    baseline: str = "plain"
    compiled: bool = False
    preload: tuple[str, ...] = ()


class Contestant(Child):
    """The parent's end of the pipes."""

    def __init__(self, task: Task) -> None:
        self.task = task
        environment = {**preloads.environment(*map(Path, task.preload)), "OMP_NUM_THREADS": str(task.threads)}
        super().__init__(python("contestant", asdict(task)), environment, task.side)
        self.ready = self.answer()

    def step(self) -> dict[str, float]:
        """Train one step. {"seconds", "loss", "minor_faults", "system_seconds", "peak_rss_mib", "idle_cpu_seconds"}."""
        return self.ask("step")


class Apart:
    """A contestant whose process ends after every step, so that the other has the memory; a step is the second of its process."""

    def __init__(self, task: Task) -> None:
        self.task, self.ready, self._spent = task, {}, 0.0

    def step(self) -> dict[str, float]:
        """As `Contestant.step`; peak memory is that of both steps."""
        with Contestant(self.task) as contestant:
            self.ready = contestant.ready
            contestant.step()  # the first one makes the optimizer's state and warms up
            result = contestant.step()
            self._spent += contestant.cpu_seconds()
        return result

    def cpu_seconds(self) -> float:
        """CPU time of the processes so far."""
        return self._spent


def _ours(task: Task) -> tuple[Any, dict[str, Any]]:
    """(function that trains a step, facts for the report): the trainer as training/pretrain.py sets it up."""
    from fugaku_megatron.comm.grid import Grid
    from fugaku_megatron.comm.solo import SoloComm
    from fugaku_megatron.config.arguments import make_run
    from fugaku_megatron.training import pretrain
    from fugaku_megatron.training.start_choices import build_ops, choose_kernels
    from fugaku_megatron.training.train import Trainer

    run, world = make_run(task.recipe, task.values), SoloComm()
    machine = pretrain.configure_process(run, world)
    groups = Grid(1, 1, 1).groups(world)
    layout = pretrain.Layout.from_run(run, 1)
    ops = build_ops(run, choose_kernels(run, layout, world).backends)
    trainer = Trainer(run, world, groups, *pretrain.build_data(run, groups, layout), ops=ops)
    return lambda: trainer.train_step().loss, {"kernels": ops.choice, "allocator": jobs.allocator(machine)}


def _baseline(task: Task) -> tuple[Any, dict[str, Any]]:
    """(function that trains a step, facts for the report): the baseline."""
    import torch

    from fugaku_megatron.config.arguments import make_run

    from .baselines import BaselineTrainer

    torch.set_num_threads(task.threads)
    trainer = BaselineTrainer(task.baseline, make_run(task.recipe, task.values), task.compiled)
    return trainer.step, {"torch": torch.__version__}


def main(task: Task) -> None:
    """The process's own end of the pipe."""
    stream = answers()
    step, facts = (_ours if task.side == "ours" else _baseline)(task)

    from fugaku_megatron.host import allocator
    from fugaku_megatron.host.allocator import peak_memory_mib

    from .disturbance import Settling, multiply_adds

    loaded = Path("/proc/self/maps").read_text() if task.preload else ""
    for library in task.preload:
        if os.path.realpath(library) not in loaded:
            raise SystemExit(f"{library} was to be preloaded and is not: is it a library of this machine?")
    answer(stream, {"allocator": allocator.allocator_name(), **facts})
    settling = Settling(multiply_adds)
    idle_since = time.process_time()
    for _ in sys.stdin:
        idle = time.process_time() - idle_since
        settling.wait()
        begin, faults = time.perf_counter(), allocator.page_faults()
        loss = step()
        seconds = time.perf_counter() - begin
        after, idle_since = allocator.page_faults(), time.process_time()
        answer(stream, {"seconds": seconds, "loss": loss, "minor_faults": after[0] - faults[0], "idle_cpu_seconds": idle,
                        "system_seconds": after[1] - faults[1], "peak_rss_mib": peak_memory_mib()})


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the parent has left, or is leaving
        main(Task(**json.loads(sys.argv[1])))
