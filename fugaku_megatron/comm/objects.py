"""Python objects from one rank to each of the others, made of the verbs for tensors. For set-up and files, not for large groups."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from .base import Comm


def scatter_object(comm: Comm, objects: Sequence[Any] | None) -> Any:
    """objects[rank] of rank 0 on every rank; the other ranks pass None. Collective. A rank sends as often as there are others."""
    if comm.rank > 0:
        return _receive(comm)
    assert len(objects) == comm.size, (len(objects), comm.size)
    for rank in range(1, comm.size):
        data = torch.frombuffer(bytearray(pickle.dumps(objects[rank], pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
        comm.send(torch.tensor([data.numel()]), rank)
        comm.send(data, rank)
    return objects[0]


def _receive(comm: Comm) -> Any:
    size = int(comm.recv(torch.zeros(1, dtype=torch.int64), 0))
    data = comm.recv(torch.empty(size, dtype=torch.uint8), 0)
    return pickle.loads(data.numpy().tobytes()) if size else None  # nothing comes where nobody sends (a dry run)
