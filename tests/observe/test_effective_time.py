"""Effective training time: hours.jsonl of runs, and its account by cause."""

import json
from pathlib import Path

import pytest

from fugaku_megatron.observe.export import spans
from fugaku_megatron.observe.export.hours import HOURS, append, read_hours
from fugaku_megatron.observe.log.effective_time import CAUSES, EffectiveTime, draw, effective_time

pytestmark = pytest.mark.unit


def start(begun, iteration):
    return {"time": begun + 1, "event": "start", "begun": begun, "iteration": iteration}


def iterations(time, last, count, **seconds):
    named = {getattr(spans, name.upper()): value for name, value in seconds.items()}
    return {
        "time": time,
        "event": "iterations",
        "iteration": last,
        "count": count,
        "seconds": named,
    }


FIRST = [
    start(1000, 0),
    iterations(1050, 10, 10, startup=20, load=5, first_iteration=7, iteration=25),
    iterations(1090, 20, 10, iteration=20, save=12, finalize=2, evaluate=3),
    iterations(1111, 30, 10, iteration=20),
]
FIRST_SECONDS = {
    "start": 20,  # 50 seconds of the first line without 5 of the load and 25 of iterations
    "load": 5,
    "first iteration": 5,  # a later one takes 2
    "training": 20 + 20 + 20,
    "saving": 14,
    "evaluation": 3,
    "other": 3 + 1,
}
# The checkpoint is of iteration 25: half of the last line is repeated.
SECOND = [start(1200, 25), iterations(1230, 35, 10, startup=9, iteration=20)]


def end(time, code):
    return {"time": time, "event": "end", "code": code}


@pytest.mark.parametrize(
    "ends, lost",
    [
        ([], {"waiting": 89}),
        ([end(1130, 5)], {"fault": 19, "waiting": 70}),
        ([end(1130, 4)], {"hang": 19, "waiting": 70}),
        ([end(1113, 0)], {"other": 4 + 2, "waiting": 87}),
    ],
)
def test_every_second_has_one_cause(ends, lost):
    found = EffectiveTime([*FIRST, *ends, *SECOND])
    want = FIRST_SECONDS | {"training": 60 - 10 + 20, "repeated": 10, "start": 20 + 10} | lost
    assert found.seconds == pytest.approx(want)
    assert found.total == 1230 - 1000
    assert found.share == pytest.approx((70 + 3) / 230)
    assert found.text()[0] == "effective training time: 31.7 % of 3 min 50 s in 2 starts (measured)"


def test_seconds_of_audits_are_no_training():
    """Also in the first iteration of a start, whose own seconds are then unknown."""
    audited = iterations(1230, 30, 10, iteration=29, audit=9)
    found = EffectiveTime([*FIRST[:3], audited])
    assert found.seconds == pytest.approx(
        FIRST_SECONDS | {"audit": 9, "other": 3 + 1 - 1 + 111, "training": 60}
    )
    first = iterations(1330, 35, 10, startup=9, first_iteration=12, iteration=33, audit=9)
    found = EffectiveTime([*FIRST, start(1280, 25), first])
    assert found.seconds["audit"] == 9 and found.seconds["first iteration"] == 5 + 33 - 9 - 10 * 2
    assert found.total == 330


@pytest.mark.parametrize(
    "jobs, cause", [((None, None), "waiting"), (("7", "7"), "waiting"), (("7", "8"), "scheduler")]
)
def test_the_time_between_two_jobs_is_the_schedulers(jobs, cause):
    lines = [FIRST[0] | {"job": jobs[0]}, *FIRST[1:], SECOND[0] | {"job": jobs[1]}, SECOND[1]]
    assert EffectiveTime(lines).seconds[cause] == 89


def test_iterations_are_kept_once_however_often_they_are_repeated():
    lines = [*FIRST, start(1200, 25), iterations(1230, 28, 3, iteration=6), start(1300, 5)]
    lines += [iterations(1400, 35, 30, iteration=60)]
    found = EffectiveTime(lines)
    assert found.seconds["training"] == pytest.approx(10 + 60)  # iterations 1 to 5, 6 to 35
    assert found.seconds["repeated"] == pytest.approx(10 + 20 + 10 + 10 + 6)
    assert found.total == 400


def test_cut_and_unknown_lines_are_passed_over(tmp_path):
    path = tmp_path / HOURS
    lines = [*map(json.dumps, FIRST), '{"time": 1111.5, "ev', '{"time": 1112, "event": "newer"}']
    path.write_text("\n".join(lines) + "\n")
    append(path, event="end", code=0)
    assert [line["event"] for line in read_hours(path)][-3:] == ["iterations", "newer", "end"]
    assert effective_time(tmp_path).seconds["training"] == 60
    assert effective_time(tmp_path / "nowhere") is None


def test_the_picture_has_a_column_of_all_causes_for_each_day(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: drawn.append(self))
    day = 86400
    lines = [start(0, 0), iterations(2.5 * day, 10, 10, startup=1, iteration=2 * day)]
    draw(tmp_path / "hours.png", EffectiveTime(lines))
    (axes,) = drawn[0].axes
    heights = [sum(bars[column].get_height() for bars in axes.containers) for column in range(3)]
    assert heights == pytest.approx([100, 100, 50]) and len(axes.containers) == 2


def test_starts_from_copies_in_memory_are_named():
    copied = iterations(1110, 20, 10, iteration=15, copy=2)
    found = EffectiveTime([*FIRST[:2], copied, {**start(1120, 20), "source": "--save-memory"}])
    assert found.from_memory == 1 and found.seconds["copying"] == 2
    assert "in 2 starts, 1 from copies in memory (measured)" in found.text()[0]


def test_a_run_records_its_starts(tmp_path, command, monkeypatch):
    """Two starts of a run: their seconds add up to the time between the first process and the last line."""
    monkeypatch.chdir(tmp_path)
    train = (
        "train --recipe demo --mock-data --vocab-size 256 --train-iters 6 --log-interval 2 --eval-iters 1 "
        "--eval-interval 4 --save run --load run --audit-interval 2"
    )
    command(train, "--exit-interval 4")
    command(train)
    lines = read_hours(Path("run", HOURS))
    found = effective_time("run")
    assert [line["iteration"] for line in lines if line["event"] == "start"] == [0, 4]
    assert found.total == pytest.approx(lines[-1]["time"] - lines[0]["begun"])
    assert [line["saving"] for line in lines if line["event"] == "start"] == ["save", "save"]
    assert sum(line.get("saves", 0) for line in lines) == 2
    assert min(found.seconds.values()) >= 0 and found.seconds.keys() <= CAUSES.keys()
    assert {"training", "evaluation", "start", "load", "saving", "audit"} <= found.seconds.keys()
    printed = command("log run --hours-png hours.png").stdout
    assert found.text()[0] in printed and Path("hours.png").read_bytes()[:4] == b"\x89PNG"
    refused = command("log run run --hours-png hours.png", code=2).stderr
    assert "pass the --save of one run, with its hours.jsonl" in refused
