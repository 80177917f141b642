"""Profiler traces: reading, merging, and their pipeline computations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...pipeline import instructions
from ...pipeline import placement as placement_module
from ...pipeline.timeline import COMPUTATIONS, Span
from ...text.named_files import StrPath, read_text
from ...text.written_files import new_file

Trace = dict[str, Any]


def read_trace(path: StrPath) -> Trace:
    remedy = "pass a trace of a run with --profile"
    text = read_text(path, "", remedy)
    try:
        trace: Trace = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: not JSON, or cut: {remedy}") from None
    return trace


def merge_traces(
    paths: Sequence[Path],
    merged: Path,
    placement: placement_module.Placement,
    pipeline: Sequence[int],
) -> list[Path]:
    """Write all traces' events into one file, one trace at a time; return the missing traces.

    pipeline: rank per stage; for `measured_spans`, as is `placement`
    """
    missing = [path for path in paths if not path.is_file()]
    shape = {
        "stages": placement.stages,
        "chunks": placement.model_chunks,
        "kind": placement.kind,
    }
    other = json.dumps({"placement": shape, "pipeline": list(pipeline)})
    with open(merged, "w", encoding="utf-8", opener=new_file) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [')
        separator = "\n"
        for path in paths:
            for event in [] if path in missing else read_trace(path)["traceEvents"]:
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")
    return missing


def measured_spans(trace: Trace) -> list[Span]:
    """Return the last recorded iteration's spans, as `timeline.spans`.

    A receive begins when its message was sent; before, the stage was idle.
    """
    shape = trace["otherData"]["placement"]
    placement = placement_module.Placement(shape["stages"], shape["chunks"], shape["kind"])
    measured = {
        (span.stage, span.op, span.microbatch, span.model_chunk): span
        for span in _instructions(trace)
    }  # later ones replace
    sent = {}
    for span in measured.values():
        if span.op in instructions.SENDS:
            receiver, tag = placement.peer(span.stage, _message(span))
            sent[receiver, tag, span.microbatch] = span.start
    found = [span for span in measured.values() if span.op in COMPUTATIONS]
    for span in measured.values():
        if span.op in instructions.RECEIVES:
            _, tag = placement.peer(span.stage, _message(span))
            start = max(span.start, sent.get((span.stage, tag, span.microbatch), span.start))
            if start < span.end:
                found.append(replace(span, start=start))
    begin = min((span.start for span in found), default=0.0)
    return [
        replace(span, start=span.start - begin, end=span.end - begin)
        for span in sorted(found, key=lambda s: (s.stage, s.start))
    ]


def _instructions(trace: Trace) -> Iterator[Span]:
    stages = {rank: stage for stage, rank in enumerate(trace["otherData"]["pipeline"])}
    for event in trace["traceEvents"]:
        about = event.get("args", {})
        if event["ph"] == "X" and "microbatch" in about and event["pid"] in stages:
            yield Span(
                stages[event["pid"]],
                event["name"],
                about["microbatch"],
                about["chunk"],
                event["ts"] / 1e6,
                (event["ts"] + event["dur"]) / 1e6,
            )


def _message(span: Span) -> instructions.Instruction:
    return instructions.Instruction(span.op, span.microbatch, span.model_chunk)


def measured_memory(trace: Trace) -> list[float]:
    peaks = {
        event["pid"]: event["args"]["peak_mib"]
        for event in trace["traceEvents"]
        if "peak_mib" in event.get("args", {})
    }
    pipeline = trace["otherData"]["pipeline"]
    return [peaks[rank] for rank in pipeline] if peaks.keys() >= set(pipeline) else []
