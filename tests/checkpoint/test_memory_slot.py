"""A rank's slot in memory: segments of parity, sealed copies, damaged bytes."""

import itertools
import os

import numpy as np
import pytest
from safetensors.torch import load_file

from fugaku_megatron.checkpoint.manifest import (
    Description,
    file_name,
    list_iterations,
    read_head,
)
from fugaku_megatron.checkpoint.memory_slot import (
    PARITY,
    Protection,
    Segments,
    Slot,
    entry_of,
    free_bytes,
    keep_only,
    map_file,
    verify_copy,
)
from fugaku_megatron.checkpoint.tensor_files import plan_file, write_tensors
from tests.checks.memory_nodes import shards
from tests.fault_injection import flip_file_bit

pytestmark = pytest.mark.unit
PROTECTION = Protection(7, (0, 1), (10, 10))


@pytest.mark.parametrize("sizes", [(10, 10), (10, 0), (9, 10, 4), (1, 7, 0, 23, 5)])
def test_the_segments_of_a_state_are_the_state(sizes):
    """Each byte of a state is in the parity of exactly one other rank, also if pieces are sent."""
    segments = Segments(sizes)
    for owner, size in enumerate(sizes):
        found = []
        for keeper in range(len(sizes)):
            for start in range(0, segments.length, 3):
                end = min(start + 3, segments.length)
                if keeper != owner:
                    found += range(*segments.span(owner, keeper, start, end))
        assert sorted(found) == list(range(size))


def make(tmp_path, iteration=3):
    """Return a sealed copy's slot."""
    own = shards(0, iteration, [100])
    slot = Slot(
        tmp_path / "copies" / "rank_00000",
        0,
        plan_file({shard.key: shard.tensor for shard in own}),
        50,
    )
    fill(slot, iteration)
    return slot


def fill(slot, iteration):
    own = shards(0, iteration, [100])
    slot.begin(iteration, own)
    slot.parity[:] = iteration
    slot.seal(own, Description(iteration, {}, {}, {}), PROTECTION)
    slot.publish(iteration)


def test_a_copy_is_a_checkpoint_file_of_the_state(tmp_path):
    slot = make(tmp_path)
    own = shards(0, 3, [100])
    tensors = {shard.key: shard.tensor for shard in own}
    found = load_file(slot.folder / file_name(0))
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensors[name]) for name in found)
    head = read_head(slot.own, 3)
    written = write_tensors(tmp_path / "file", tensors)
    assert {**head["files"][file_name(0)], "shards": 0} == {**written, "shards": 0}
    assert (tmp_path / "file").read_bytes() == (slot.folder / file_name(0)).read_bytes()
    kept = Protection.of(head)
    assert kept._replace(parity=None) == PROTECTION and kept.parity == entry_of(slot.parity)
    assert verify_copy(slot.folder, head)


def test_a_slot_is_used_again_and_is_no_copy_meanwhile(tmp_path):
    slot = make(tmp_path)
    inode = os.stat(slot.folder / PARITY).st_ino
    assert list_iterations(slot.own) == [3]
    slot.begin(5, shards(0, 5, [100]))
    assert list_iterations(slot.own) == []
    fill(slot, 5)
    assert list_iterations(slot.own) == [5]
    assert os.stat(slot.folder / PARITY).st_ino == inode
    assert verify_copy(slot.folder, read_head(slot.own, 5))


@pytest.mark.parametrize("name", [file_name(0), PARITY])
def test_a_flipped_bit_is_found(tmp_path, name):
    slot = make(tmp_path)
    flip_file_bit(slot.folder / name)
    assert not verify_copy(slot.folder, read_head(slot.own, 3))


def test_a_copy_without_parity_is_verified_without(tmp_path):
    slot = make(tmp_path)
    (slot.folder / PARITY).unlink()
    assert verify_copy(slot.folder, read_head(slot.own, 3))


def test_only_kept_copies_stay(tmp_path):
    slot = make(tmp_path)
    (tmp_path / "other").mkdir()
    other = make(tmp_path / "other", 4)
    keep_only(slot.own.parent, lambda path: path.name == "iter_0000003")
    keep_only(other.own.parent, lambda path: path.name == "iter_0000003")
    assert list_iterations(slot.own) == [3] and not other.own.exists()


def test_the_room_includes_the_copies_that_are_overwritten(tmp_path):
    before = free_bytes(tmp_path / "copies")
    slot = make(tmp_path)
    slot.parity[:] = 1
    assert abs(free_bytes(tmp_path / "copies") - before) < 1 << 24


def test_a_full_memory_is_an_error_and_no_signal(tmp_path):
    """Pages are allocated when the file is made. Otherwise a full tmpfs would end the process by SIGBUS."""
    made = map_file(tmp_path / "file", 1 << 20)
    assert os.stat(tmp_path / "file").st_blocks * 512 >= 1 << 20 and not made.any()
    with pytest.raises(OSError, match=r"space|large"):
        map_file(tmp_path / "huge", 1 << 50)
    assert not map_file(tmp_path / "empty", 0).size


def test_entries_are_the_checksums_of_files(tmp_path):
    for size in (0, 1, 1 << 20, (1 << 20) + 5):
        data = np.arange(size, dtype=np.uint64).astype(np.uint8)
        (tmp_path / "file").write_bytes(data.tobytes())
        head = {"files": {"file": entry_of(data)}}
        assert verify_copy(tmp_path, head)
    assert len(set(itertools.chain(head["files"]["file"]["blocks"]))) > 1
