"""Reading a checkpoint: any piece from any other pieces, with little more memory than the piece."""

import os
import random
import tracemalloc
from dataclasses import replace

import pytest
import torch

from fugaku_megatron.checkpoint import load as load_module
from fugaku_megatron.checkpoint.load import load_shards, load_weights, open_checkpoint
from fugaku_megatron.checkpoint.manifest import Description, Folders, read_manifest
from fugaku_megatron.checkpoint.schema import BLOCK_BYTES
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.comm.base import SoloComm
from tests.helpers import load_checkpoint, save_checkpoint
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

ROWS, COLUMNS = 4096, 2048  # 32 MiB in FP32
MIB = 1 << 20


def stored(directory, ranks: int = 1) -> torch.Tensor:
    """A matrix in rows over so many ranks, and a vector on each of them; returns the matrix."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)

    def save(comm):
        part = whole.chunk(ranks)[comm.rank]
        shards = [
            Shard("matrix", part, (ROWS, COLUMNS), (comm.rank * len(part), 0), tuple(part.shape)),
            Shard.whole(f"vector {comm.rank}", torch.ones(7)),
        ]
        save_checkpoint(directory, shards, comm, Description(1, {}, {}, {}))

    ThreadWorld(ranks).run(save)
    return whole


def read(directory, shard: Shard) -> tuple[int, int]:
    """Load one shard, and return the bytes read and Python's peak memory without the shards."""
    checkpoint = open_checkpoint(directory, SoloComm())
    tracemalloc.start()
    try:
        count = load_shards(checkpoint, [shard], Folders(SoloComm()))
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_are_read_with_little_more_than_themselves(ranks, tmp_path):
    whole = stored(tmp_path, ranks)
    part = Shard("matrix", torch.zeros(1000, COLUMNS), (ROWS, COLUMNS), (555, 0), (1000, COLUMNS))
    count, peak = read(tmp_path, part)
    assert torch.equal(part.tensor, whole[555:1555])
    assert count <= part.tensor.nbytes + 2 * ranks * 2 * BLOCK_BYTES and peak < 16 * MIB
    flat = Shard("matrix", torch.zeros(12_345), (ROWS, COLUMNS), (0, 0), (ROWS, COLUMNS), 2_000_001)
    count, _ = read(tmp_path, flat)
    assert (
        torch.equal(flat.tensor, whole.view(-1)[2_000_001:2_012_346]) and count <= 4 * BLOCK_BYTES
    )


def test_columns_take_no_more_memory_than_rows(tmp_path):
    whole = stored(tmp_path)
    part = Shard("matrix", torch.zeros(ROWS, 512), (ROWS, COLUMNS), (0, 700), (ROWS, 512))
    count, peak = read(tmp_path, part)
    assert torch.equal(part.tensor, whole[:, 700:1212])
    assert count <= whole.nbytes + 2 * BLOCK_BYTES and peak < 16 * MIB, "64 MiB are allowed"


def test_a_rank_opens_only_files_that_hold_what_it_needs(tmp_path, monkeypatch):
    stored(tmp_path, 4)
    opened = []
    original = load_module.read_shards
    monkeypatch.setattr(
        load_module,
        "read_shards",
        lambda path, work: opened.append(path.name) or original(path, work),
    )
    read(
        tmp_path,
        Shard("matrix", torch.zeros(100, COLUMNS), (ROWS, COLUMNS), (1000, 0), (100, COLUMNS)),
    )
    assert opened == ["rank_00000.safetensors", "rank_00001.safetensors"]
    for name in ("rank_00002.safetensors", "rank_00003.safetensors"):
        os.truncate(tmp_path / "iter_0000001" / name, 10)
    read(tmp_path, Shard.whole("vector 1", torch.zeros(7)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"key": "absent"}, "has no absent"),
        (
            {"global_shape": (16, 6)},
            r"global shape is \[8, 6\] in .*iter_0000001, \[16, 6\] in this run",
        ),
        (
            {"global_shape": (8, 6, 1), "offset": (0, 0, 0), "slice_shape": (8, 6, 1)},
            r"global shape is \[8, 6\] in ",
        ),
        (
            {"tensor": torch.zeros(8, 6).bfloat16()},
            "dtype is float32 in .*iter_0000001, bfloat16 in this run",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_both_sides(changes, problem, tmp_path):
    shard = Shard.whole("w", torch.ones(8, 6))
    save_checkpoint(tmp_path, [shard], SoloComm(), Description(1, {}, {}, {}))
    with pytest.raises(ValueError, match=problem):
        load_checkpoint(tmp_path, [replace(shard, **changes)], SoloComm())


def test_a_gap_is_named_and_nothing_is_copied(tmp_path):
    half = Shard("w", torch.ones(4, 6), (8, 6), (4, 0), (4, 6))
    save_checkpoint(tmp_path, [half], SoloComm(), Description(1, {}, {}, {}))
    whole = Shard.whole("w", torch.zeros(8, 6))
    with pytest.raises(
        ValueError, match=r"hold 24 of the 48 elements \[0, 48\) of the slice \[8, 6\] at \[0, 0\]"
    ):
        load_checkpoint(tmp_path, [whole], SoloComm())
    assert not whole.tensor.any()


# Weights alone, from any pieces ---------------------------------------------------------------------------------------------------

KEY = "weight/w"


def pieces(whole, rows, columns, ranges, rng):
    """`whole` as a grid of slices, each cut into flat ranges, in any order."""
    shards = []
    for i, band in enumerate(whole.chunk(rows, 0)):
        for j, part in enumerate(band.chunk(columns, 1)):
            offset = (i * band.shape[0], j * part.shape[1])
            cuts = sorted(rng.sample(range(1, part.numel()), ranges - 1))
            for start, end in zip([0, *cuts], [*cuts, part.numel()], strict=True):
                shards.append(
                    Shard(
                        KEY,
                        part.reshape(-1)[start:end].clone(),
                        tuple(whole.shape),
                        offset,
                        tuple(part.shape),
                        start,
                    )
                )
    rng.shuffle(shards)
    return shards


def save(directory, shards):
    ThreadWorld(len(shards)).run(
        lambda comm: save_checkpoint(
            directory, [shards[comm.rank]], comm, Description(1, {}, {}, {})
        )
    )


def load(directory, target, padded=()):
    load_weights(directory, 1, read_manifest(directory, 1), [target], SoloComm(), padded)


@pytest.mark.parametrize(("rows", "columns", "ranges"), [(1, 1, 1), (2, 1, 3), (2, 2, 2)])
def test_any_pieces_make_the_whole_and_any_part_of_it(tmp_path, rows, columns, ranges):
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    save(tmp_path, pieces(whole, rows, columns, ranges, random.Random(0)))
    target = Shard.whole(KEY, torch.zeros(6, 8))
    load(tmp_path, target)
    assert torch.equal(target.tensor, whole)
    part = Shard(KEY, torch.zeros(3, 5, dtype=torch.bfloat16), (6, 8), (2, 1), (3, 5))
    load(tmp_path, part)
    assert torch.equal(part.tensor, whole[2:5, 1:6].bfloat16())


@pytest.mark.parametrize("rows", [5, 8])
def test_padded_rows(tmp_path, rows):
    whole = torch.randn(6, 4)
    save(tmp_path, pieces(whole, 2, 1, 2, random.Random(1)))
    target = Shard.whole(KEY, torch.zeros(rows, 4))
    with pytest.raises(ValueError, match=r"weight/w: global shape is \[6, 4\] in .*iter_0000001, "):
        load(tmp_path, target)
    load(tmp_path, target, padded=("w",))
    kept = min(rows, 6)
    assert torch.equal(target.tensor[:kept], whole[:kept]) and not target.tensor[kept:].any()
