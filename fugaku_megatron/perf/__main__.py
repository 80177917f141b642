"""One door to the performance model: python -m fugaku_megatron.perf COMMAND --help

A command is a module of this package with add_arguments(parser) and main(args) -> exit code, imported when it is called.
Test: pytest tests/test_perf_tables.py
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from ..run import arguments

PROGRAM = "python -m fugaku_megatron.perf"
COMMANDS = {  # name and module -> what it does
    "tables": "the published benchmark tables: printed, corrected, computed again and modelled",
    "fit": "fit the model's parameters to the tables; prints errors, in sample and left out",
    "predict": "seconds, TFLOPs and memory of a run that pretrain_gpt.py's flags describe",
    "plan": "search parallel layouts for a model on given nodes; picture, bottlenecks, command line",
    "calibrate": "measure this host's peak, GEMM curve, bandwidth and MPI, and write them as a machine",
}


def _usage() -> str:
    return "\n".join([f"usage: {PROGRAM} COMMAND [options]", "", *(f"  {name:10} {help}" for name, help in COMMANDS.items())])


def run(argv: Sequence[str]) -> int:
    """The exit code of one command. Raises ValueError, one line, for a user's mistake."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"give {' or '.join(COMMANDS)}"
        raise ValueError(f"command {argv[0]} is unknown: {remedy}")
    module = importlib.import_module("..calibration.calibrate" if argv[0] == "calibrate" else f".{argv[0]}", __package__)
    parser = arguments.Parser(prog=f"{PROGRAM} {argv[0]}", description=module.__doc__, allow_abbrev=False,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    module.add_arguments(parser)
    values, unknown = parser.parse_known_args(argv[1:])
    if unknown:
        raise ValueError(arguments.suggest(parser, unknown))
    return module.main(values)


def main() -> int:
    """Runs the command line; a user's mistake is one line and exit code 2."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
