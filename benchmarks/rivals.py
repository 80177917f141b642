"""Rivals of a family's kernels that need processes of their own: torch with its MKL as shipped, and OpenBLAS.

Which of their kernels these libraries use is settled when a process starts, so one process cannot show two. A rival is this program
with the same options: it makes the same cases and runs its own side of one when it is asked to, once its threads have a core each,
as ours have. It sleeps while others compute. Left out: the cases (gemm.py and the other families), medians and rows (driver.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from fugaku_megatron.host import allocator

from . import openblas
from .__main__ import family, make_parser
from .child import answer, answers
from .disturbance import Settling, multiply_adds
from .driver import OPENBLAS, SHIPPED, seconds, selected


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
