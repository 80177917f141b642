"""Live line on a terminal, also below mpiexec, and log file."""

import contextlib
import io
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_megatron.observe.export.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.observe.log.iteration_metrics import IterationMetrics, parse_log
from fugaku_megatron.observe.log.screen import WIDTH, LiveLine, Screen
from fugaku_megatron.text.numbers import duration_text

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from fugaku_megatron.observe.log.screen import on_terminal
print("rank", "terminal" if on_terminal(sys.stdout) else "other", flush=True)
"""


def step(iteration, end=100):
    return IterationMetrics(
        iteration,
        end,
        consumed_samples=8 * iteration,
        consumed_tokens=8192 * iteration,
        elapsed_seconds=2.0,
        global_batch_size=8,
        lm_loss=10.0 / iteration,
        skipped=0,
        tflops=1.5,
    )


def visible(shown):
    """Return the lines that a terminal shows: text after a carriage return overwrites the line."""
    lines = []
    for line in shown.split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        lines.append(cells.rstrip())
    return lines


def test_the_live_line_says_progress_loss_speed_and_time_left():
    line = LiveLine(100)
    assert line.text() == "iteration 0/100 (0%)"
    for i in (1, 2, 3, 4):
        line.add(step(i))
    assert line.text() == "iteration 4/100 (4%) | loss 2.5000 | 4,096 tokens/s | 3 min 12 s left"
    assert len(LiveLine(10**80).text()) == WIDTH


def test_a_resumed_run_estimates_from_its_own_iterations():
    line = LiveLine(100, 90)
    line.add(step(91))
    assert line.text().endswith("| 18 s left")


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (18720, "5 h 12 min"),
        (187200, "2 d 4 h"),
        (-1, "0 s"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_on_a_terminal_the_live_line_stands_for_log_lines_which_go_to_the_file(tmp_path):
    stream = io.StringIO()
    log = tmp_path / "run.log"
    writer = MetricsWriter(4, 1, LogOutputs(stream=stream, live="on", log_file=log))
    for i in (1, 2, 3, 4):
        writer.add(step(i, end=4))
        if i == 2:
            writer.print("saved a checkpoint")
    writer.close()
    assert visible(stream.getvalue()) == [
        "saved a checkpoint",
        "iteration 4/4 (100%) | loss 2.5000 | 4,096 tokens/s | 0 s left",
        "",
    ]
    assert [line.iteration for line in parse_log(log.read_text().splitlines())] == [1, 2, 3, 4]
    assert "saved a checkpoint\n" in log.read_text()


def test_where_log_lines_are_not_kept_one_line_says_how():
    stream = io.StringIO()
    MetricsWriter(4, 1, LogOutputs(stream=stream, live="on")).close()
    assert visible(stream.getvalue())[0].startswith(
        "note: log lines are not printed on a terminal: --log-file FILE keeps them"
    )


def test_without_a_terminal_log_lines_are_printed_and_added_to_the_file(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("earlier job\n")
    stream = io.StringIO()
    writer = MetricsWriter(4, 1, LogOutputs(stream=stream, log_file=log))
    line = writer.add(step(1)).format_line()
    assert stream.getvalue() == line + "\n" and log.read_text() == f"earlier job\n{line}\n"


def test_the_log_file_takes_a_path_of_any_bytes(tmp_path):
    screen = Screen(io.StringIO(), None, tmp_path / "run.log")
    screen.line("saved to " + os.fsdecode(b"b\xff"))
    assert (tmp_path / "run.log").read_bytes() == b"saved to b\xff\n"


def test_a_log_file_that_cannot_be_written_any_more_is_said_once(tmp_path):
    stream = io.StringIO()
    screen = Screen(stream, None, tmp_path / "gone" / "run.log")
    screen.line("one")
    screen.line("two")
    assert [line.partition(": no longer")[0] for line in stream.getvalue().splitlines()] == [
        "one",
        f"--log-file {tmp_path / 'gone' / 'run.log'}",
        "two",
    ]


def on_pty(words):
    """Run a command on a terminal; return its output."""
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=ROOT, env=ENVIRONMENT
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert job.wait(timeout=200) == 0, shown
    return shown.decode()


ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LAUNCHERS = [
    path
    for path in (
        Path(sys.executable).with_name("mpiexec"),
        shutil.which("mpiexec.openmpi"),
        shutil.which("mpiexec.hydra"),
    )
    if path and Path(path).exists()
]


@pytest.mark.parametrize("launcher", [None, *LAUNCHERS], ids=str)
def test_a_terminal_is_seen_also_below_mpiexec(launcher):
    words = [sys.executable, "-c", SCRIPT]
    if launcher:
        words = [str(launcher), "-n", "1", *words]
    assert re.search("rank terminal", on_pty(words))
    piped = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert "rank other" in piped.stdout


@pytest.mark.skipif(not LAUNCHERS, reason="no mpiexec")
def test_a_pipe_between_the_rank_and_mpiexec_is_no_terminal():
    words = [str(LAUNCHERS[0]), "-n", "1", "sh", "-c", f"{sys.executable} -c '{SCRIPT}' | cat"]
    assert "rank other" in on_pty(words)
