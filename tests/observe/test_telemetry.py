"""Export of figures and spans by OTLP to a collector."""

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.span_groups import span_groups
from fugaku_megatron.observe.export import telemetry as telemetry_module
from fugaku_megatron.observe.export.telemetry import Otlp, Telemetry
from fugaku_megatron.observe.hang.watchdog import Watchdog
from fugaku_megatron.observe.log.iteration_metrics import IterationMetrics
from fugaku_megatron.run import pretrain as pretrain_module
from fugaku_megatron.run.loop import Session
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

WORDS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 "
    "--mock-data --vocab-size 64 --log-interval 1 --eval-iters 1 --eval-interval 2 --kernels torch --train-iters 4 "
    "--save-interval 2 --otel-enabled"
).split()
FIGURES = {
    "step_duration_ms",
    "loss",
    "throughput_tflops",
    "grad_norm",
    "learning_rate",
    "skipped_iters",
    "tokens_per_sec",
    "memory_allocated_gb",
}


class Collector(HTTPServer):
    """A collector that keeps what it receives: metric -> values, spans in the order of their ends."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.metrics, self.spans, self.resources = {}, [], []

    def of(self, name):
        return [span for span in self.spans if span.name == name]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/v1/metrics"):
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.server.resources.append(attributes(resource.resource))
                for scope in resource.scope_metrics:
                    self.server.metrics.update((metric.name, metric) for metric in scope.metrics)
        else:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resources.append(attributes(resource.resource))
                for scope in resource.scope_spans:
                    self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def attributes(of):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@pytest.fixture
def collector(monkeypatch):
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(pretrain_module, "configure_process", lambda *_: "")
    monkeypatch.setattr(
        pretrain_module, "iteration_line", lambda *_: ""
    )  # which measures the machine
    monkeypatch.setattr(Session, "_draw", lambda *_: None)
    yield
    logging.getLogger("opentelemetry").handlers = []


def train(*words, world=None):
    pretrain_module.pretrain(parse([*WORDS, *words]), world or SoloComm(), Watchdog.off())


def test_a_collector_receives_the_figures_and_spans_under_megatrons_names(collector, tmp_path):
    save = ["--save", str(tmp_path), "--otel-service-name", "run"]
    train(*save, "--otel-span-groups", "per_step,microbatch")
    assert set(collector.metrics) == {f"megatron.training.{name}" for name in FIGURES}
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    losses = [each["lm_loss"] for each in history if each["kind"] == "train"]
    (loss,) = collector.metrics["megatron.training.loss"].gauge.data_points
    assert loss.as_double == losses[-1]
    (duration,) = collector.metrics["megatron.training.step_duration_ms"].histogram.data_points
    assert (
        duration.count == 4 and collector.metrics["megatron.training.step_duration_ms"].unit == "ms"
    )

    names = {span.name for span in collector.spans}
    assert names == {
        "megatron.startup",
        "megatron.startup.model_init",
        "megatron.startup.dataloader",
        "megatron.checkpoint.load",
        "megatron.train",
        "megatron.train.first_iteration",
        "megatron.train.iteration",
        "megatron.train.iteration.audit",
        "megatron.train.iteration.forward_backward",
        "megatron.train.iteration.optimizer",
        "megatron.microbatch.forward",
        "megatron.microbatch.backward",
        "megatron.evaluate",
        "megatron.evaluate.step",
        "megatron.checkpoint.save",
    }
    evaluations = {span.span_id for span in collector.of("megatron.evaluate")}
    for step in collector.of("megatron.evaluate.step"):
        assert step.parent_span_id in evaluations
        assert attributes(step) == {"megatron.eval_iteration": 1}
    iterations = collector.of("megatron.train.iteration")
    assert [attributes(span)["megatron.iteration"] for span in iterations] == [1, 2, 3, 4]
    assert attributes(iterations[0])["megatron.skipped"] is False
    assert [
        attributes(s)["megatron.iteration"] for s in collector.of("megatron.checkpoint.save")
    ] == [2, 4]
    first, second = collector.of("megatron.train")
    assert second.links[0].span_id == first.span_id and first.trace_id != second.trace_id
    assert iterations[3].parent_span_id == second.span_id
    (startup,) = collector.of("megatron.startup")
    assert collector.of("megatron.startup.model_init")[0].parent_span_id == startup.span_id
    assert attributes(startup) == {"is_goodput_span": True}
    resource = collector.resources[0]
    assert resource["service.name"] == "run" and resource["megatron.precision"] == "fp32"
    assert resource["dl.batch_size"] == 4 and resource["megatron.num_layers"] == 2


def test_one_rank_exports_the_default_groups_and_the_stages_messages(collector, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    words = ["--pipeline-model-parallel-size", "2", "--eval-iters", "0"]
    ThreadWorld(2).run(lambda world: train(*words, world=world))
    assert {span.name for span in collector.spans} == {
        "megatron.startup",
        "megatron.train",
        "megatron.train.first_iteration",
    }
    assert len(collector.of("megatron.train")) == 1
    assert {each["service.instance.id"] for each in collector.resources} == {"17-rank0"}
    collector.spans.clear()
    words += ["--otel-span-groups", "communication"]
    ThreadWorld(2).run(lambda world: train(*words, world=world))
    names = {span.name for span in collector.spans}
    assert names == {"megatron.p2p.send_forward", "megatron.p2p.recv_backward"}


PLAIN = [word for word in WORDS if word != "--otel-enabled"]


def test_variables_of_megatron_lm_are_flags(collector, monkeypatch):
    monkeypatch.setenv("NEMO_LENS_ENABLED", "1")
    monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "evaluate")
    pretrain_module.pretrain(parse(PLAIN), SoloComm(), Watchdog.off())
    assert {span.name for span in collector.spans} == {
        "megatron.evaluate",
        "megatron.evaluate.step",
    }
    assert parse([*PLAIN, "--otel-span-groups", "job"]).run.output.otel_span_groups == "job"
    monkeypatch.setenv("MEGATRON_OTEL_ENABLED", "0")  # has precedence
    assert not parse(PLAIN).run.output.otel_enabled


@pytest.mark.parametrize(
    ("name", "value", "note"),
    [
        ("RANK_STRATEGY", "single_rank", None),
        ("TRACES_ENABLED", "1", None),
        ("EXPORTER", "console", "MEGATRON_OTEL_EXPORTER console has no effect: rank 0 exports"),
        ("EXPORT_RANK", "-1", "MEGATRON_OTEL_EXPORT_RANK -1 has no effect: rank 0 exports"),
        ("METRICS_ENABLED", "0", "MEGATRON_OTEL_METRICS_ENABLED 0 has no effect"),
    ],
)
def test_a_variable_without_effect_is_noted(monkeypatch, name, value, note):
    monkeypatch.setenv(f"MEGATRON_OTEL_{name}", value)
    notes = [each for each in parse(WORDS).notes if "MEGATRON_OTEL" in each]
    assert len(notes) == bool(note) and all(each.startswith(note) for each in notes)
    assert not [each for each in parse(PLAIN).notes if "MEGATRON_OTEL" in each]


def test_wrong_variables_are_one_line(monkeypatch):
    monkeypatch.setenv("MEGATRON_OTEL_ENABLED", "maybe")
    with pytest.raises(ValueError, match="MEGATRON_OTEL_ENABLED is 'maybe': set it to 1 or 0"):
        parse(PLAIN)
    monkeypatch.setenv("MEGATRON_OTEL_ENABLED", "1")
    monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "steps")
    with pytest.raises(ValueError, match="--otel-span-groups steps has 'steps'"):
        parse(PLAIN)


def test_skipped_iterations_are_counted(collector):
    telemetry = Telemetry(Otlp("s", frozenset()))
    for skipped in (1, 0, 2):
        telemetry.interval(IterationMetrics(iteration=1, train_iters=2, skipped=skipped))
    telemetry.close()
    (count,) = collector.metrics["megatron.training.skipped_iters"].sum.data_points
    assert count.as_int == 3 and not collector.spans


def test_a_run_without_a_collector_says_so_once(monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    train("--train-iters", "1")
    lines = [line for line in capsys.readouterr().out.splitlines() if "--otel-enabled" in line]
    assert len(lines) == 1 and lines[0].endswith("the run continues")


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(telemetry_module, "PACKAGE", "opentelemetry_of_nobody.http")
    with pytest.raises(
        ValueError, match=r"^--otel-enabled: a package is missing: .* extra \[otel\]$"
    ):
        train()


def test_another_protocol_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL is grpc, and http/protobuf"):
        train()


def test_groups_of_spans():
    assert span_groups("default, microbatch") == span_groups("default") | {"microbatch"}
    assert span_groups("all") == span_groups("profiling") > span_groups("per_step")
    for wrong in ("", "default,", "steps"):
        with pytest.raises(ValueError, match="pass default or per_step or profiling or all, or"):
            parse([*WORDS, "--otel-span-groups", wrong])
    assert parse([*PLAIN, "--otel-service-name", "x"]).notes[-1] == (
        "--otel-service-name has no effect without --otel-enabled"
    )


def test_the_file_for_node_exporter_names_otlp():
    with pytest.raises(ValueError, match="--otel-enabled, and OTEL_EXPORTER_OTLP_METRICS.*/otlp"):
        parse([*PLAIN, "--prometheus-textfile", "run.prom"])
