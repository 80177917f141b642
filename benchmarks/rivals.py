"""Rivals of a family's kernels that need processes of their own: torch with its MKL as shipped, and OpenBLAS.

Which of their kernels these libraries use is settled when a process starts, so one process cannot show two. A rival is this program
with the same options: it makes the same cases and runs its own side of one when it is asked to, once its threads have a core each,
as ours have. It sleeps while others compute. Left out: the cases (gemm.py and the other families), medians and rows (driver.py).
Test: pytest tests/test_benchmarks.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch

from fugaku_megatron.host import allocator

from . import mkl, openblas
from .child import Child, answer, answers, python
from .settling import Settling, multiply_adds

if TYPE_CHECKING:
    from .driver import Case

SHIPPED, OPENBLAS = "MKL shipped", "OpenBLAS"
PAUSE = 0.05  # s; threads of OpenMP and OpenBLAS spin for some tens of milliseconds after their work, then they sleep


class Rival(Child):
    """The parent's end. `name` says which library it is, and which of its kernels run."""

    def __init__(self, kind: str, words: Sequence[str], environment: dict[str, str]) -> None:
        super().__init__(python("rivals", kind, *words), environment, kind)
        self.ready = self.answer()
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
