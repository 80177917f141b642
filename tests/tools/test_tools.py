"""Tools that draw and measure, and mistakes in calls to tools and benchmarks: one line, no usage block, no traceback."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main as benchmarks
from fugaku_megatron.cli import program
from fugaku_megatron.host import kernels
from tools import demo_corpus, gemm_error, plot_result

pytestmark = pytest.mark.system


def call(tool, *words: object) -> int:
    return program.start(tool.__name__.rpartition(".")[2], tool, list(map(str, words)))


NO_FOLDER = "no is not a directory: make it, or pass another file"


@pytest.mark.parametrize(
    "tool, words, message",
    [
        (plot_result, "", "the following arguments are required: STEP_JSON, --output"),
        (plot_result, "no.json --output a.png", "no.json"),
        (plot_result, "text --output a.png", "text"),
        (
            plot_result,
            "other.json --output a.png",
            "is not there: pass STEP_JSON of python -m benchmarks step",
        ),
        (plot_result, "other.json --output no/a.png", NO_FOLDER),
        (demo_corpus, "", "the following arguments are required: --output"),
        (demo_corpus, "--output other.json", "other.json: cannot be written (File exists)"),
        (gemm_error, "--rows 0", "pass numbers above 0"),
        (gemm_error, "--rows 4 --depth 40 --chunks 8 0", "pass numbers above 0"),
        (
            gemm_error,
            "--rows 4 --depth 40 --chunks 70000",
            "--chunks 70000: pass numbers from 1 to 65536",
        ),
        (gemm_error, "--quux", "unknown flag --quux"),
    ],
)
def test_mistakes_of_the_tools_are_one_line(command, tool, words, message, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "text").write_text("no")
    done = command(words, code=2, start=lambda words: call(tool, *words))
    done.mistake(message)
    assert done.stdout == "" and done.stderr.startswith(tool.__name__.rpartition(".")[2] + ": ")


@pytest.mark.parametrize(
    "words, message",
    {
        "": "the following arguments are required: family",
        "stepp": "argument family: invalid choice: 'stepp'",
        "step --ranks x": "argument --ranks: invalid int value: 'x'",
        "step --quux": "unknown flag --quux",
    }.items(),
)
def test_mistakes_of_the_benchmarks_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        benchmarks(words.split())
    said = str(end.value)
    assert said.startswith(f"python -m benchmarks: {message}") and "\n" not in said
    assert capsys.readouterr() == ("", "")


# gemm_error ----------------------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_formats():
    case = gemm_error.Case(name="c", left=1.0, right=0.02)
    with kernels.target("portable"):
        errors = gemm_error.measure(case, 24, 512, (1, 16, 256))
        large = gemm_error.measure(gemm_error.CASES[-1], 8, 128, (16,))
    # A rounding to p bits has a relative error below 2^-p, its root mean square is about 0.4 of that.
    assert 0.3 * 2**-11 < errors.fp16_result < 0.6 * 2**-11
    assert errors.bf16_operands == pytest.approx(8 * errors.fp16_operands, rel=0.2)
    assert errors.fp32_sums < 1e-6
    chunks = errors.chunks
    assert errors.fp16_result < 2 * chunks[1] < 2 * chunks[16] < 2 * chunks[256] < 2 * 2**-7
    assert errors.overflows == set() and large.overflows == {16}
    assert gemm_error.table([large], (16,))[2].endswith("| overflow |")


# Pictures ------------------------------------------------------------------------------------------------------------------------
