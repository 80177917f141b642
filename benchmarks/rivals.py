"""Rivals of a family's kernels that need processes of their own: torch with its MKL as shipped, and OpenBLAS.

Which of their kernels these libraries use is settled when a process starts, so one process cannot show two. A rival is this program
with the same options: it makes the same cases and runs its own side of one when it is asked to, once its threads have a core each,
as ours have. It sleeps while others compute. Left out: the cases (gemm.py and the other families), medians and rows (driver.py).
Test: pytest tests/test_benchmarks.py
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fugaku_megatron.host import allocator
from fugaku_megatron.host.fma_peak import fma_gflops

from . import mkl, openblas
from .child import Child, answer, answers

if TYPE_CHECKING:
    from .driver import Case

SHIPPED, OPENBLAS = "MKL shipped", "OpenBLAS"
PAUSE = 0.05  # s; threads of OpenMP and OpenBLAS spin for some tens of milliseconds after their work, then they sleep
SETTLE_STEPS = 600_000  # of the loop of multiply-adds
SETTLE_SECONDS = 1.0  # at most, until every thread has a core
SETTLED = 0.75  # of the best rate: two threads on one core have half of it
QUIET = 0.9  # share of wall time for which threads ran; below that others disturbed them


class Rival(Child):
    """The parent's end. `name` says which library it is, and which of its kernels run."""

    def __init__(self, kind: str, words: Sequence[str], environment: dict[str, str]) -> None:
        super().__init__("rivals", [kind, *words], environment, kind)
        self.name = self.ready["name"]

    def take_turn(self) -> tuple[float, bool]:
        """(seconds of the case that `ask("next")` went to, whether nobody disturbed it)."""
        time.sleep(PAUSE)
        done = self.ask("run")
        time.sleep(PAUSE)
        return done["seconds"], done["quiet"]


def start(stack: ExitStack, options: argparse.Namespace, case: Case, words: Sequence[str]) -> list[Rival]:
    """Those that differ from what this process measures; they end with the stack.

    case: the family's first one. words: a command line with these options. Where numpy has no OpenBLAS, a line says so.
    """
    environments = {}
    if options.mkl == mkl.BOTH and mkl.narrowed():
        environments[SHIPPED] = mkl.environment("shipped")
    if case.openblas_run is not None:
        environments[OPENBLAS] = {**mkl.environment("shipped"), **openblas.environment(options.threads)}
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    started = [stack.enter_context(Rival(kind, words, {**environment, **threads})) for kind, environment in environments.items()]
    for rival in started:
        if "missing" in rival.ready:
            print(f"no {rival.name}: {rival.ready['missing']}", flush=True)
    return [rival for rival in started if "missing" not in rival.ready]


def first_answer(kind: str) -> dict[str, str]:
    """The name of this process's library, and what is missing for it."""
    if kind == SHIPPED:
        return {"name": SHIPPED}
    try:
        return {"name": f"{OPENBLAS} {openblas.core()}"}
    except ValueError as error:
        return {"name": OPENBLAS, "missing": str(error)}


class Settling:
    """Waits until this process's threads have a core each. work: some milliseconds of theirs.

    What slept may wake two threads on one core, in this system or, of virtual CPUs, in the one below, and be moved only a second
    later; products of less than 100 ms ran at half their rate.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._best = work, math.inf
        self.wait(all_the_time=True)

    def now(self) -> bool:
        """Whether the work takes about as long as it did at best."""
        start = time.perf_counter()
        self._work()
        taken = time.perf_counter() - start
        self._best = min(self._best, taken)
        return taken <= self._best / SETTLED

    def wait(self, all_the_time: bool = False) -> None:
        """Return when it does, or after SETTLE_SECONDS."""
        end = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < end and (not self.now() or all_the_time):
            pass

    def run(self, work: Callable[[], Any], clock: Callable[[], float], threads: int) -> tuple[Any, bool]:
        """(What `work` returns, whether so many threads had a core each meanwhile). clock: of their processor time."""
        self.wait()
        wall, cpu = time.perf_counter(), clock()
        result = work()
        ran = clock() - cpu >= QUIET * threads * (time.perf_counter() - wall)
        return result, ran and self.now()


def multiply_adds() -> None:
    """Two milliseconds of the threads that torch and the kernels share."""
    fma_gflops(SETTLE_STEPS)


def main(kind: str, words: Sequence[str]) -> None:
    """The process's own end of the pipes: the lines "next" and "run"."""
    from .__main__ import family, make_parser
    from .driver import seconds, selected

    stream, options = answers(), make_parser().parse_args(words)
    torch.set_num_threads(options.threads)
    allocator.tune("tuned")
    answer(stream, first_answer(kind))
    cases, run, settling = selected(options, family(options).cases), None, None
    for line in sys.stdin:
        settling = settling or Settling(openblas.work if kind == OPENBLAS else multiply_adds)
        if line == "next\n":
            case = next(cases)
            run = case.openblas_run if kind == OPENBLAS else case.baseline_run
            run()
            answer(stream, {})
        else:
            taken, quiet = settling.run(partial(seconds, run), time.thread_time, 1)
            answer(stream, {"seconds": taken, "quiet": quiet})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
