"""A site's limits: resource groups, clocks and power modes, file rules. `pjacl --rg` takes
precedence.

Sources: Fugaku user's guide 1.52 (resource groups, power control, LLIO), RIKEN's LLIO briefing of
July 2025. Read on 2026-11-20.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import NamedTuple

from ..config.fields import check
from ..planner.machine import unknown

TABLE_DATE = "2026-11-20"
HOUR = 3600
RANKS_PER_NODE = (1, 2, 4)  # each rank has whole CMGs
TORUS_ABOVE = 384  # nodes; a larger job must request a torus of whole units
SINGLE_FILE_NODES = 7000  # if more open the same file, the file system stops
SINGLE_FILE_PROCESSES = 28000
SPLIT_OUTPUT_ABOVE = 10000  # processes that may write their output files into one directory
LOCAL_TMP_GIB = 87  # a node's share of the SSD
MARGIN = 900  # seconds before the end of a job at which the trainer saves and exits
RETENTION_NODES = 9216  # larger jobs must not request retention_state=1


class ResourceGroup(NamedTuple):
    """A resource group. smallest, largest: nodes of a job. hours: maximum elapse time"""

    name: str
    smallest: int
    largest: int
    hours: float

    def accepts(self, nodes: int) -> bool:
        return self.smallest <= nodes <= self.largest


GROUPS = {
    group.name: group
    for group in (
        ResourceGroup("small", 1, 384, hours=72),
        ResourceGroup("small-torus", 1, 384, hours=72),
        ResourceGroup("small-s1", 1, 384, hours=72),
        ResourceGroup("large", 385, 12288, hours=24),
        ResourceGroup("huge", 12289, 82944, hours=8),
        ResourceGroup("int", 1, 384, hours=6),
        ResourceGroup("f-pt", 1, 12288, hours=24),
        ResourceGroup("spot-int", 1, 384, hours=4),
        ResourceGroup("spot-small", 1, 384, hours=4),
        ResourceGroup("spot-large", 385, 12288, hours=4),
    )
}


# power state -> the values it can have
STATES = {
    "freq": (2000, 2200),
    "eco_state": range(3),
    "retention_state": range(2),
    "throttling_state": range(10),
    "issue_state": range(2),
    "ex_pipe_state": range(2),
}


class Mode(NamedTuple):
    """A clock and power mode. freq: MHz."""

    name: str
    freq: int
    eco_state: int
    refused: str = ""

    @property
    def ghz(self) -> float:
        return self.freq / 1000

    @property
    def states(self) -> dict[str, int]:
        """Every power state's value; a job sets all, because the site's defaults have changed."""
        return dict.fromkeys(STATES, 0) | {"freq": self.freq, "eco_state": self.eco_state}

    @property
    def directive(self) -> str:
        """pjsub's option -L for all power states."""
        return ",".join(f"{name}={value}" for name, value in self.states.items())


MODES = {
    mode.name: mode
    for mode in (
        Mode("normal-2.0", 2000, eco_state=0),
        Mode(
            "boost-2.2",
            2200,
            eco_state=0,
            refused="Fugaku has refused freq=2200,eco_state=0 since April 2025: use "
            "--mode normal-2.0 (freq=2000,eco_state=0), which has both floating-point pipes at 2.0 GHz",
        ),
        Mode("boost-eco-2.2", 2200, eco_state=2),
        Mode("eco-2.0", 2000, eco_state=2),
    )
}


def is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text) is not None


def is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def mode(name: str) -> Mode:
    if name not in MODES:
        raise unknown("--mode", name, MODES)
    return MODES[name]


def parse_pjacl(text: str) -> dict[str, ResourceGroup]:
    """Parse `pjacl --rg`; blocks in another form are skipped."""
    groups = {}
    for block in re.split(r"(?=rscgrp\s*[:=]|\[\s*rscgrp)", text):
        name = re.search(r"rscgrp\s*[:=]\s*([\w-]+)", block)
        nodes = re.search(r"\bnode\b[^\d\n]*(\d+)\s*[-,]\s*(\d+)", block)
        elapse = re.search(r"\belapse\b[^\d\n]*(?:[\d:]+\s*[-,]\s*)?(\d+):(\d\d):(\d\d)", block)
        if name and nodes and elapse:
            hours = int(elapse[1]) + int(elapse[2]) / 60 + int(elapse[3]) / HOUR
            groups[name[1]] = ResourceGroup(name[1], int(nodes[1]), int(nodes[2]), hours)
    return groups


def resource_groups() -> tuple[dict[str, ResourceGroup], str]:
    """Return resource groups from pjacl, or else from the built-in table; and the source."""
    if shutil.which("pjacl"):
        try:
            output = subprocess.run(
                ["pjacl", "--rg"], capture_output=True, text=True, timeout=20
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            output = ""
        groups = parse_pjacl(output)
        if groups:
            return {**GROUPS, **groups}, "pjacl --rg"
    return GROUPS, f"the table of {TABLE_DATE}"


def smallest(nodes: int, groups: dict[str, ResourceGroup]) -> ResourceGroup:
    for name in ("small", "large", "huge"):
        if name in groups and groups[name].accepts(nodes):
            return groups[name]
    maximum = max(group.largest for group in groups.values())
    raise ValueError(f"--nodes {nodes}: no resource group accepts this number: pass 1 to {maximum}")


def seconds(clock: str, name: str = "elapse=") -> int:
    """Parse [[HH:]MM:]SS."""
    parts = clock.split(":")
    check(1 <= len(parts) <= 3 and all(map(is_number, parts)), f"{name}{clock}: write HH:MM:SS")
    return sum(int(p) * 60**i for i, p in enumerate(reversed(parts)))


def min_seconds(elapse: str) -> int:
    """Return the guaranteed seconds: the smaller value of elapse=FROM-TO (spot groups)."""
    return min(map(seconds, elapse.split("-")))


def clock(total: float) -> str:
    """Format seconds as HH:MM:SS, rounded up."""
    whole = -int(-total // 1)
    return f"{whole // HOUR:02d}:{whole % HOUR // 60:02d}:{whole % 60:02d}"
