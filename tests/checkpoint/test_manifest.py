"""A manifest that was changed in any field is refused in one line that names file and remedy."""

import json
import os
import shutil

import pytest

from fugaku_megatron.checkpoint import manifest, schema
from tests.file_damage import MISSING, changed

pytestmark = pytest.mark.unit

RECORD = {
    "key": "layer.weight",
    "dtype": "float32",
    "global_shape": [8, 6],
    "offset": [4, 0],
    "slice_shape": [4, 6],
    "flat_start": 12,
    "numel": 12,
}
STATE = {
    "progress": {"iteration": 100, "consumed_samples": 800, "skipped": 2, "nans": 0},
    "scaler": {"scale": 1.0},
    "optimizer_steps": 98,
    "rng": {"seed": 1, "sample": 800},
}
FILES = {"rank_00000.safetensors": {"size": 4, "crc32": "0123abcd", "shards": [RECORD]}}
CONFIG = {"model": {"num_layers": 1, "norm_epsilon": 1e-5}, "shape": (1, 2)}
# Fields of the manifest and their new values in JSON. FILE is the entry of a file, which has one record.
CHANGES = """\
iteration 99
iteration 100.0
state/optimizer_steps 97
state/rng/seed 2
state/progress/skipped 0
layout/world_size 2
config/model/norm_epsilon 1e-06
config/model/num_layers (removed)
FILE/shards/0/key "layer.bias"
FILE/shards/0/flat_start 0
FILE/shards/0/offset [0, 0]
FILE/shards/0/dtype "bfloat16"
state/extra 1"""
# Also found where the manifest has no checksum.
IMPOSSIBLE = """\
iteration (removed)
iteration "100"
iteration -1
iteration true
state (removed)
state []
state/optimizer_steps (removed)
state/optimizer_steps 101
state/optimizer_steps 2.5
state/optimizer_steps null
state/progress (removed)
state/progress 5
state/progress/iteration 99
state/progress/iteration (removed)
state/progress/consumed_samples 801
state/progress/consumed_samples "800"
state/rng/sample 0
state/rng 3
state/scaler (removed)
layout 1
layout/world_size 0
config null
config/model []
files (removed)
files []
files/.. {}
files {"../outside": {}}
files/other 7
FILE/size -4
FILE/size (removed)
FILE/crc32 5
FILE/crc32 (removed)
FILE/shards {}
FILE/shards/0 1
FILE/shards/0/flat_start (removed)
FILE/shards/0/flat_start 13
FILE/shards/0/numel -1
FILE/shards/0/offset [5, 0]
FILE/shards/0/offset [4]
FILE/shards/0/offset 4
FILE/shards/0/global_shape [7, 6]
FILE/shards/0/slice_shape [4, null]
FILE/shards/0/key (removed)
FILE/shards/0/dtype 32
format_version 3
format_version [1]
format null"""


def read_changes(table):
    """Yield (path, value) of each row of a table."""
    for row in table.splitlines():
        path, value = row.split(" ", 1)
        path = path.replace("FILE", "files/rank_00000.safetensors")
        yield path, MISSING if value == MISSING else json.loads(value)


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "iter_0000100"
    folder.mkdir()
    description = manifest.Description(100, {"world_size": 1}, CONFIG, STATE)
    manifest.write_manifest(folder, description, FILES)
    return folder / manifest.MANIFEST


def unsigned(contents):
    """Return contents in the format version before checksums."""
    return {
        **{name: value for name, value in contents.items() if name != schema.CHECKSUM},
        "format_version": manifest.UNSIGNED_VERSION,
    }


def refusal(path, iteration=100):
    with pytest.raises(ValueError) as raised:
        manifest.read_manifest(path.parents[1], iteration)
    message = str(raised.value)
    assert str(path) in message and "\n" not in message
    return message


def test_what_was_written_is_read_also_from_before_checksums(path):
    contents = manifest.read_manifest(path.parents[1], 100)
    assert contents["state"] == STATE and contents["config"]["shape"] == [1, 2]
    path.write_text(
        json.dumps(contents, indent=1, sort_keys=True)
    )  # laid out anew, the same contents
    assert manifest.read_manifest(path.parents[1], 100) == contents
    contents = manifest.read_manifest(path.parents[1], 100)
    assert manifest.unsigned_note(contents, path.parent) == ""
    path.write_text(json.dumps(unsigned(contents)))
    note = manifest.unsigned_note(manifest.read_manifest(path.parents[1], 100), path.parent)
    assert (
        note.startswith(f"note: {path} was written before manifests had a checksum")
        and "\n" not in note
    )


def test_every_change_is_refused_without_a_checksum_too_where_it_cannot_be(path):
    contents = json.loads(path.read_text())
    for where, value in [*read_changes(CHANGES), *read_changes(IMPOSSIBLE)]:
        path.write_text(json.dumps(changed(contents, where, value)))
        assert "--ckpt-step" in refusal(path) or where.startswith("format")
    for where, value in read_changes(IMPOSSIBLE):
        if not where.startswith("format"):
            path.write_text(json.dumps(changed(unsigned(contents), where, value)))
            name = where.rpartition("/")[2]
            assert name in refusal(path) or where.endswith("shards/0")


def test_a_missing_checksum_and_a_renamed_folder_are_refused(path):
    contents = json.loads(path.read_text())
    for value in (MISSING, None, "00000000", 5):
        path.write_text(json.dumps(changed(contents, schema.CHECKSUM, value)))
        assert "its field crc32 says" in refusal(path)
    path.write_text(
        json.dumps(
            {**changed(contents, "iteration", 7), "format_version": manifest.UNSIGNED_VERSION}
        )
    )
    assert "its field crc32 says" in refusal(path)
    path.write_text(json.dumps(contents))
    other = path.parent.with_name("iter_0000200")
    shutil.copytree(path.parent, other)
    message = refusal(other / path.name, 200)
    assert "is of iteration 100, its folder says 200: rename the folder to iter_0000100" in message


def test_what_is_not_json_or_not_a_file_is_refused_without_waiting(path):
    for text in ("[" * 200_000, '{"iteration": ' + "9" * 5000 + "}", "\udcff", "", "null"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        refusal(path)
    for text in ("9" * 5000, "12" * 60, "-1", "1.5"):
        (path.parents[1] / manifest.TRACKER).write_text(text)
        with pytest.raises(ValueError, match="should hold an iteration"):
            manifest.latest_iteration(path.parents[1])
    tracker = path.parents[1] / manifest.TRACKER
    for name in (path, tracker):
        name.unlink(missing_ok=True)
        os.mkfifo(name)
    assert "not a regular file" in refusal(path)
    with pytest.raises(ValueError, match="not a regular file"):
        manifest.latest_iteration(path.parents[1])
    path.unlink()
    path.mkdir()
    assert "not a regular file" in refusal(path)
