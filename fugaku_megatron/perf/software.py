"""Software as data (software.json): the work of an implementation besides matrix products, and whose parameters apply to it.

A style counts, per layer and micro-batch, how often element-wise operators move and how often they allocate each kind of tensor:
hidden (s, b, h), qkv (s, b, 3h/t), context (s, b, h/t), scores (b, n/t, s, s), mlp (s, b, f/t), logits (s, b, v/t).
logits_in_chunks: the head works on chunks of memory.logits_rows rows. recompute_ends_early: see accounting.recomputed_records.
computes_in: fp32 where 16-bit operands are widened, null where products run in the run's own precision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import features
from ..config.checks import check
from ..config.run_config import RunConfig
from ..pipeline.parts import CHUNKED, INTERLEAVED, ONE_F_ONE_B, SPLITS_BACKWARD
from .machine import Machine, unknown
from .parameters import Fitted, MemoryParameters, Parameters, fitted

DATA = Path(__file__).parent / "software.json"
THIS_PROJECT = "fugaku_megatron"  # the name of this project's own trainer
ALIASES = {"this": THIS_PROJECT}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices that software offers. recompute: none, selective, full (all layers), block (some layers of each stage) or
    auto (as few of each stage as memory allows, which is never slower than none, block or full).

    names: rows of config/features.py that it has; other people's software has none of them. Raises ValueError for a row that is not
    built: a gain without an implementation is not modelled.
    """

    ranks_per_node: tuple[int, ...]
    recompute: tuple[str, ...]
    zero_stages: tuple[int, ...]
    schedules: tuple[str, ...]
    names: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        missing = sorted(self.names - features.built())
        check(not missing, f"{', '.join(missing)}: the trainer does not have it, so it is not modelled: see config/features.py")

    @staticmethod
    def from_names(names: frozenset[str], ranks_per_node: tuple[int, ...]) -> Choices:
        """The choices of this project's trainer with only the offers `names`."""
        recompute = {"none": True, "selective": features.SELECTIVE in names, "block": features.BLOCK in names, "full": True,
                     "auto": features.RECOMPUTE_AUTO in names}
        return Choices(ranks_per_node=ranks_per_node, recompute=tuple(kind for kind, there in recompute.items() if there),
                      zero_stages=(0, 1) if features.ZERO_1 in names else (0,), names=names,
                      schedules=(ONE_F_ONE_B, *(INTERLEAVED,) * (features.INTERLEAVED in names),
                                 *SPLITS_BACKWARD * (features.ZERO_BUBBLE in names)))


@dataclass(frozen=True, kw_only=True)
class Software:
    """An implementation of the training step.

    group: the group of software whose fitted parameters apply. style: name of its counts of element-wise work.
    page_faults: "none" (memory is kept), "across nodes" (large blocks fault in again, and in runs on several nodes, where the
    network has registered them, cost more to return), "registered" (they always cost more).
    old_torch: element-wise work and operator calls take longer by the factor of PyTorch 1.7.
    machines: names of machines on which it has run. choices: those of the planner; this project's come from config/features.py.
    counts: the row of `style` in software.json. fitted: the values of `group`. Both follow from names that are compared, so they
    take no part in comparisons.
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
        """The offers that the software has and the run uses."""
        return frozenset(name for name in self.choices.names if features.FEATURES[name].used(run))

    def lacking(self, run: RunConfig) -> list[str]:
        """The offers that the run has switched on by a flag without a value, and that the software does not have."""
        switches = [name for name in features.SWITCHES if features.FEATURES[name].used(run)]
        return [name for name in switches if name not in self.choices.names]

    def without(self, name: str) -> Software:
        """This project's software without one of its offers."""
        return replace(self, choices=Choices.from_names(self.choices.names - {name}, self.choices.ranks_per_node))

    def cut(self, run: RunConfig) -> RunConfig:
        """The run as this software does it: without what it lacks, in 1F1B's order instead of one that it lacks, and with an even
        split of layers unless it has a balanced one.

        Raises ValueError for a --pipeline-split that it does not offer, and for numbers of layers that do not divide.
        """
        for name in self.lacking(run):
            run = features.switched(run, name, False)
        if run.parallel.schedule not in self.choices.schedules:
            run = with_schedule(run, ONE_F_ONE_B, 1)
        if features.BALANCED_SPLIT in self.choices.names:
            return run
        layers, pp, split = run.model.num_layers, run.parallel.pipeline_model_parallel_size, run.parallel.pipeline_split
        check(split in ("balanced", "even"), f"--pipeline-split {split}: {self.name} cuts layers evenly; leave it out, or give "
              f"--software {THIS_PROJECT}")
        check(layers % pp == 0 or layers < pp, f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {pp}, "
              f"and {self.name} cuts layers evenly: change one of them")
        return replace(run, parallel=replace(run.parallel, pipeline_split="even"))

    @property
    def measured(self) -> bool:
        """Whether its parameters come from measured runs."""
        return bool(self.fitted.names)

    def known_on(self, machine: Machine) -> bool:
        """Whether it has run on the machine, or its kernels were measured there."""
        return machine.name in self.machines or self.measured_on(machine)

    def measured_on(self, machine: Machine) -> bool:
        """Whether calibrate measured this software's kernels on the machine."""
        return self.style == "native" and bool(machine.native)

    def parameters(self, machine: Machine) -> Parameters:
        """The values for a prediction on the machine: the group's, replaced by those that were measured on the machine itself.

        Where dropout was not measured apart, it is in the measured shares of attention.
        """
        measured = {"dropout_flops": 0.0, **machine.native} if self.measured_on(machine) else {}
        return replace(self.fitted.values, **measured)

    def memory(self, machine: Machine) -> MemoryParameters:
        """The memory model's values for a prediction on the machine, in the same way."""
        if self.style == "native" and machine.process_mib is not None:
            return replace(self.fitted.memory, base_mib=machine.process_mib)
        return self.fitted.memory


def with_schedule(run: RunConfig, name: str, chunks: int, pending: int | None = None) -> RunConfig:
    """The run with another pipeline schedule. chunks: of each stage. pending: see --zero-bubble-max-pending-backward."""
    virtual = chunks if name in CHUNKED and chunks > 1 else None
    return replace(run, parallel=replace(run.parallel, pipeline_schedule=None if name == ONE_F_ONE_B else name,
                                         num_virtual_stages_per_pipeline_rank=virtual, num_layers_per_virtual_pipeline_stage=None,
                                         zero_bubble_max_pending_backward=pending))


def names() -> list[str]:
    """The software that software.json describes."""
    return sorted(json.loads(DATA.read_text())["software"])


def load(name: str, flag: str = "--software") -> Software:
    """Software by its name or alias, the value of `flag`. Raises ValueError naming the known ones."""
    data, name = json.loads(DATA.read_text()), ALIASES.get(name, name)
    if name not in data["software"]:
        raise unknown(flag, name, data["software"])
    facts = data["software"][name]
    choices: dict[str, Any] = {key: tuple(value) for key, value in facts["choices"].items()}
    has = Choices.from_names(features.built(), **choices) if facts["style"] == "native" else Choices(**choices)
    return Software(name=name, **{**facts, "machines": tuple(facts["machines"]), "choices": has},
                    counts=data["styles"][facts["style"]], fitted=fitted(facts["group"]))
