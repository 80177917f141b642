"""Runs one family of benchmarks:

    python -m benchmarks FAMILY [options]

    gemm, experts, attention, rowwise, delta_net, step, alloc, tables, two_hosts, schedule, decode, formats, programs, trainers,
    collectives

A family is described in core.py. One that measures torch in this process has TORCH_HERE: the process starts again with the MKL of
--mkl.
"""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from fugaku_megatron.cli.output_files import check_file, check_picture
from fugaku_megatron.cli.parser import Parser

from . import core, preloads

FAMILIES = (
    "gemm",
    "experts",
    "attention",
    "rowwise",
    "delta_net",
    "step",
    "alloc",
    "tables",
    "two_hosts",
    "schedule",
    "decode",
    "formats",
    "programs",
    "trainers",
    "collectives",
)


def check_outputs(options: argparse.Namespace) -> None:
    """Raise ValueError, before anything is measured, for a file that cannot be written."""
    check_file("--json", options.json)
    check_picture(getattr(options, "png", None))


def module_of(family: str) -> ModuleType:
    """Return a family by its name."""
    return importlib.import_module(f"{__package__}.{family}")


def make_parser() -> Parser:
    """Return the parser of all families."""
    parser = Parser(
        prog="python -m benchmarks", description="Measured comparisons, in turn in one run."
    )
    names = parser.add_subparsers(dest="family", required=True)
    for name in FAMILIES:
        module = module_of(name)
        sub = names.add_parser(
            name, help=module.__doc__.splitlines()[0], description=module.__doc__
        )
        module.add_arguments(sub)
        sub.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
        if hasattr(module, "draw"):
            sub.add_argument(
                "--png",
                type=Path,
                metavar="FILE",
                help="draw the result into FILE (needs matplotlib)",
            )
        sub.set_defaults(defaults={action.dest: action.default for action in sub._actions})
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run the family."""
    name = ""
    try:
        options = make_parser().parse_args(argv)
        name = f" {options.family}"
        module = module_of(options.family)
        check_outputs(options)
        if argv is None and hasattr(module, "TORCH_HERE"):
            preloads.start_again(options.mkl)
        core.run(module, options)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"python -m benchmarks{name}: {error}") from None


if __name__ == "__main__":
    main()
