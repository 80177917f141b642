"""Software as data (software.json): element-wise work of an implementation, and its parameters.

A style counts, per layer and micro-batch, moves and allocations of each kind of tensor: hidden (s,
b, h), qkv (s, b, 3h/t), context (s, b, h/t), scores (b, n/t, s, s), mlp (s, b, f/t), logits (s, b,
v/t). fitted.json has fitted values, tools/priors.json log-normal priors with unit, meaning and
source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config import features
from ..config.fields import check
from ..config.run_config import RunConfig
from ..pipeline.schedule_names import ONE_F_ONE_B, SCHEDULES, row
from .machine import Machine, unknown

FITTED = Path(__file__).parent / "fitted.json"


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """One software group's values; see tools/priors.json. A rate 0 is the machine's own.

    attention_forward, attention_backward: a fused kernel's share of peak without dropout on the
        matmuls below the diagonal (two in forward, five in backward): maximum / (1 + half / s) at
        sequence length s; 0: attention runs as other matmuls
    dropout_flops: a core's FLOPs at peak in the time for one dropout decision
    wait_ms: spread of the ranks' starts in a blocking collective between neighbouring nodes
    register_gbs: rate at which the network registers a newly mapped block of a collective
    bf16x3: --fp32-matmul bf16x3's rate relative to FP32
    """

    gemm_fraction: float = 1.0
    gemm_half: float = 1.0
    attention_forward: float = 0.0
    attention_backward: float = 0.0
    attention_forward_half: float = 0.0
    attention_backward_half: float = 0.0
    dropout_flops: float = 0.0
    bf16x3: float = 0.0
    unaligned: float = 1.0
    elementwise_fraction: float = 1.0
    call_us: float = 0.0
    fault_gbs: float = 0.0
    unmap_ms: float = 0.0
    reduce_gbs: float = 0.0
    wait_ms: float = 0.0
    register_gbs: float = 0.0
    intra_reduce_gbs: float = 0.0
    transfer_fraction: float = 1.0
    pipeline_warmup_s: float = 0.0
    iteration_s: float = 0.0
    old_torch: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MemoryParameters:
    """Memory model values; see tools/priors.json. threads: on a node with this project's kernels."""

    base_mib: float = 600.0
    glibc_mib: float = 0.0
    peer_mib: float = 1.0
    activation: float = 1.0
    working: float = 1.0
    in_flight: float = 0.0
    logits: float = 1.0
    state_bytes: float = 16.0
    sharded_bytes: float = 0.0
    threads: float = 0


# Not fitted: this project has not been measured on an A64FX. Each value's source is in docs/performance-model.md.
MODELLED: dict[str, Parameters] = {
    "fugaku_megatron": Parameters(
        gemm_fraction=1.0,
        gemm_half=1.0,
        attention_forward=0.65,
        attention_backward=0.62,
        dropout_flops=170.0,
        elementwise_fraction=0.7,
        call_us=5.0,
        iteration_s=0.25,
    ),
}


MODEL_ERROR = 0.2  # standard deviation of the logarithm of a time that no measurement has confirmed


class Fitted(NamedTuple):
    """One group's values. covariance: between the values' logarithms, ordered as `names`."""

    values: Parameters
    names: tuple[str, ...]
    covariance: tuple[tuple[float, ...], ...]
    noise: float  # standard deviation of the residuals of the rows' logarithmic times
    memory: MemoryParameters
    # model.facts -> smallest and largest value among the fitted rows
    ranges: dict[str, tuple[float, float]]
    # model.tensor_parallel of the fitted rows; None: no rows
    tensor_parallel: tuple[tuple[int, int, bool, str], ...] | None = None


def fitted(group: str) -> Fitted:
    """Load a group's fitted values, or return the modelled values of unmeasured software."""
    if group in MODELLED:
        return Fitted(
            values=MODELLED[group],
            names=(),
            covariance=(),
            noise=MODEL_ERROR,
            memory=MemoryParameters(),
            ranges={},
        )
    data = json.loads(FITTED.read_text())[group]
    names = tuple(data["parameters"])
    assert set(names) <= {f.name for f in fields(Parameters)}
    return Fitted(
        values=Parameters(**{n: data["parameters"][n]["value"] for n in names}),
        names=names,
        covariance=tuple(map(tuple, data["covariance"])),
        noise=data["noise"],
        memory=MemoryParameters(
            **{"peer_mib": 0.0, **{n: p["value"] for n, p in data["memory"].items()}}
        ),
        ranges={k: tuple(v) for k, v in data["ranges"].items()},
        tensor_parallel=tuple(tuple(seen) for seen in data["tensor_parallel"]),
    )


DATA = Path(__file__).parent / "software.json"


THIS_PROJECT = "fugaku_megatron"  # the name of this project's own trainer


ALIASES = {"this": THIS_PROJECT}


class Choices(NamedTuple):
    """Software choices.

    recompute: none, selective, full, block (some layers per stage) or auto (as few as memory
        allows)
    """

    ranks_per_node: tuple[int, ...]
    recompute: tuple[str, ...]
    zero_stages: tuple[int, ...]
    schedules: tuple[str, ...]
    names: frozenset[str] = frozenset()

    @staticmethod
    def from_names(names: frozenset[str], ranks_per_node: tuple[int, ...]) -> Choices:
        """Derive recompute kinds, ZeRO stages and schedules from names of features."""
        recompute = {
            "none": None,
            "selective": features.SELECTIVE,
            "block": features.BLOCK,
            "full": None,
            "auto": features.RECOMPUTE_AUTO,
        }

        def exists(feature: str | None) -> bool:
            return feature is None or feature in names

        return Choices(
            ranks_per_node=ranks_per_node,
            recompute=tuple(kind for kind, feature in recompute.items() if exists(feature)),
            zero_stages=(0, 1) if features.ZERO_1 in names else (0,),
            names=names,
            schedules=tuple(name for name, each in SCHEDULES.items() if exists(each.feature)),
        )


@dataclass(frozen=True, kw_only=True)
class Software:
    """Training-step implementation.

    style: name for its element-wise counts
    page_faults: "none" (memory is kept), "across nodes" (large blocks fault again, and cost more in
        runs on several nodes, whose network has registered them), "registered" (they always cost
        more)
    old_torch: element-wise work and operator calls are slower by PyTorch 1.7's factor
    """

    name: str
    title: str
    group: str
    style: str
    page_faults: str
    old_torch: bool
    machines: tuple[str, ...]
    choices: Choices
    counts: Mapping[str, Any] = field(compare=False, repr=False)
    fitted: Fitted = field(compare=False, repr=False)

    def active(self, run: RunConfig) -> frozenset[str]:
        return self.choices.names & features.used(run)

    def lacking(self, run: RunConfig) -> list[str]:
        missing = features.used(run) - self.choices.names
        return [name for name in features.SWITCHES if name in missing]

    def without(self, name: str) -> Software:
        return replace(
            self,
            choices=Choices.from_names(self.choices.names - {name}, self.choices.ranks_per_node),
        )

    def cut(self, run: RunConfig) -> RunConfig:
        """Return the run restricted to this software: 1F1B for missing schedules, an even split for
        a balanced one.

        Raise ValueError for an unsupported --pipeline-split or an uneven one.
        """
        for name in self.lacking(run):
            run = features.switched(run, name, False)
        if run.parallel.schedule not in self.choices.schedules:
            run = with_schedule(run, ONE_F_ONE_B, 1)
        if features.BALANCED_SPLIT in self.choices.names:
            return run
        layers = run.model.num_layers
        split = run.parallel.pipeline_split
        check(
            split in ("balanced", "even"),
            f"--pipeline-split {split}: {self.name} cuts layers evenly; leave it out, or pass "
            f"--software {THIS_PROJECT}",
        )
        check(
            layers % run.pp == 0 or layers < run.pp,
            f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {run.pp}, "
            f"and {self.name} cuts layers evenly: change one of them",
        )
        return replace(run, parallel=replace(run.parallel, pipeline_split="even"))

    @property
    def measured(self) -> bool:
        return bool(self.fitted.names)

    def known_on(self, machine: Machine) -> bool:
        return machine.name in self.machines or self.measured_on(machine)

    def measured_on(self, machine: Machine) -> bool:
        return self.style == "native" and bool(machine.native)

    def parameters(self, machine: Machine) -> Parameters:
        """Return the group's values, replaced by the machine's measured ones.

        Dropout that was not measured is part of attention's shares.
        """
        measured = {"dropout_flops": 0.0, **machine.native} if self.measured_on(machine) else {}
        return replace(self.fitted.values, **measured)

    def memory(self, machine: Machine) -> MemoryParameters:
        if self.style != "native":
            return self.fitted.memory
        base = self.fitted.memory.base_mib if machine.process_mib is None else machine.process_mib
        return replace(self.fitted.memory, base_mib=base, threads=machine.threads)


def with_schedule(run: RunConfig, name: str, chunks: int, pending: int | None = None) -> RunConfig:
    """Return the run with the flags of a schedule. pending: most pending backward passes"""
    virtual = chunks if row(name).chunks is None and chunks > 1 else None
    return replace(
        run,
        parallel=replace(
            run.parallel,
            pipeline_schedule=None if row(name).is_1f1b else name,
            num_virtual_stages_per_pipeline_rank=virtual,
            num_layers_per_virtual_pipeline_stage=None,
            zero_bubble_max_pending_backward=pending,
        ),
    )


def names() -> list[str]:
    return sorted(json.loads(DATA.read_text())["software"])


def load(name: str, flag: str = "--software") -> Software:
    """Load software by name or alias, with its fitted values. ValueError names `flag`."""
    data = json.loads(DATA.read_text())
    name = ALIASES.get(name, name)
    if name not in data["software"]:
        raise unknown(flag, name, data["software"])
    facts = data["software"][name]
    choices: dict[str, Any] = {key: tuple(value) for key, value in facts["choices"].items()}
    has = (
        Choices.from_names(frozenset(features.FEATURES), **choices)
        if facts["style"] == "native"
        else Choices(**choices)
    )
    return Software(
        name=name,
        **{**facts, "machines": tuple(facts["machines"]), "choices": has},
        counts=data["styles"][facts["style"]],
        fitted=fitted(facts["group"]),
    )
