"""Traces of several ranks in one file. Run: pytest tests/test_traces.py"""

import json

from fugaku_megatron.logs.traces import merge, read


def trace(path, *names):
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "name": name} for name in names]}))
    return path


def test_events_of_all_traces_are_in_one_file(tmp_path):
    paths = [trace(tmp_path / "0.json", "a", "b"), tmp_path / "1.json", trace(tmp_path / "2.json", "c")]
    assert merge(paths, tmp_path / "all.json") == [tmp_path / "1.json"]
    assert [event["name"] for event in read(tmp_path / "all.json")] == ["a", "b", "c"]


def test_no_trace_at_all_is_an_empty_one(tmp_path):
    merge([], tmp_path / "all.json")
    assert read(tmp_path / "all.json") == []
