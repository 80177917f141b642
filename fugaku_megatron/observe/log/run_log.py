"""Reader of a log or history: iterations, and the configuration from its `run:` line or flags."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, fields

from ...cli.arguments import make_run
from ...config.fields import as_tuples, check, check_type, of_topic
from ...config.layout import Layout, flags_of_sizes
from ...config.model import ModelConfig
from ...config.parallel import ParallelConfig
from ...config.precision import PrecisionConfig
from ...config.run_config import RunConfig
from ...config.training import RECOMPUTE, BatchConfig, TrainingConfig
from ...costs.flops import hardware_flops, parameter_flops
from ...text.named_files import JsonObject, about
from ..export.metrics_writer import parse_peak_memory, parse_validation_line
from .iteration_metrics import IterationMetrics, parse_line

WARM_UP = 2  # first iterations of a job, excluded from medians
_RUN = "run: "
_RECORD = '{"kind": "'  # prefix of a history line
_CLOCK = re.compile(r" at ([\d.]+) GHz \(measured\)")
_RECOMPUTE = of_topic(TrainingConfig, RECOMPUTE)
_GROUPS = {
    "model": ModelConfig,
    "batch": BatchConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "training": TrainingConfig,
}
# Fields of the `run:` line: name -> group of the configuration, field.
_LOGGED = {
    f.name: (group, f)
    for group, config in _GROUPS.items()
    for f in fields(config)
    if group != "training" or f.name in _RECOMPUTE
}
FORMULAS: dict[str, Callable[[RunConfig, int], float]] = {
    "hardware": hardware_flops,
    "parameter": lambda run, size: parameter_flops(run, size, replicas=True),
}
_PEAK = re.compile(rb"peak memory per rank: max \d+ MiB")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Configuration of a logged run; properties are None if unknown."""

    values: JsonObject = field(default_factory=dict)
    recipe: str | None = None
    nodes: int | None = None
    ranks: int | None = None
    other_program: bool = False

    @property
    def run(self) -> RunConfig | None:
        if self.recipe is None and not any(f.name in self.values for f in fields(ModelConfig)):
            return None
        run = make_run(self.recipe, self.values)
        check(
            run.model.vocab_size is not None,
            "--vocab-size is missing: pass it with the other sizes of the model",
        )
        return run

    def parallel(self, name: str) -> int | None:
        value: int | None = self.values.get(name)
        if run := self.run:
            value = getattr(run.parallel, name)
        return value

    @property
    def tp(self) -> int | None:
        return self.parallel("tensor_model_parallel_size")

    @property
    def pp(self) -> int | None:
        return self.parallel("pipeline_model_parallel_size")

    @property
    def zero_stage(self) -> int | None:
        return self.parallel("zero_stage")

    @property
    def dp(self) -> int | None:
        """Ranks / (tp * pp * cp). ValueError if not an integer."""
        ranks = self.ranks
        tp = self.tp
        pp = self.pp
        if ranks is None or tp is None or pp is None:
            return None
        cp = self.parallel("context_parallel_size") or 1
        check(
            ranks % (tp * pp * cp) == 0,
            f"{ranks} ranks (--nodes x --ranks-per-node) are not divisible by "
            f"{flags_of_sizes(tp, pp, cp)}: change one of them",
        )
        return ranks // (tp * pp * cp)

    @property
    def mbs(self) -> int | None:
        return self.run.batch.micro_batch_size if self.run else self.values.get("micro_batch_size")

    @property
    def precision(self) -> str | None:
        if self.run:
            return self.run.precision.name
        return next((name for name in ("bf16", "fp16") if self.values.get(name)), None)

    @property
    def recompute(self) -> str | None:
        if self.run:
            return self.run.training.recompute_granularity or "none"
        return self.values.get("recompute_granularity")

    def check(self) -> None:
        _ = self.run
        _ = self.dp


def format_run(run: RunConfig, layout: Layout, nodes: int) -> str:
    """Return the `run:` line: JSON of nodes, ranks and relevant fields that are not at their defaults."""
    values = {
        name: value
        for name, (group, f) in _LOGGED.items()
        if (value := getattr(getattr(run, group), name)) != f.default
    }
    values["global_batch_size"] = layout.global_batch_size(run)
    return _RUN + json.dumps({"nodes": nodes, "world_size": layout.world_size, **values})


def parse_run(line: str) -> Job:
    """Return the job of a `run:` line. Raises ValueError for unknown or invalid values."""
    try:
        values = json.loads(line[line.index(_RUN + "{") + len(_RUN) :])
        nodes = values.pop("nodes")
        ranks = values.pop("world_size")
    except (ValueError, KeyError, RecursionError):
        raise ValueError(f"not a run line: {line.strip()[:80]!r}") from None
    _check_known("run line", values, _LOGGED)
    job = Job(values=as_tuples(values), nodes=nodes, ranks=ranks)
    with about("the run line is damaged"):
        for name, number in (("nodes", nodes), ("world_size", ranks)):
            check(
                type(number) is int and 0 < number < 2**31,
                f"{name} is {number!r:.60}, not a whole number from 1 to 2147483647",
            )
        for name, value in job.values.items():
            check_type(_LOGGED[name][1], value)
        job.check()
    return job


def _check_known(what: str, names: Iterable[str], known: Collection[str]) -> None:
    unknown = sorted({*names} - {*known})
    check(
        not unknown,
        f"the {what} has {', '.join(unknown)}, which this version does not know: read it with the version that wrote it",
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def exact_seconds(iteration: IterationMetrics) -> float | None:
    """Return seconds, from samples per second (3 decimals) if the time (2 decimals) is less exact."""
    seconds = iteration.elapsed_seconds
    rate = iteration.samples_per_second
    size = iteration.global_batch_size
    if rate and size and (seconds is None or 0.005 * rate > 0.0005 * seconds):
        return size / rate
    return seconds


class RunLog:
    """Log of a run, which may grow; an iteration that is logged again replaces the earlier values.

    memory_mib: maximum over ranks
    """

    def __init__(self, path: str, job: Job | None = None, formula: str = "hardware") -> None:
        self.path = path
        self.formula = formula
        self._described = job or Job(other_program=True)
        self._begin()

    def _begin(self) -> None:
        self.job = self._described
        self.experts: JsonObject | None = None
        self._by_iteration: dict[int, IterationMetrics] = {}
        self._validations: dict[int, float] = {}
        self._lines = 0
        self._offset = 0
        self._rest = b""  # an incomplete last line
        self._start("")

    def _start(self, machine: str) -> None:
        self.machine = machine
        self.memory_mib: int | None = None
        self._ended = False
        self._of_job: list[IterationMetrics] = []

    # Contents

    @property
    def iterations(self) -> list[IterationMetrics]:
        """Iterations of all jobs, in order."""
        return [self._by_iteration[number] for number in sorted(self._by_iteration)]

    @property
    def last(self) -> IterationMetrics | None:
        return self._by_iteration[max(self._by_iteration)] if self._by_iteration else None

    @property
    def validations(self) -> list[tuple[int, float]]:
        """Iterations and their validation losses, in order."""
        return sorted(self._validations.items())

    @property
    def counted(self) -> list[IterationMetrics]:
        """Iterations for medians: the last job's after WARM_UP, or all if there are no more."""
        return self._of_job[WARM_UP:] or self._of_job

    @property
    def ghz(self) -> float | None:
        clock = _CLOCK.search(self.machine)
        return float(clock[1]) if clock else self.job.values.get("cpu_frequency")

    @property
    def finished(self) -> bool:
        if self._ended or not (self.job.other_program and self._of_job):
            return self._ended
        return self._of_job[-1].iteration >= self._of_job[-1].train_iters

    @property
    def seconds(self) -> float | None:
        return _median(map(exact_seconds, self.counted))

    @property
    def tflops(self) -> float | None:
        """Logged, per rank."""
        return _median(i.tflops for i in self.counted)

    @property
    def watts(self) -> float | None:
        """All nodes, during iterations."""
        return _median(i.watts for i in self.counted)

    @property
    def tokens_per_joule(self) -> float | None:
        return _median(i.tokens_per_joule for i in self.counted)

    @property
    def recomputed_tflops(self) -> float | None:
        """TFLOPs per rank by costs/flops.py; None without model, batch or time."""
        run = self.job.run
        ranks = self.job.ranks
        if run is None or ranks is None:
            return None
        flops = FORMULAS[self.formula if self.job.other_program else "hardware"]
        return _median(
            flops(run, i.global_batch_size) / ranks / seconds / 1e12
            for i in self.counted
            if i.global_batch_size and (seconds := exact_seconds(i))
        )

    @property
    def gbs(self) -> int | None:
        return self.counted[-1].global_batch_size if self.counted else None

    # Reading

    def poll(self) -> bool:
        """Read new lines; return True if the file has grown. Begin again if a job has overwritten the file."""
        try:
            check(
                os.path.isfile(self.path) or not os.path.exists(self.path),
                f"{self.path}: is not a regular file: pass a run's log",
            )
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # overwritten by another job
                    self._begin()
                file.seek(self._offset)
                new = file.read()
        except OSError as error:
            raise ValueError(f"{self.path}: {error.strerror}: pass a run's log") from None
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        self.read_lines(line.decode(errors="replace") for line in whole)
        return bool(new)

    def finish(self) -> None:
        """Read all lines, and the last one if it is complete but for its end. ValueError without iterations."""
        self.poll()
        if self._rest.rstrip().endswith(b"|") or _PEAK.search(self._rest):
            self.read_lines([self._rest.decode(errors="replace")])
            self._rest = b""
        check(
            self.last,
            f"{self.path}: has no line of an iteration ('iteration 1/ 100 | ...'): pass a run's log or history.jsonl",
        )

    def read_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._lines += 1
            with about(f"{self.path} line {self._lines}"):
                self._read(line)

    def _read(self, line: str) -> None:
        if line.startswith(_RECORD):
            self._read_record(line)
        elif _CLOCK.search(line):
            self._start(line.strip())
        elif _RUN + "{" in line:
            self.job = parse_run(line)
        elif "iteration" in line and " | " in line:
            if "validation loss at iteration" in line:
                number, loss, _ = parse_validation_line(line)
                self._validations[number] = loss
            elif re.search(r"\biteration\s+\d+/", line):
                self._add(parse_line(line))
        elif (memory := parse_peak_memory([line])) is not None:
            self.memory_mib = memory
            self._ended = True

    def _read_record(self, line: str) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"not a record of a history: {line.strip()[:80]!r}") from None
        kind = record.pop("kind")
        known = {f.name: f for f in fields(IterationMetrics)}
        if kind == "train":
            _check_known("record", record, known)
            for f in known.values():
                check_type(f, record.get(f.name))
            self._add(IterationMetrics(**record))
        elif kind == "validation":
            check(
                type(record.get("iteration")) is int,
                f"iteration is {record.get('iteration')!r:.60}, not int",
            )
            check(
                isinstance(loss := record.get("lm_loss"), float),
                f"lm_loss is {loss!r:.60}, not float",
            )
            self._validations[record["iteration"]] = loss
        elif kind == "experts":
            self.experts = {"kind": kind, **record}

    def _add(self, metrics: IterationMetrics) -> None:
        self._of_job.append(metrics)
        self._by_iteration[metrics.iteration] = metrics
