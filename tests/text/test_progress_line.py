"""Progress lines on standard error."""

import io
import sys

import pytest

from fugaku_megatron.text.progress_line import ProgressLine

pytestmark = pytest.mark.unit


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "shown"), [(io.StringIO(), "first\nsecond\n"), (Terminal(), "\rfirst \rsecond ")]
)
def test_a_line_is_written_over_on_a_terminal(monkeypatch, stream, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    progress = ProgressLine(0.0, 0.0)
    progress("first")
    progress("second")
    assert stream.getvalue() == shown


def test_a_line_waits_for_its_period(capsys):
    progress = ProgressLine(1e6)
    progress("too early")
    assert capsys.readouterr().err == "" and progress.seconds < 1e6
