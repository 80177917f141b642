"""The picture of a pipeline: every kind of bar where its span is, in its colour, and the memory beside it."""

from __future__ import annotations

import pytest

from fugaku_megatron.logs import pipeline_plot
from fugaku_megatron.pipeline.parts import BACKWARD_INPUT, FORWARD
from fugaku_megatron.pipeline.schedule import build
from fugaku_megatron.pipeline.timeline import Costs, spans

figure = pytest.importorskip("matplotlib.figure")


def drawn(name: str, chunks: int) -> tuple:
    """The axes of a picture without a file, and the spans that they show."""
    schedule = build(name, 3, chunks, 4)
    walked = spans(schedule, Costs.alike(schedule, transfer=0.1))
    axes = figure.Figure().subplots()
    kinds = pipeline_plot._bars(axes, walked, 3)
    return axes, walked, [label for _, label in kinds]


def bars(axes, colour) -> set[tuple[float, float, int]]:
    """(left, right, stage) of the bars of a colour, to a millionth."""
    from matplotlib.colors import to_rgb
    found = [p for p in axes.patches if p.get_facecolor()[:3] == pytest.approx(to_rgb(colour))]
    return {(round(p.get_x(), 6), round(p.get_x() + p.get_width(), 6), round(p.get_y() + p.get_height() / 2)) for p in found}


@pytest.mark.parametrize(("name", "chunks", "op", "colour"), [
    ("1f1b", 1, FORWARD, "tab:blue"), ("zb-h1", 1, BACKWARD_INPUT, "tab:orange"), ("zbv", 2, FORWARD, "tab:blue")])
def test_bars_stand_where_the_spans_are(name, chunks, op, colour):
    axes, walked, _ = drawn(name, chunks)
    assert bars(axes, colour) == {(round(s.start, 6), round(s.end, 6), s.stage) for s in walked if s.op == op and s.chunk == 0}
    assert bars(axes, pipeline_plot.IDLE) == {(0, round(max(s.end for s in walked), 6), stage) for stage in range(3)}


def test_the_legend_names_what_there_is():
    assert drawn("1f1b", 1)[2] == ["F forward", "B backward", "message under way"]
    assert drawn("zbv", 2)[2] == ["F forward", "I gradient of the input", "W gradient of the weights", "message under way"]


def test_the_file(tmp_path):
    _, walked, _ = drawn("zbv", 2)
    for memory in ([100.0, 90.0, 80.0], []):
        pipeline_plot.draw(tmp_path / "a.png", walked, memory, "zbv")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="--png"):
        pipeline_plot.draw(tmp_path / "none" / "a.png", walked, [], "zbv")


def test_planned_beside_measured(tmp_path):
    rows = [(name, drawn(name, chunks)[1], drawn(name, chunks)[1]) for name, chunks in (("1f1b", 1), ("zbv", 2))]
    pipeline_plot.compare(tmp_path / "a.png", rows)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="--png"):
        pipeline_plot.compare(tmp_path / "none" / "a.png", rows)
