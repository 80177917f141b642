"""A module of this package as a program of its own, which is no rank of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .environment import without_launcher


def start_module(module: str, *words: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a module with the words of its command line. options: of subprocess.Popen"""
    package = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", f"{package.name}.{module}", *words],
        stdin=subprocess.DEVNULL,
        env={**without_launcher(), "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8:surrogateescape"},
        **options,
    )
