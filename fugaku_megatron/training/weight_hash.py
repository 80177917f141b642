"""--check-weight-hash-across-dp-replicas-interval (Megatron's): do all data-parallel replicas hold the same weights, to the bit?

Every rank forms a CRC-32 of each of its parameters; two small reductions over its replicas find a difference, and one over all
ranks tells everybody. Only then hashes are gathered, to name the rank whose bits most replicas do not have. Compared are the
weights that the model computes with; master weights and moments decide the next ones, so a fault there is seen after the next
update, unless ZeRO-1 spreads it to all replicas.
"""

from __future__ import annotations

import platform
import zlib
from collections import Counter

import torch
from torch import Tensor

from ..comm.agreement import first_rank
from .train import Trainer


def parameter_hashes(trainer: Trainer) -> Tensor:
    """(parameters,) int64: the CRC-32 of each parameter's bytes, in the order of the flat buffer."""
    parameters = trainer.optimizer.flat.parameters
    return torch.tensor([zlib.crc32(p.detach().view(-1).view(torch.uint8).numpy()) for p in parameters])


def differing_replica(trainer: Trainer) -> str | None:
    """Which rank's weights differ from those of its replicas, as text for the log; None where none does. Collective.

    With --overlap-param-gather it waits for the gathers under way.
    """
    trainer.optimizer.buckets.await_weights()
    own, dp, world = parameter_hashes(trainer), trainer.groups.dp, trainer.world
    differs = dp.all_reduce(own.clone(), "min") != dp.all_reduce(own.clone(), "max")
    if not bool(world.all_reduce(differs.any())):
        return None
    text = _describe(trainer, own, differs) if differs.any() else ""
    rank = first_rank(world, (world.rank,) if text else None, 1)
    return world.broadcast_object(text, root=rank)


def _describe(trainer: Trainer, own: Tensor, differs: Tensor) -> str:
    """What this rank says of itself: nothing where most replicas agree with it. Collective over the replicas, which all call."""
    dp, index = trainer.groups.dp, int(differs.nonzero()[0])
    hashes = dp.all_gather(torch.empty(dp.size, dtype=torch.int64), own[index : index + 1])
    places = dp.all_gather_object(f"rank {trainer.world.rank} (node {platform.node()}, replica {dp.rank})")
    name = trainer.optimizer.flat.parameters[index].spec.name
    (common, count), *others = Counter(hashes.tolist()).most_common()
    if others and others[0][1] == count:
        return f"{', '.join(places)} hold different bits in {name}, and no bits are those of most of them"
    return "" if int(own[index]) == common else f"{places[dp.rank]} holds other bits in {name} than {count} of {dp.size} replicas"
