"""Comparison of state with copies on several ranks, before every save and by --check-weight-hash-across-dp-replicas-interval.

Compared are, among
    data-parallel ranks (divided experts: ranks with the same experts): weights, frozen ones too,
        and without --zero-stage 1 master weights and moments
    tensor-parallel ranks: norms, routers, biases, whatever is not split, and its state
    the first and the last pipeline stage: the tied word embedding and its state
Each tensor becomes one number, compared by two small reductions per group. A fault in a ZeRO-1 shard reaches all replicas, so it is
not found.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.tensor_files import as_bytes
from ..checkpoint.trusted import AGREED, NO_REPLICAS, NOT_COMPARED
from ..comm.agreement import first_rank
from ..comm.base import Comm
from ..comm.grid import Groups
from ..config.run_config import RunConfig
from ..costs.stages import holds_tied_copy
from ..nn.model import Stage
from ..nn.parameter import ModelParameter, scales_of
from ..optim.buckets import BucketShard
from ..optim.optimizer import Optimizer
from ..start.exit_codes import ExitCode

FLAG = "--check-weight-hash-across-dp-replicas-interval"
WEIGHTS = "weights"
STATES = "optimizer states"
WORDS = 4096  # columns whose sums are hashed, of 8 bytes each
# A group of ranks with copies -> one of them, several.
COPIES = {
    "dp": ("replica", "replicas"),
    "edp": ("replica", "replicas"),
    "tp": ("tensor-parallel rank", "tensor-parallel ranks"),
    "etp": ("tensor-parallel rank of experts", "tensor-parallel ranks of experts"),
    "embedding": ("copy of the tied embedding", "copies of the tied embedding"),
}


class Difference(NamedTuple):
    """Difference between ranks.

    kind: WEIGHTS, STATES or results. text: rank, node and tensor
    suspect_from: first iteration whose results may be wrong; None: the saved state is right
    """

    kind: str
    text: str
    suspect_from: int | None = None


class ReplicasDiffer(RuntimeError):
    """Error for ranks that must have the same bits and differ. Raised on every rank, with one line."""

    exit_code = ExitCode.REPLICAS_DIFFER
    everywhere = True  # rank 0 alone reports it

    def __init__(self, text: str, found: Difference) -> None:
        super().__init__(text)
        self.found = found


class Replica(NamedTuple):
    """Tensor with copies on other ranks. kind: WEIGHTS or STATES. name: for the log."""

    kind: str
    name: str
    tensor: Tensor


class Deviation(NamedTuple):
    """Tensor with copies that differ within a group. rank: in the group. hashes, places: of every
    rank.
    """

    kind: str
    name: str
    rank: int
    hashes: list[int]
    places: list[str]
    copies: str

    @property
    def others(self) -> int:
        return sum(value != self.hashes[self.rank] for value in self.hashes)

    def difference(self, alone: bool) -> Difference:
        """Describe the deviation. alone: no other rank differs from as many ranks, so the fault is here."""
        if alone:
            who = f"{self.places[self.rank]} holds other bits in {self.name}"
            return Difference(
                self.kind, f"{who} than {self.others} of {len(self.hashes)} {self.copies}"
            )
        who = f"{', '.join(self.places)} hold different bits in {self.name}"
        return Difference(self.kind, f"{who}, and most of them do not agree on any")


def content_hash(tensor: Tensor) -> int:
    """Return the CRC-32 of column sums of the tensor's words modulo 2^64, which any flipped bit changes.

    The number of threads does not matter.
    """
    flat = tensor.detach().reshape(-1)
    elements = 8 // flat.element_size()
    whole = flat.numel() // (elements * WORDS) * elements * WORDS
    head = flat[:whole]
    tail = flat[whole:]
    if head.storage_offset() % elements:
        head = head.clone()  # a view as words must begin at one
    sums = head.view(torch.int64).view(-1, WORDS).sum(0)
    return zlib.crc32(as_bytes(tail), zlib.crc32(as_bytes(sums)))


class Replicas:
    """This rank's tensors that have copies on other ranks. agreed: last iteration without a
    difference.
    """

    def __init__(self, optimizer: Optimizer, stage: Stage, groups: Groups) -> None:
        self._optimizer = optimizer
        self._stage = stage
        self._groups = groups
        self.agreed: int | None = None

    @property
    def exist(self) -> bool:
        """True if any rank's state has copies. The same on all ranks."""
        groups = self._groups
        return groups.world.size > 1 and (groups.dp.size > 1 or groups.tp.size > 1 or self.ties)

    @property
    def ties(self) -> bool:
        """True if two pipeline stages have the word embedding. The same on all ranks."""
        return holds_tied_copy(self._optimizer.run, self._stage.placement.last_stage)

    def state(self, iteration: int) -> str:
        if not self.exist:
            return NO_REPLICAS
        return AGREED if self.agreed == iteration else NOT_COMPARED

    def reset(self) -> None:
        self.agreed = None

    def difference(self, iteration: int, again: bool = False) -> Difference | None:
        """Compare all copies once in an iteration, after pending gathers; None if they agree. Collective.

        again: also if they agreed in this iteration
        """
        if not self.exist or (self.agreed == iteration and not again):
            return None
        self._optimizer.buckets.await_weights()
        found = [deviation for group in COPIES if (deviation := self._differ(group))]
        world = self._groups.world
        count = sum(each.others for each in found)
        most = int(world.all_reduce(torch.tensor(count), "max"))
        if not most:
            self.agreed = iteration
            return None
        suspected = count == most
        alone = int(world.all_reduce(torch.tensor(int(suspected)))) == 1
        rank = first_rank(world, (world.rank,) if suspected else None, 1)
        assert rank is not None, "some rank disagrees with most others"
        own = max(found, key=lambda each: each.others).difference(alone) if suspected else None
        difference: Difference | None = world.broadcast_object(own, root=rank)
        return difference

    def _differ(self, group: str) -> Deviation | None:
        """Return a deviation within a group, or None. Collective over the group."""
        comm: Comm = getattr(self._groups, group)
        if comm.size == 1:
            return None
        held = [*self._held(group)]
        if not held:
            return None
        own = torch.tensor([content_hash(each.tensor) for each in held])
        differs = comm.all_reduce(own.clone(), "min") != comm.all_reduce(own.clone(), "max")
        if not differs.any():
            return None
        index = int(differs.nonzero()[0])
        hashes = comm.all_gather_object(int(own[index]))
        copy, copies = COPIES[group]
        places = comm.all_gather_object(
            f"rank {self._groups.world.rank} (node {platform.node()}, {copy} {comm.rank})"
        )
        return Deviation(held[index].kind, held[index].name, comm.rank, hashes, places, copies)

    def _held(self, group: str) -> Iterator[Replica]:
        """Yield the tensors with copies in a group, in the same order on all ranks."""
        optimizer = self._optimizer
        for parameter in (*optimizer.flat.parameters, *optimizer.flat.frozen):
            if self._alike(group, parameter):
                name = parameter.spec.name
                yield Replica(WEIGHTS, name, parameter)
                if (scales := scales_of(parameter)) is not None:
                    yield Replica(WEIGHTS, f"{name} (scales)", scales)
        for bucket, shard in zip(optimizer.flat.buckets, optimizer.shards, strict=True):
            if group in ("dp", "edp"):
                if (group == "edp") == bucket.expert and not optimizer.sharded:
                    yield from self._state(shard, group, by_block=True)
            else:
                yield from self._state(shard, group, by_block=False)

    def _alike(self, group: str, parameter: ModelParameter) -> bool:
        spec = parameter.spec
        if group in ("dp", "edp"):
            return spec.expert == (group == "edp")
        if group == "embedding":
            return parameter is self._stage.tied_copy
        return spec.partition_dim is None and spec.expert == (group == "etp")

    def _state(self, shard: BucketShard, group: str, by_block: bool) -> Iterator[Replica]:
        """Yield the master weights and moments of this rank's shard of a bucket.

        by_block: include 8-bit moments; only ranks with the same bucket have the same codes.
        """
        kinds = [("exp_avg", shard.exp_avg, 0), ("exp_avg_sq", shard.exp_avg_sq, shard.orthogonal)]
        if shard.model_weights is not None:
            kinds.insert(0, ("master weight", shard.master, 0))
        flat = self._optimizer.flat
        for parameter, start in zip(flat.parameters, flat.starts, strict=True):
            if not self._alike(group, parameter):
                continue
            for kind, tensor, first in kinds:
                begin = max(start - shard.start - first, 0)
                end = start + parameter.numel() - shard.start - first
                piece = tensor[begin : max(end, begin)]
                if piece.numel():
                    yield Replica(STATES, f"{kind} of {parameter.spec.name}", piece)
        if by_block:
            place = f"the parameters from element {shard.start} on"
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), shard.eight_bit or (), strict=False):
                yield Replica(STATES, f"{kind} of {place}", moment.codes)
                yield Replica(STATES, f"scales of {kind} of {place}", moment.scales)


def comparison_line(replicas: Replicas, run: RunConfig, groups: Groups) -> str:
    """Return the log's line on states compared across replicas, and states not compared."""
    interval = run.numbers.check_weight_hash_across_dp_replicas_interval
    if not replicas.exist:
        return (
            "note: no rank's weights have a copy on another rank: there are no replicas to compare"
        )
    if not interval:
        return f"note: {FLAG} 0: replicas are not compared, before saves neither"
    compared = []
    alone = []
    sharded = run.parallel.zero_stage == 1
    size = groups.dp.size
    if size > 1:
        what = "weights" if sharded else "weights and optimizer states"
        compared.append(f"{what} of {size} data-parallel replicas")
    else:
        alone.append("all else, which data-parallel size 1 leaves without a copy")
    if groups.tp.size > 1:
        compared.append("what tensor-parallel ranks do not split")
    if replicas.ties:
        compared.append("the tied embedding of two stages")
    if sharded and size > 1:
        alone.append("optimizer states, which --zero-stage 1 keeps once")
    line = f"replicas: compared are {', '.join(compared)}, every {interval} iterations and before every save"
    return f"{line}; not {'; '.join(alone)}" if alone else line
