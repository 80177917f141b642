"""The energy that this node uses, from the counters of its system.

    counters = Counters.find()
    counters.joules()              since the call before

RAPL of Intel's and AMD's CPUs (/sys/class/powercap), AMD's own driver (/sys/class/hwmon), Fugaku's Power API (libpwr). Only the
first of these that can be read counts, because they measure the same. Left out: sums over nodes (observe/memory.py), GPUs.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .allocator import read_text

POWER_API = "libpwr.so"
# The library has no numbers in its interface that are the same everywhere, so they are read from the header of the site.
POWER_HEADERS = ("/opt/FJSVtcs/pwrm/aarch64/include/pwr.h", "/usr/include/pwr.h")
_ENUMERATION = re.compile(r"enum\b[^{;]*\{(.*?)\}", re.DOTALL)
_DEFINITION = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+\(?(-?\w+)\)?[ \t]*$", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass
class Counter:
    """One counter. read: joules since some moment, None where it cannot be read. wraps: joules at which it begins again."""

    name: str
    read: Callable[[], float | None]
    wraps: float | None = None
    last: float | None = None

    def joules(self) -> float | None:
        """Since the call before. A counter that has wrapped around more than once in between says too little."""
        before = self.last
        self.last = self.read()
        if before is None or self.last is None:
            return None
        passed = self.last - before
        return passed + self.wraps if passed < 0 and self.wraps else max(0.0, passed)


@dataclass
class Counters:
    """The counters of a node that add up to its CPUs, memory where it has one, or the whole node. why: the reason for none."""

    source: str
    counters: list[Counter] = field(default_factory=list)
    why: str = ""

    @classmethod
    def find(
        cls, root: str = "/", library: str = POWER_API, headers: tuple[str, ...] = POWER_HEADERS
    ) -> Counters:
        """What can be read below root/sys, or else through Fugaku's library."""
        denied = ""
        for source, candidates in (("RAPL", _rapl(Path(root))), ("amd_energy", _amd(Path(root)))):
            known = [*candidates]
            for counter in known:
                counter.joules()
            if known and all(counter.last is not None for counter in known):
                return cls(source, known)
            denied = (
                denied
                or f"{source} cannot be read: chmod a+r its energy files as root" * bool(known)
            )
        api = _power_api(library, headers)
        if isinstance(api, Counter) and api.read() is not None:
            return cls("Power API", [api])
        return cls(
            "",
            why=denied or (api if isinstance(api, str) else "the Power API has no measured energy"),
        )

    def joules(self) -> float | None:
        """Since the call before; None where there is no counter, and once one of them fails."""
        passed = [counter.joules() for counter in self.counters]
        return (
            sum(value for value in passed if value is not None)
            if passed and None not in passed
            else None
        )

    def describe(self) -> str:
        """For the log's first line."""
        if not self.counters:
            return "no energy counter" + (f" ({self.why})" if self.why else "")
        return f"energy from {self.source} ({', '.join(counter.name for counter in self.counters)})"


def _rapl(root: Path) -> Iterator[Counter]:
    """Packages and memory; a package holds its cores, and psys holds the packages."""
    zones = (root / "sys/class/powercap").glob("intel-rapl:*")
    for zone in sorted(zones, key=lambda path: [int(part) for part in path.name.split(":")[1:]]):
        name = read_text(zone / "name") or ""
        wraps = read_text(zone / "max_energy_range_uj") or ""
        if name.startswith("package") or name == "dram":
            yield Counter(
                name,
                _microjoules(zone / "energy_uj"),
                int(wraps) / 1e6 if wraps.isdecimal() else None,
            )


def _amd(root: Path) -> Iterator[Counter]:
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        if read_text(folder / "name") == "amd_energy":
            for label in sorted(folder.glob("energy*_label")):
                if (name := read_text(label) or "").startswith("Esocket"):
                    yield Counter(
                        name, _microjoules(folder / label.name.replace("_label", "_input"))
                    )


def _microjoules(path: Path) -> Callable[[], float | None]:
    def read() -> float | None:
        text = read_text(path) or ""
        return int(text) / 1e6 if text.isdecimal() else None

    return read


def header_constants(text: str) -> dict[str, int]:
    """The numbers that a C header defines, by #define or in enumerations. Raises ValueError for an expression."""
    text = _COMMENT.sub("", text)
    found = {
        name: int(value, 0)
        for name, value in _DEFINITION.findall(text)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", value)
    }
    for body in _ENUMERATION.findall(text):
        number = -1
        for name, _, value in (item.partition("=") for item in body.split(",") if item.strip()):
            value = value.strip()
            number = number + 1 if not value else found[value] if value in found else int(value, 0)
            found[name.strip()] = number
    return found


def _power_api(library: str, headers: tuple[str, ...]) -> Counter | str:
    """The measured energy of the node as Fugaku's Power API has it, or why there is none; "" where the library is not installed."""
    try:
        api = ctypes.CDLL(library)
    except OSError:
        return ""
    text = next((text for header in headers if (text := read_text(Path(header)))), "")
    try:
        known = header_constants(text)
        context, role, attribute = (
            known[name] for name in ("PWR_CNTXT_FX1000", "PWR_ROLE_APP", "PWR_ATTR_MEASURED_ENERGY")
        )
    except (KeyError, ValueError):
        return f"{library} is there, but none of {', '.join(headers)} has its constants"
    held = ctypes.c_void_p()
    node = ctypes.c_void_p()
    started = api.PWR_CntxtInit(context, role, b"fugaku_megatron", ctypes.byref(held)) == 0
    if not started or api.PWR_CntxtGetObjByName(held, b"plat.node", ctypes.byref(node)) != 0:
        return "the Power API does not show this node"
    return Counter("plat.node", _node_energy(api, node, attribute))


def _node_energy(api: Any, node: ctypes.c_void_p, attribute: int) -> Callable[[], float | None]:
    def read() -> float | None:
        value = ctypes.c_double()
        stamp = ctypes.c_int64()
        failed = api.PWR_ObjAttrGetValue(node, attribute, ctypes.byref(value), ctypes.byref(stamp))
        return None if failed else value.value

    return read
