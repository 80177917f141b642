"""Metrics of an iteration and of a run: Megatron-DeepSpeed's log line both ways, and the row of the published tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_START = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|")

# How the records of an interval's iterations become one value of its line: a function of the records and the field's name.
Reduction = Callable[[Sequence["IterationMetrics"], str], Any]


def _last(records: Sequence[IterationMetrics], name: str) -> Any:
    return getattr(records[-1], name)


def _total(records: Sequence[IterationMetrics], name: str) -> int:
    return sum(getattr(record, name) for record in records)


def _mean(records: Sequence[IterationMetrics], name: str) -> float | None:
    values = [getattr(record, name) for record in records]
    return None if None in values else sum(values) / len(values)


def _counted(records: Sequence[IterationMetrics], name: str) -> int | None:
    counts = [record.counted_tokens for record in records]
    return None if None in counts else sum(count or 0 for count in counts)


def _counted_share(records: Sequence[IterationMetrics], name: str) -> float | None:
    """Return the share of the interval's tokens that count in the loss, in %."""
    counted, rate = _counted(records, name), _tokens_per_second(records, name)
    return (
        None
        if counted is None or not rate
        else 100 * counted / (rate * _total(records, "elapsed_seconds"))
    )


def _counted_per_second(records: Sequence[IterationMetrics], name: str) -> float | None:
    counted = _counted(records, name)
    return None if counted is None else counted / _total(records, "elapsed_seconds")


def _rounded_mean(records: Sequence[IterationMetrics], name: str) -> int | None:
    mean = _mean(records, name)
    return None if mean is None else round(mean)


def _mean_over_time(records: Sequence[IterationMetrics], name: str) -> float:
    """The mean of a rate: iterations weigh as much as they take seconds."""
    return sum(getattr(record, name) * record.elapsed_seconds for record in records) / _total(
        records, "elapsed_seconds"
    )


def _mean_of_updates(records: Sequence[IterationMetrics], name: str) -> float | None:
    """The mean over the iterations that were not skipped, or over all when all of them were, so that the field stays in the log."""
    return _mean([record for record in records if not record.skipped] or records, name)


def _samples_per_second(records: Sequence[IterationMetrics], name: str) -> float:
    return _total(records, "global_batch_size") / _total(records, "elapsed_seconds")


def _tokens_per_second(records: Sequence[IterationMetrics], name: str) -> float | None:
    """Samples per second times the tokens of a sample, which are those consumed over the samples consumed."""
    last = records[-1]
    if not last.consumed_tokens or not last.consumed_samples:
        return None
    return _samples_per_second(records, name) * last.consumed_tokens / last.consumed_samples


def _tokens_per_joule(records: Sequence[IterationMetrics], name: str) -> float | None:
    rate, watts = _tokens_per_second(records, name), records[-1].watts
    return rate / watts if rate and watts else None


def _nan_iterations(records: Sequence[IterationMetrics], name: str) -> int:
    return sum(
        record.lm_loss is not None and not math.isfinite(record.lm_loss) for record in records
    )


def rate_text(rate: float | None) -> str:
    """TFLOPs with two decimals as Megatron-DeepSpeed prints them; below 0.1 with three significant digits; "-" when unknown."""
    if rate is None:
        return "-"
    decimals = 2 - math.floor(math.log10(abs(rate))) if 0 < abs(rate) < 0.1 else 2
    return f"{rate:.{decimals}f}"


def _metric(
    label: str,
    form: str | Callable[[Any], str],
    reduction: Reduction,
    tag: str | None = None,
    interval_tag: str | None = None,
) -> Any:
    """A field of `IterationMetrics`, None by default.

    label, form: name and format, or function that formats, in the log line. tag: the TensorBoard tag (Megatron's) for the value
    of every iteration. interval_tag: the tag for the value of every interval.
    """
    return field(
        default=None,
        metadata={
            "label": label,
            "form": form,
            "reduction": reduction,
            "tag": tag,
            "interval_tag": interval_tag,
        },
    )


@dataclass(frozen=True)
class IterationMetrics:
    """The metrics of one iteration, or of a log interval: one log line, in which fields that are None do not appear.

    The fields are in the order of the line: Megatron-DeepSpeed's first, then our own. Seconds are per iteration, `tflops` is 10^12
    operations per second and rank. `minor_faults` and `system_seconds` (per iteration) and `clock_ghz` (measured after the last
    iteration) are those of the rank that prints; `resident_mib` and `shared_mib`, read then as well, are those of the largest rank.
    `lm_loss` is what is minimised, with the z-loss of --use-z-loss; `lm_loss_alone` is that without it, only with this flag.
    `load_balancing_loss` and `router_z_loss` are means over layers with experts, without their factors, and `largest_load` is the
    tokens of the expert with most, over the mean of its layer.
    `watts` is the mean power of all nodes during the iterations, None where one of them has no counter.
    An interval needs `elapsed_seconds`, `global_batch_size`, `lm_loss`, `skipped` and `tflops` of each of its iterations, and
    computes `nans`, `samples_per_second` and, where samples and tokens are counted, `tokens_per_second` and
    `tokens_per_joule` itself. Where the loss leaves tokens out, `counted_tokens` are those that it counts in the interval.
    """

    iteration: int
    train_iters: int
    consumed_samples: int | None = _metric("consumed samples", "{:12d}", _last)
    consumed_tokens: int | None = _metric("consumed tokens", "{:12d}", _last)
    elapsed_seconds: float | None = _metric(
        "elapsed time per iteration (s)", "{:.2f}", _mean, interval_tag="iteration-time"
    )
    learning_rate: float | None = _metric("learning rate", "{:.3E}", _last, "learning-rate")
    global_batch_size: int | None = _metric("global batch size", "{:5d}", _last, "batch-size")
    lm_loss: float | None = _metric("lm loss", "{:.6E}", _mean_of_updates, "lm loss")
    lm_loss_alone: float | None = _metric(
        "lm loss without z-loss", "{:.6E}", _mean_of_updates, "lm loss without z-loss"
    )
    load_balancing_loss: float | None = _metric(
        "load_balancing_loss", "{:.6E}", _mean, "load_balancing_loss"
    )
    router_z_loss: float | None = _metric("z_loss", "{:.6E}", _mean, "z_loss")
    largest_load: float | None = _metric(
        "largest load of an expert", "{:.2f}", _mean, "largest-expert-load"
    )
    loss_scale: float | None = _metric("loss scale", "{:.1f}", _last, "loss-scale")
    grad_norm: float | None = _metric("grad norm", "{:.3f}", _last, "grad-norm")
    num_zeros: float | None = _metric("num zeros", "{:.1f}", _last, "num-zeros")
    params_norm: float | None = _metric("params norm", "{:.3f}", _last, "params-norm")
    skipped: int | None = _metric("number of skipped iterations", "{:3d}", _total)
    nans: int | None = _metric("number of nan iterations", "{:3d}", _nan_iterations)
    samples_per_second: float | None = _metric("samples per second", "{:.3f}", _samples_per_second)
    tokens_per_second: float | None = _metric("tokens per second", "{:.1f}", _tokens_per_second)
    counted_tokens: int | None = _metric("counted tokens", "{:d}", _counted)
    counted_share: float | None = _metric("counted share (%)", "{:.1f}", _counted_share)
    counted_per_second: float | None = _metric(
        "counted tokens per second", "{:.1f}", _counted_per_second
    )
    tflops: float | None = _metric("TFLOPs", rate_text, _mean_over_time, interval_tag="throughput")
    minor_faults: int | None = _metric("minor faults", "{:d}", _rounded_mean)
    system_seconds: float | None = _metric("system time (s)", "{:.3f}", _mean)
    clock_ghz: float | None = _metric("clock (GHz)", "{:.2f}", _last)
    resident_mib: float | None = _metric("memory per rank (MiB)", "{:.0f}", _last)
    shared_mib: float | None = _metric("shared memory (MiB)", "{:.0f}", _last)
    watts: float | None = _metric("power (W)", "{:.1f}", _last, interval_tag="power")
    tokens_per_joule: float | None = _metric(
        "tokens per joule", "{:.4g}", _tokens_per_joule, interval_tag="tokens-per-joule"
    )

    @classmethod
    def from_interval(cls, records: Sequence[IterationMetrics]) -> IterationMetrics:
        """The metrics of an interval from those of its iterations, at least one, in order."""
        values = {name: metadata["reduction"](records, name) for name, metadata in METRICS}
        return cls(records[-1].iteration, records[-1].train_iters, **values)

    def format_line(self) -> str:
        """The line as Megatron-DeepSpeed prints it; fields that are None are left out."""
        parts = [f" iteration {self.iteration:8d}/{self.train_iters:8d} |"]
        for name, metadata in METRICS:
            value = getattr(self, name)
            if value is not None:
                form = metadata["form"]
                parts.append(
                    f" {metadata['label']}: {form(value) if callable(form) else form.format(value)} |"
                )
        return "".join(parts)


METRICS = tuple(
    (f.name, f.metadata) for f in fields(IterationMetrics) if f.metadata
)  # (field, what `_metric` says of it)


def parse_line(line: str) -> IterationMetrics:
    """The inverse of `format_line`. Ignores a prefix (rank, time) and unknown fields; reads milliseconds too.

    Raises ValueError if it is not a log line or a number cannot be read.
    """
    head = _START.search(line)
    if head is None:
        raise ValueError(f"not a log line of an iteration: {line.strip()[:80]!r}")
    pairs = (part.rpartition(":") for part in line[head.end() :].split("|"))
    texts = {name.strip(): value.strip() for name, _, value in pairs}
    if "elapsed time per iteration (ms)" in texts:
        texts["elapsed time per iteration (s)"] = str(
            float(texts["elapsed time per iteration (ms)"]) / 1000
        )
    values: dict[str, Any] = {}
    for name, metadata in METRICS:
        label, form = metadata["label"], metadata["form"]
        if label in texts:
            values[name] = _number(
                texts[label], int if isinstance(form, str) and form.endswith("d}") else float, label
            )
    return IterationMetrics(iteration=int(head[1]), train_iters=int(head[2]), **values)


def parse_log(lines: Iterable[str]) -> list[IterationMetrics]:
    """The iterations of a whole log; other lines are ignored."""
    return [parse_line(line) for line in lines if _START.search(line)]


def _number(text: str, kind: type, name: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not a number") from None


def published_header() -> tuple[str, ...]:
    """The printed columns of the tables of document 002."""
    return (
        "Nodes",
        "Freq",
        "Size",
        "DP",
        "TP",
        "PP",
        "MBS",
        "GBS",
        "Mem",
        "Sec/it",
        "TFLOPs",
        "Est. Aggr. PetaFLOPs",
        "Notes",
    )


def size_name(parameters: int) -> str:
    """124M, 1.3B, 30B."""
    unit, letter = (10**9, "B") if parameters >= 10**9 else (10**6, "M")
    return f"{parameters / unit:.{0 if parameters >= 10 * unit else 1}f}{letter}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def seconds_text(value: float | None) -> str:
    """Seconds as the tables print them, with more decimals for small models: four below 0.1, two below 100, else one."""
    return _or_dash(
        value,
        ".1f" if value and value >= 100 else ".2f" if value is None or value >= 0.1 else ".4f",
    )


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One run; None is printed as "-". seconds are per iteration, tflops per rank, memory_mib is the largest rank's."""

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
    notes: str = "-"

    @property
    def petaflops(self) -> float | None:
        """PFLOPs of all ranks, TFLOPs x ranks / 1024 as in the tables (which have one rank per node)."""
        return (
            None if self.tflops is None or self.ranks is None else self.tflops * self.ranks / 1024
        )

    def cells(self) -> tuple[str, ...]:
        """The cells under published_header()."""
        ghz, mib = (
            _or_dash(value, ".1f") + (unit if value is not None else "")
            for value, unit in ((self.ghz, "GHz"), (self.memory_mib, " MiB"))
        )
        layout = (_or_dash(value, "d") for value in (self.dp, self.tp, self.pp, self.mbs, self.gbs))
        return (
            _or_dash(self.nodes, "d"),
            ghz,
            self.size,
            *layout,
            mib,
            seconds_text(self.seconds),
            rate_text(self.tflops),
            _or_dash(self.petaflops, ".4f"),
            self.notes,
        )


# The printed title of a column -> the column's name here.
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
