"""Rows, CSV, picture and --follow of fugaku-megatron log."""

import csv
import os
import re
import signal
import subprocess
import sys

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.observe.iteration_metrics import PublishedRow, parse_log, published_header
from fugaku_megatron.reproduction.rows import load
from tests.checks.run_logs import history
from tests.helpers import A100, OUR_LOG

COMMAND = [sys.executable, "-m", "fugaku_megatron", "log"]
A100_FLAGS = (
    "--nodes 1 --ranks-per-node 8 --fp16 --num-layers 8 --hidden-size 14400 --seq-length 2048 --num-attention-heads 32 "
    "--vocab-size 250000 --micro-batch-size 1 --tensor-model-parallel-size 8 --checkpoint-activations "
    "--formula parameter"
).split()


@pytest.fixture
def logs(tmp_path):
    for name, text in (("ours.log", OUR_LOG), ("a100.log", A100[0] + "\n")):
        (tmp_path / name).write_text(text)
    return tmp_path


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("row", [r for r in load(["002"]) if r.fit_time], ids=lambda r: str(r.line))
def test_the_published_rows_come_out_as_they_were_printed(row):
    ours = PublishedRow(
        nodes=row.nodes,
        ranks=row.ranks,
        ghz=row.ghz,
        size=row.size,
        dp=row.dp,
        tp=row.tp,
        pp=row.pp,
        mbs=row.mbs,
        gbs=row.gbs,
        memory_mib=row.memory_mib,
        seconds=row.seconds,
        tflops=row.tflops,
    ).cells()
    assert (*ours[:9], ours[-1]) == (*row.cells[:9], row.cells[-1])
    assert float(ours[9]) == row.seconds and float(ours[10]) == pytest.approx(row.tflops, abs=0.005)
    assert float(ours[11]) == pytest.approx(
        row.petaflops, rel=0.02, abs=1.1e-4
    )  # theirs were cut, or come from other digits


def test_a_row_for_each_log(logs, capsys):
    assert program.main(["log", str(logs / "ours.log"), str(logs / "a100.log"), *A100_FLAGS]) == 0
    header, _, ours, a100, *_ = capsys.readouterr().out.splitlines()
    assert tuple(cells(header)) == published_header()
    assert cells(ours)[:9] == ["1", "4.5GHz", "0.9M", "2", "1", "1", "2", "8", "294.0 MiB"]
    assert (
        cells(ours)[-1]
        == "ours.log, fp32, recompute none, ZeRO 0, 0.0589 TFLOPs recomputed, loss 6.26"
    )
    assert cells(ours)[10] == "0.0600"
    assert cells(a100) == [
        "1",
        "-",
        "24B",
        "1",
        "8",
        "1",
        "1",
        "2048",
        "-",
        "770.0",
        "108.47",
        "0.8474",
        "a100.log, fp16, recompute full, ZeRO 0, 108.47 TFLOPs recomputed, loss 63.84",
    ]


def test_csv_and_picture_hold_the_same(logs, capsys):
    pytest.importorskip("matplotlib")
    paths = [str(logs / name) for name in ("ours.log", "a100.log")]
    assert (
        program.main(
            [
                "log",
                *paths,
                *f"--csv {logs / 't.csv'} --png {logs / 't.png'} --markdown".split(),
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("### Runs, measured\n\n| Nodes")
    ours, a100 = csv.DictReader((logs / "t.csv").open())
    assert (ours["layers"], ours["dp"], ours["precision"], ours["iterations"], ours["tflops"]) == (
        "4",
        "2",
        "fp32",
        "4",
        "0.06",
    )
    assert (a100["dp"], a100["layers"], a100["seconds"], a100["loss"]) == (
        "",
        "",
        "769.99",
        "63.84045",
    )
    assert (logs / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_csv_has_a_row_per_iteration_where_asked(logs, capsys):
    paths = [str(logs / name) for name in ("ours.log", "a100.log")]
    assert program.main(["log", *paths, "--csv", str(logs / "t.csv"), "--per-iteration"]) == 0
    rows = list(csv.DictReader((logs / "t.csv").open()))
    assert [(row["log"], row["iteration"]) for row in rows] == [
        (paths[0], str(i)) for i in range(1, 7)
    ] + [(paths[1], "2")]
    assert (rows[-1]["lm_loss"], rows[-1]["samples_per_second"], rows[-1]["tokens_per_second"]) == (
        "63.84045",
        "2.66",
        "",
    )
    assert [float(row["lm_loss"]) for row in rows] == [
        i.lm_loss for i in parse_log((OUR_LOG + A100[0]).splitlines())
    ]


def test_a_history_makes_the_same_files(logs, capsys):
    pytest.importorskip("matplotlib")
    (logs / "history.jsonl").write_text(history(OUR_LOG))
    assert (
        program.main(
            (
                f"log {logs / 'history.jsonl'} --csv {logs / 'h.csv'} --per-iteration --png "
                f"{logs / 'h.png'}"
            ).split()
        )
        == 0
    )
    assert "history.jsonl: medians over 4 lines; iteration 6 of 6" in capsys.readouterr().out
    assert [row["iteration"] for row in csv.DictReader((logs / "h.csv").open())] == [
        str(i) for i in range(1, 7)
    ]
    assert (logs / "h.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_runs_are_compared_by_their_last_losses(logs, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(logs)
    for name, text in (("a", OUR_LOG), ("b", OUR_LOG.replace("lm loss: 6.25", "lm loss: 6.05"))):
        (logs / name).mkdir()
        (logs / name / "history.jsonl").write_text(history(text))
    losses = [
        parse_log(text.splitlines())[-1].lm_loss
        for text in (OUR_LOG, OUR_LOG.replace("lm loss: 6.25", "lm loss: 6.05"))
    ]
    assert program.main("log a b --png both.png --x tokens".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| Run"))
    assert cells(lines[start]) == [
        "Run",
        "Iterations",
        "Tokens",
        "Last lm loss",
        "Last validation loss",
    ]
    rows = [cells(line) for line in lines[start + 2 : start + 4]]
    assert (
        losses[1] < losses[0]
        and [row[0] for row in rows] == ["a", "b"]
        and {row[1] for row in rows} == {"6"}
    )
    assert [row[3] for row in rows] == [f"{losses[0]:.6g}", f"{losses[1]:.6g} (lowest)"]
    assert (logs / "both.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["ours.log", "bare.log", "--x", "tokens"],
            "--x tokens: bare.log does not say how many tokens were consumed: leave it out",
        ),
        (
            ["folder.csv"],
            "folder.csv: is a directory without history.jsonl: pass a run's log or its --save",
        ),
        (["ours.log", "--per-iteration"], "--per-iteration needs --csv FILE: pass both"),
        (["gone.log"], "gone.log: No such file or directory: pass a run's log"),
        (
            ["ours.log", "--csv", "nowhere/t.csv"],
            "--csv nowhere/t.csv: .*/nowhere is not a directory: make it",
        ),
        (
            ["ours.log", "--csv", "a100.log"],
            "--csv a100.log: pass a file whose name ends with .csv",
        ),
        (
            ["ours.log", "--png", "a100.log"],
            "--png a100.log: pass a file whose name ends with .png",
        ),
        (["ours.log", "--csv", "folder.csv"], "--csv folder.csv is a directory: pass a file in it"),
        (["ours.log", "--nodes", "0"], "--nodes is 0: pass a number above 0"),
        (["ours.log", "--world-size", "4", "--dry-run"], "pass --nodes and --ranks-per-node"),
        (["ours.log", "--num-layers", "8"], "--hidden-size, --num-attention-heads"),
        (
            ["ours.log", "--nodes", "3", "--recipe", "30b", "--tensor-model-parallel-size", "2"],
            "3 ranks .* are not divisible",
        ),
        (["ours.log", "--folow"], r"unknown flag --folow: did you mean --follow\?"),
    ],
)
def test_a_mistake_is_one_line(logs, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(logs)
    (logs / "folder.csv").mkdir()
    (logs / "bare.log").write_text(" iteration        1/       2 | lm loss: 3.0 |\n")
    assert program.main(["log", *flags]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(f"fugaku-megatron log: .*{message}.*\n", error), error
    assert (logs / "a100.log").read_text() == A100[0] + "\n"


def test_the_command_follows_a_job_to_its_last_line(logs):
    path, head = logs / "live.log", OUR_LOG.index(" iteration        4/")
    path.write_text(OUR_LOG[:head])
    job = subprocess.Popen(
        [*COMMAND, *f"{path} --follow --interval 0.1 --csv {logs / 'live.csv'}".split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr.readline().startswith(f"{path}: iteration 3 of 6, ")
    with path.open("a") as file:
        file.write(OUR_LOG[head:])
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0 and "iteration 6 of 6" in err and "| 294.0 MiB |" in out
    assert (logs / "live.csv").exists()


def test_following_says_tokens_per_second_and_the_time_left(logs, capsys):
    text = OUR_LOG.replace("| TFLOPs:", "| tokens per second: 20405.5 | TFLOPs:")
    (logs / "new.log").write_text(text)
    assert program.main(["log", str(logs / "new.log"), "--follow"]) == 0
    assert ", 20,406 tokens/s, loss 6.26, 0 s left\n" in capsys.readouterr().err


def heed_interrupts():
    """Restore SIGINT, which a shell ignores in background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_following_with_the_table(logs):
    job = subprocess.Popen(
        [*COMMAND, str(logs / "a100.log"), "--follow", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    job.stderr.readline()
    os.kill(job.pid, signal.SIGINT)
    out, _ = job.communicate(timeout=200)
    assert job.returncode == 0 and "| 108.47 |" in out
