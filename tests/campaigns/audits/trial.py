"""One silent fault on one of four ranks, which are threads, in a run with audits."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from fugaku_megatron.checkpoint import trusted
from fugaku_megatron.checkpoint.manifest import iteration_path, list_iterations
from fugaku_megatron.comm.base import Comm
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import Observed
from fugaku_megatron.nn.ops import FAMILIES
from fugaku_megatron.observe.numbers.audit import Audit, watch_numbers
from fugaku_megatron.run.kernel_choice import build_ops
from fugaku_megatron.run.loop import Session
from fugaku_megatron.training.trainer import Trainer
from tests.checks.session import Writer
from tests.fault_injection import MATMULS, change_after, flip_bit, matmul_result
from tests.helpers import lay_out, make_trainer
from tests.threads import ThreadWorld

ROUTED = {"num_experts": 4, "moe_router_topk": 2, "swiglu": True, "disable_bias_linear": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP 4": ("dp4", {}),
    "DP 2 x TP 2": ("tp2 dp2", {}),
    "DP 4, ZeRO-1": ("dp4 zero", {}),
    "DP 4, EP 2": ("dp4 ep2", ROUTED),
}
KINDS = ("weight", "moment", "gradient", "activation", "matmul")
RANKS = 4
AUDITS = 3  # iterations between audits of faults that stay
LONGEST = 12  # iterations of such a run
CALLS = 1000  # of a matmul for each wrong one
LONGEST_OF_MATMULS = 60  # iterations, each audited
SAVES = 2  # iterations between checkpoints


@dataclass(frozen=True)
class Fault:
    """A silent fault. onset: the first iteration with wrong bits, unless they are random"""

    seed: int
    layout: str
    kind: str
    rank: int
    onset: int

    @staticmethod
    def draw(seed: int, number: int) -> Fault:
        """Draw a fault of a campaign: kinds and layouts take turns."""
        draw = random.Random(f"{seed} {number}")
        kind = KINDS[number % len(KINDS)]
        layout = list(LAYOUTS)[number // len(KINDS) % len(LAYOUTS)]
        return Fault(draw.getrandbits(32), layout, kind, draw.randrange(RANKS), draw.randint(2, 6))

    @property
    def interval(self) -> int:
        return 1 if self.kind == "matmul" else AUDITS

    def run(self, directory: str) -> RunConfig:
        flags = {
            "num_layers": 2,
            "save": directory,
            "save_interval": SAVES,
            "audit_interval": self.interval,
            "train_iters": LONGEST_OF_MATMULS if self.kind == "matmul" else LONGEST,
        }
        layout, more = LAYOUTS[self.layout]
        return lay_out(layout, {**flags, **more})[0]


class Outcome(NamedTuple):
    """An end of a run with a fault.

    found: iteration in which the run ended, or None
    named: the line names the rank alone
    among: the line names the rank and another one
    trusted: no checkpoint with wrong bits can be loaded unasked
    """

    fault: Fault
    onset: int
    found: int | None
    named: bool
    among: bool
    trusted: bool
    line: str


class _Matmuls:
    """Kernels of which one in CALLS flips a bit of its result. first_wrong: iteration"""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.trainer: Trainer | None = None
        self.first_wrong: int | None = None
        self.library = Observed(kernels, MATMULS, self._call)

    def _call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if self.draw.randrange(CALLS) == 0:
            wrong = matmul_result(name, args).data
            if wrong.numel() and self.trainer:
                if self.first_wrong is None:
                    self.first_wrong = self.trainer.progress.iteration + 1
                flip_bit(wrong, self.draw.randrange(wrong.numel()), self.draw.randrange(31))
        return result


def _flip_weight(trainer: Trainer, draw: random.Random) -> None:
    trainer.optimizer.buckets.await_weights()
    weight = draw.choice(trainer.optimizer.flat.parameters).data
    flip_bit(weight, draw.randrange(weight.numel()), draw.randrange(31))


def _flip_moment(trainer: Trainer, draw: random.Random) -> None:
    shard = draw.choice(trainer.optimizer.shards)
    used = draw.choice([r for r in shard.ranges if r.end > r.start])
    moment = draw.choice((shard.exp_avg, shard.exp_avg_sq))
    flip_bit(moment, draw.randrange(used.start, used.end), draw.randrange(31))


def _stuck_gradient(trainer: Trainer, fault: Fault, draw: random.Random) -> None:
    """Flip one bit of the gradients of a bucket before every sum from the onset on."""
    buckets = trainer.optimizer.buckets
    flat = trainer.optimizer.flat
    number = draw.randrange(len(flat.buckets))
    start = flat.buckets[number].start
    owners = [each for each in zip(flat.parameters, flat.starts, strict=True) if each[1] >= start]
    parameter, begin = owners[0]
    element = begin - start + draw.randrange(parameter.numel())
    bit = draw.randrange(31)
    inner = buckets.before_sum

    def before_sum(index: int, grads: Any) -> None:
        if index == number and trainer.progress.iteration + 1 >= fault.onset:
            flip_bit(grads, element, bit)
        if inner:
            inner(index, grads)

    buckets.before_sum = before_sum


def _stuck_activation(trainer: Trainer, fault: Fault, draw: random.Random) -> None:
    """Flip one bit of the output of attention or an MLP in every forward from the onset on."""
    layer = draw.choice(trainer.stage.layers)
    module = draw.choice((layer.self_attention, layer.mlp))
    place = draw.random()
    bit = draw.randrange(31)

    def flip(module: Any, args: Any, output: Any) -> None:
        if trainer.progress.iteration + 1 >= fault.onset:
            flip_bit(output.data, int(place * output.numel()), bit)

    module.register_forward_hook(flip)


def train_with_fault(
    world: Comm, run: RunConfig, fault: Fault
) -> tuple[int, int | None, list[str]]:
    """Train on one rank; return exit code, the first iteration with a wrong matmul, and the log."""
    draw = random.Random(fault.seed)
    here = world.rank == fault.rank
    matmuls = _Matmuls(draw) if here and fault.kind == "matmul" else None
    library = matmuls.library if matmuls else kernels
    trainer = make_trainer(world, run, build_ops(run, dict.fromkeys(FAMILIES, "native"), library))
    if matmuls:
        matmuls.trainer = trainer
    if here and fault.kind == "activation":
        _stuck_activation(trainer, fault, draw)
    log = Writer()
    watch_numbers(trainer, log.event)
    assert isinstance(trainer.audit, Audit)
    trainer.audit.parts = 1  # as in a run with batches of real size
    if here and fault.kind == "gradient":
        _stuck_gradient(trainer, fault, draw)
    flips = {"weight": _flip_weight, "moment": _flip_moment}
    if fault.kind in flips:
        flip = partial(flips[fault.kind], draw=draw)
        change_after(trainer, fault.onset, flip, fault.rank)
    signals = SimpleNamespace(stop_requested=False)
    code = 0
    try:
        Session(trainer, log, run.training.train_iters or 0, (), signals=signals).run()
    except SystemExit as ended:
        code = int(ended.code or 0)
    trainer.close()
    wrong = matmuls.first_wrong if matmuls else None
    return code, wrong, log.lines


def _equals_undisturbed(directory: str, fault: Fault, iterations: Sequence[int]) -> bool:
    """Return whether these checkpoints have the tensors of a run without a wrong matmul: rounding may remove a wrong bit."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        right = replace(fault, rank=RANKS)  # no rank
        ThreadWorld(RANKS).run(train_with_fault, fault.run(other), right)
        pairs = [
            (path, Path(other) / path.relative_to(directory))
            for iteration in iterations
            for path in iteration_path(Path(directory), iteration).rglob("*.safetensors")
        ]
        return bool(pairs) and all(a.read_bytes() == b.read_bytes() for a, b in pairs)


def attempt(fault: Fault) -> Outcome:
    """Train with a fault, and judge the run's end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        results = ThreadWorld(RANKS).run(train_with_fault, fault.run(directory), fault)
        onset = fault.onset
        if fault.kind == "matmul":
            onset = results[fault.rank][1] or LONGEST_OF_MATMULS + 1
        suspect = trusted.suspects(directory)
        loadable = [
            each for each in list_iterations(directory) if each >= onset and each not in suspect
        ]
        right = not loadable or (
            fault.kind == "matmul" and _equals_undisturbed(directory, fault, loadable)
        )
    code, _, lines = results[0]
    line = lines[-1] if code else ""
    place = f"rank {fault.rank} (node "
    places = line.count(" (node ")
    return Outcome(
        fault,
        onset=onset,
        found=int(re.findall(r"iteration (\d+)", line)[0]) if code == 6 else None,
        named=place in line and places == 1,
        among=place in line and places > 1,
        trusted=right,
        line=line,
    )
