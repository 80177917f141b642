"""Run an unchanged PyTorch program on the kernels:

python -m fugaku_megatron.torch_backend [--report] [--kernels auto|native] [--allocator tuned|stock] train.py ARGS
python -m fugaku_megatron.torch_backend [--report] [--kernels auto|native] [--allocator tuned|stock] -m module ARGS
"""

from __future__ import annotations

import argparse
import atexit
import math
import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType

from ..host import allocator
from ..text.named_files import unreadable
from ..text.numbers import say
from ..text.table import Column, text_table
from . import build, use

_COMMAND = f"python -m {__package__}"
_INTERRUPTED = 130
_COLUMNS: tuple[Column, ...] = (
    ("operator", "<44", lambda row: row[0]),
    ("calls", ">10", lambda row: row[1]),
    ("served %", ">8.1f", lambda row: 100 * row[2] / row[1]),
    ("seconds", ">10.3f", lambda row: row[3]),
    ("with torch", ">10.3f", lambda row: None if math.isnan(row[4]) else row[4]),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program that the command line names; exit as the program does."""
    parser = _parser()
    options = parser.parse_args(arguments)
    program = options.module or options.program
    if not program:
        parser.error("no program: pass the path of a script, or -m and a module")
    if not options.module and os.path.isfile(program[0]) and (why := unreadable(program[0])):
        parser.error(f"cannot read {program[0]}: {why}")
    if not options.module and not os.path.exists(program[0]):
        parser.error(f"no file {program[0]}: pass the path of a script, or -m and a module")
    use(options.kernels)
    allocator.tune(options.allocator)
    if options.report:
        build.load().count(True)
        atexit.register(_print_report)
    sys.argv[:] = program
    _run(program[0], is_module=bool(options.module))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--report", action="store_true", help="print calls and times of each operator at exit"
    )
    parser.add_argument(
        "--kernels",
        choices=("auto", "native"),
        default="auto",
        help="auto: for each shape the faster of both; native: the same bits in every run",
    )
    parser.add_argument(
        "--allocator",
        choices=("tuned", "stock"),
        default="tuned",
        help="tuned: large tensors keep their memory when they are freed; stock: as without this program",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="module to run, and its arguments"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script, and its arguments")
    return parser


def _run(program: str, is_module: bool) -> None:
    """Run the program as __main__; its error is shown as Python shows it."""
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(program))
            runpy.run_path(program, run_name="__main__")
    except Exception as error:
        _show(error)
        sys.exit(1)
    except KeyboardInterrupt as error:
        _show(error)
        sys.exit(_INTERRUPTED)


def _show(error: BaseException) -> None:
    error.__traceback__ = _of_program(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)


def _of_program(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that started the program."""
    starters = (__file__, "<frozen runpy>", runpy.__file__)
    while traceback and traceback.tb_frame.f_code.co_filename in starters:
        traceback = traceback.tb_next
    return traceback


def _print_report() -> None:
    """Print a row for each operator that was called. Of the kernels "native" PyTorch's seconds are unknown."""
    counts = build.load().counts()
    if not counts:
        say("no replaced operator was called on the CPU")
        return
    columns = list(zip(*counts))
    total = ("all", *(sum(column) for column in columns[1:]))
    for line in text_table(_COLUMNS, [*counts, total]):
        say(line)


if __name__ == "__main__":
    main()
