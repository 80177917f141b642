"""Rows, CSV, picture and --follow of fugaku-megatron log."""

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_megatron.observe.log.iteration_metrics import PublishedRow, parse_log
from fugaku_megatron.reproduction.rows import load
from tests.checks.run_logs import history
from tests.helpers import A100, OUR_LOG

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "fugaku_megatron", "log"]
A100_FLAGS = (
    "--nodes 1 --ranks-per-node 8 --fp16 --num-layers 8 --hidden-size 14400 --seq-length 2048 --num-attention-heads 32 "
    "--vocab-size 250000 --micro-batch-size 1 --tensor-model-parallel-size 8 --checkpoint-activations "
    "--formula parameter"
)


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """The working directory, with two logs."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("ours.log", OUR_LOG), ("a100.log", A100[0] + "\n")):
        (tmp_path / name).write_text(text)
    return tmp_path


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("row", [r for r in load(["002"]) if r.fit_time], ids=lambda r: str(r.line))
def test_the_published_rows_come_out_as_they_were_printed(row):
    names = "nodes ranks ghz size dp tp pp mbs gbs memory_mib seconds tflops".split()
    ours = [*PublishedRow(**{name: getattr(row, name) for name in names}).cells().values()]
    assert (*ours[:9], ours[-1]) == (*row.cells[:9], row.cells[-1])
    assert float(ours[9]) == row.seconds and float(ours[10]) == pytest.approx(row.tflops, abs=0.005)
    # theirs were cut, or come from other digits
    assert float(ours[11]) == pytest.approx(row.petaflops, rel=0.02, abs=1.1e-4)


def test_a_row_for_each_log(logs, command):
    printed = command("log ours.log a100.log", A100_FLAGS).stdout
    header, _, ours, a100, *_ = printed.splitlines()
    assert cells(header)[:3] == ["Nodes", "Freq", "Size"]
    ours = cells(ours)
    assert ours[:9] == ["1", "4.5GHz", "0.9M", "2", "1", "1", "2", "8", "294.0 MiB"]
    notes = "ours.log, fp32, recompute none, ZeRO 0, 0.0589 TFLOPs recomputed, loss 6.26"
    assert ours[-1] == notes and ours[10] == "0.0600"
    *numbers, notes = cells(a100)
    assert numbers == "1 - 24B 1 8 1 1 2048 - 770.0 108.47 0.8474".split()
    assert notes == "a100.log, fp16, recompute full, ZeRO 0, 108.47 TFLOPs recomputed, loss 63.84"


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def assert_picture(path):
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_csv_and_picture_hold_the_same(logs, command):
    pytest.importorskip("matplotlib")
    printed = command("log ours.log a100.log --csv t.csv --png t.png --markdown").stdout
    assert printed.startswith("### Runs, measured\n\n| Nodes")
    ours, a100 = read_csv(logs / "t.csv")
    ours_expected = {
        "layers": "4",
        "dp": "2",
        "precision": "fp32",
        "iterations": "4",
        "tflops": "0.06",
    }
    a100_expected = {"dp": "", "layers": "", "seconds": "769.99", "loss": "63.84045"}
    assert ours_expected.items() <= ours.items() and a100_expected.items() <= a100.items()
    assert_picture(logs / "t.png")


def test_csv_has_a_row_per_iteration_where_asked(logs, command):
    command("log ours.log a100.log --csv t.csv --per-iteration")
    rows = read_csv(logs / "t.csv")
    expected = [("ours.log", str(i)) for i in range(1, 7)] + [("a100.log", "2")]
    assert [(row["log"], row["iteration"]) for row in rows] == expected
    last = {"lm_loss": "63.84045", "samples_per_second": "2.66", "tokens_per_second": ""}
    assert last.items() <= rows[-1].items()
    lines = parse_log((OUR_LOG + A100[0]).splitlines())
    assert [float(row["lm_loss"]) for row in rows] == [line.lm_loss for line in lines]


def test_a_history_makes_the_same_files(logs, command):
    pytest.importorskip("matplotlib")
    (logs / "history.jsonl").write_text(history(OUR_LOG))
    printed = command("log history.jsonl --csv h.csv --per-iteration --png h.png").stdout
    assert "history.jsonl: medians over 4 lines; iteration 6 of 6" in printed
    iterations = [row["iteration"] for row in read_csv(logs / "h.csv")]
    assert iterations == [str(i) for i in range(1, 7)]
    assert_picture(logs / "h.png")


def test_runs_are_compared_by_their_last_losses(logs, command):
    pytest.importorskip("matplotlib")
    losses = []
    for name, text in (("a", OUR_LOG), ("b", OUR_LOG.replace("lm loss: 6.25", "lm loss: 6.05"))):
        (logs / name).mkdir()
        (logs / name / "history.jsonl").write_text(history(text))
        losses.append(parse_log(text.splitlines())[-1].lm_loss)
    printed = command("log a b --png both.png --x tokens").stdout
    table = printed[printed.index("| Run") :].splitlines()
    header, _, *rows = map(cells, table[:4])
    assert header == ["Run", "Iterations", "Tokens", "Last lm loss", "Last validation loss"]
    assert losses[1] < losses[0]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("a", "6", f"{losses[0]:.6g}"),
        ("b", "6", f"{losses[1]:.6g} (lowest)"),
    ]
    assert_picture(logs / "both.png")


@pytest.mark.parametrize(
    "flags, message",
    {
        "ours.log bare.log --x tokens": "--x tokens: bare.log does not say how many tokens were consumed: leave it out",
        "folder.csv": "folder.csv: is a directory without history.jsonl: pass a run's log or its --save",
        "ours.log --per-iteration": "--per-iteration needs --csv FILE: pass both",
        "gone.log": "gone.log: No such file or directory: pass a run's log",
        "ours.log --csv nowhere/t.csv": "--csv nowhere/t.csv: .*/nowhere is not a directory: make it",
        "ours.log --csv a100.log": "--csv a100.log: pass a file whose name ends with .csv",
        "ours.log --png a100.log": "--png a100.log: pass a file whose name ends with .png",
        "ours.log --csv folder.csv": "--csv folder.csv is a directory: pass a file in it",
        "ours.log --nodes 0": "--nodes is 0: pass a number above 0",
        "ours.log --world-size 4 --dry-run": "pass --nodes and --ranks-per-node",
        "ours.log --num-layers 8": "--hidden-size, --num-attention-heads",
        "ours.log --nodes 3 --recipe 30b --tensor-model-parallel-size 2": "3 ranks .* are not divisible",
        "ours.log --folow": r"unknown flag --folow: did you mean --follow\?",
    }.items(),
)
def test_a_mistake_is_one_line(logs, command, flags, message):
    (logs / "folder.csv").mkdir()
    (logs / "bare.log").write_text(" iteration        1/       2 | lm loss: 3.0 |\n")
    error = command("log", flags, code=2).stderr
    assert re.fullmatch(f"fugaku-megatron log: .*{message}.*\n", error), error
    assert (logs / "a100.log").read_text() == A100[0] + "\n"


def follow(logs, words, **options):
    """Follow a log from the logs' folder."""
    return subprocess.Popen(
        [*COMMAND, *f"{words} --follow --interval 0.1".split()],
        cwd=logs,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_the_command_follows_a_job_to_its_last_line(logs):
    path = logs / "live.log"
    head = OUR_LOG.index(" iteration        4/")
    path.write_text(OUR_LOG[:head])
    job = follow(logs, "live.log --csv live.csv")
    assert job.stderr.readline().startswith("live.log: iteration 3 of 6, ")
    with path.open("a") as file:
        file.write(OUR_LOG[head:])
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0 and "iteration 6 of 6" in err and "| 294.0 MiB |" in out
    assert (logs / "live.csv").exists()


def test_following_says_tokens_per_second_and_the_time_left(logs, command):
    text = OUR_LOG.replace("| TFLOPs:", "| tokens per second: 20405.5 | TFLOPs:")
    (logs / "new.log").write_text(text)
    said = command("log new.log --follow").stderr
    assert ", 20,406 tokens/s, loss 6.26, 0 s left\n" in said


def heed_interrupts():
    """Restore SIGINT: a shell ignores it in background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_following_with_the_table(logs):
    job = follow(logs, "a100.log", preexec_fn=heed_interrupts)
    job.stderr.readline()
    os.kill(job.pid, signal.SIGINT)
    out, _ = job.communicate(timeout=200)
    assert job.returncode == 0 and "| 108.47 |" in out
