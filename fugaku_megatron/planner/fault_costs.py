"""Seconds that faults and copies of the training state cost a job: measured in a run's hours.jsonl, or modelled.

A model's seconds follow from the bytes of a checkpoint and the rates of the machine. Left out: training that background copies slow
down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

from ..config.fields import check
from ..config.run_config import RunConfig
from ..costs.buckets import zero_shards
from ..costs.memory import frozen_elements
from ..costs.sizes import FP32_BYTES
from ..costs.stages import model_parameters
from ..observe.export import spans
from ..observe.export.hours import HOURS, read_hours
from ..observe.hang.watchdog import ITERATIONS as HANG_ITERATIONS
from ..observe.hang.watchdog import SHORTEST as SHORTEST_HANG
from ..observe.log.effective_time import EffectiveTime
from ..start.exit_codes import ExitCode
from ..text.named_files import JsonObject, StrPath
from .fault_model import KINDS, NODE, PROCESS, WIDE, Copies, Pace, Strategy
from .machine import GB
from .search import LayoutCandidate
from .system import System, start_up

SAVE = "save"
ASYNC = "async_save"
LOCAL = "save_local"
MEMORY = "save_memory"
COPY = "save after save_local"
COPIED = 3  # times that memory is read or written to copy a byte: read, write, and the read before a write
COMPARED = 0.003  # of an iteration at most, for what runs with audits compare in every iteration
BEGIN = 0.14  # s for which every save waits, measured with --async-save: comparison of replicas, agreement of ranks, manifest
LAUNCHER = 2.0  # s until a launcher has seen that a process ended (assumed)
MEASURED = "measured"
MODEL = "model"


@dataclass(frozen=True)
class Costs:
    """Seconds that a job's faults and copies cost.

    besides: audits and other work, as a share of an iteration
    start: from the process to the end of the first iteration, without loading
    detect: from a fault to the next process, by kind
    wait: for which training waits for a copy, by flag
    delay: further seconds until the copy is complete
    load: of a copy
    measured: names of the values that are no model's, such as "wait save"
    """

    iteration: float
    besides: float
    start: float
    detect: dict[str, float]
    wait: dict[str, float]
    delay: dict[str, float]
    load: dict[str, float]
    measured: frozenset[str] = frozenset()

    @property
    def pace(self) -> Pace:
        return Pace(self.iteration, self.besides)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (value, source, meaning) of each cost."""
        rows = [
            (f"{self.iteration:.4g} s", self._source("iteration"), "an iteration"),
            (
                f"{self.besides:.2%}",
                self._source("besides"),
                "of it in addition: audits, log lines",
            ),
            (f"{self.start:.4g} s", self._source("start"), "start without loading"),
        ]
        for name, values, meaning in (
            ("detect", self.detect, "from a fault to the next start: {} fault"),
            ("wait", self.wait, "training waits for a copy: --{}"),
            ("delay", self.delay, "until the copy is complete: --{}"),
            ("load", self.load, "loading: --{}"),
        ):
            for key, value in values.items():
                if value:
                    what = meaning.format(key.replace("_", "-"))
                    rows.append((f"{value:.4g} s", self._source(f"{name} {key}"), what))
        return rows

    def _source(self, name: str) -> str:
        return MEASURED if name in self.measured else MODEL

    def strategies(self) -> list[Strategy]:
        """Return the ways to copy the state, without intervals."""
        found: list[Strategy] = []
        if SAVE in self.wait:
            found.append(((self._copies(SAVE, KINDS),),))
        if ASYNC in self.wait:
            background = self._copies(ASYNC, KINDS)
            found.append(((background,),))
            if MEMORY in self.wait:
                memory = self._copies(MEMORY, (PROCESS, NODE))
                found.append(((memory,), (background,)))
        if LOCAL in self.wait:
            local = self._copies(LOCAL, (PROCESS,))
            shared = self._copies(COPY, KINDS)
            found.append(((local, shared),))
        return found

    def _copies(self, flag: str, survives: Sequence[str]) -> Copies:
        load = self.load[SAVE if flag in (ASYNC, COPY) else flag]
        restart = {kind: self.detect[kind] + self.start + load for kind in KINDS}
        return Copies(flag, frozenset(survives), self.wait[flag], self.delay[flag], restart)


def checkpoint_bytes(run: RunConfig) -> float:
    """Return the bytes of a checkpoint of the trained weights in FP32 and their moments, in FP32 if of 8 bits, and of frozen weights."""
    alone = run.on_one_rank
    trained = model_parameters(run) - frozen_elements(alone, 0)
    moments = run.optimizer.moment_bytes
    if run.optimizer.exp_avg_dtype == "int8":
        moments = FP32_BYTES * len(run.optimizer.states)
    if run.output.no_save_optim:
        moments = 0.0
    kept = 0.0 if run.lora.on else frozen_elements(alone, 0) * run.element_bytes
    return kept + trained * (FP32_BYTES + moments)


def file_system_rate(system: System, asked: float | None) -> float:
    """Return the GB/s of the whole job. ValueError if they are unknown.

    asked: --file-system-gbs
    """
    machine = system.machine
    if asked is not None:
        return asked
    if machine.file_system_gbs is None or machine.node_storage_gbs is None:
        raise ValueError(
            f"--mtbf: {machine.name} has no rate of a file system: pass --file-system-gbs"
        )
    return min(machine.file_system_gbs, system.nodes * machine.node_storage_gbs)


def modelled(plan: LayoutCandidate, rate: float) -> Costs:
    """Return a plan's costs. rate: `file_system_rate`"""
    system = plan.system
    machine = system.machine
    nodes = system.nodes
    whole = checkpoint_bytes(plan.run)
    writers = plan.layout.tp * plan.layout.pp * zero_shards(plan.run, plan.layout)
    own = whole / min(nodes, math.ceil(writers / system.ranks_per_node))  # of a node
    stored = whole / (rate * GB)
    snapshot = COPIED * own / (machine.stream_gbs * GB)
    wait = {SAVE: BEGIN + stored, ASYNC: BEGIN + snapshot}
    delay = {SAVE: 0.0, ASYNC: stored}
    load = {SAVE: stored}
    if machine.node_storage_gbs:
        load[LOCAL] = own / (machine.node_storage_gbs * GB)
        wait[LOCAL] = BEGIN + load[LOCAL]
        wait[COPY] = delay[LOCAL] = 0.0
        delay[COPY] = stored
    if nodes > 1:
        load[MEMORY] = own / (machine.link_gbs * GB)
        wait[MEMORY] = BEGIN + snapshot
        delay[MEMORY] = max(load[MEMORY], plan.seconds)  # sent during the next iteration
    interval = plan.run.numbers.audit_interval
    silent = max(SHORTEST_HANG, HANG_ITERATIONS * plan.seconds)
    return Costs(
        iteration=plan.seconds,
        besides=1 / interval + COMPARED if interval else 0.0,
        start=start_up(nodes) + plan.seconds,
        detect={PROCESS: LAUNCHER, NODE: silent, WIDE: silent},
        wait=wait,
        delay=delay,
        load=load,
    )


def read_history(save: StrPath) -> list[JsonObject]:
    """Return the lines of the hours.jsonl in --costs-from. ValueError without a record of iterations."""
    path = Path(save) / HOURS
    check(
        path.is_file(),
        f"--costs-from {save}: there is no {HOURS} in it: pass the --save of a run",
    )
    lines = read_hours(path)
    check(
        any(line.get("count") for line in lines),
        f"--costs-from {save}: its {HOURS} has no iteration: pass the --save of a run that has trained",
    )
    return lines


def measured(costs: Costs, lines: Sequence[JsonObject]) -> Costs:
    """Replace what the lines of a run's hours.jsonl have measured."""
    found = EffectiveTime(lines)
    count = sum(line["count"] for line in lines if line["event"] == "iterations")
    seconds = found.seconds
    trained = sum(seconds.get(cause, 0.0) for cause in ("training", "evaluation", "repeated"))
    besides = sum(seconds.get(cause, 0.0) for cause in ("audit", "other"))
    costs = replace(
        costs,
        iteration=trained / count,
        besides=besides / trained,
        measured=frozenset({"iteration", "besides"}),
    )
    return _restarts(_saves(costs, lines, seconds), lines)


def _saves(costs: Costs, lines: Sequence[JsonObject], seconds: dict[str, float]) -> Costs:
    saving = next((line["saving"] for line in lines if line.get("saving")), SAVE)
    for flag, number, cause, delay in (
        (MEMORY, "copies", "copying", costs.iteration),
        (saving, "saves", "saving", 0.0),
    ):
        if count := sum(line.get(number, 0) for line in lines):
            costs = replace(
                costs,
                wait=costs.wait | {flag: seconds.get(cause, 0.0) / count},
                delay={flag: delay} | costs.delay,
                load={flag: 0.0} | costs.load,
                measured=costs.measured | {f"wait {flag}"},
            )
    return costs


def _restarts(costs: Costs, lines: Sequence[JsonObject]) -> Costs:
    """Measure starts, and the time from faults to the next start.

    A fault is assumed in the middle of a log interval. A hang is found as a lost node is: by silence. Starts that ended before
    their first line are left out.
    """
    starts = []
    loads = []
    detections: dict[str, list[float]] = {PROCESS: [], NODE: []}
    waits = []
    pace = costs.pace
    for before, line in pairwise(lines):
        events = before["event"], line["event"]
        if events == ("start", "iterations") and spans.STARTUP in line["seconds"]:
            load = line["seconds"].get(spans.LOAD, 0.0)
            later = line["seconds"].get(spans.SAVE, 0.0) + line["seconds"].get(spans.EVALUATE, 0.0)
            whole = line["time"] - before["begun"] - pace.seconds(line["count"])
            starts.append(whole - load - later)
            if before["iteration"]:
                loads.append(load)
        if events == ("iterations", "end") and line["code"] != ExitCode.FINISHED:
            half = pace.seconds(before["count"]) / 2
            kind = NODE if line["code"] == ExitCode.HANG else PROCESS
            detections[kind].append(max(0.0, line["time"] - before["time"] - half))
        if events == ("end", "start"):
            waits.append(max(0.0, line["begun"] - before["time"]))
    names = set()
    if starts:
        costs = replace(costs, start=max(0.0, mean(starts)))
        names.add("start")
    if loads:
        costs = replace(costs, load=costs.load | {SAVE: mean(loads)})
        names.add(f"load {SAVE}")
    for kind, seconds in detections.items():
        if seconds:
            whole = mean(seconds) + mean(waits or [0.0])
            costs = replace(costs, detect=costs.detect | {kind: whole})
            names.add(f"detect {kind}")
    return replace(costs, measured=costs.measured | names)
