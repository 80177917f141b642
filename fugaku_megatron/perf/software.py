"""Software as data (software.json): the work of an implementation besides matmuls, and whose parameters apply to it.

A style counts, per layer and micro-batch, how often element-wise operators move and how often they allocate each kind of tensor:
hidden (s, b, h), qkv (s, b, 3h/t), context (s, b, h/t), scores (b, n/t, s, s), mlp (s, b, f/t), logits (s, b, v/t).
logits_in_chunks: the head works on chunks of memory.logits_rows rows. recompute_ends_early: see accounting.recomputed_records.
computes_in: fp32 where 16-bit operands are widened, null where matmuls run in the run's own precision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..config import features
from ..config.checks import check
from ..config.run_config import RunConfig
from ..pipeline.parts import CHUNKED, INTERLEAVED, ONE_F_ONE_B, SPLITS_BACKWARD
from .machine import Machine, unknown

FITTED = Path(__file__).parent / "fitted.json"


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Values of one group of software; see PRIORS for meaning and unit. A rate of 0 is the machine's own.

    attention_forward, attention_backward: share of peak that a fused kernel without dropout reaches on the matmuls below the
    diagonal, two in forward and five in backward (accounting.ATTENTION_BACKWARD_SHARE), the maximum of share = maximum / (1 + half
    / s) at sequence length s; 0: attention runs as other matmuls do. dropout_flops: what a core does at its peak in the time in
    which dropout decides on one probability of attention, once in forward and once more in backward.
    """

    gemm_fraction: float = 1.0
    gemm_half: float = 1.0
    attention_forward: float = 0.0
    attention_backward: float = 0.0
    attention_forward_half: float = 0.0
    attention_backward_half: float = 0.0
    dropout_flops: float = 0.0
    unaligned: float = 1.0
    elementwise_fraction: float = 1.0
    call_us: float = 0.0
    fault_gbs: float = 0.0
    unmap_ms: float = 0.0
    reduce_gbs: float = 0.0
    intra_reduce_gbs: float = 0.0
    transfer_fraction: float = 1.0
    pipeline_warmup_s: float = 0.0
    iteration_s: float = 0.0
    old_torch: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MemoryParameters:
    """Values of the memory model; see MEMORY_PRIORS. The defaults are this project's, whose kernels keep what accounting counts."""

    base_mib: float = 600.0
    glibc_mib: float = 0.0
    peer_mib: float = 1.0
    activation: float = 1.0
    working: float = 1.0
    in_flight: float = 0.0
    logits: float = 1.0
    state_bytes: float = 16.0
    sharded_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is known of a parameter before the fit. prior, bounds: in `unit`."""

    name: str
    unit: str
    meaning: str
    prior: float
    spread: float  # standard deviation of the logarithm
    bounds: tuple[float, float]
    source: str


def _p(name: str, unit: str, prior: float, spread: float, low: float, high: float, meaning: str, source: str) -> Prior:
    return Prior(name=name, unit=unit, meaning=meaning, prior=prior, spread=spread, bounds=(low, high), source=source)


PRIORS: dict[str, tuple[Prior, ...]] = {
    "a64fx": (
        _p("gemm_fraction", "of the curve", 0.75, 0.3, 0.2, 1.0, "what torch's GEMM reaches of a good library's curve",
           "BLIS's curves of libraries at 48 cores: 62 (ArmPL) to 90 % (SSL2) at large sizes"),
        _p("gemm_half", "of the curve's", 1.0, 0.3, 0.4, 2.5, "size at which GEMM reaches half, relative to the curve",
           "BLIS's curve of 48 cores"),
        _p("elementwise_fraction", "of a CMG's STREAM", 0.46, 0.4, 0.05, 1.0, "eager element-wise operators of a rank",
           "93 of 201 GB/s: STREAM of 48 threads with all pages on one CMG, where prepaging puts them"),
        _p("call_us", "us", 100.0, 0.5, 1.0, 500.0, "time of an operator apart from its data: dispatch, team of 48 threads",
           "eager PyTorch takes 10-20 us on server cores; an A64FX core is some five times slower at such code"),
        _p("fault_gbs", "GB/s", 25.0, 0.7, 1.0, 200.0, "rate at which the kernel hands out zeroed pages again",
           "a few cores' write bandwidth"),
        _p("unmap_ms", "ms", 2.0, 0.7, 0.01, 50.0, "returning one large block when the network has registered it",
           "a hypothesis (docs/performance.md): deregistration is a system call that interrupts all 48 cores"),
        _p("reduce_gbs", "GB/s", 1.3, 0.5, 0.2, 6.3, "rate of a link in a large blocking all-reduce, summation included",
           "IMB Allreduce, slope 1-4 MiB: 2.6 GB/s of vector with 4 ranks a node; half for one rank that sums alone"),
        _p("intra_reduce_gbs", "GB/s", 0.3, 0.7, 0.05, 20.0, "rate of a link in a blocking all-reduce inside a node",
           "MPICH's 1.5 GB/s between two x86 cores (64 MiB in 44 ms); an A64FX core is some five times slower at such code"),
        _p("pipeline_warmup_s", "s per stage", 0.5, 0.8, 0.0, 3.0,
           "pipeline warm-up: first micro-batch of an iteration through a stage, serial in the fill",
           "the 30B tables show the first one or two iterations"),
        _p("iteration_s", "s", 0.3, 0.7, 0.0, 3.0, "per iteration and not shrinking: data loading, logging, stragglers",
           "plausible for Python on one A64FX core"),
        _p("old_torch", "factor", 1.4, 0.3, 1.0, 3.0, "torch 1.7 against 1.10: element-wise and per-call time",
           "vectorised loops came to AArch64 after 1.7"),
    ),
    "a100": (
        _p("gemm_fraction", "of peak", 0.75, 0.2, 0.4, 0.95, "GEMM with full tiles, full waves and long K",
           "cuBLAS reaches 70-85 % of 312 TFLOPS on large matmuls"),
        _p("gemm_half", "of 600", 0.5, 0.7, 0.01, 4.0, "K at which a tile reaches half its rate",
           "prologue of a few hundred steps"),
        _p("unaligned", "of a matmul's rate", 0.07, 0.5, 0.01, 0.6, "matmuls with a side that 8 does not divide",
           "no tensor cores: 19.5 of 312 TFLOPS"),
        _p("elementwise_fraction", "of HBM", 0.7, 0.2, 0.2, 0.95, "rate of fused element-wise kernels", "copies reach 80-90 %"),
        _p("call_us", "us", 5.0, 0.7, 0.5, 100.0, "launch of a kernel, synchronous (CUDA_LAUNCH_BLOCKING=1)", "launch latency"),
        _p("reduce_gbs", "GB/s", 6.0, 0.6, 0.5, 12.5, "rate of one GPU's share of the network in gradient reduction",
           "50 GB/s a node over 8 GPUs"),
        _p("intra_reduce_gbs", "GB/s", 150.0, 0.4, 20.0, 240.0, "rate of a GPU's NVLinks in tensor-parallel all-reduce",
           "NCCL tests: 235 GB/s bus bandwidth for large messages"),
        _p("transfer_fraction", "of a link", 0.5, 0.6, 0.02, 1.0, "what pipeline sends reach of a port", "8 GPUs share 4 ports"),
        _p("iteration_s", "s", 1.0, 0.8, 0.0, 20.0, "per iteration and not shrinking", "data loading, logging"),
    ),
}
MEMORY_PRIORS: dict[str, tuple[Prior, ...]] = {
    "a64fx": (
        _p("base_mib", "MiB", 700.0, 0.5, 1.0, 3000.0, "process, Python, libraries, data", "a Python process with torch and MPI"),
        _p("glibc_mib", "MiB", 300.0, 0.7, 1.0, 2000.0, "what glibc's arenas keep beyond tcmalloc", "fragments of mixed sizes"),
        _p("peer_mib", "MiB", 1.0, 0.7, 0.01, 3.0, "MPI's receive buffer for each peer, up to 256 of them",
           "Fujitsu MPI user's guide: common_tofu_max_fastmode_procs, about 1 MiB each"),
        _p("activation", "factor", 1.0, 0.4, 0.3, 3.0, "what is kept for the backward, against the formula", "1: the formula"),
        _p("working", "factor", 0.8, 0.5, 0.05, 3.0, "what one layer's backward needs for itself, against the formula",
           "below 1: not all at once"),
        _p("in_flight", "tensors", 2.0, 0.4, 0.5, 4.0, "tensors (s, b, h) at a stage's ends per micro-batch in flight",
           "input and output, before Megatron released outputs"),
        _p("logits", "tensors", 4.0, 0.4, 1.0, 10.0, "tensors as large as the logits at once",
           "logits, softmax, gradient, temporary"),
    ),
    "a100": (
        _p("base_mib", "MiB", 2500.0, 0.3, 1.0, 9000.0, "CUDA context, NCCL, caches", "context and NCCL buffers"),
        _p("activation", "factor", 1.0, 0.3, 0.3, 3.0, "what is kept for the backward, against the formula", "1: the formula"),
        _p("working", "factor", 0.8, 0.5, 0.05, 3.0, "what one layer's backward needs for itself, against the formula",
           "below 1: not all at once"),
        _p("in_flight", "tensors", 1.0, 0.5, 0.2, 4.0, "tensors (s, b, h) at a stage's ends per micro-batch in flight",
           "one buffer"),
        _p("logits", "tensors", 8.0, 0.4, 1.0, 20.0, "tensors as large as the 16-bit logits at once", "FP32 copies count twice"),
        _p("state_bytes", "bytes", 4.0, 0.2, 2.0, 10.0, "per parameter on every rank", "weights and gradients of 2 bytes"),
        _p("sharded_bytes", "bytes", 14.0, 0.2, 8.0, 24.0, "per parameter over the ZeRO-1 shards",
           "FP32 master, two moments, and gradients in part"),
    ),
}
# Not fitted: this project has not been measured on an A64FX. Each value's source is in docs/performance.md.
MODELLED: dict[str, Parameters] = {
    "fugaku_megatron": Parameters(gemm_fraction=1.0, gemm_half=1.0, attention_forward=0.65, attention_backward=0.62,
                                  dropout_flops=170.0, elementwise_fraction=0.7, call_us=5.0, iteration_s=0.25),
}
MODEL_ERROR = 0.2  # standard deviation of the logarithm of a time that no measurement has confirmed


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """One group's values with their uncertainty. covariance: of the values' logarithms, in the order of `names`."""

    values: Parameters
    names: tuple[str, ...]
    covariance: tuple[tuple[float, ...], ...]
    noise: float  # standard deviation of the residuals of the rows' logarithmic times
    memory: MemoryParameters
    ranges: dict[str, tuple[float, float]]  # model.facts -> smallest and largest value among the fitted rows


def fitted(group: str) -> Fitted:
    """The values of a group: those of MODELLED, or those that fitted.json holds."""
    if group in MODELLED:
        return Fitted(values=MODELLED[group], names=(), covariance=(), noise=MODEL_ERROR, memory=MemoryParameters(), ranges={})
    data = json.loads(FITTED.read_text())[group]
    names = tuple(data["parameters"])
    assert set(names) <= {f.name for f in fields(Parameters)}
    return Fitted(values=Parameters(**{n: data["parameters"][n]["value"] for n in names}), names=names,
                  covariance=tuple(map(tuple, data["covariance"])), noise=data["noise"],
                  memory=MemoryParameters(**{"peer_mib": 0.0, **{n: p["value"] for n, p in data["memory"].items()}}),
                  ranges={k: tuple(v) for k, v in data["ranges"].items()})


DATA = Path(__file__).parent / "software.json"
THIS_PROJECT = "fugaku_megatron"  # the name of this project's own trainer
ALIASES = {"this": THIS_PROJECT}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of a software. recompute: none, selective, full (all layers), block (some layers of each stage) or
    auto (as few of each stage as memory allows, which is never slower than none, block or full).

    names: rows of config/features.py that it has; other people's software has none of them.
    """

    ranks_per_node: tuple[int, ...]
    recompute: tuple[str, ...]
    zero_stages: tuple[int, ...]
    schedules: tuple[str, ...]
    names: frozenset[str] = frozenset()

    @staticmethod
    def from_names(names: frozenset[str], ranks_per_node: tuple[int, ...]) -> Choices:
        """The choices of this project's trainer with only the features `names`."""
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
        """The features that the software has and the run uses."""
        return frozenset(name for name in self.choices.names if features.FEATURES[name].used(run))

    def lacking(self, run: RunConfig) -> list[str]:
        """The features that the run has switched on by a flag without a value, and that the software does not have."""
        switches = [name for name in features.SWITCHES if features.FEATURES[name].used(run)]
        return [name for name in switches if name not in self.choices.names]

    def without(self, name: str) -> Software:
        """This project's software without one of its features."""
        return replace(self, choices=Choices.from_names(self.choices.names - {name}, self.choices.ranks_per_node))

    def cut(self, run: RunConfig) -> RunConfig:
        """The run as this software does it: without what it lacks, in 1F1B's order instead of one that it lacks, and with an even
        split of layers unless it has a balanced one.

        Raises ValueError for a --pipeline-split that it does not have, and for numbers of layers that do not divide.
        """
        for name in self.lacking(run):
            run = features.switched(run, name, False)
        if run.parallel.schedule not in self.choices.schedules:
            run = with_schedule(run, ONE_F_ONE_B, 1)
        if features.BALANCED_SPLIT in self.choices.names:
            return run
        layers, pp, split = run.model.num_layers, run.parallel.pipeline_model_parallel_size, run.parallel.pipeline_split
        check(split in ("balanced", "even"), f"--pipeline-split {split}: {self.name} cuts layers evenly; leave it out, or pass "
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
    has = Choices.from_names(frozenset(features.FEATURES), **choices) if facts["style"] == "native" else Choices(**choices)
    return Software(name=name, **{**facts, "machines": tuple(facts["machines"]), "choices": has},
                    counts=data["styles"][facts["style"]], fitted=fitted(facts["group"]))
