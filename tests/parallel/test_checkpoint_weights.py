"""Weights put together from any pieces: against a scatter of single elements, and gaps and damage by name."""

import random

import pytest
import torch

from fugaku_megatron.checkpoint.load import load_weights
from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.comm.solo import SoloComm
from tests.helpers import save_checkpoint
from tests.threads import ThreadWorld

KEY = "weight/w"


def pieces(whole, rows, columns, ranges, rng):
    """`whole` as a grid of slices, each cut into flat ranges, in any order."""
    shards = []
    for i, band in enumerate(whole.chunk(rows, 0)):
        for j, part in enumerate(band.chunk(columns, 1)):
            offset = (i * band.shape[0], j * part.shape[1])
            cuts = sorted(rng.sample(range(1, part.numel()), ranges - 1))
            for start, end in zip([0, *cuts], [*cuts, part.numel()], strict=True):
                shards.append(Shard(KEY, part.reshape(-1)[start:end].clone(), tuple(whole.shape), offset, tuple(part.shape), start))
    rng.shuffle(shards)
    return shards


def save(directory, shards):
    ThreadWorld(len(shards)).run(lambda comm: save_checkpoint(directory, 1, [shards[comm.rank]], {}, comm, {}, {}))


def load(directory, target, padded=()):
    load_weights(directory, 1, read_manifest(directory, 1), [target], SoloComm(), padded)


def whole_target(shape, dtype=torch.float32):
    return Shard(KEY, torch.zeros(shape, dtype=dtype), shape, (0,) * len(shape), shape)


@pytest.mark.parametrize(("rows", "columns", "ranges"), [(1, 1, 1), (2, 1, 3), (1, 2, 3), (2, 2, 2), (1, 1, 6)])
def test_any_pieces_make_the_whole_and_any_part_of_it(tmp_path, rows, columns, ranges):
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    save(tmp_path, pieces(whole, rows, columns, ranges, random.Random(0)))
    target = whole_target((6, 8))
    load(tmp_path, target)
    assert torch.equal(target.tensor, whole)
    part = Shard(KEY, torch.zeros(3, 5, dtype=torch.bfloat16), (6, 8), (2, 1), (3, 5))
    load(tmp_path, part)
    assert torch.equal(part.tensor, whole[2:5, 1:6].bfloat16())


@pytest.mark.parametrize("rows", [5, 8])
def test_padded_rows(tmp_path, rows):
    whole = torch.randn(6, 4)
    save(tmp_path, pieces(whole, 2, 1, 2, random.Random(1)))
    target = whole_target((rows, 4))
    with pytest.raises(ValueError, match=r"weight/w: global shape is \[6, 4\] in .*iter_0000001, "):
        load(tmp_path, target)
    load(tmp_path, target, padded=("w",))
    kept = min(rows, 6)
    assert torch.equal(target.tensor[:kept], whole[:kept]) and not target.tensor[kept:].any()


def test_what_is_missing_or_damaged_is_named(tmp_path):
    shards = pieces(torch.ones(4, 4), 2, 1, 2, random.Random(2))
    save(tmp_path / "gap", shards[:-1])
    save(tmp_path / "whole", shards)
    (tmp_path / "whole" / "iter_0000001" / "rank_00002.safetensors").write_bytes(b"x")
    target = whole_target((4, 4))
    with pytest.raises(ValueError, match=r"weight/w: the files of .*iter_0000001 hold \d+ of the 16 elements "):
        load(tmp_path / "gap", target)
    with pytest.raises(ValueError, match=r"rank_00002\.safetensors is 1 bytes"):
        load(tmp_path / "whole", target)
    with pytest.raises(ValueError, match="has no weight/v; the model or"):
        load(tmp_path / "whole", Shard("weight/v", torch.zeros(1), (1,), (0,), (1,)))
