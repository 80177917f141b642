"""The picture of allocators, of made-up results."""

from __future__ import annotations

import pytest

from benchmarks import pictures

NAMES = ("stock", "tuned", "tcmalloc")


def result(slow: float = 12.0) -> dict:
    rows = [{"kernels": "native", "recompute": recompute, "ranks": ranks, "allocator": name, "seconds": seconds, "ratio": 1.0}
            for recompute, seconds, names in (("none", 8.0, NAMES), ("full", slow, NAMES[1:])) for ranks in (1, 2)
            for name in names]
    return {"recipe": "124m", "dtype": "fp32", "micro_batch_size": 1, "global_batch_size": 4, "cpu": "a CPU", "clock_ghz": 4.0,
            "rows": rows}


@pytest.fixture
def figure(tmp_path, monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    figures, save = [], figure_module.Figure.savefig
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    pictures.draw_allocators(tmp_path / "a.png", result())
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    return figures[0]


def test_panels_have_one_axis_and_an_allocator_one_colour(figure):
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[1] > 12.0
    colors = [{bars.get_label(): bars.patches[0].get_facecolor() for bars in axes.containers} for axes in (left, right)]
    assert list(colors[0]) == list(NAMES) and list(colors[1]) == list(NAMES[1:])
    assert all(colors[0][name] == color for name, color in colors[1].items())


def test_the_one_legend_lies_over_no_panel(figure):
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(NAMES)
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)
