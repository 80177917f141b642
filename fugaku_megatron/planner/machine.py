"""Machines as data: best hardware rates, each constant with its source (machines/*.json).

Nothing is fitted to training runs. GB/s are 10^9 bytes per second, GiB 2^30 bytes, TFLOPs 10^12
operations per second.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..config.fields import check
from ..text.named_files import JsonObject, read_text, unique_keys

FOLDER = Path(__file__).parent / "machines"


MIB = 2**20
GIB = 2**30
GB = 10**9


# below and above any rate, size or count of a node in the units of this file
MIN_CONSTANT = 1e-9
MAX_CONSTANT = 1e9


KINDS = ("cpu", "gpu")


# of a share of peak, and of how steeply it rises with the size
CURVE_LIMITS = {"maximum": 2.0, "exponent": 16.0}


FP32 = "fp32"
PRECISIONS = (FP32, "fp16", "bf16")
INT8 = "int8"  # descriptions of an earlier calibrate lack its rate


CURVES = ("gemm_curves", "int8_curves")


COLLECTIONS = {"tuple": list, "dict": dict}  # of a field in a description; others are numbers


class GemmCurve(NamedTuple):
    """Share of peak for an n x n x n matmul: maximum / (1 + (half / n) ^ exponent)."""

    threads: int
    maximum: float
    half: float
    exponent: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Node and network; rates per node at its clock and power mode."""

    name: str
    title: str
    kind: str  # cpu or gpu
    units: int  # parts of a node with memory of their own: CMGs, sockets or GPUs
    threads: int  # threads of a node that compute; SMs of one GPU
    ranks_per_node: int  # the customary number
    nominal_ghz: float
    ghz: float
    clocks_ghz: tuple[float, ...]  # that a job can select
    clock_gain_limit: float  # a higher clock gains at most this factor
    # share of peak that remains in eco mode (one of two pipes); 1 without such a mode
    eco_fraction: float
    # precision (fp32, bf16, fp16, perhaps int8) -> peak at the nominal clock
    peak_tflops: dict[str, float]
    memory_gib: float  # usable by the job
    stream_gbs: float  # STREAM triad
    link_gbs: float  # between two ranks on two nodes, one direction
    injection_gbs: float  # of all ranks of a node together, one direction
    link_alpha_us: float  # latency between nodes
    large_allreduce_gbs: float  # bytes of the vector over the time of its all-reduce
    intra_gbs: float  # between two ranks of a node, one direction
    intra_alpha_us: float  # latency inside a node
    gemm_curves: tuple[GemmCurve, ...]
    # factor on all times from a known fault of the machine's set-up; 1 if none is known
    host_factor: float
    sources: dict[str, str]  # constant -> source
    int8_curves: tuple[GemmCurve, ...] = ()  # measured, with one operand quantized in the call
    # fields of parameters.Parameters that calibrate measured here
    native: dict[str, float] = field(default_factory=dict)
    core: dict[str, float] = field(default_factory=dict)  # fields of micro_kernel.Core
    # MiB of a rank of this project before it has tensors, measured by calibrate
    process_mib: float | None = None
    # pessimistic rate of a ring's link in large all-reduces; None: no slower one is known
    slow_reduce_gbs: float | None = None
    # of a node's ranks together in large all-to-alls; None: no slower than a ring
    all_to_all_gbs: float | None = None
    # of a ring's link in an all-reduce inside a node; None: intra_gbs
    intra_reduce_gbs: float | None = None
    file_system_gbs: float | None = None  # of the shared file system, for all jobs; None: unknown
    # of a node into its own disk, and at most into the file system; None: unknown
    node_storage_gbs: float | None = None

    @cached_property
    def clock(self) -> float:
        """Speed relative to the nominal clock."""
        return min(self.ghz / self.nominal_ghz, self.clock_gain_limit)

    @property
    def max_ranks(self) -> int:
        """Most ranks on a node: one per GPU, or one per thread."""
        return self.units if self.kind == "gpu" else self.threads

    def gemm_curve(self, threads: int, int8: bool = False) -> GemmCurve:
        """Return the curve for `threads`: measured, interpolated in log(threads), or the nearest.

        int8: FP32's if INT8 was not measured
        """
        measured = self.int8_curves if int8 and self.int8_curves else self.gemm_curves
        curves = {curve.threads: curve for curve in measured}
        near = neighbours(curves, threads)
        below = curves[near[0]]
        above = curves[near[-1]]
        if below is above:
            return below
        weight = math.log(threads / below.threads) / math.log(above.threads / below.threads)

        def between(name: str) -> float:
            return math.exp(
                (1 - weight) * math.log(getattr(below, name))
                + weight * math.log(getattr(above, name))
            )

        return GemmCurve(
            threads=threads, **{name: between(name) for name in ("maximum", "half", "exponent")}
        )

    def curve_note(self, threads: int) -> str | None:
        near = neighbours([curve.threads for curve in self.gemm_curves], threads)
        if near == [threads]:
            return None
        used = (
            f"the curves with {near[0]} and {near[1]} are interpolated"
            if len(near) > 1
            else f"the curve with {near[0]} is used"
        )
        return f"{self.name} has no GEMM curve with {threads} threads: {used}"

    def at(self, ghz: float | None = None, eco: bool = False) -> Machine:
        """Return the machine at a clock in GHz and in eco mode; ValueError if either is missing."""
        check(
            ghz is None or ghz in self.clocks_ghz,
            f"--ghz {ghz} is not a clock of {self.name}: pass {' or '.join(map(str, self.clocks_ghz))}",
        )
        check(
            not eco or self.eco_fraction < 1,
            f"--eco-state 2: {self.name} has no eco mode; leave it out",
        )
        peak = {
            name: value * (self.eco_fraction if eco else 1)
            for name, value in self.peak_tflops.items()
        }
        return replace(self, ghz=ghz or self.ghz, peak_tflops=peak)


def neighbours(known: Iterable[int], number: int) -> list[int]:
    """Return `number` if it is known, else the nearest known numbers below and above."""
    known = sorted(known)
    if number in known:
        return [number]
    return [n for n in known if n < number][-1:] + [n for n in known if n > number][:1]


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    known = sorted(known)
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    return ValueError(
        f"{kind} {name} is unknown: pass one of {', '.join(known)}"
        + (f" (did you mean {near[0]}?)" if near else "")
    )


def names() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.json"))


def _constants(path: Path) -> JsonObject:
    data: JsonObject = json.loads(read_text(path, ""), object_pairs_hook=unique_keys)
    if "sections" in data:  # a report contains the description
        check("machine" in data, "this report ended before it had measured the machine")
        data = data["machine"]
    if "base" in data:
        base = _constants(FOLDER / f"{data['base']}.json")
        data = {**base, **data, "constants": {**base["constants"], **data["constants"]}}
    return data


def load(name: str) -> Machine:
    """Load a machine by name, or from calibrate's or report's file."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        raise unknown("--machine", name, names())
    try:
        return from_data(path.stem, _constants(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--machine {name}: {path} is not a machine's description ({error}): "
            "write one with fugaku-megatron calibrate"
        ) from error


def _check_numbers(name: str, value: Any) -> None:
    """Raise TypeError unless all numbers are finite and positive; latencies and measured kernel
    parameters may be 0.
    """
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(f"{name} {key}", part)
    else:
        minimum = 0.0 if name.startswith("native") or name.endswith("alpha_us") else MIN_CONSTANT
        if not isinstance(value, (int, float)) or not minimum <= value <= MAX_CONSTANT:
            raise TypeError(
                f"{name} is {value!r:.60}, not a number above 0, from {MIN_CONSTANT:g} to {MAX_CONSTANT:g}"
            )


def _check_kinds(values: JsonObject) -> None:
    types = {each.name: str(each.type).partition("[")[0] for each in fields(Machine)}
    for key, value in values.items():
        if (
            not isinstance(value, COLLECTIONS.get(types.get(key, ""), (int, float)))
            or value == []
            or key == "peak_tflops"
            and not value
        ):
            raise TypeError(f"{key} is {value!r:.60}, which is empty or of another kind")
        if types.get(key) == "int" and not isinstance(value, int):
            raise TypeError(f"{key} is {value!r:.60}, not a whole number")
    lacking = [name for name in PRECISIONS if name not in values.get("peak_tflops", PRECISIONS)]
    if lacking:
        raise TypeError(f"peak_tflops has no {', '.join(lacking)}")


def from_data(name: str, data: JsonObject) -> Machine:
    """Build a machine from a description. KeyError, TypeError or ValueError for wrong data."""
    constants = data["constants"]
    values = {key: constant["value"] for key, constant in constants.items()}
    for key, value in values.items():
        _check_numbers(key, value)
    _check_kinds(values)
    for kind in CURVES:
        for curve in values.get(kind, []):
            for key, limit in CURVE_LIMITS.items():
                if curve.get(key, 0) > limit:
                    raise TypeError(f"{kind} has {key} {curve[key]!r:.60}, above {limit:g}")
        if kind in values:
            values[kind] = tuple(GemmCurve(**curve) for curve in values[kind])
    values["clocks_ghz"] = tuple(values["clocks_ghz"])
    needed = {
        f.name for f in fields(Machine) if f.default is MISSING and f.default_factory is MISSING
    }
    missing = needed - values.keys() - {"name", "title", "kind", "ghz", "sources"}
    if missing:
        raise KeyError(f"no {', '.join(sorted(missing))}")
    if data["kind"] not in KINDS:
        raise ValueError(f"kind is {data['kind']!r:.60}, not {' or '.join(KINDS)}")
    return Machine(
        name=name,
        title=data["title"],
        kind=data["kind"],
        ghz=values["nominal_ghz"],
        sources={key: constant["source"] for key, constant in constants.items()},
        **values,
    )
