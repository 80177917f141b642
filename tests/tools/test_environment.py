"""Scripts called by a Python without the packages: they use .venv, or print one line with the remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    "pretrain_gpt.py",
    "pretrain_hybrid.py",
    "tools/preprocess_data.py",
    "scripts/submit.py",
    "scripts/pjsub/local_pjsub",
    "scripts/pjsub/local_pjstat",
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the scripts and the package, without .venv."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(
        ROOT / "fugaku_megatron",
        folder / "fugaku_megatron",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    for name in (*SCRIPTS, "tools/__init__.py", "tools/environment.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    for path in (ROOT / "scripts" / "pjsub").glob("local_*.py"):
        shutil.copy(path, folder / "scripts" / "pjsub")
    return folder


@pytest.fixture
def environment(checkout):
    """A .venv with a script as Python: it prints its PATH, then starts the tests' Python."""
    folder = checkout / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/sh\necho "PATH $PATH"\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    yield folder
    shutil.rmtree(folder.parent)


def call(folder: Path, script: str) -> subprocess.CompletedProcess:
    """Run the script's --help on the Python below the tests' own, without any installed package (-S)."""
    bare = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    return subprocess.run(
        [bare, "-S", folder / script, "--help"],
        text=True,
        capture_output=True,
        env=clean,
        timeout=200,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_without_an_environment_says_what_to_do(checkout, script):
    done = call(checkout, script)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "lacks numpy" in done.stderr
    assert "run `make setup` in " in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_starts_itself_with_the_checkouts_python(checkout, environment, script):
    done = call(checkout, script)
    assert done.returncode == 0, done.stderr
    first, page = done.stdout.split("\n", 1)
    assert first.startswith(f"PATH {environment}:") and "--" in page
    assert script.startswith("scripts/pjsub") or page.startswith(f"usage: {Path(script).name} ")
