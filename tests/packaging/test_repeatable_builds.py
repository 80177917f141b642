"""Two builds of the same sources, in other folders and with another umask, have the same bytes; a changed archive is found."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pybind11
import pytest
import torch

from tools import verify_wheel

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
# Of one small target without optimization, but with debug information, which names the folders of sources and headers.
QUICK = {"KERNEL_TARGETS": "portable", "CXXFLAGS": "-O0 -g", "CCACHE_DISABLE": "1"}


def build(folder: Path, kind: str, umask: int, variables: dict[str, str]) -> Path:
    """Build an archive of the tracked files in a copy of the checkout, and return its path."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout: what belongs to the archive is not known")
    for name in tracked.stdout.split():
        if (ROOT / name).is_file():
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
            copy.chmod((ROOT / name).stat().st_mode & ~umask)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX")}
    command = [sys.executable, "setup.py", "--quiet", kind, "--dist-dir", "out"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "SOURCE_DATE_EPOCH": "1700000000", **variables},
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.umask(umask),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = (folder / "out").iterdir()
    return archive


def test_a_source_archive_is_repeated_in_another_folder(tmp_path):
    first = build(tmp_path / "one", "sdist", 0o022, {})
    again = build(tmp_path / "another", "sdist", 0o077, {})
    assert verify_wheel.first_difference(first, again) == ""
    facts = {facts for _, facts, _ in verify_wheel.members(first)}
    assert facts == {"1700000000 644 0 0 "}


@pytest.mark.slow
def test_a_wheel_is_repeated_in_another_folder(tmp_path):
    """The objects are compiled anew: neither a folder nor a date is in them."""
    first = build(tmp_path / "one", "bdist_wheel", 0o022, QUICK)
    again = build(tmp_path / "another" / "deeper", "bdist_wheel", 0o077, QUICK)
    assert verify_wheel.main([str(first), str(again)]) == ""
    for name, _, content in verify_wheel.members(first):
        assert str(tmp_path).encode() not in content, name


def test_a_wheels_metadata_names_compiler_flags_and_parts(wheel):
    """The command of every object is there, with no folder of this machine."""
    contents = {name: content for name, _, content in verify_wheel.members(wheel)}
    (kernels,) = (json.loads(v) for k, v in contents.items() if k.endswith("/KERNELS.json"))
    library = next(v for k, v in contents.items() if "/_kernels" in k)
    assert kernels["source_hash"].encode() in library
    for target in kernels["targets"]:
        assert f"table_{target}.o" in kernels["objects"]
    assert all(re.search(r"\d+\.\d+", version) for version in kernels["compilers"].values())
    for name, row in kernels["objects"].items():
        assert "-O3" in row["command"] and (ROOT / row["source"]).exists(), name
    assert str(ROOT) not in json.dumps(kernels) and sys.prefix not in json.dumps(kernels)
    assert "-isystem pybind11" in kernels["objects"]["module.o"]["command"]


def test_a_wheels_libraries_name_no_folder_of_this_machine(wheel):
    """The kernels and the dispatch library: neither the checkout, nor torch, nor the headers of Python."""
    folders = (ROOT, torch.__path__[0], sys.prefix, sysconfig.get_path("include"))
    libraries = [(name, v) for name, _, v in verify_wheel.members(wheel) if name.endswith(".so")]
    assert len(libraries) == 2
    for name, content in libraries:
        named = [str(folder) for folder in folders if str(folder).encode() in content]
        assert not named, f"{name}: {named}"


def test_a_wheels_bill_of_materials_is_cyclonedx(wheel):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    contents = {name: content for name, _, content in verify_wheel.members(wheel)}
    (text,) = (v.decode() for k, v in contents.items() if "/sboms/" in k)
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    (component,) = json.loads(text)["components"]
    assert component["purl"] == f"pkg:pypi/pybind11@{pybind11.__version__}"


@pytest.fixture
def changed(tmp_path):
    """Write a small wheel, add files to a copy, and return both."""

    def write(path: Path, files: dict[str, bytes], listed: list[str]) -> Path:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(zipfile.ZipInfo(name), content)
            digests = {name: hashlib.sha256(files[name]).digest() for name in listed}
            lines = [
                f"{name},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},1"
                for name, digest in digests.items()
            ]
            record = "\n".join([*lines, "a.dist-info/RECORD,,"])
            archive.writestr(zipfile.ZipInfo("a.dist-info/RECORD"), record)
        return path

    return lambda name, files, listed: write(tmp_path / name, files, listed)


def test_a_file_that_was_added_to_a_wheel_is_named(changed):
    module = {"a.py": b"1"}
    built = changed("built.whl", module, ["a.py"])
    added = changed("added.whl", {**module, "b.py": b"2"}, ["a.py"])
    listed = changed("listed.whl", {**module, "b.py": b"2"}, ["a.py", "b.py"])
    assert verify_wheel.main([str(built)]) == ""
    assert verify_wheel.main([str(added)]) == f"{added}: b.py is not in RECORD"
    assert verify_wheel.main([str(listed)]) == ""
    assert verify_wheel.main([str(listed), str(built)]).startswith("b.py in ")


def test_a_changed_file_of_a_wheel_is_named(changed):
    built = changed("built.whl", {"a.py": b"1"}, ["a.py"])
    other = changed("other.whl", {"a.py": b"2"}, ["a.py"])
    assert verify_wheel.first_difference(built, other) == "a.py: the contents differ"
    missing = verify_wheel.main(["missing.whl"])
    assert missing == "missing.whl does not exist"


def test_a_date_that_is_no_number_is_refused(tmp_path):
    command = [sys.executable, "setup.py", "--version"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "today"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    message = "setup.py: SOURCE_DATE_EPOCH is 'today'; it must be seconds since 1970\n"
    assert done.stderr.endswith(message) and "Traceback" not in done.stderr
