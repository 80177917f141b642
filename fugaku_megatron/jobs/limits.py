"""A site's limits: resource groups, clocks and power modes, file rules. `pjacl --rg` takes
precedence.

Sources: Fugaku user's guide 1.52 (resource groups, power control, LLIO), RIKEN's LLIO briefing of
July 2025. Read on 2026-11-20.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

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
RETENTION_NODES = 9216  # larger jobs must not request retention_state=1


@dataclass(frozen=True, kw_only=True)
class ResourceGroup:
    """A resource group. nodes: smallest and largest job. hours: maximum elapse time."""

    name: str
    nodes: tuple[int, int]
    hours: float


GROUPS = {
    g.name: g
    for g in (
        ResourceGroup(name="small", nodes=(1, 384), hours=72),
        ResourceGroup(name="small-torus", nodes=(1, 384), hours=72),
        ResourceGroup(name="small-s1", nodes=(1, 384), hours=72),
        ResourceGroup(name="large", nodes=(385, 12288), hours=24),
        ResourceGroup(name="huge", nodes=(12289, 82944), hours=8),
        ResourceGroup(name="int", nodes=(1, 384), hours=6),
        ResourceGroup(name="f-pt", nodes=(1, 12288), hours=24),
        ResourceGroup(name="spot-int", nodes=(1, 384), hours=4),
        ResourceGroup(name="spot-small", nodes=(1, 384), hours=4),
        ResourceGroup(name="spot-large", nodes=(385, 12288), hours=4),
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


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A clock and power mode. freq: MHz. refused: the site's reason, or ""."""

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
        return {
            "freq": self.freq,
            "eco_state": self.eco_state,
            "retention_state": 0,
            "throttling_state": 0,
            "issue_state": 0,
            "ex_pipe_state": 0,
        }

    @property
    def directive(self) -> str:
        """pjsub's option -L for all power states."""
        return ",".join(f"{name}={value}" for name, value in self.states.items())


MODES = {
    m.name: m
    for m in (
        Mode(name="normal-2.0", freq=2000, eco_state=0),
        Mode(
            name="boost-2.2",
            freq=2200,
            eco_state=0,
            refused="Fugaku has refused freq=2200,eco_state=0 since April 2025: use "
            "--mode normal-2.0 (freq=2000,eco_state=0), which has both floating-point pipes at 2.0 GHz",
        ),
        Mode(name="boost-eco-2.2", freq=2200, eco_state=2),
        Mode(name="eco-2.0", freq=2000, eco_state=2),
    )
}


def is_name(text: str) -> bool:
    """Return True for a job or group name that needs no quotes."""
    return re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text) is not None


def is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def mode(name: str) -> Mode:
    """Return the mode. ValueError names the known modes."""
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
            groups[name[1]] = ResourceGroup(
                name=name[1], nodes=(int(nodes[1]), int(nodes[2])), hours=hours
            )
    return groups


def resource_groups() -> tuple[dict[str, ResourceGroup], str]:
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
    """Return the usual group. ValueError if none accepts `nodes`."""
    for name in ("small", "large", "huge"):
        if name in groups and groups[name].nodes[0] <= nodes <= groups[name].nodes[1]:
            return groups[name]
    maximum = max(g.nodes[1] for g in groups.values())
    check(False, f"--nodes {nodes}: no resource group accepts this number: pass 1 to {maximum}")
    raise AssertionError


def seconds(clock: str, name: str = "elapse=") -> int:
    """Parse HH:MM:SS, MM:SS or seconds. ValueError for anything else."""
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
