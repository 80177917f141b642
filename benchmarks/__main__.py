"""Runs one family of benchmarks: python -m benchmarks {gemm,attention,rowwise} [options]

A family is a module of this package with a docstring and either add_arguments(parser) and cases(options), which yields driver.Case
(options then: [--recipe R] [--target T|all] [--dtype D] [--threads N] [--json F]), or a main() with options of its own.
Left out: the timing itself (driver.py). Test: python -m benchmarks gemm --recipe demo
"""

import argparse
import importlib
import pkgutil
import sys

from . import __path__, driver


def families() -> list[str]:
    """Names of the family modules."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in ("__main__", "driver"))


def main() -> None:
    """Parses the command line and runs the family."""
    if len(sys.argv) > 1 and sys.argv[1] in families():
        module = importlib.import_module(f"{__package__}.{sys.argv[1]}")
        if not hasattr(module, "cases") or not hasattr(module, "add_arguments"):
            del sys.argv[1]
            return module.main()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Kernels against torch, in turn in one process.")
    names = parser.add_subparsers(dest="family", required=True)
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in families()}
    for name in [name for name, module in modules.items() if not hasattr(module, "add_arguments")]:
        names.add_parser(name, help=modules.pop(name).__doc__.splitlines()[0])
    for name, module in modules.items():
        sub = names.add_parser(name, help=module.__doc__.splitlines()[0])
        driver.add_arguments(sub)
        module.add_arguments(sub)
        sub.set_defaults(defaults={a: sub.get_default(a) for a in vars(sub.parse_args([]))})
    options = parser.parse_args()
    try:
        driver.run(options, modules[options.family].cases)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"python -m benchmarks {options.family}: {error}") from None


if __name__ == "__main__":
    main()
