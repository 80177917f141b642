"""Tests with another torch are left out, with a line that says why, if that torch cannot be downloaded."""

import sys
from pathlib import Path

import pytest

from tools import other_torch

pytestmark = pytest.mark.unit

FAILING = (
    "#!/bin/sh\necho 'WARNING: retrying' >&2\necho 'ERROR: no route to the index' >&2\nexit 1\n"
)


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(other_torch, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python", FAILING)))
    return tmp_path / "cache"
