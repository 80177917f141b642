"""Runs one family of benchmarks:

    python -m benchmarks {gemm,attention,rowwise,step,alloc,tables,comm,two_hosts,schedule,save,watch,decode} [options]

A family is a module of this package with a docstring, add_arguments(parser), and either run(options), or cases(options), which
yields driver.Case (kernels against torch, with the options of driver.add_arguments). Where torch is measured in this process, as in
cases and in a family with TORCH_HERE, the process starts again with the MKL of --mkl. Left out: the timing itself (driver.py and
the families' modules).
"""

import argparse
import importlib
from collections.abc import Sequence
from types import ModuleType

from fugaku_megatron.config.command_line import Parser
from fugaku_megatron.config.outputs import check_file, check_picture

from . import driver, mkl

FAMILIES = ("gemm", "attention", "rowwise", "step", "alloc", "tables", "comm", "two_hosts", "schedule", "save", "watch",
            "decode")


def check_outputs(options: argparse.Namespace) -> None:
    """ValueError, before anything is measured, for a file that cannot be written."""
    for name in ("json", "csv"):
        check_file(f"--{name}", getattr(options, name, None))
    check_picture(getattr(options, "png", None))


def family(options: argparse.Namespace) -> ModuleType:
    """The module of parsed options."""
    return importlib.import_module(f"{__package__}.{options.family}")


def make_parser() -> Parser:
    """Of all families."""
    parser = Parser(prog="python -m benchmarks", description="Measured comparisons, in turn in one run.")
    names = parser.add_subparsers(dest="family", required=True)
    for name in FAMILIES:
        module = importlib.import_module(f"{__package__}.{name}")
        sub = names.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__)
        if hasattr(module, "cases"):
            driver.add_arguments(sub)
        module.add_arguments(sub)
        sub.set_defaults(defaults={a: sub.get_default(a) for a in vars(sub.parse_args([]))})
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the family."""
    name = ""
    try:
        options = make_parser().parse_args(argv)
        name, module = f" {options.family}", family(options)
        check_outputs(options)
        if argv is None and (hasattr(module, "cases") or hasattr(module, "TORCH_HERE")):
            mkl.start_again(options.mkl)
        if hasattr(module, "cases"):
            driver.run(options, module.cases)
        else:
            module.run(options)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"python -m benchmarks{name}: {error}") from None


if __name__ == "__main__":
    main()
