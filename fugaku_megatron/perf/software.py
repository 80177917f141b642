"""Software as data: what an implementation does besides matrix products, and by which parameters it is judged (software.json).

A style counts, per layer and micro-batch, how often element-wise operators move and allocate each kind of tensor:
hidden (s, b, h), qkv (s, b, 3h/t), context (s, b, h/t), scores (b, n/t, s, s), mlp (s, b, f/t), logits (s, b, v/t).
logits_in_chunks: of rows, as memory.logits_rows says. recompute_ends_early: see accounting.recomputed_records.
computes_in: fp32 where 16-bit operands are widened, null where products run in the run's own precision.
Test: pytest tests/test_perf_software.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..run.config import RunConfig, check
from .machine import Machine, unknown
from .parameters import Fitted, MemoryParameters, Parameters, fitted

DATA = Path(__file__).parent / "software.json"


@dataclass(frozen=True, kw_only=True)
class Offers:
    """What software can be told. recompute: none, selective, full (all layers) or block (some layers of each stage)."""

    ranks_per_node: tuple[int, ...]
    recompute: tuple[str, ...]
    zero_stages: tuple[int, ...]
    schedules: tuple[str, ...]
    pipeline_split: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Software:
    """An implementation.

    group: whose parameters hold. style: counts of element-wise work. page_faults: "none" (memory is kept), "across nodes" (large
    blocks fault in again, and cost more to give back where the network has registered them), "registered" (always so).
    old_torch: element-wise work and calls take the old torch's factor.
    machines: where it is known to run. offers: what it can be told, for the planner.
    """

    name: str
    title: str
    group: str
    style: str
    page_faults: str
    old_torch: bool
    machines: tuple[str, ...]
    offers: Offers

    def cut(self, run: RunConfig) -> RunConfig:
        """The run with its layers cut into stages as this software does: evenly, unless it offers --pipeline-split.

        Raises ValueError for numbers of layers that it cannot be told, and for those that do not divide.
        """
        if self.offers.pipeline_split:
            return run
        layers, pp, split = run.model.num_layers, run.parallel.pipeline_model_parallel_size, run.parallel.pipeline_split
        check(split in ("balanced", "even"), f"--pipeline-split {split}: {self.name} cuts layers evenly; leave it out, or give "
              "--software this")
        check(layers % pp == 0 or layers < pp, f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {pp}, "
              f"and {self.name} cuts layers evenly: change one of them")
        return replace(run, parallel=replace(run.parallel, pipeline_split="even"))

    @property
    def counts(self) -> dict[str, Any]:
        return _data()["styles"][self.style]

    @property
    def fitted(self) -> Fitted:
        return fitted(self.group)

    @property
    def measured(self) -> bool:
        """Whether its parameters come from measured runs."""
        return bool(self.fitted.names)

    def known_on(self, machine: Machine) -> bool:
        return machine.name in self.machines or self.measured_on(machine)

    def measured_on(self, machine: Machine) -> bool:
        """Whether perf calibrate measured this software's kernels on the machine."""
        return self.style == "native" and bool(machine.native)

    def parameters(self, machine: Machine) -> Parameters:
        """What a prediction on the machine uses: the group's values, and what was measured on the machine itself."""
        return replace(self.fitted.values, **machine.native) if self.measured_on(machine) else self.fitted.values

    def memory(self, machine: Machine) -> MemoryParameters:
        """The same of memory."""
        measured = self.style == "native" and machine.process_mib is not None
        return replace(self.fitted.memory, base_mib=machine.process_mib) if measured else self.fitted.memory


@cache
def _data() -> dict[str, Any]:
    return json.loads(DATA.read_text())


def names() -> list[str]:
    return sorted(_data()["software"])


def load(name: str, flag: str = "--software") -> Software:
    """Software by name, as `flag` gave it. Raises ValueError naming the known ones."""
    if name not in _data()["software"]:
        raise unknown(flag, name, names())
    facts = _data()["software"][name]
    offers = Offers(**{key: tuple(value) for key, value in facts["offers"].items()})
    return Software(name=name, **{**facts, "machines": tuple(facts["machines"]), "offers": offers})
