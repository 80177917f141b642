"""Counters of the memory's error correction (ECC), from Linux's EDAC drivers, read once in each log interval."""

from __future__ import annotations

import platform
from pathlib import Path

from ...comm.agreement import Nodes, first_rank
from ...comm.base import Comm
from ...text.named_files import StrPath
from ..observer import MetricValues, Observer, Say

EDAC = "/sys/devices/system/edac"
COUNTERS = ("ce_count", "ue_count", "dimm_ce_count", "dimm_ue_count")


def read_counters(root: StrPath) -> dict[str, int]:
    """Return counter -> errors since the node's start, of memory controllers and their modules; empty if not readable.

    Names are paths such as mc/mc0/dimm3/dimm_ce_count.
    """
    found = {}
    for path in sorted(Path(root).glob("mc/mc*/**/*_count")):
        if path.name in COUNTERS:
            try:
                found[str(path.relative_to(root))] = int(path.read_text())
            except (OSError, ValueError):
                continue
    return found


class MemoryErrors(Observer):
    """Node with growing counters, by the first rank of each node."""

    def __init__(self, world: Comm, nodes: Nodes, say: Say) -> None:
        self.world = world
        self.say = say
        self._reads = nodes.leads
        self._counters = self._read()

    def _read(self) -> dict[str, int]:
        return read_counters(EDAC) if self._reads else {}

    def finish_interval(self, iteration: int) -> MetricValues:
        """Report every node with a counter that grew."""
        before = self._counters
        self._counters = self._read()
        grown = [
            f"{name} by {count - before.get(name, 0)} to {count}"
            for name, count in self._counters.items()
            if count > before.get(name, 0)
        ]
        if first_rank(self.world, (0,) if grown else None, 1) is None:
            return {}
        own = f"node {platform.node()}: {', '.join(grown)}" if grown else None
        for text in filter(None, self.world.gather_object(own) or ()):
            self.say(
                iteration,
                f"memory errors grow on {text} (ce: corrected, ue: not corrected). "
                "A module with growing counters will fail: exclude the node from the next job",
            )
        return {}
