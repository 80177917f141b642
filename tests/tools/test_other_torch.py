"""Tests with another torch are left out, with a line that says why, if that torch cannot be downloaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import other_torch

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FAILING = (
    "#!/bin/sh\necho 'WARNING: retrying' >&2\necho 'ERROR: no route to the index' >&2\nexit 1\n"
)
PYTHON = """#!/bin/sh
case "$3" in
    2.9.1) exit 3;;
    2.13.0) exit 1;;
    2.15.0) echo /folder/$3;;
    *) echo "tests with $PYTHONPATH";;
esac
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(other_torch, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python", FAILING)))
    return tmp_path / "cache"


def test_a_failed_download_is_one_line(cache, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["other_torch", "2.9.1"])
    with pytest.raises(SystemExit) as status:
        other_torch.main()
    assert status.value.code == other_torch.UNAVAILABLE
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "other_torch: no torch 2.9.1 here: pip: ERROR: no route to the index\n"
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_a_version_in_the_cache_needs_no_download(cache):
    folder = other_torch.place("2.9.1")
    folder.mkdir(parents=True)
    assert other_torch.unpacked("2.9.1") == folder


def test_other_machine_types_have_no_other_torch(cache, monkeypatch):
    monkeypatch.setattr(other_torch.platform, "machine", lambda: "aarch64")
    with pytest.raises(other_torch.Unavailable, match="x86-64"):
        other_torch.unpacked("2.9.1")


@pytest.mark.parametrize(
    "versions, status, output",
    [("2.9.1 2.15.0", 0, "torch 2.15.0\ntests with /folder/2.15.0\n"), ("2.13.0 2.15.0", 2, "")],
    ids=["unavailable", "broken"],
)
def test_make_leaves_out_an_unavailable_version_alone(tmp_path, versions, status, output):
    program(tmp_path / "python", PYTHON)
    needs = ["setup", ".venv/stamps/kernels", ".venv/stamps/test-packages"]
    command = ["make", "--silent", *(f"--old-file={name}" for name in needs), "test-torch"]
    variables = [f"BIN={tmp_path}", f"OTHER_TORCH={versions}"]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(
        [*command, *variables], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (status, output), done.stderr
