"""Export of a run's figures and spans by OTLP, with the names of Megatron-LM's telemetry.

One rank exports, over HTTP. The variables of the OpenTelemetry SDK apply: OTEL_EXPORTER_OTLP_ENDPOINT and others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from ...config.run_config import RunConfig
from ...config.span_groups import span_groups
from ...host.observed import INSTRUCTIONS, Arguments, Keywords, Observed
from ...pipeline.instructions import Executor
from ..log.iteration_metrics import IterationMetrics
from .hours import SpanTimes, scheduler_job
from .spans import INSTRUCTION_SPANS, PHASE_SPANS, SPANS, TRAIN
from .writer import Writer

NAMESPACE = "megatron.training"
GAUGE = "gauge"
COUNTER = "counter"
HISTOGRAM = "histogram"
METHODS = {GAUGE: "set", COUNTER: "add", HISTOGRAM: "record"}  # of an instrument
SERVICE = "megatron-lm"
PROTOCOL = "http/protobuf"
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_PROTOCOL"
PACKAGE = "opentelemetry.exporter.otlp.proto.http"


class Figure(NamedTuple):
    """Field of `IterationMetrics`, times `factor`, under a name of Megatron-LM's training_metrics.py."""

    name: str
    kind: str
    description: str
    field: str
    factor: float = 1
    unit: str = ""

    def value(self, metrics: IterationMetrics) -> float | None:
        value: float | None = getattr(metrics, self.field)
        return None if value is None else value * self.factor


FIGURES = (
    Figure(
        "step_duration_ms",
        HISTOGRAM,
        "Mean seconds of an iteration x 1000",
        "elapsed_seconds",
        1e3,
        unit="ms",
    ),
    Figure("loss", GAUGE, "Mean training loss of the log interval", "lm_loss"),
    Figure("throughput_tflops", GAUGE, "TFLOP/s of a rank", "tflops"),
    Figure("grad_norm", GAUGE, "Norm of the gradients", "grad_norm"),
    Figure("skipped_iters", COUNTER, "Iterations without an update", "skipped"),
    Figure("learning_rate", GAUGE, "Learning rate", "learning_rate"),
    Figure("tokens_per_sec", GAUGE, "Tokens per second of all ranks", "tokens_per_second"),
    Figure(
        "memory_allocated_gb",
        GAUGE,
        "Memory of the largest rank in GiB",
        "resident_mib",
        1 / 1024,
    ),
)


@dataclass(frozen=True)
class Otlp:
    """Service name, span groups and resource attributes of an OTLP export."""

    service_name: str
    groups: frozenset[str]
    resource: dict[str, str | int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunConfig, dp: int) -> Otlp | None:
        """Build the export from flags and the job's environment variables; None without --otel-enabled."""
        output = run.output
        if not output.otel_enabled:
            return None
        run_id = os.environ.get("NEMO_LENS_RUN_ID") or scheduler_job() or uuid.uuid4().hex[:12]
        resource: dict[str, str | int | None] = {
            "nemo.run.id": run_id,
            "service.instance.id": f"{run_id}-rank0",
            "dl.tensor_parallel.size": run.tp,
            "dl.pipeline_parallel.size": run.pp,
            "dl.data_parallel.size": dp,
            "dl.batch_size": run.batch.global_batch_size,
            "dl.sequence_length": run.model.seq_length,
            "megatron.num_layers": run.model.num_layers,
            "megatron.hidden_size": run.model.hidden_size,
            "megatron.num_attention_heads": run.model.num_attention_heads,
            "megatron.train_iters": run.training.train_iters,
            "megatron.micro_batch_size": run.batch.micro_batch_size,
            "megatron.precision": run.precision.name,
        }
        return cls(
            output.otel_service_name or os.environ.get("OTEL_SERVICE_NAME") or SERVICE,
            span_groups(output.otel_span_groups),
            {name: value for name, value in resource.items() if value is not None},
        )

    def check(self) -> None:
        """Raise ValueError if the exporter package is missing or another protocol is requested."""
        try:
            found = importlib.util.find_spec(PACKAGE)
        except ImportError:
            found = None
        if found is None:
            raise ValueError(
                "--otel-enabled: a package is missing: pip install opentelemetry-exporter-otlp-proto-http, or this "
                "package with its extra [otel]"
            )
        protocol = os.environ.get(PROTOCOL_VARIABLE, PROTOCOL)
        if protocol != PROTOCOL:
            raise ValueError(
                f"--otel-enabled: {PROTOCOL_VARIABLE} is {protocol:.40}, and {PROTOCOL} alone is sent: unset it, and "
                "name the collector's port for HTTP (4318) in OTEL_EXPORTER_OTLP_ENDPOINT"
            )


class _Warning(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            text = [*record.getMessage().splitlines(), ""][0]
            self._say(f"note: --otel-enabled: {text:.200}; the run continues")


class Telemetry(Writer):
    """Figures and spans of this rank; without `otlp` nothing is exported.

    times: for hours.jsonl
    """

    def __init__(self, otlp: Otlp | None = None, say: Callable[[str], None] = print) -> None:
        self.times = SpanTimes()
        self._groups = otlp.groups if otlp else frozenset[str]()
        self._interval = contextlib.ExitStack()
        self._open_interval = False
        self._previous: Any = None
        self._providers: list[Any] = []
        self._instruments: dict[str, Callable[[float], None]] = {}
        if otlp:
            self._open(otlp, say)

    def _open(self, otlp: Otlp, say: Callable[[str], None]) -> None:
        # The packages take a second to import.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        logger = logging.getLogger("opentelemetry")
        logger.handlers = [_Warning(say)]
        logger.propagate = False
        resource = Resource.create({"service.name": otlp.service_name, **otlp.resource})
        traces = TracerProvider(resource=resource)
        traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        metrics = MeterProvider(
            resource=resource,
            metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())],
        )
        self._providers = [traces, metrics]
        self._tracer = traces.get_tracer(NAMESPACE)
        meter = metrics.get_meter(NAMESPACE)
        for figure in FIGURES:
            name = f"{NAMESPACE}.{figure.name}"
            create = getattr(meter, f"create_{figure.kind}")
            instrument = create(name, figure.unit, figure.description)
            self._instruments[figure.name] = getattr(instrument, METHODS[figure.kind])

    def interval(self, metrics: IterationMetrics) -> None:
        for figure in FIGURES:
            value = figure.value(metrics)
            if value is not None and figure.name in self._instruments:
                self._instruments[figure.name](value)

    @contextlib.contextmanager
    def span(self, name: str, **attributes: float) -> Iterator[dict[str, float]]:
        """Mark the block as a span of SPANS, below the span around the block.

        attributes: without their prefix `megatron.`.
        """
        row = SPANS[name]
        added: dict[str, float] = {}
        begin = time.perf_counter()
        if row.group not in self._groups:
            yield added
            self.times.add(name, time.perf_counter() - begin)
            return
        with self._tracer.start_as_current_span(name) as span:
            if row.goodput:
                span.set_attribute("is_goodput_span", True)
            try:
                yield added
            finally:
                self.times.add(name, time.perf_counter() - begin)
                for key, value in {**attributes, **added}.items():
                    span.set_attribute(f"megatron.{key}", value)

    def phase(self, name: str, **attributes: float) -> contextlib.AbstractContextManager[object]:
        return self.span(PHASE_SPANS[name], **attributes)

    def watch(self, executor: Executor) -> Executor:
        if not {"microbatch", "communication"} & self._groups:
            return executor

        def call(name: str, function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
            with self.span(INSTRUCTION_SPANS[name], microbatch_id=args[0].microbatch):
                return function(*args, **kwargs)

        return cast(Executor, Observed(executor, INSTRUCTIONS, call))

    def begin_interval(self) -> None:
        """Begin a span `megatron.train` in a new trace, linked to the one before, unless one is open.

        As in Megatron-LM, one trace has the iterations between two saves, so that a job that is killed loses one.
        """
        if self._open_interval or SPANS[TRAIN].group not in self._groups:
            return
        self._open_interval = True
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, use_span

        links = [Link(self._previous.get_span_context())] if self._previous else []
        self._previous = self._tracer.start_span(TRAIN, context=Context(), links=links)
        self._previous.set_attribute("is_goodput_span", True)
        self._interval.enter_context(use_span(self._previous, end_on_exit=True))

    def end_interval(self) -> None:
        self._interval.close()
        self._open_interval = False

    def close(self) -> None:
        self.end_interval()
        for provider in self._providers:
            provider.shutdown()
        self._providers = []
