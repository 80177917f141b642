"""Machines as data: what the hardware can do at best, each constant with its source (machines/*.json).

Nothing here is fitted to a training run; what software makes of a machine is in `software`. Unknown hardware is an error.
Run: python -m fugaku_megatron.perf predict --machine a64fx ...   Test: pytest tests/test_perf_machine.py
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..run.config import check

FOLDER = Path(__file__).parent / "machines"
MIB, GIB, GB = 2**20, 2**30, 10**9
OPTIONAL = ("native", "process_mib")  # constants that only perf calibrate knows


@dataclass(frozen=True, kw_only=True)
class GemmCurve:
    """Share of peak that a good library reaches on an n x n x n product: maximum / (1 + (half / n) ^ exponent)."""

    threads: int
    maximum: float
    half: float
    exponent: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node and the network that joins nodes; rates are of a whole node in its present mode."""

    name: str
    title: str
    kind: str  # cpu or gpu
    units: int  # CMGs, sockets or GPUs of a node: what has memory of its own
    threads: int  # threads of a node that compute; SMs of one GPU
    ranks_per_node: int  # the customary number
    nominal_ghz: float
    ghz: float
    clocks_ghz: tuple[float, ...]  # those one can ask for
    clock_gain_limit: float  # a higher clock gains at most this factor
    eco_fraction: float  # of peak that remains in eco mode (one of two pipes), 1 where there is none
    peak_tflops: dict[str, float]  # FP32, BF16, FP16 at the nominal clock
    memory_gib: float  # usable by the job
    stream_gbs: float
    link_gbs: float  # node to node, one direction, one pair
    injection_gbs: float  # all pairs of a node together
    link_alpha_us: float
    large_allreduce_gbs: float  # bytes of the vector / time
    intra_gbs: float  # between ranks of a node, one direction
    intra_alpha_us: float
    gemm_curves: tuple[GemmCurve, ...]
    host_factor: float  # time lost to a known fault of the machine's set-up, 1: none
    sources: dict[str, str]
    native: dict[str, float] = field(default_factory=dict)  # parameters.Parameters of software `this`, measured here
    process_mib: float | None = None  # a rank of software `this` before it has tensors, measured here

    @property
    def clock(self) -> float:
        """Speed of what follows the clock, relative to the nominal one."""
        return min(self.ghz / self.nominal_ghz, self.clock_gain_limit)

    @property
    def most_ranks(self) -> int:
        """What a node has for ranks: GPUs, or threads."""
        return self.units if self.kind == "gpu" else self.threads

    @property
    def node_memory_bytes(self) -> float:
        return self.memory_gib * GIB

    def gemm_curve(self, threads: int) -> GemmCurve:
        """The published curve of the nearest team size."""
        return min(self.gemm_curves, key=lambda c: abs(c.threads - threads))

    def at(self, ghz: float | None = None, eco: bool = False) -> Machine:
        """The machine at another clock, or in eco mode. Raises ValueError for a clock it does not have."""
        check(ghz is None or ghz in self.clocks_ghz,
              f"--ghz {ghz} is not a clock of {self.name}: give {' or '.join(map(str, self.clocks_ghz))}")
        check(not eco or self.eco_fraction < 1, f"--eco-state 2: {self.name} has no eco mode; leave it out")
        peak = {name: value * (self.eco_fraction if eco else 1) for name, value in self.peak_tflops.items()}
        return replace(self, ghz=ghz or self.ghz, peak_tflops=peak)


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The one line for a name that is not in a table."""
    known = sorted(known)
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    return ValueError(f"{kind} {name} is unknown: give one of {', '.join(known)}" + (f" (did you mean {near[0]}?)" if near else ""))


def names() -> list[str]:
    """The machines there is data for."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))


def _constants(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    if "base" in data:
        base = _constants(FOLDER / f"{data['base']}.json")
        data = {**base, **data, "constants": {**base["constants"], **data["constants"]}}
    return data


def load(name: str) -> Machine:
    """A machine by name, or from a file that `perf calibrate` wrote. Raises ValueError naming the known ones."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        raise unknown("--machine", name, names())
    try:
        return from_data(path.stem, _constants(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--machine {name}: {path} is not a machine's description ({error}): "
                         "write one with perf calibrate") from error


def _check_numbers(name: str, value: Any) -> None:
    """Raises TypeError unless all in `value` are numbers above 0; latencies and what calibrate measures of kernels may be 0."""
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(f"{name} {key}", part)
    else:
        least = 0.0 if name.startswith("native") or name.endswith("alpha_us") else math.nextafter(0.0, 1.0)
        if not isinstance(value, (int, float)) or not least <= value < math.inf:
            raise TypeError(f"{name} is {value!r}, not a number above 0")


def from_data(name: str, data: dict[str, Any]) -> Machine:
    """A machine from the contents of its file. Raises KeyError or TypeError for what is no description."""
    constants = data["constants"]
    values = {key: constant["value"] for key, constant in constants.items()}
    for key, value in values.items():
        _check_numbers(key, value)
    values["gemm_curves"] = tuple(GemmCurve(**curve) for curve in values["gemm_curves"])
    values["clocks_ghz"] = tuple(values["clocks_ghz"])
    missing = {f.name for f in fields(Machine)} - values.keys() - {"name", "title", "kind", "ghz", "sources", *OPTIONAL}
    if missing:
        raise KeyError(f"no {', '.join(sorted(missing))}")
    return Machine(name=name, title=data["title"], kind=data["kind"], ghz=values["nominal_ghz"],
                   sources={key: constant["source"] for key, constant in constants.items()}, **values)
