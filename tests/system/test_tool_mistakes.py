"""Mistakes of those who call the tools and the benchmarks: one line, no usage block, no traceback."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main as benchmarks
from fugaku_megatron import cli
from tools import demo_corpus, gemm_error, plot_profile, plot_result, plot_rooms


@pytest.mark.parametrize("tool, words, message", [
    (plot_result, [], "the following arguments are required: STEP_JSON, --output"),
    (plot_result, ["{dir}/no.json", "--output", "{dir}/a.png"], "no.json"),
    (plot_result, ["{dir}/other.json", "--output", "{dir}/a.png"], "is not there: give STEP_JSON of python -m benchmarks step"),
    (plot_result, ["{dir}/other.json", "--output", "{dir}/no/a.png"], "no is not a directory: make it, or give another file"),
    (plot_rooms, ["now=fugaku_megatron"], "the following arguments are required: --png"),
    (plot_rooms, ["now={dir}/no", "--png", "{dir}/a.png"], "no: give TITLE=FOLDER, a folder that is there"),
    (plot_rooms, ["{dir}", "--png", "{dir}/a.png"], "give TITLE=FOLDER, a folder that is there"),
    (plot_rooms, ["now={dir}", "--png", "{dir}/no/a.png"], "no is not a directory: make it, or give another file"),
    (plot_profile, ["a={dir}/no.txt", "--output", "{dir}/no/a.png"], "no is not a directory: make it, or give another file"),
    (demo_corpus, [], "the following arguments are required: --output"),
    (demo_corpus, ["--output", "{dir}/other.json"], "other.json: cannot be written (File exists)"),
    (gemm_error, ["--rows", "0"], "give numbers above 0"),
    (gemm_error, ["--quux"], "unknown flag --quux"),
    (plot_profile, ["--quux"], "the following arguments are required: LABEL=FILE, --output"),
])
def test_mistakes_of_the_tools_are_one_line(tool, words, message, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "other.json").write_text("{}")
    name = tool.__name__.rpartition(".")[2]
    assert cli.start(name, tool, [word.format(dir=tmp_path) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"{name}: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("words, message", [
    ([], "python -m benchmarks: the following arguments are required: family"),
    (["stepp"], "python -m benchmarks: argument family: invalid choice: 'stepp'"),
    (["step", "--ranks", "x"], "python -m benchmarks: argument --ranks: invalid int value: 'x'"),
    (["step", "--quux"], "python -m benchmarks: unknown flag --quux"),
])
def test_mistakes_of_the_benchmarks_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        benchmarks(words)
    assert str(end.value).startswith(message) and "\n" not in str(end.value) and capsys.readouterr() == ("", "")
