"""The picture of a run."""

import json
import os

import pytest

from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.logs import log_table, plot
from fugaku_megatron.logs.run_log import read_log
from tests.helpers import OUR_LOG

TRAIN = [{"kind": "train", "iteration": i, "lm_loss": 10.0 / i, "learning_rate": 1e-4, "tflops": 0.5}
         for i in range(1, 9)]
VALIDATION = [{"kind": "validation", "iteration": i, "lm_loss": loss} for i, loss in ((4, 3.0), (8, 2.0))]


@pytest.fixture
def made(monkeypatch):
    """The figures that were saved."""
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    save = figure_module.Figure.savefig
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    return figures


def test_the_loss_is_drawn_where_the_numbers_say(tmp_path, made):
    assert plot.loss_curve(tmp_path / "loss.png", TRAIN + VALIDATION) is True
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    loss, rate, tflops = made[0].axes
    assert [line.get_label() for line in loss.lines] == ["training", "validation"]
    assert list(loss.lines[0].get_ydata()) == [r["lm_loss"] for r in TRAIN]
    assert list(loss.lines[1].get_xdata()) == [4, 8]
    assert (rate.get_ylabel(), tflops.get_ylabel()) == ("learning rate", "TFLOPs per rank")
    assert list(tflops.lines[0].get_ydata()) == [0.5] * 8


def test_a_run_has_one_colour_in_all_panels(tmp_path, made):
    assert plot.loss_curves(tmp_path / "two.png", {"a": VALIDATION, "b": TRAIN + VALIDATION, "c": TRAIN}) is True
    loss, rate, tflops = made[0].axes
    assert [(line.get_label()[:1], line.get_color()) for line in loss.lines] == [("_", "C0"), ("b", "C1"), ("_", "C1"), ("c", "C2")]
    assert [line.get_color() for line in rate.lines] == [line.get_color() for line in tflops.lines] == ["C1", "C2"]


def test_the_title_says_size_layout_and_directory(tmp_path, made):
    run = make_run("demo", {"vocab_size": 320, "tensor_model_parallel_size": 2})
    heading = plot.title(plot.describe(run, 4), "/data/runs/demo")
    assert heading == "0.9M, DP 4 x TP 2 x PP 1, fp32\n/data/runs/demo"
    assert plot.loss_curve(tmp_path / "loss.png", TRAIN, heading) and made[0].get_suptitle() == heading
    assert len(plot.title("", "/x" * 200)) == plot.WIDTH + 3


def test_logs_are_named_by_what_differs(tmp_path, made):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.log").write_text(OUR_LOG)
    logs = [read_log(tmp_path / name / "run.log") for name in ("a", "b")]
    assert log_table.draw(tmp_path / "two.png", logs) and log_table.draw(tmp_path / "one.png", logs[:1])
    labels = [text.get_text() for text in made[0].axes[0].get_legend().get_texts()]
    assert labels == [f"{name}/run.log\n0.9M, DP 2 x TP 1 x PP 1, fp32" for name in ("a", "b")]
    assert made[0].get_suptitle() == plot.title("", tmp_path)
    assert made[1].get_suptitle() == plot.title("0.9M, DP 2 x TP 1 x PP 1, fp32", tmp_path / "a" / "run.log")


def test_a_history_file_without_some_values_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    skipped = {**TRAIN[0], "lm_loss": None, "tflops": None}
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in [skipped, {**TRAIN[1], "tflops": None}]))
    assert plot.loss_curve(tmp_path / "loss.png", path) is True


def test_files_in_the_way_are_a_line_and_no_error(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "loss.png").mkdir()
    assert plot.loss_curve(tmp_path / "loss.png", TRAIN) is False
    assert plot.loss_curve(tmp_path / "a.png", tmp_path / "absent.jsonl") is False
    first, second = capsys.readouterr().out.splitlines()
    assert "loss.png: not drawn, " in first and "Is a directory" in first
    assert "a.png: not drawn, " in second and "absent.jsonl" in second


def test_nothing_to_draw_or_no_matplotlib_is_a_line_and_no_error(tmp_path, monkeypatch, capsys):
    assert plot.loss_curve(tmp_path / "a.png", []) is False
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert plot.loss_curve(tmp_path / "b.png", TRAIN) is False
    first, second = capsys.readouterr().out.splitlines()
    assert "a.png: not drawn, the history has no loss yet" in first
    assert "b.png: not drawn, a package is missing: pip install matplotlib" in second
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_its_own_draws_the_same(tmp_path, capfd, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TRAIN))
    assert plot.start_loss_curve(tmp_path / "loss.png", tmp_path / "history.jsonl", "124M\n/here").wait(60) == 0
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    assert plot.start_loss_curve(odd, tmp_path / "history.jsonl", odd).wait(60) == 0 and os.path.getsize(odd) > 0
    assert plot.start_loss_curve(odd, tmp_path / "none.jsonl", odd).wait(60) == 0
    assert plot.start_loss_curve(tmp_path / "other.png", tmp_path / "none.jsonl").wait(60) == 0
    assert "other.png: not drawn" in capfd.readouterr().out
