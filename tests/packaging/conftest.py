"""The wheel of this checkout, built once for all tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_megatron.host import kernels
from tests.checks.once import once

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Built once for all workers, by this environment's packages and from the targets that the checkout's library has.

    The other targets take minutes to compile, longer than a test may last.
    """
    built = [
        row["name"] for row in kernels.targets() if row["compiled"] and row["name"] != "reference"
    ]

    def build(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
        options = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["KERNEL_TARGETS"] = ",".join(built)
        done = subprocess.run(
            [*pip, *options], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return next(once(tmp_path_factory, "wheel", build).glob("fugaku_megatron-*.whl"))
