"""Pieces of tensors against a scatter of single elements."""

import math
import random

import pytest
import torch

from fugaku_megatron.checkpoint.shards import Piece, range_boxes


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 1), (1, 6), (2, 3, 4)])
def test_boxes_hold_the_elements_of_the_range_in_order(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for end in range(start, whole.numel() + 1):
            parts = [whole[tuple(slice(b, b + n) for b, n in zip(begin, extent, strict=True))].flatten()
                     for begin, extent in range_boxes(shape, start, end)]
            assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(start, end))
            assert len(parts) <= 2 * len(shape) - 1


def drawn(shape, rng):
    """A piece of a tensor of this shape."""
    offset = tuple(rng.randrange(n) for n in shape)
    part = tuple(rng.randint(1, n - o) for n, o in zip(shape, offset))
    start = rng.randrange(math.prod(part))
    return Piece(offset, part, start, rng.randint(1, math.prod(part) - start))


def elements(whole, piece):
    """The values that a piece holds, (n,)."""
    part = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))]
    return part.reshape(-1)[piece.start : piece.start + piece.numel].clone()


@pytest.mark.parametrize("shape", [(), (11,), (5, 6), (3, 4, 5)])
def test_what_two_pieces_share_is_copied_from_one_to_the_other(shape):
    rng, whole = random.Random(0), torch.arange(1, math.prod(shape) + 1).view(shape)
    for _ in range(300 if shape else 1):
        source, target = (drawn(shape, rng) for _ in range(2))
        held, wanted = elements(whole, source), elements(whole, target)
        filled, copied = torch.zeros_like(wanted), 0
        for box in source.shared(target):
            for band in box.bands(2):
                first, last = source.span(band)
                assert 0 <= first < last <= source.numel
                target.view(filled, band).copy_(source.view(held[first:last], band, first))
                copied += band.numel
        both = set(held.tolist()) & set(wanted.tolist())
        assert filled.tolist() == [v if v in both else 0 for v in wanted.tolist()] and copied == len(both)
