"""Quick commands of python -m benchmarks, each in a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import make_parser

ROOT = Path(__file__).resolve().parents[2]
# A round in which others compute, here the other tests, is not run again.
QUICK = """
from benchmarks import __main__, disturbance, driver, rowwise, shapes, step, tables
driver.PATIENCE = step.PATIENCE = tables.ATTEMPTS = 1
disturbance.SETTLE_SECONDS, driver.CLOCK_STEPS, driver.TRIAD_ELEMENTS = 0.02, 1_000_000, 1 << 20
rowwise.UPDATE_ELEMENTS = 1 << 16
shapes.vocabulary = lambda recipe: 512
"""

needs_mpi = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(),
    reason="no mpiexec next to python: pip install mpich",
)


def options(command: str):
    """Return a command's parsed options."""
    return make_parser().parse_args(command.split())


def start(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a Python program on one thread."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done


def result(path: Path, command: str, *more: str) -> tuple[dict, str]:
    """Run one command; return the JSON result and the output."""
    words = [*command.split(), *more, "--json", str(path)]
    done = start(f"{QUICK}__main__.main()", *words)
    return json.loads(path.read_text()), done.stdout
