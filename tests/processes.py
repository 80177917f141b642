"""Python programs that a test starts in the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.mpi import launch

ROOT = Path(__file__).resolve().parents[1]


def write_program(path: Path, text: str) -> Path:
    """Write a script that can be started."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def run_python(*words: object, code: int | None = 0, **variables: str) -> launch.Result:
    """Run this environment's Python in the checkout and check the exit code."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **variables},
    )
    seconds = time.monotonic() - begin
    return launch.Result(done.returncode, done.stdout, done.stderr, seconds).check(code)
