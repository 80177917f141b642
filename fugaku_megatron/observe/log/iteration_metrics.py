"""Metrics of iterations as Megatron-DeepSpeed's log line, and a run's row in the published tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

UNKNOWN = "-"  # a cell without a value
_START = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|")

# (records of an interval's iterations, field name) -> the interval's value
Reduction = Callable[[Sequence["IterationMetrics"], str], Any]


class Metric(NamedTuple):
    """A field of `IterationMetrics`.

    tag, interval_tag: Megatron's TensorBoard tags
    """

    label: str
    form: str | Callable[[Any], str]
    reduction: Reduction
    tag: str | None
    interval_tag: str | None

    def text(self, value: Any) -> str:
        return self.form(value) if callable(self.form) else format(value, self.form)

    def parse(self, text: str) -> float:
        try:
            if isinstance(self.form, str) and self.form.endswith("d"):
                return int(text)
            return float(text)
        except ValueError:
            raise ValueError(f"{self.label}: {text!r} is not a number") from None


def _last(records: Sequence[IterationMetrics], name: str) -> Any:
    return getattr(records[-1], name)


def _total(records: Sequence[IterationMetrics], name: str) -> Any:
    return sum(getattr(record, name) for record in records)


def _known_total(records: Sequence[IterationMetrics], name: str) -> Any:
    """Return the sum, None if a value is unknown."""
    values = [getattr(record, name) for record in records]
    return None if None in values else sum(values)


def _mean(records: Sequence[IterationMetrics], name: str) -> float | None:
    total = _known_total(records, name)
    return None if total is None else total / len(records)


def _rounded_mean(records: Sequence[IterationMetrics], name: str) -> int | None:
    mean = _mean(records, name)
    return None if mean is None else round(mean)


def _mean_over_time(records: Sequence[IterationMetrics], name: str) -> Any:
    return sum(getattr(record, name) * record.elapsed_seconds for record in records) / _seconds(
        records
    )


def _mean_of_updates(records: Sequence[IterationMetrics], name: str) -> float | None:
    """Return the mean without skipped iterations; over all if all were skipped."""
    return _mean([record for record in records if not record.skipped] or records, name)


def _seconds(records: Sequence[IterationMetrics]) -> Any:
    return _total(records, "elapsed_seconds")


def _counted_share(records: Sequence[IterationMetrics], name: str) -> Any:
    counted = _known_total(records, "counted_tokens")
    rate = _tokens_per_second(records, name)
    if counted is None or not rate:
        return None
    return 100 * counted / (rate * _seconds(records))


def _counted_per_second(records: Sequence[IterationMetrics], _: str) -> Any:
    counted = _known_total(records, "counted_tokens")
    return None if counted is None else counted / _seconds(records)


def _samples_per_second(records: Sequence[IterationMetrics], _: str) -> Any:
    return _total(records, "global_batch_size") / _seconds(records)


def _tokens_per_second(records: Sequence[IterationMetrics], name: str) -> Any:
    last = records[-1]
    if not last.consumed_tokens or not last.consumed_samples:
        return None
    return _samples_per_second(records, name) * last.consumed_tokens / last.consumed_samples


def _tokens_per_joule(records: Sequence[IterationMetrics], name: str) -> Any:
    rate = _tokens_per_second(records, name)
    watts = records[-1].watts
    return rate / watts if rate and watts else None


def _nan_iterations(records: Sequence[IterationMetrics], _: str) -> int:
    losses = [record.lm_loss for record in records if record.lm_loss is not None]
    return sum(not math.isfinite(loss) for loss in losses)


def rate_text(rate: float | None) -> str:
    """Return TFLOPs with two decimals as in Megatron-DeepSpeed, below 0.1 with three significant digits."""
    if rate is None:
        return UNKNOWN
    decimals = 2
    if 0 < abs(rate) < 0.1:
        decimals -= math.floor(math.log10(abs(rate)))
    return f"{rate:.{decimals}f}"


def _metric(
    label: str,
    form: str | Callable[[Any], str],
    reduction: Reduction,
    tag: str | None = None,
    interval_tag: str | None = None,
) -> Any:
    metric = Metric(label, form, reduction, tag, interval_tag)
    return field(default=None, metadata={"metric": metric})


def _mtp_loss(depth: int) -> Any:
    """Return the metric of an MTP module's loss, named as in Megatron-LM."""
    label = f"mtp_{depth} loss"
    return _metric(label, ".6E", _mean_of_updates, label)


@dataclass(frozen=True)
class IterationMetrics:
    """Metrics of an iteration or a log interval, in the log line's order. None is not printed.

    elapsed_seconds, system_seconds, minor_faults: per iteration; faults and system time on the
        printing rank
    lm_loss: minimised loss, including the z-loss
    lm_loss_alone: without the z-loss, only with --use-z-loss
    mtp_1_loss: of the first MTP module, without its factor; not part of `lm_loss`. Others likewise, up to MAX_MODULES
    load_balancing_loss, router_z_loss: means over layers with experts, without their factors
    largest_load: the busiest expert's tokens, relative to its layer's mean
    counted_tokens: in the loss, if it excludes some
    tflops: per rank
    clock_ghz: printing rank, after the last iteration
    resident_mib, shared_mib: largest rank, after the last iteration
    watts: all nodes, mean
    """

    iteration: int
    train_iters: int
    consumed_samples: int | None = _metric("consumed samples", "12d", _last)
    consumed_tokens: int | None = _metric("consumed tokens", "12d", _last)
    elapsed_seconds: float | None = _metric(
        "elapsed time per iteration (s)", ".2f", _mean, interval_tag="iteration-time"
    )
    learning_rate: float | None = _metric("learning rate", ".3E", _last, "learning-rate")
    global_batch_size: int | None = _metric("global batch size", "5d", _last, "batch-size")
    lm_loss: float | None = _metric("lm loss", ".6E", _mean_of_updates, "lm loss")
    lm_loss_alone: float | None = _metric(
        "lm loss without z-loss", ".6E", _mean_of_updates, "lm loss without z-loss"
    )
    mtp_1_loss: float | None = _mtp_loss(1)
    mtp_2_loss: float | None = _mtp_loss(2)
    mtp_3_loss: float | None = _mtp_loss(3)
    mtp_4_loss: float | None = _mtp_loss(4)
    load_balancing_loss: float | None = _metric(
        "load_balancing_loss", ".6E", _mean, "load_balancing_loss"
    )
    router_z_loss: float | None = _metric("z_loss", ".6E", _mean, "z_loss")
    largest_load: float | None = _metric(
        "largest load of an expert", ".2f", _mean, "largest-expert-load"
    )
    loss_scale: float | None = _metric("loss scale", ".1f", _last, "loss-scale")
    grad_norm: float | None = _metric("grad norm", ".3f", _last, "grad-norm")
    num_zeros: float | None = _metric("num zeros", ".1f", _last, "num-zeros")
    params_norm: float | None = _metric("params norm", ".3f", _last, "params-norm")
    skipped: int | None = _metric("number of skipped iterations", "3d", _total)
    nans: int | None = _metric("number of nan iterations", "3d", _nan_iterations)
    samples_per_second: float | None = _metric("samples per second", ".3f", _samples_per_second)
    tokens_per_second: float | None = _metric("tokens per second", ".1f", _tokens_per_second)
    counted_tokens: int | None = _metric("counted tokens", "d", _known_total)
    counted_share: float | None = _metric("counted share (%)", ".1f", _counted_share)
    counted_per_second: float | None = _metric(
        "counted tokens per second", ".1f", _counted_per_second
    )
    tflops: float | None = _metric("TFLOPs", rate_text, _mean_over_time, interval_tag="throughput")
    minor_faults: int | None = _metric("minor faults", "d", _rounded_mean)
    system_seconds: float | None = _metric("system time (s)", ".3f", _mean)
    clock_ghz: float | None = _metric("clock (GHz)", ".2f", _last)
    resident_mib: float | None = _metric("memory per rank (MiB)", ".0f", _last)
    shared_mib: float | None = _metric("shared memory (MiB)", ".0f", _last)
    watts: float | None = _metric("power (W)", ".1f", _last, interval_tag="power")
    tokens_per_joule: float | None = _metric(
        "tokens per joule", ".4g", _tokens_per_joule, interval_tag="tokens-per-joule"
    )

    @classmethod
    def from_interval(cls, records: Sequence[IterationMetrics]) -> IterationMetrics:
        values = {name: metric.reduction(records, name) for name, metric in METRICS}
        return cls(records[-1].iteration, records[-1].train_iters, **values)

    def format_line(self) -> str:
        line = f" iteration {self.iteration:8d}/{self.train_iters:8d} |"
        for name, metric in METRICS:
            value = getattr(self, name)
            if value is not None:
                line += f" {metric.label}: {metric.text(value)} |"
        return line


METRICS: tuple[tuple[str, Metric], ...] = tuple(
    (each.name, each.metadata["metric"]) for each in fields(IterationMetrics) if each.metadata
)


def parse_line(line: str) -> IterationMetrics:
    """Invert `format_line`. Ignore a prefix (rank, time) and unknown fields; accept milliseconds."""
    head = _START.search(line)
    if head is None:
        raise ValueError(f"not a log line of an iteration: {line.strip()[:80]!r}")
    pairs = (part.rpartition(":") for part in line[head.end() :].split("|"))
    texts = {name.strip(): value.strip() for name, _, value in pairs}
    milliseconds = texts.get("elapsed time per iteration (ms)")
    if milliseconds is not None:
        texts["elapsed time per iteration (s)"] = str(float(milliseconds) / 1000)
    values: dict[str, Any] = {
        name: metric.parse(texts[metric.label]) for name, metric in METRICS if metric.label in texts
    }
    return IterationMetrics(iteration=int(head[1]), train_iters=int(head[2]), **values)


def parse_log(lines: Iterable[str]) -> list[IterationMetrics]:
    return [parse_line(line) for line in lines if _START.search(line)]


def size_name(parameters: int) -> str:
    """Return 124M, 1.3B, 30B."""
    unit = 10**6
    letter = "M"
    if parameters >= 10**9:
        unit = 10**9
        letter = "B"
    decimals = 0 if parameters >= 10 * unit else 1
    return f"{parameters / unit:.{decimals}f}{letter}"


def or_dash(value: float | None, form: str, unit: str = "") -> str:
    return UNKNOWN if value is None else format(value, form) + unit


def seconds_text(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value >= 100:
        return f"{value:.1f}"
    if value >= 0.1:
        return f"{value:.2f}"
    return f"{value:.4f}"


class PublishedRow(NamedTuple):
    """A run in the published tables; "-" for None.

    memory_mib: largest rank
    seconds: per iteration
    tflops: per rank
    """

    nodes: int | None
    ranks: int | None
    ghz: float | None
    size: str
    dp: int | None
    tp: int | None
    pp: int | None
    mbs: int | None
    gbs: int | None
    memory_mib: float | None
    seconds: float | None
    tflops: float | None
    notes: str = UNKNOWN

    @property
    def petaflops(self) -> float | None:
        """PFLOPs, TFLOPs x ranks / 1024 as in the tables (which have one rank per node)."""
        if self.tflops is None or self.ranks is None:
            return None
        return self.tflops * self.ranks / 1024

    def cells(self) -> dict[str, str]:
        """Return formatted values by the published tables' titles, unknown values as dashes."""
        return {
            "Nodes": or_dash(self.nodes, "d"),
            "Freq": or_dash(self.ghz, ".1f", "GHz"),
            "Size": self.size,
            "DP": or_dash(self.dp, "d"),
            "TP": or_dash(self.tp, "d"),
            "PP": or_dash(self.pp, "d"),
            "MBS": or_dash(self.mbs, "d"),
            "GBS": or_dash(self.gbs, "d"),
            "Mem": or_dash(self.memory_mib, ".1f", " MiB"),
            "Sec/it": seconds_text(self.seconds),
            "TFLOPs": rate_text(self.tflops),
            "Est. Aggr. PetaFLOPs": or_dash(self.petaflops, ".4f"),
            "Notes": self.notes,
        }


# Printed title of a column -> field of a row.
HEADERS = {
    "Nodes": "nodes",
    "GPUs": "gpus",
    "Ranks per node": "ranks_per_node",
    "Freq": "freq",
    "Size": "size",
    "Layers": "layers",
    "hidden-size": "hidden",
    "NHIDDEN": "hidden",
    "num-attention-heads": "heads",
    "NHEADS": "heads",
    "ZS": "zero",
    "async": "async",
    "DP": "dp",
    "TP": "tp",
    "MP": "tp",
    "PP": "pp",
    "MBS": "mbs",
    "GBS": "gbs",
    "AC": "ac",
    "Mem": "mem",
    "Sec/it": "seconds",
    "TFLOPs": "tflops",
    "TFLOPs*": "tflops",
    "Est. Aggr. PetaFLOPs": "petaflops",
    "Notes": "notes",
}
