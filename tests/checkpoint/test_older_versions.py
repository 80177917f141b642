"""Checkpoints that older versions wrote: runs resume from them, with the losses that the older version had.

tests/recorded/write_checkpoints.py writes them.
"""

import json
import tarfile
from pathlib import Path

import pytest

from fugaku_megatron.checkpoint.manifest import (
    FOLDERS_VERSION,
    FORMAT_VERSION,
    read_manifest,
)
from tests.checkpoint import test_folders
from tests.checks.library_and_command import command_line
from tests.recorded.write_checkpoints import (
    BASE,
    FOLDERS,
    LAST,
    LORA,
    MEGATRON,
    MODEL,
    SAVED,
)
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

CHECKPOINTS = Path(__file__).parents[1] / "recorded" / "checkpoints"
EXPECTED = {
    folder.name: json.loads((folder / "expected.json").read_text())
    for folder in sorted(CHECKPOINTS.iterdir())
}
ROWS = [(version, name) for version, runs in EXPECTED.items() for name in runs if name != FOLDERS]
NEWEST = max(EXPECTED, key=lambda version: [int(number) for number in version.split(".")])
# of losses: sums of other orders. Moments of 8 bits and 16-bit weights are rounded at random.
TOLERANCE = {"moments": 1e-4, "bf16": 1e-4, "fp16": 1e-4, "muon": 1e-5, "int8": 1e-5}


def unpack(version: str, name: str, folder: Path) -> None:
    with tarfile.open(CHECKPOINTS / version / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")


@pytest.mark.parametrize(("version", "name"), ROWS)
def test_a_run_continues_from_an_older_versions_checkpoint(version, name, tmp_path, monkeypatch):
    expected = EXPECTED[version][name]
    unpack(version, name, tmp_path)
    flags = f"{MODEL} {expected['flags']} --save save"
    if MEGATRON not in flags:
        flags += " --load save"
    if LORA in expected["flags"]:
        unpack(version, BASE, tmp_path / "base")
        flags += " --pretrained-checkpoint base/save"
    monkeypatch.chdir(tmp_path)
    (found, *_) = ThreadWorld(expected["ranks"]).run(command_line, flags.split())
    losses = found[::2]  # and gradient norms between them
    losses = losses[-len(expected["losses"]) :]
    assert losses == pytest.approx(expected["losses"], rel=TOLERANCE.get(name, 1e-6))


@pytest.mark.parametrize("version", EXPECTED)
def test_folders_of_an_older_version_load(version, tmp_path, monkeypatch):
    unpack(version, FOLDERS, tmp_path)
    ranks = EXPECTED[version][FOLDERS]["ranks"]
    monkeypatch.setattr(test_folders, "RANKS", ranks)
    found = test_folders.load(tmp_path / "save", size=ranks)
    assert found == [test_folders.content(rank) for rank in range(ranks)]


def schema(value, name="") -> set[str]:
    """Return the paths of a manifest's fields. Names of files and folders are data, and flags have tests of their own."""
    if isinstance(value, list):
        return set().union(*(schema(each, f"{name}[]") for each in value))
    if not isinstance(value, dict) or name == ".config":
        return {name}
    named = name in (".files", ".folders")
    return set().union(
        *(schema(each, f"{name}.{'*' if named else key}") for key, each in value.items())
    )


def test_every_schema_has_a_checkpoint_of_its_version(tmp_path):
    """A change of the manifest needs a fixture that was written before it, and another of the version that has it."""
    unpack(NEWEST, "dense", tmp_path / "old")
    unpack(NEWEST, FOLDERS, tmp_path / "folders")
    ranks = EXPECTED[NEWEST]["dense"]["ranks"]
    flags = f"{MODEL} --save {tmp_path / 'new'}"
    ThreadWorld(ranks).run(command_line, flags.split())
    old = read_manifest(tmp_path / "old" / "save", SAVED)
    assert schema(read_manifest(tmp_path / "new", LAST)) == schema(old)
    folders = read_manifest(tmp_path / "folders" / "save", 1)
    assert (old["format_version"], folders["format_version"]) == (FORMAT_VERSION, FOLDERS_VERSION)
