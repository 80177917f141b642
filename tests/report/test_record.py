"""Files of a report and its time: names, interrupted writes, shares of the sections."""

from __future__ import annotations

import getpass
import json
import os
import platform
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.host.energy import Counters
from fugaku_megatron.planner import machine
from fugaku_megatron.report import (
    context,
    measure,
    record,
    training,
)
from fugaku_megatron.report.record import NAMES, Budget, without_names
from fugaku_megatron.text import written_files
from tests.checks.calibration import rank as calibrated_rank
from tests.checks.reports import HEALTHY

pytestmark = pytest.mark.unit


def test_names_are_replaced_and_words_that_contain_them_are_not():
    words = {"/home/jo": "HOME", "jo": "USER", "node7": "HOST"}
    text = {
        "a": ["failed on node7: /home/jo/x: jo may not", "a job on node77", 5],
        "b": "3 tokens/s, 16K/s",
    }
    assert without_names(text, words) == {
        "a": ["failed on HOST: PATH: USER may not", "a job on node77", 5],
        "b": "3 tokens/s, 16K/s",
    }


def test_files_are_whole_after_every_section_and_names_stay_on_request(tmp_path):
    path = tmp_path / "r.json"
    secret = f"{getpass.getuser()} at {platform.node()} in {os.getcwd()}"
    for names in (False, True):
        one = record.Record(
            path, Budget(1.0), {".txt": lambda data: f"complete: {data['complete']}"}, names
        )
        one.data["sections"]["host"] = {"error": secret, "x": 1.23456789}
        one.write()
        data = json.loads(path.read_text())
        assert data["complete"] is False and data["sections"]["host"]["x"] == 1.2346
        assert path.with_suffix(".txt").read_text() == "complete: False"
        assert (data["sections"]["host"]["error"] == secret) is names and ("names" in data) is names
        one.end("finished", complete=True)
        assert record.read("--compare", path)["complete"] is True
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "r.txt"]


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    record.write_atomically(path, "first")
    monkeypatch.setattr(record.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError):
        record.write_atomically(path, "second")
    assert path.read_text() == "first" and len([*tmp_path.iterdir()]) == 1


def test_a_signal_that_writes_during_a_write_does_not_mix_two_texts(tmp_path, monkeypatch):
    def opened(*args, **kwargs):
        def interrupted():
            del file.flush  # closing calls it as well
            record.write_atomically(path, "the last words")
            raise SystemExit

        monkeypatch.undo()
        file = open(*args, **kwargs)
        file.flush = interrupted
        return file

    path = tmp_path / "r.json"
    monkeypatch.setattr(written_files, "open", opened, raising=False)
    with pytest.raises(SystemExit):
        record.write_atomically(path, "a long text of before")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("r.json", "the last words")
    ]


def test_the_time_of_a_section_is_its_share_of_what_is_left():
    now = [0.0]
    budget = Budget(10.0, lambda: now[0])
    assert budget.of("training", ("layers", "storage")) == pytest.approx(582 * 26 / 56)
    now[0] = 300.0
    assert budget.of("storage", ()) == pytest.approx(282)
    now[0] = 900.0
    assert budget.of("storage", ()) == 0.0


def test_sections_without_time_are_left_out_and_named(tmp_path, monkeypatch, capsys):
    """Measure with a section of kernels that takes longer than the whole report may."""
    now = [0.0]
    took = {"host": 1.0, "kernels": 70.0, "communication": 20.0}

    def section(name, _):
        now[0] += took[name]
        return HEALTHY[name]

    alone = context.Context(
        world=SoloComm(), nodes=find_nodes(SoloComm()), scale=context.SHRUNK, energy=Counters("")
    )
    monkeypatch.setattr(measure, "SECTIONS", {name: partial(section, name) for name in NAMES})
    monkeypatch.setattr(measure, "make_context", lambda world, args: alone)
    monkeypatch.setattr(measure, "end_with_signal", lambda report: None)
    monkeypatch.setattr(
        measure, "Budget", lambda minutes, spent: Budget(minutes, lambda: now[0], 2.0)
    )
    args = SimpleNamespace(
        output=tmp_path / "r.json", minutes=1.5, only=None, with_names=False, spent=0.0
    )
    measure.measure(SoloComm(), args)
    data = json.loads((tmp_path / "r.json").read_text())
    assert list(data["sections"]) == list(took) and data["left_out"] == list(NAMES[3:])
    out = capsys.readouterr().out
    assert "after 1:33; no time left within --minutes for training, layers, storage" in out


def test_training_needs_time_for_two_steps():
    alone = context.Context(
        world=SoloComm(),
        nodes=find_nodes(SoloComm()),
        scale=context.Scale(),
        energy=Counters(""),
        free=1e12,
        seconds=5.0,
        compute=replace(calibrated_rank(), gemm={machine.FP32: ((512, 1.0),)}),
    )
    (row,) = training.training_section(alone)["rows"]
    assert row == {"ranks": 1, "left_out": "time"}
