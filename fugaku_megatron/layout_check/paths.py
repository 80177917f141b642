"""Paths of a run that a rank of a small run may lack, because its shard of the optimizer's state has no such elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..comm.base import Comm
from ..config.run_config import RunConfig
from ..optim.buckets import BucketShard
from ..training.trainer import Trainer


class Path(NamedTuple):
    """A path of the optimizer. runs: True on a rank whose shards execute it"""

    name: str
    needed: Callable[[RunConfig], bool]
    runs: Callable[[Sequence[BucketShard]], bool]


PATHS = (
    Path(
        "updates of matrices by Muon",
        lambda run: run.optimizer.muon,
        lambda shards: any(shard.orthogonal for shard in shards),
    ),
    Path(
        "scales of 8-bit moments that ZeRO-1 shards share",
        lambda run: run.optimizer.exp_avg_dtype == "int8",
        lambda shards: any(shard.shared_blocks() for shard in shards),
    ),
)


def can_lack_paths(run: RunConfig) -> bool:
    return bool(run.parallel.zero_stage) and any(path.needed(run) for path in PATHS)


def lacking_paths(trainer: Trainer, world: Comm) -> list[str]:
    """Return each path that ranks with data-parallel peers lack, with these ranks. Collective."""
    shards = trainer.optimizer.shards
    peers = trainer.groups.dp.size > 1
    own = [
        path.name for path in PATHS if peers and path.needed(trainer.run) and not path.runs(shards)
    ]
    everyone = world.all_gather_object(own)
    lacking = []
    for path in PATHS:
        ranks = [str(rank) for rank, names in enumerate(everyone) if path.name in names]
        if ranks:
            lacking.append(f"{path.name}, on rank {' '.join(ranks)}")
    return lacking
