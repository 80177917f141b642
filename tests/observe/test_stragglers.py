"""Slow ranks from all ranks' seconds, and `fugaku-megatron log --ranks`: table, plot and errors."""

from dataclasses import replace

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.observe.log.rank_table import Interval, find, mean, parse_interval, read, text

pytestmark = pytest.mark.unit


def interval(computation, data=None, tp=1, pp=1, iteration_seconds=2.0):
    data = data or [0.0] * len(computation)
    rest = [iteration_seconds - c - d for c, d in zip(computation, data, strict=True)]
    return Interval(10, tp, pp, {"computation": computation, "data": data, "reductions": rest})


@pytest.mark.parametrize(
    ("seconds", "work", "slow"),
    [
        (interval([1.0, 1.0, 1.3, 1.05]), [1.0], [(2, 0, "computation")]),
        (
            interval([1.0, 1.3, 1.0, 1.6, 1.0]),
            [1.0],
            [(3, 0, "computation"), (1, 0, "computation")],
        ),  # the slowest comes first
        (interval([1.0, 1.5] * 3, pp=2), [1.0, 1.0], []),  # stages are compared among themselves
        (interval([1.0, 1.5, 1.0, 1.5, 1.3, 1.5], pp=2), [1.0, 1.0], [(4, 0, "computation")]),
        (
            interval([1.0, 1.5, 2.0], pp=3, iteration_seconds=3.0),
            [1.0, 1.5, 2.0],
            [],
        ),  # stages of few ranks by their work
        (
            interval([1.0, 1.5, 2.0], pp=3, iteration_seconds=3.0),
            [1.0, 1.5, 1.5],
            [(2, 2, "computation")],
        ),
        (interval([1.0, 1.0], data=[0.5, 0.0]), [1.0], [(0, 0, "data")]),
    ],
)
def test_slow_ranks_are_found(seconds, work, slow):
    assert [(s.rank, s.stage, s.phase) for s in find(seconds, work)] == slow


def test_how_a_slow_rank_is_named_and_a_record_read_back():
    slow = find(interval([1.0, 1.0, 1.3, 1.05]), [1.0])[0]
    waiting = find(interval([1.0, 1.0], data=[0.5, 0.0]), [1.0])[0]
    assert slow.text("node7") == (
        "rank 2 (stage 0, node7): computation 1.300 s per iteration, "
        "30 % slower than the median of its stage (1.000 s)"
    )
    assert waiting.text("a") == "rank 0 (stage 0, a): data 0.500 s per iteration"
    original = interval([1.0, 1.25], tp=2)
    assert parse_interval(original.line()) == original
    assert replace(original, tp=1).stage(1) == 0 and original.layout == (2, 2, 1, 1)
    assert [replace(original, tp=2, pp=2, cp=2).stage(rank) for rank in range(10)] == [
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        0,
        0,
    ]
    older = (
        '{"iteration": 1, "tp": 1, "pp": 1, "seconds": {"data": [1]}}'  # of a version without cp
    )
    assert parse_interval(older).cp == 1


@pytest.mark.parametrize(
    ("computation", "pp", "work", "usual_of"),
    [
        (
            [1.0, 2.0],
            1,
            [1.0],
            "100 % slower than its work takes at the speed of the faster rank (1.000 s)",
        ),
        (
            [1.0, 2.0],
            2,
            [1.0, 1.0],
            "100 % slower than the work of its stage, which has one rank, takes at the speed of "
            "the faster rank (1.000 s)",
        ),
        (
            [1.0, 1.5, 2.0, 1.0],
            4,
            [1.0, 1.5, 1.0, 1.0],
            "100 % slower than the work of its stage, which has one rank, takes at the median "
            "speed of all 4 ranks (1.000 s)",
        ),
        (
            [1.0, 1.0, 2.0, 1.0],
            2,
            [1.0, 1.0],
            "100 % slower than the work of its stage, which has 2 ranks, takes at the median speed "
            "of all 4 ranks (1.000 s)",
        ),
        ([1.0, 2.0, 1.0], 1, [1.0], "100 % slower than the median of its stage (1.000 s)"),
    ],
)
def test_a_stage_of_few_ranks_has_no_median(computation, pp, work, usual_of):
    (slow,) = find(interval(computation, pp=pp), work)
    assert slow.text("a").endswith(usual_of)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "iteration 1/ 2 |",
        "{}",
        "[]",
        '{"iteration": 1, "tp": 1, "pp": 1, "seconds": {}}',
        '{"iteration": 1, "tp": 1, "pp": 1, "seconds": {"data": [1], "computation": [1, 2]}}',
        '{"iteration": 1, "tp": 0, "pp": 1, "seconds": {"data": [1]}}',
        '{"iteration": 1, "tp": 1, "pp": 1, "seconds": {"data": ["1"]}}',
    ],
)
def test_another_line_is_not_a_record(line):
    with pytest.raises(ValueError, match="not a record of --log-ranks"):
        parse_interval(line)


def of_ranks(iteration, computation, tp=1):
    reductions = [2 - seconds for seconds in computation]
    return Interval(iteration, tp, 1, {"computation": computation, "reductions": reductions})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ranks.jsonl"
    intervals = of_ranks(10, [9.0, 9.0]), of_ranks(20, [1.0, 1.5]), of_ranks(30, [1.0, 1.1])
    path.write_text("".join(each.line() + "\n" for each in intervals))
    return path


def test_the_first_interval_is_not_counted_and_the_command_prints_and_draws(file, tmp_path, capsys):
    assert mean(read(file)).seconds == {
        "computation": [1.0, 1.3],
        "reductions": pytest.approx([1.0, 0.7]),
    }
    rows = [line.replace("|", " ").split() for line in text(file, read(file)).splitlines()]
    assert ["computation", "1.000", "1.150", "1.300", "1", "0"] in rows
    assert ["reductions", "0.700", "0.850", "1.000", "0", "0"] in rows
    program.main(["log", str(file), "--ranks", "--png", str(tmp_path / "ranks.png")])
    assert "2 ranks, means over 2 log intervals up to iteration 30" in capsys.readouterr().out
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_replaces_what_it_repeats_and_another_layout_begins_anew(file):
    for added, iterations in (
        (of_ranks(20, [1.0, 1.7]), [10, 20, 30]),
        (of_ranks(40, [1.0, 1.0], tp=2), [40]),
    ):
        with open(file, "a") as more:
            more.write(added.line() + "\n")
        found = {i.iteration: i for i in read(file)}
        assert (
            list(found) == iterations
            and found[added.iteration].seconds["computation"] == added.seconds["computation"]
        )
