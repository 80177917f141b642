"""Start of torch.distributed under an MPI launcher: torchrun's variables, and a store whose address MPI brings to all ranks."""

# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
# torch's stubs leave out what its modules export.
from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ..start import environment
from . import process_group

LOOPBACK = "127.0.0.1"
# Ports of the stores below; a second init_process_group makes another store.
_served: set[str] = set()
Rendezvous = Iterator[tuple[dist.Store, int, int]]


def register() -> None:
    """Register the backend, and set torchrun's variables from the MPI launcher's."""
    if not dist.is_available() or process_group.NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(
        process_group.NAME, process_group.create, extended_api=True, devices=["cpu"]
    )
    if environment.processes()[1] > 1 and environment.TORCH_RANK not in os.environ:
        set_variables()
        # The function torch.distributed.rendezvous hides its module.
        handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
        handlers["env"] = partial(env_rendezvous, handlers["env"])


def set_variables() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does."""
    found = {
        environment.TORCH_RANK: str(environment.rank()),
        environment.TORCH_SIZE: str(environment.processes()[1]),
        environment.TORCH_LOCAL_RANK: environment.first_set(environment.LOCAL_RANKS),
        "LOCAL_WORLD_SIZE": environment.first_set(environment.LOCAL_SIZES),
    }
    for name, value in found.items():
        if value is not None:
            os.environ.setdefault(name, value)


def env_rendezvous(
    original: Callable[..., Rendezvous],
    url: str,
    timeout: timedelta = dist.default_pg_timeout,
    **options: Any,
) -> Rendezvous:
    """Yield (store, rank, world size), by torch's handler of env:// if an address is given.

    Rank 0 serves the store; MASTER_ADDR and MASTER_PORT name it. Collective.
    """
    if "MASTER_ADDR" in os.environ and os.environ.get("MASTER_PORT") not in _served:
        yield from original(url, timeout=timeout, **options)
        return
    world = process_group.mpi_world(timeout)
    host = socket.gethostname()
    one_node = len(set(world.all_gather_object(host))) == 1
    address = LOOPBACK if one_node else host
    start = partial(dist.TCPStore, world_size=world.size, timeout=timeout, wait_for_workers=False)
    port = 0
    if world.rank == 0:
        store = start(address, port, is_master=True)
        port = store.port
    address, port = world.broadcast_object((address, port))
    if world.rank != 0:
        store = start(address, port)
    _served.add(str(port))
    os.environ["MASTER_ADDR"] = address
    os.environ["MASTER_PORT"] = str(port)
    yield store, world.rank, world.size
