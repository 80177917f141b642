"""Tells a rank's watchdog who is who, once MPI is there: ranks and folder of its node, and the address of the node it reports to.
"""

from __future__ import annotations

import secrets
import socket

import torch

from ..comm.agreement import Nodes
from ..comm.base import Comm
from ..watchdog.verdict import LISTENERS, Address, Link, open_socket, own_address, parent
from ..watchdog.watch import Watchdog


def place(watchdog: Watchdog, world: Comm, nodes: Nodes) -> None:
    """Tell the watchdog who is who. Collective."""
    folder = nodes.ranks.broadcast_object(watchdog.heart.folder)
    if folder is not None:
        local = tuple(nodes.ranks.all_gather_object(world.rank))
        watchdog.placed(world.rank, folder, local, _link(world, nodes) if nodes.count > 1 else None)


def _link(world: Comm, nodes: Nodes) -> Link:
    """A socket of each rank, of which the first ones of each node are made known to the nodes that report to it."""
    token, towards = world.broadcast_object((secrets.randbits(62), own_address()))
    opened = open_socket(own_address(towards) if nodes.number else towards)
    address, port = opened.getsockname()
    ports = nodes.ranks.all_gather_object(port)[:LISTENERS]
    return Link(nodes.number, nodes.count, token, opened, _parents(world, nodes, address, ports))


def _parents(world: Comm, nodes: Nodes, address: str, ports: list[int]) -> list[Address]:
    """Where the node above listens. Of each node one rank learns 24 bytes of all others, for as long as this takes."""
    own = torch.tensor([int.from_bytes(socket.inet_aton(address), "big"), *ports, *[0] * (LISTENERS - len(ports))])
    leaders = world.split(0 if nodes.leads else 1, world.rank)
    above = parent(nodes.number)
    if nodes.leads:
        everyone = leaders.all_gather(own.new_empty(leaders.size, own.numel()), own)  # (nodes, 1 + LISTENERS)
        own = everyone[above or 0].clone()
    number, *listening = nodes.ranks.broadcast(own).tolist()
    host = socket.inet_ntoa(number.to_bytes(4, "big"))
    return [(host, port) for port in listening if port and above is not None]
