"""Plots of runs, pipelines and allocators."""

import json
import os

import pytest

from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.observe.log import log_command, loss_plot, schedule_plot
from fugaku_megatron.observe.log.run_log import RunLog
from fugaku_megatron.pipeline.schedule import build
from fugaku_megatron.pipeline.timeline import Costs, spans
from tests.checks.run_logs import read_log
from tests.helpers import OUR_LOG

pytestmark = pytest.mark.unit


@pytest.fixture
def made(monkeypatch):
    """Collect the saved figures."""
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    save = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure,
        "savefig",
        lambda self, *a, **k: (figures.append(self), save(self, *a, **k)),
    )
    return figures


TRAIN = [
    {"kind": "train", "iteration": i, "lm_loss": 10.0 / i, "learning_rate": 1e-4, "tflops": 0.5}
    for i in range(1, 9)
]
VALIDATION = [
    {"kind": "validation", "iteration": i, "lm_loss": loss} for i, loss in ((4, 3.0), (8, 2.0))
]


def write_history(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_loss_is_drawn_where_the_numbers_say(tmp_path, made):
    assert loss_plot.loss_curve(tmp_path / "loss.png", TRAIN + VALIDATION) is True
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    loss, rate, tflops = made[0].axes
    assert [line.get_label() for line in loss.lines] == ["training", "validation"]
    assert list(loss.lines[0].get_ydata()) == [r["lm_loss"] for r in TRAIN]
    assert list(loss.lines[1].get_xdata()) == [4, 8]
    some = [{**TRAIN[0], "lm_loss": None, "tflops": None}, TRAIN[1]]
    write_history(tmp_path / "history.jsonl", some)
    assert loss_plot.loss_curve(tmp_path / "some.png", tmp_path / "history.jsonl") is True, (
        "a history without some values"
    )
    assert (rate.get_ylabel(), tflops.get_ylabel()) == ("learning rate", "TFLOPs per rank")
    assert list(tflops.lines[0].get_ydata()) == [0.5] * 8


def test_the_load_of_every_expert_is_drawn(tmp_path, made):
    """Draw the last record of a run from its history or its log; the table names the largest load."""
    loads = [
        {
            "kind": "experts",
            "iteration": i,
            "layers": [1, 2],
            "loads": [[0.5, 1.5, i], [1.0, 1.0, 1.0]],
        }
        for i in (4, 8)
    ]
    train = [{**record, "largest_load": 1.5, "train_iters": 8} for record in TRAIN]
    write_history(tmp_path / "history.jsonl", train + loads)
    log = read_log(tmp_path / "history.jsonl")
    assert loss_plot.loss_curve(
        tmp_path / "loss.png", tmp_path / "history.jsonl"
    ) and log_command.draw(tmp_path / "log.png", [log])
    for figure in made:
        axes = next(axes for axes in figure.axes if axes.get_xlabel() == "expert")
        assert axes.images[0].get_array().tolist() == loads[1]["loads"]
        assert [text.get_text() for text in axes.get_yticklabels()] == ["1", "2"]
    assert "an expert has 1.5 x the mean load" in log_command.text([log])
    assert loss_plot.loss_curves(tmp_path / "two.png", {"a": train + loads, "b": train})
    assert all(a.get_xlabel() != "expert" for a in made[2].axes)


def test_colours_and_titles_of_runs(tmp_path, made):
    assert (
        loss_plot.loss_curves(
            tmp_path / "two.png", {"a": VALIDATION, "b": TRAIN + VALIDATION, "c": TRAIN}
        )
        is True
    )
    loss, rate, tflops = made[0].axes
    assert [(line.get_label()[:1], line.get_color()) for line in loss.lines] == [
        ("_", "C0"),
        ("b", "C1"),
        ("_", "C1"),
        ("c", "C2"),
    ]
    assert (
        [line.get_color() for line in rate.lines]
        == [line.get_color() for line in tflops.lines]
        == ["C1", "C2"]
    )
    run = make_run("demo", {"vocab_size": 320, "tensor_model_parallel_size": 2})
    heading = loss_plot.title(loss_plot.describe(run, 4), "/data/runs/demo")
    assert heading == "0.9M, DP 4 x TP 2 x PP 1, fp32\n/data/runs/demo"
    shared = make_run("demo", {"vocab_size": 320, "context_parallel_size": 2})
    assert loss_plot.describe(shared, 4) == "0.9M, DP 4 x TP 1 x PP 1 x CP 2, fp32"
    assert (
        loss_plot.loss_curve(tmp_path / "loss.png", TRAIN, heading)
        and made[1].get_suptitle() == heading
    )
    assert len(loss_plot.title("", "/x" * 200)) == loss_plot.WIDTH + 3


def test_logs_are_named_by_what_differs(tmp_path, made):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.log").write_text(OUR_LOG)
    logs = [read_log(tmp_path / name / "run.log") for name in ("a", "b")]
    assert log_command.draw(tmp_path / "two.png", logs) and log_command.draw(
        tmp_path / "one.png", logs[:1]
    )
    labels = [text.get_text() for text in made[0].axes[0].get_legend().get_texts()]
    assert labels == [f"{name}\n0.9M, DP 2 x TP 1 x PP 1, fp32" for name in ("a", "b")]
    assert made[0].get_suptitle() == loss_plot.title("", tmp_path)
    assert made[1].get_suptitle() == loss_plot.title(
        "0.9M, DP 2 x TP 1 x PP 1, fp32", tmp_path / "a" / "run.log"
    )


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a/history.jsonl", "runs/b/history.jsonl"], ["a", "b"]),
        (["x/a/save/history.jsonl", "x/b/save/history.jsonl"], ["a", "b"]),
        (["a/1/history.jsonl", "a/2/history.jsonl", "b/1/history.jsonl"], ["a/1", "a/2", "b/1"]),
        (["a/history.jsonl", "a/b/history.jsonl"], ["history.jsonl", "b/history.jsonl"]),
        (["a/x.log", "a/y.log"], ["x.log", "y.log"]),
        (["a/history.jsonl"], ["a"]),
        (["a/x.log"], ["x.log"]),
    ],
)
def test_a_table_names_its_runs(tmp_path, paths, names):
    logs = [RunLog(path) for path in paths]
    for log in logs:
        log.read_lines(OUR_LOG.splitlines())
    rows = log_command.text(logs).splitlines()[2:]
    assert [row.split("|")[-2].split(",")[0].strip() for row in rows[: len(paths)]] == names


def test_files_in_the_way_and_nothing_to_draw_are_lines_and_no_errors(
    tmp_path, capsys, monkeypatch
):
    pytest.importorskip("matplotlib")
    (tmp_path / "loss.png").mkdir()
    assert loss_plot.loss_curve(tmp_path / "loss.png", TRAIN) is False
    assert loss_plot.loss_curve(tmp_path / "a.png", tmp_path / "absent.jsonl") is False
    first, second = capsys.readouterr().out.splitlines()
    assert "loss.png: not drawn, " in first and "Is a directory" in first
    assert "a.png: not drawn, " in second and "absent.jsonl" in second
    assert loss_plot.loss_curve(tmp_path / "a.png", []) is False
    monkeypatch.setattr(loss_plot.importlib.util, "find_spec", lambda name: None)
    assert loss_plot.loss_curve(tmp_path / "b.png", TRAIN) is False
    first, second = capsys.readouterr().out.splitlines()
    assert "a.png: not drawn, the history has no loss yet" in first
    assert "b.png: not drawn, a package is missing: pip install matplotlib" in second
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_process_of_its_own_draws_the_same(tmp_path, capfd, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_history(tmp_path / "history.jsonl", TRAIN)
    assert (
        loss_plot.start_loss_curve(
            tmp_path / "loss.png", tmp_path / "history.jsonl", "124M\n/here"
        ).wait(60)
        == 0
    )
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    assert (
        loss_plot.start_loss_curve(odd, tmp_path / "history.jsonl", odd).wait(60) == 0
        and os.path.getsize(odd) > 0
    )
    assert loss_plot.start_loss_curve(odd, tmp_path / "none.jsonl", odd).wait(60) == 0
    assert loss_plot.start_loss_curve(tmp_path / "other.png", tmp_path / "none.jsonl").wait(60) == 0
    assert "other.png: not drawn" in capfd.readouterr().out


def test_files_of_one_pipeline_and_of_planned_next_to_measured(tmp_path):
    pytest.importorskip("matplotlib")
    schedule = build("zbv", 3, 2, 4)
    walked = spans(schedule, Costs.alike(schedule, transfer=0.1))
    rows = [(name, walked, walked) for name in ("1f1b", "zbv")]
    for draw in (
        lambda path: schedule_plot.draw(path, walked, [100.0, 90.0, 80.0], "zbv"),
        lambda path: schedule_plot.draw(path, walked, [], "zbv"),
        lambda path: schedule_plot.compare(path, rows),
    ):
        draw(tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match="--png"):
            draw(tmp_path / "none" / "a.png")
