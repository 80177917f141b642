"""`make setup`, the last step in containers/Dockerfile, on a folder with only the recipe's copies. No image is built."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
COPIES = re.findall(r"^COPY (.*) (\S+)$", (ROOT / "containers/Dockerfile").read_text(), re.M)


@pytest.fixture
def image(tmp_path):
    """A folder with the recipe's copies."""
    ignore = shutil.ignore_patterns(
        "__pycache__", "*.so"
    )  # as in containers/Dockerfile.dockerignore
    for sources, target in COPIES:
        for source in sources.split():
            path = tmp_path / (source if target == "./" else target)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, path, symlinks=True, ignore=ignore)
            else:
                shutil.copy(ROOT / source, path)
    return tmp_path


def test_make_setup_finds_what_it_needs(image):
    done = subprocess.run(["make", "--dry-run", "setup"], cwd=image, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "setup.py --quiet build_ext --inplace" in done.stdout and "pip" in done.stdout
    named = re.findall(r"(?:-r|constraint) (\S+)", done.stdout)
    assert named and all((image / name).is_file() for name in named)


@pytest.mark.slow
def test_make_setup_succeeds(image):
    subprocess.run(["make", "setup"], cwd=image, check=True)
    programs = image / ".venv" / "bin"
    flags = "--recipe demo --mock-data --vocab-size 512 --train-iters 2 --eval-iters 0".split()
    subprocess.run(
        [programs / "mpiexec", "-n", "2", programs / "fugaku-megatron", "train", *flags],
        cwd=image / "scripts",
        check=True,
    )
