"""fugaku-megatron verify: every damage to a checkpoint is one line that names the file."""

import json
import os
import re

import pytest
import torch

from fugaku_megatron.checkpoint import load as load_module
from fugaku_megatron.checkpoint import manifest as folders_module
from fugaku_megatron.checkpoint import verify
from fugaku_megatron.checkpoint.manifest import FORMAT, MANIFEST, TRACKER, Description
from fugaku_megatron.checkpoint.schema import BLOCK_BYTES, checksum
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.cli import program
from tests.fault_injection import flip_file_bit
from tests.helpers import save_checkpoint
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

RANKS, NUMEL = 3, 700_000  # 2.7 MiB: three blocks


def save(directory, iteration=10, leave_out=None):
    whole = (RANKS * NUMEL,)

    def rank(comm):
        shards = [
            Shard(
                "w", torch.full((NUMEL,), 1.0 + comm.rank), whole, (0,), whole, comm.rank * NUMEL
            ),
            Shard.whole(f"b{comm.rank}", torch.ones(3)),
        ]
        if comm.rank == leave_out:
            shards = []
        save_checkpoint(directory, shards, comm, Description(iteration, {}, {}, {}))

    ThreadWorld(RANKS).run(rank)
    return directory / f"iter_{iteration:07d}"


def check(directory, capsys, *flags):
    """(exit code, lines on standard output, standard error)."""
    code = program.main(["verify", str(directory), *flags])
    output = capsys.readouterr()
    return code, output.out.splitlines(), output.err


def test_whole_checkpoints(tmp_path, capsys):
    first = save(tmp_path)
    second = save(tmp_path, 20)
    code, lines, errors = check(tmp_path, capsys)
    assert (code, errors) == (0, "")
    assert lines == [
        f"{first}: 3 files, 0.008 GiB: whole",
        f"{second}: 3 files, 0.008 GiB: whole",
        "all files OK",
    ]
    assert check(tmp_path, capsys, "--ckpt-step", "10", "--threads", "1")[1] == [lines[0], lines[2]]


def test_checkpoints_in_folders(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(folders_module, "FOLDER_FILES", 2)
    monkeypatch.setattr(load_module, "FOLDER_FILES", 2)
    path = save(tmp_path)
    assert check(tmp_path, capsys)[0] == 0
    flip_file_bit(path / "ranks_000002" / "rank_00002.safetensors", -1)
    assert check(tmp_path, capsys)[1][0].startswith(
        f"{path}/ranks_000002/rank_00002.safetensors is damaged in its bytes "
    )
    (path / "ranks_000002" / MANIFEST).write_text("{}")
    code, lines, _ = check(tmp_path, capsys)
    assert (
        code == 1
        and lines[0].startswith(f"{path}/ranks_000002/manifest.json has 2 bytes")
        and "files of" in lines[0]
    )
    assert any("hold 1400000 elements of w, which has 2100000" in line for line in lines)


@pytest.mark.parametrize("position", [0, 500, BLOCK_BYTES + 1, -1])
def test_a_flipped_bit_anywhere_is_found(position, tmp_path, capsys):
    path = save(tmp_path) / "rank_00001.safetensors"
    flip_file_bit(path, position, 4)
    code, (line, summary, count), _ = check(tmp_path, capsys)
    block = position % path.stat().st_size // BLOCK_BYTES
    end = min((block + 1) * BLOCK_BYTES, path.stat().st_size)
    assert code == 1 and line.startswith(
        f"{path} is damaged in its bytes {block * BLOCK_BYTES} to {end}, "
    )
    assert line.endswith("its header among them" if block == 0 else "which hold w")
    assert summary.endswith(": 1 problem") and count == "1 problem"


def test_damages_of_several_files_are_a_line_each(tmp_path, capsys):
    path = save(tmp_path)
    for position in (BLOCK_BYTES, 2 * BLOCK_BYTES):  # neighbours: one line
        flip_file_bit(path / "rank_00000.safetensors", position)
    os.truncate(path / "rank_00001.safetensors", 99)
    (path / "rank_00002.safetensors").unlink()
    code, lines, _ = check(tmp_path, capsys)
    assert code == 1 and len(lines) == 5 and lines[-1] == "3 problems"
    assert lines[0].startswith(
        f"{path}/rank_00000.safetensors is damaged in its bytes {BLOCK_BYTES} to "
    )
    assert lines[1].startswith(f"{path}/rank_00001.safetensors has 99 bytes, the manifest says ")
    assert lines[2] == f"{path}/rank_00002.safetensors is missing"


def test_a_manifest_that_is_damaged(tmp_path, capsys):
    save(tmp_path)
    manifest = save(tmp_path, 20) / MANIFEST
    manifest.write_text("{")
    code, lines, _ = check(tmp_path, capsys)
    assert (
        code == 1
        and f"{manifest} is damaged" in lines[1]
        and lines[2].endswith("iter_0000020: not checked further")
    )


def test_a_tensor_that_is_not_wholly_there(tmp_path, capsys):
    path = save(tmp_path, leave_out=1)
    code, lines, _ = check(tmp_path, capsys)
    assert (
        code == 1 and lines[0] == f"{path}: the files hold 1400000 elements of w, which has 2100000"
    )


def rewrite(path, change):
    """Change a manifest's entries, and its checksum."""
    contents = json.loads((path / MANIFEST).read_text())
    assert contents["format"] == FORMAT
    change(contents["files"])
    contents["crc32"] = checksum(contents)
    (path / MANIFEST).write_text(json.dumps(contents))


def test_a_header_that_does_not_agree_with_the_manifest(tmp_path, capsys):
    path = save(tmp_path)
    rewrite(path, lambda files: files["rank_00000.safetensors"]["shards"][1].update(key="b7"))
    assert f"{path}/rank_00000.safetensors does not hold b7" in check(tmp_path, capsys)[1][0]


def test_files_from_before_blocks_had_checksums(tmp_path, capsys):
    path = save(tmp_path)
    rewrite(
        path,
        lambda files: [
            entry.pop(name) for entry in files.values() for name in ("blocks", "block_size")
        ],
    )
    assert check(tmp_path, capsys)[0] == 0
    flip_file_bit(path / "rank_00002.safetensors", -5)
    assert check(tmp_path, capsys)[1][0].startswith(f"{path}/rank_00002.safetensors has CRC-32 ")


def test_the_tracker(tmp_path, capsys):
    save(tmp_path)
    (tmp_path / TRACKER).write_text("11")
    code, lines, _ = check(tmp_path, capsys)
    assert code == 1 and lines[0] == (
        f"{tmp_path}/{TRACKER} names iteration 11, and iter_0000011 is missing: correct the "
        "number in that file, or choose an iteration by --ckpt-step"
    )
    (tmp_path / TRACKER).unlink()
    assert check(tmp_path, capsys)[0] == 0, (
        "a first save that was ended before it wrote the tracker"
    )


def test_progress_of_long_work(tmp_path, capsys, monkeypatch):
    save(tmp_path)
    monkeypatch.setattr(verify, "INTERVAL", 0.0)
    errors = check(tmp_path, capsys, "--threads", "2")[2]
    assert errors.splitlines()[-1] == "checked 0.0 of 0.0 GiB" and len(errors.splitlines()) == RANKS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "is not a directory"),
        ("empty", "holds no checkpoint"),
        ("save/iter_0000010", "pass its parent .*save and --ckpt-step"),
    ],
)
def test_nothing_to_check_is_a_mistake_of_the_call(name, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    save(tmp_path / "save")
    code, lines, error = check(tmp_path / name, capsys)
    assert code == 2 and lines == [] and error.count("\n") == 1
    assert re.search(message, error)
    for words in (("--ckpt-step", "11"), ("--threads", "0")):
        assert check(tmp_path / "save", capsys, *words)[0] == 2
