"""Runs one family of benchmarks: python -m benchmarks {gemm,attention,rowwise,step,alloc,tables} [options]

A family is a module of this package with a docstring, add_arguments(parser), and either cases(options), which yields driver.Case
(kernels against torch; options then: [--recipe R] [--target T|all] [--dtype D] [--threads N] [--json F]), or run(options).
Left out: the timing itself (driver.py, step.py, alloc.py, tables.py). Test: pytest tests/test_benchmarks.py
"""

import argparse
import importlib
import os
from collections.abc import Sequence

from fugaku_megatron.run.config import check

from . import driver

FAMILIES = ("gemm", "attention", "rowwise", "step", "alloc", "tables")


def check_outputs(options: argparse.Namespace) -> None:
    """ValueError, before anything is measured, for a file that cannot be written."""
    for name in ("json", "csv", "png"):
        path = getattr(options, name, None)
        writable = path is None or (not path.is_dir() and os.access(path if path.exists() else path.absolute().parent, os.W_OK))
        check(writable, f"--{name} {path}: cannot be written; give a file in a folder that exists")


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the family."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measured comparisons, in turn in one run.")
    names = parser.add_subparsers(dest="family", required=True)
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in FAMILIES}
    for name, module in modules.items():
        sub = names.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__,
                               formatter_class=argparse.RawDescriptionHelpFormatter)
        if hasattr(module, "cases"):
            driver.add_arguments(sub)
        module.add_arguments(sub)
        sub.set_defaults(defaults={a: sub.get_default(a) for a in vars(sub.parse_args([]))})
    options = parser.parse_args(argv)
    module = modules[options.family]
    try:
        check_outputs(options)
        if hasattr(module, "cases"):
            driver.run(options, module.cases)
        else:
            module.run(options)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"python -m benchmarks {options.family}: {error}") from None


if __name__ == "__main__":
    main()
