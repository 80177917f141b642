"""Energy that this node uses, from the system's counters.

Sources, of which the first readable counts: RAPL (/sys/class/powercap), AMD's driver (/sys/class/hwmon), Fugaku's Power API
(libpwr). Sums over nodes: observe/resources/energy.py. GPUs are not measured.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cgroup import read_text

POWER_API = "libpwr.so"
# The library's constants differ between sites and are read from the site's header.
POWER_HEADERS = ("/opt/FJSVtcs/pwrm/aarch64/include/pwr.h", "/usr/include/pwr.h")
_ENUMERATION = re.compile(r"enum\b[^{;]*\{(.*?)\}", re.DOTALL)
_DEFINITION = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+\(?(-?\w+)\)?[ \t]*$", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass
class Counter:
    """An energy counter.

    read: joules since some moment, None on failure
    wraps: joules until the counter restarts
    """

    name: str
    read: Callable[[], float | None]
    wraps: float | None = None
    last: float | None = None

    def joules(self) -> float | None:
        """Return joules since the previous call; too few after more than one wrap."""
        before = self.last
        self.last = self.read()
        if before is None or self.last is None:
            return None
        passed = self.last - before
        if passed < 0 and self.wraps:
            return passed + self.wraps
        return max(0.0, passed)


@dataclass
class Counters:
    """Counters whose sum is the node's CPUs (and memory if counted), or the whole node. why: reason for none"""

    source: str
    counters: list[Counter] = field(default_factory=list)
    why: str = ""

    @classmethod
    def find(
        cls, root: str = "/", library: str = POWER_API, headers: tuple[str, ...] = POWER_HEADERS
    ) -> Counters:
        """Return the first readable source's counters: RAPL, AMD's driver, then the Power API."""
        denied = ""
        for source, candidates in (("RAPL", _rapl(Path(root))), ("amd_energy", _amd(Path(root)))):
            known = [*candidates]
            for counter in known:
                counter.joules()
            if known and all(counter.last is not None for counter in known):
                return cls(source, known)
            if known and not denied:
                denied = f"{source} cannot be read: chmod a+r its energy files as root"
        api = _power_api(library, headers)
        if isinstance(api, str):
            return cls("", why=denied or api)
        if api.read() is None:
            return cls("", why=denied or "the Power API has no measured energy")
        return cls("Power API", [api])

    def joules(self) -> float | None:
        """Return joules since the previous call, None without counters or after a failure."""
        passed = [counter.joules() for counter in self.counters]
        known = [value for value in passed if value is not None]
        return sum(known) if passed and len(known) == len(passed) else None

    def describe(self) -> str:
        if not self.counters:
            return f"no energy counter ({self.why})" if self.why else "no energy counter"
        return f"energy from {self.source} ({', '.join(counter.name for counter in self.counters)})"


def _rapl(root: Path) -> Iterator[Counter]:
    """Iterate over packages and memory. A package includes its cores; psys includes the packages."""
    zones = (root / "sys/class/powercap").glob("intel-rapl:*")
    for zone in sorted(zones, key=lambda path: [int(part) for part in path.name.split(":")[1:]]):
        name = read_text(zone / "name") or ""
        wraps = read_text(zone / "max_energy_range_uj") or ""
        if name.startswith("package") or name == "dram":
            range_joules = int(wraps) / 1e6 if wraps.isdecimal() else None
            yield Counter(name, _microjoules(zone / "energy_uj"), range_joules)


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
    """Return integers that a C header defines by #define or enum. ValueError for an expression."""
    text = _COMMENT.sub("", text)
    found = {
        name: int(value, 0)
        for name, value in _DEFINITION.findall(text)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", value)
    }
    for body in _ENUMERATION.findall(text):
        number = -1
        for item in filter(str.strip, body.split(",")):
            name, _, value = map(str.strip, item.partition("="))
            if not value:
                number += 1
            elif value in found:
                number = found[value]
            else:
                number = int(value, 0)
            found[name] = number
    return found


def _power_api(library: str, headers: tuple[str, ...]) -> Counter | str:
    """Return Fugaku's Power API counter, or the reason for none; "" if not installed."""
    try:
        api = ctypes.CDLL(library)
    except OSError:
        return ""
    texts = (read_text(Path(header)) for header in headers)
    text = next(filter(None, texts), "")
    try:
        known = header_constants(text)
        context, role, attribute = (
            known[name] for name in ("PWR_CNTXT_FX1000", "PWR_ROLE_APP", "PWR_ATTR_MEASURED_ENERGY")
        )
    except (KeyError, ValueError):
        return f"{library} is there, but none of {', '.join(headers)} has its constants"
    handle = ctypes.c_void_p()
    node = ctypes.c_void_p()
    started = api.PWR_CntxtInit(context, role, b"fugaku_megatron", ctypes.byref(handle)) == 0
    if not started or api.PWR_CntxtGetObjByName(handle, b"plat.node", ctypes.byref(node)) != 0:
        return "the Power API does not show this node"
    return Counter("plat.node", _node_energy(api, node, attribute))


def _node_energy(api: Any, node: ctypes.c_void_p, attribute: int) -> Callable[[], float | None]:
    def read() -> float | None:
        value = ctypes.c_double()
        stamp = ctypes.c_int64()
        failed = api.PWR_ObjAttrGetValue(node, attribute, ctypes.byref(value), ctypes.byref(stamp))
        return None if failed else value.value

    return read
