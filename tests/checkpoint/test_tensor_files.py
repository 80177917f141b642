"""Files of tensors: safetensors, their checksums, ranges read block by block, and the boxes that pieces of tensors share."""

import math
import random
import zlib

import pytest
import torch
from safetensors.torch import load_file

from fugaku_megatron.checkpoint.schema import BLOCK_BYTES, BlockChecksums, combine, crc32
from fugaku_megatron.checkpoint.shards import Piece, range_boxes
from fugaku_megatron.checkpoint.tensor_files import BlockFile, read_header, write_tensors

pytestmark = pytest.mark.unit

TENSORS = {
    "b": torch.arange(300_000.0),
    "a": torch.ones(3, 5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(7.0),
    "mask": torch.ones(3, dtype=torch.bool),
    "c": torch.randn(64, 4096),
}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    return path, write_tensors(path, TENSORS)


def test_what_was_written_is_safetensors_with_the_files_checksums(saved):
    stored = load_file(saved[0])
    assert stored.keys() == TENSORS.keys() and all(
        torch.equal(stored[name], TENSORS[name]) for name in TENSORS
    )
    assert all(
        stored[name].dtype == TENSORS[name].dtype and stored[name].shape == TENSORS[name].shape
        for name in TENSORS
    )
    path, entry = saved
    content = path.read_bytes()
    blocks = [content[i : i + BLOCK_BYTES] for i in range(0, len(content), BLOCK_BYTES)]
    assert (
        len(blocks) == 3
        and entry["size"] == len(content)
        and entry["crc32"] == crc32(path) == f"{zlib.crc32(content):08x}"
    )
    assert entry["blocks"] == "".join(f"{zlib.crc32(block):08x}" for block in blocks)


def test_checksums_do_not_depend_on_how_the_bytes_come():
    content = random.Random(0).randbytes(2 * BLOCK_BYTES + 5)
    rng = random.Random(1)
    for size in (BLOCK_BYTES, 2 * BLOCK_BYTES, len(content), 0):
        whole = BlockChecksums()
        parts = BlockChecksums()
        done = 0
        whole.add(memoryview(content[:size]))
        while done < size:
            step = rng.randint(1, 300_000)
            parts.add(memoryview(content[done : min(done + step, size)]))
            done += step
        first = zlib.crc32(content[:100])
        second = zlib.crc32(content[100 : 100 + size])
        assert (
            combine(first, second, size) == zlib.crc32(content[: 100 + size])
            or size > len(content) - 100
        )
        assert (
            whole.record() == parts.record()
            and whole.record()["crc32"] == f"{zlib.crc32(content[:size]):08x}"
        )


def test_ranges_are_read_with_their_blocks_and_the_header_leads_to_the_values(saved):
    path, entry = saved
    content = path.read_bytes()
    with BlockFile(path, entry) as file:
        assert file.read(10, 20) == content[10:20] and file.read_bytes == BLOCK_BYTES
        assert (
            file.read(20, BLOCK_BYTES + 1) == content[20 : BLOCK_BYTES + 1]
            and file.read_bytes == 2 * BLOCK_BYTES
        )
        assert file.read(len(content) - 3, len(content)) == content[-3:] and file.read_bytes == len(
            content
        )
    rng = random.Random(0)
    with BlockFile(path, entry) as file:
        for _ in range(50):
            start = rng.randrange(len(content))
            end = rng.randint(start, len(content))
            assert file.read(start, end) == content[start:end]
    path, entry = saved
    with BlockFile(path, entry) as file:
        stored = read_header(file)
        assert stored.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            place = stored[name]
            data = file.read(place.start, place.start + place.numel * place.dtype.itemsize)
            assert data == tensor.view(-1).view(torch.uint8).numpy().tobytes()


def test_a_flipped_bit_is_found_by_whoever_reads_its_block_or_its_file(saved):
    path, entry = saved
    whole = {
        name: entry[name] for name in ("size", "crc32")
    }  # an entry without the checksums of blocks
    with BlockFile(path, whole) as file:
        assert file.read(5, 9) == path.read_bytes()[5:9]
    content = bytearray(path.read_bytes())
    content[BLOCK_BYTES + 7] ^= 4
    path.write_bytes(content)
    with BlockFile(path, entry) as file:
        file.read(0, BLOCK_BYTES)
        file.read(2 * BLOCK_BYTES, len(content))
        with pytest.raises(
            ValueError,
            match=rf"rank_00000.safetensors has CRC-32 .* bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}",
        ):
            file.read(0, len(content))
    with pytest.raises(ValueError, match="has CRC-32 .*manifest says"), BlockFile(path, whole):
        pass


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 1), (1, 6), (2, 3, 4)])
def test_boxes_hold_the_elements_of_the_range_in_order(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for end in range(start, whole.numel() + 1):
            parts = [
                whole[tuple(slice(b, b + n) for b, n in zip(begin, extent, strict=True))].flatten()
                for begin, extent in range_boxes(shape, start, end)
            ]
            assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(
                range(start, end)
            )
            assert len(parts) <= 2 * len(shape) - 1


def drawn(shape, rng):
    """Draw a piece of a tensor of this shape."""
    offset = tuple(rng.randrange(n) for n in shape)
    part = tuple(rng.randint(1, n - o) for n, o in zip(shape, offset))
    start = rng.randrange(math.prod(part))
    return Piece(offset, part, start, rng.randint(1, math.prod(part) - start))


def elements(whole, piece):
    """Return the values of a piece, (n,)."""
    part = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))]
    return part.reshape(-1)[piece.start : piece.start + piece.numel].clone()


@pytest.mark.parametrize("shape", [(), (11,), (5, 6), (3, 4, 5)])
def test_what_two_pieces_share_is_copied_from_one_to_the_other(shape):
    rng = random.Random(0)
    whole = torch.arange(1, math.prod(shape) + 1).view(shape)
    for _ in range(300 if shape else 1):
        source, target = (drawn(shape, rng) for _ in range(2))
        held = elements(whole, source)
        wanted = elements(whole, target)
        filled = torch.zeros_like(wanted)
        copied = 0
        for box in source.shared(target):
            for band in box.bands(2):
                first, last = source.span(band)
                assert 0 <= first < last <= source.numel
                target.view(filled, band).copy_(source.view(held[first:last], band, first))
                copied += band.numel
        both = set(held.tolist()) & set(wanted.tolist())
        assert filled.tolist() == [
            v if v in both else 0 for v in wanted.tolist()
        ] and copied == len(both)
