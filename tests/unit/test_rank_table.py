"""fugaku-megatron log --ranks: table, heat map and mistakes."""

import pytest

from fugaku_megatron import cli
from fugaku_megatron.logs.rank_table import Interval, mean, read, text


def interval(iteration, computation, tp=1):
    return Interval(iteration, tp, 1, {"computation": computation, "reductions": [2 - c for c in computation]})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ranks.jsonl"
    intervals = interval(10, [9.0, 9.0]), interval(20, [1.0, 1.5]), interval(30, [1.0, 1.1])
    path.write_text("".join(each.line() + "\n" for each in intervals))
    return path


def test_the_first_interval_is_not_counted(file):
    assert mean(read(file)).seconds == {"computation": [1.0, 1.3], "reductions": pytest.approx([1.0, 0.7])}
    rows = [line.replace("|", " ").split() for line in text(file, read(file)).splitlines()]
    assert ["computation", "1.000", "1.150", "1.300", "1", "0"] in rows
    assert ["reductions", "0.700", "0.850", "1.000", "0", "0"] in rows


def test_a_resumed_run_replaces_what_it_repeats(file):
    with open(file, "a") as more:
        more.write(interval(20, [1.0, 1.7]).line() + "\n")
    assert [i.iteration for i in read(file)] == [10, 20, 30] and read(file)[1].seconds["computation"] == [1.0, 1.7]


def test_another_layout_begins_anew(file):
    with open(file, "a") as more:
        more.write(interval(40, [1.0, 1.0], tp=2).line() + "\n")
    assert [i.iteration for i in read(file)] == [40]


def test_the_command_prints_and_draws(file, tmp_path, capsys):
    cli.main(["log", str(file), "--ranks", "--png", str(tmp_path / "ranks.png")])
    assert "2 ranks, means over 2 log intervals up to iteration 30" in capsys.readouterr().out
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("words", "message"), [
    (["no.jsonl"], "no.jsonl: cannot be read"), (["FILE", "--csv", "x.csv"], "--ranks writes no CSV file"),
    (["FILE", "FILE", "--png", "x.png"], "--png x.png draws the ranks of one file, and there are 2"),
    (["LOG"], "line 1: not a record of --log-ranks")])
def test_mistakes_are_one_line(file, tmp_path, words, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LOG").write_text(" iteration 1/ 2 | lm loss: 1.0 |\n")
    assert cli.main(["log", "--ranks", *(str(file) if word == "FILE" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
