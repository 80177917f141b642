"""Random mutants of the parallel code, and how --check-layout finds them.

    python -m tests.campaigns.mutants --seed 1 --count 30

Each mutant is one change of the package's copy in a temporary folder. Its process checks a few layouts on threads. Only functions
that these layouts call are changed. Results:
    named       a tensor differs, and the report names it
    stopped     the program raises an error or hangs
    alike       one rank changes like the layout: only a record of the original (--against) differs
    no effect   no tensor of these layouts changes
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy  # loaded once for all mutants, which are forked
import torch

from tests.campaigns.mutants.mutations import Site, mutant, sites
from tests.campaigns.mutants.trial import (
    ALIKE,
    NAMED,
    NO_EFFECT,
    STOPPED,
    Result,
    reached_functions,
    try_mutant,
)

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "fugaku_megatron"
FOLDERS = ("comm", "nn", "optim", "pipeline", "training")
TIMEOUT = 300  # s of a mutant
LOADED = (numpy, torch)


def forked(function, *arguments, timeout=None):
    """Return function(*arguments) of another process, or None after `timeout` seconds or if the process dies."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def work():
        sending.send(function(*arguments))

    process = context.Process(target=work)
    process.start()
    result = None
    if receiving.poll(timeout):
        try:
            result = receiving.recv()
        except EOFError:
            result = None
    process.kill()
    process.join()
    return result


def candidates(folder: Path, reached: dict[str, set[int]]) -> list[tuple[str, Site]]:
    """Return everything that can be changed in the files of FOLDERS."""
    found = []
    for name in sorted(reached):
        if name.split("/")[0] in FOLDERS:
            source = (folder / PACKAGE / name).read_text()
            found += [(name, site) for site in sites(source, reached[name])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        record = folder / "record"
        shutil.copytree(
            ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__")
        )
        reached = forked(reached_functions, folder, record)
        assert reached is not None, "the original fails its own check"
        for file, site in rng.sample(candidates(folder, reached), options.count):
            path = folder / PACKAGE / file
            original = path.read_text()
            changed = mutant(original, site)
            path.write_text(changed.source)
            result = forked(try_mutant, folder, record, timeout=TIMEOUT)
            path.write_text(original)
            result = result or Result(STOPPED, f"no end within {TIMEOUT} s, or the process died")
            counts[result.kind] += 1
            print(f"{result.kind:<9} {file}:{changed.line}: {changed.change}", flush=True)
            print(f"          {result.text:.300}", flush=True)
    score = ", ".join(f"{counts[kind]} {kind}" for kind in (NAMED, STOPPED, ALIKE, NO_EFFECT))
    print(f"{options.count} mutants of seed {options.seed}: {score}")


if __name__ == "__main__":
    main()
