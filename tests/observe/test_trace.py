"""Traces of several ranks in one file, and the schedule in it."""

import json
from dataclasses import replace

import pytest

from fugaku_megatron.observe.log import schedule_plot
from fugaku_megatron.observe.profile import trace as trace_module
from fugaku_megatron.pipeline.instructions import SENDS
from fugaku_megatron.pipeline.placement import Placement
from fugaku_megatron.pipeline.schedule import build
from fugaku_megatron.pipeline.schedule_names import SCHEDULES
from fugaku_megatron.pipeline.timeline import COMPUTATIONS, Costs, Span
from fugaku_megatron.pipeline.timeline import spans as planned

pytestmark = pytest.mark.unit

ONE = Placement(1)


def written(path, *names):
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "name": name} for name in names]}))
    return path


def test_events_and_memory_of_all_traces_are_in_one_file(tmp_path):
    paths = [
        written(tmp_path / "0.json", "a", "b"),
        tmp_path / "1.json",
        written(tmp_path / "2.json", "c"),
    ]
    assert trace_module.merge_traces(paths, tmp_path / "all.json", ONE, [0]) == [
        tmp_path / "1.json"
    ]
    assert [
        event["name"] for event in trace_module.read_trace(tmp_path / "all.json")["traceEvents"]
    ] == [
        "a",
        "b",
        "c",
    ]
    trace_module.merge_traces([], tmp_path / "all.json", ONE, [0])
    trace = trace_module.read_trace(tmp_path / "all.json")
    assert trace_module.measured_spans(trace) == [] == trace_module.measured_memory(trace)
    with pytest.raises(ValueError, match="holds no instructions of a schedule"):
        schedule_plot.draw_trace(str(tmp_path / "all.json"), str(tmp_path / "no.png"))
    events = [
        {"ph": "M", "pid": rank, "name": "process_labels", "args": {"peak_mib": 10.0 + rank}}
        for rank in (0, 2)
    ]
    other = {"placement": {"stages": 2}, "pipeline": [0, 2]}
    assert trace_module.measured_memory({"traceEvents": events, "otherData": other}) == [10.0, 12.0]
    assert trace_module.measured_memory({"traceEvents": events[:1], "otherData": other}) == []


def recorded(lists, expected):
    """Write a trace of stages on ranks 0, 2, 4 ... with the spans `expected`, after a slower iteration."""
    placement = lists.placement
    events = []

    def event(span, shift):
        events.append(
            {
                "ph": "X",
                "pid": 2 * span.stage,
                "name": span.op,
                "ts": 1e6 * (shift + span.start),
                "dur": 1e6 * (span.end - span.start),
                "args": {"microbatch": span.microbatch, "chunk": span.model_chunk},
            }
        )

    for shift in (0.0, 1000.0):
        for stage in range(placement.stages):
            clock = 0.0
            spans = {(s.op, s.microbatch, s.model_chunk): s for s in expected if s.stage == stage}
            for i in lists.instructions(stage):
                span = spans.get(
                    (i.op, i.microbatch, i.model_chunk),
                    Span(stage, i.op, i.microbatch, i.model_chunk, clock, clock),
                )
                waited = (
                    span if i.op in (*COMPUTATIONS, *SENDS) else replace(span, start=clock)
                )  # a receive waits for its sender
                event(waited, shift)
                clock = span.end
    pipeline = [2 * stage for stage in range(placement.stages)]
    about = {"stages": placement.stages, "chunks": placement.model_chunks, "kind": placement.kind}
    return {
        "traceEvents": [{"ph": "M", "name": "process_name", "args": {}}, *events],
        "otherData": {"placement": about, "pipeline": pipeline},
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_was_run_as_planned_looks_as_planned(name):
    lists = build(name, 3, {"interleaved": 2, "zbv": 2}.get(name, 1), 4)
    expected = planned(lists, Costs.alike(lists, transfer=0.25))
    found = trace_module.measured_spans(recorded(lists, expected))
    assert {round_to_ms(span) for span in found} == {round_to_ms(span) for span in expected}


def round_to_ms(span):
    return replace(span, start=round(span.start, 3), end=round(span.end, 3))
