"""Reading of logs, recorded by this program and on A100s."""

import json
import os
import statistics

import pytest

from fugaku_megatron.observe.log import run_log
from fugaku_megatron.observe.log.iteration_metrics import parse_line
from fugaku_megatron.observe.log.run_log import (
    Job,
    RunLog,
)
from tests.checks.refusals import assert_refusal, refusals
from tests.checks.run_logs import (
    history,
    read_log,
)
from tests.helpers import A100, OUR_LOG
from tests.time_limit import time_limit

pytestmark = pytest.mark.unit

A100_JOB = Job(
    other_program=True,
    nodes=1,
    ranks=8,
    values={
        "num_layers": 8,
        "hidden_size": 14400,
        "num_attention_heads": 32,
        "seq_length": 2048,
        "vocab_size": 250000,
        "micro_batch_size": 1,
        "tensor_model_parallel_size": 8,
        "fp16": True,
        "recompute_granularity": "full",
    },
)


def written(tmp_path, text, name="run.log"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_our_log_says_everything(tmp_path):
    log = read_log(written(tmp_path, OUR_LOG))
    assert [i.iteration for i in log.iterations] == [1, 2, 3, 4, 5, 6] and len(log.counted) == 4
    # medians of 8 / samples per second of iterations 3 to 6
    seconds = (8 / 164.217 + 8 / 152.956) / 2
    assert log.seconds == pytest.approx(seconds) and log.tflops == pytest.approx(0.06)
    # the log's own line: FLOPs per iteration of 8 samples: 5.9391e+09 hardware
    assert log.recomputed_tflops == pytest.approx(
        5.9391e9 / 2 * statistics.mean((164.217, 152.956)) / 8 / 1e12, rel=1e-4
    )
    assert (log.ghz, log.memory_mib, log.finished, log.gbs) == (4.48, 294, True, 8)
    assert (log.job.nodes, log.job.ranks, log.job.dp, log.job.precision, log.job.recompute) == (
        1,
        2,
        2,
        "fp32",
        "none",
    )
    assert log.machine.startswith("node01: AMD EPYC")


def test_a_history_is_read_as_its_log(tmp_path):
    log = read_log(written(tmp_path, OUR_LOG))
    kept = read_log(written(tmp_path, history(OUR_LOG), "history.jsonl"))
    assert kept.iterations == log.iterations and (kept.seconds, kept.tflops, kept.gbs) == (
        log.seconds,
        log.tflops,
        log.gbs,
    )
    assert kept.finished and kept.validations == [(4, 6.5)] and kept.job.run is None
    model = Job(
        values=log.job.values, nodes=1, ranks=2, other_program=True
    )  # what a run's flags say
    described = read_log(tmp_path / "history.jsonl", model)
    assert described.recomputed_tflops == log.recomputed_tflops and described.job.dp == 2


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"kind": "train", "iteration": 1', "line 2: not a record of a history"),
        ('{"kind": "train", "iteration": 1}', "line 2: train_iters is None, not int"),
        (
            '{"kind": "train", "iteration": 1, "train_iters": 2, "lm_loss": "x"}',
            "line 2: lm_loss is 'x', not float",
        ),
        (
            '{"kind": "train", "iteration": 1, "train_iters": 2, "speed": 3}',
            "line 2: the record has speed, which this version",
        ),
        ('{"kind": "validation", "iteration": 1}', "line 2: lm_loss is None, not float"),
    ],
)
def test_a_damaged_history_is_refused_with_its_line(tmp_path, record, message):
    with pytest.raises(ValueError, match=f"history.jsonl {message}"):
        read_log(
            written(tmp_path, history(OUR_LOG).splitlines()[0] + f"\n{record}\n", "history.jsonl")
        )


def test_the_a100_lines_give_the_printed_row_and_tflops(tmp_path):
    log = read_log(written(tmp_path, A100[0]), A100_JOB, "parameter")
    assert (log.seconds, log.tflops, log.gbs, log.finished) == (769.99, 108.47, 2048, False)
    assert log.recomputed_tflops == pytest.approx(108.47, abs=0.01)
    assert (log.job.dp, log.job.tp, log.job.pp, log.job.precision) == (1, 8, 1, "fp16")
    unknown = read_log(written(tmp_path, A100[1]))
    assert (unknown.seconds, unknown.recomputed_tflops, unknown.job.tp, unknown.job.run) == (
        434.14,
        None,
        None,
        None,
    )
    line = parse_line(A100[0])
    assert run_log.exact_seconds(line) == 769.99
    fast = parse_line(
        "iteration 1/ 2 | elapsed time per iteration (s): 0.05 | global batch size: 8 | samples per second: 159.417"
    )
    assert run_log.exact_seconds(fast) == 8 / 159.417
    assert run_log.exact_seconds(parse_line("iteration 1/ 2 | lm loss: 3.0 |")) is None


def test_a_resumed_job_counts_alone_and_supersedes_what_it_repeats():
    reader = RunLog("run.log")
    line = " iteration {}/ 9 | elapsed time per iteration (s): {} | lm loss: {} |"
    machine = "a: CPU at 2.00 GHz (measured), 48 CPUs"
    reader.read_lines([machine, *(line.format(i, 5, i) for i in (1, 2, 3, 4))])
    reader.read_lines([machine, *(line.format(i, 7, 10 + i) for i in (3, 4, 5, 6))])
    log = reader
    assert [i.lm_loss for i in log.iterations] == [1, 2, 13, 14, 15, 16]
    assert [i.iteration for i in log.counted] == [5, 6] and log.seconds == 7


def test_a_log_that_grows_is_read_once_and_one_written_anew_is_read_anew(tmp_path):
    path = written(tmp_path, OUR_LOG[:-200])
    file = RunLog(str(path))
    assert file.poll() and not file.finished and not file.poll()
    before = len(file.iterations)
    path.write_text(OUR_LOG)
    assert file.poll() and file.finished and len(file.iterations) == 6 > before
    cut = read_log(written(tmp_path, A100[0] + "\n" + A100[0][:-30]))
    assert len(cut.counted) == 1
    path.write_text(OUR_LOG)
    file = RunLog(str(path))
    assert file.poll() and file.finished
    path.write_text(OUR_LOG[: OUR_LOG.index(" iteration        4/")])
    assert file.poll() and not file.finished and len(file.iterations) == 3


def test_mistakes_are_named(tmp_path):
    os.mkfifo(tmp_path / "fifo.log")
    for path, message in (
        (tmp_path / "gone.log", "gone.log: No such file or directory: pass a run's log"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "fifo.log", "fifo.log: is not a regular file: pass a run's log"),
        (written(tmp_path, "hello\n", "a.log"), "no line of an iteration"),
        (
            written(tmp_path, "hello\n iteration 1/ 2 | loss scale: x |\n", "b.log"),
            "b.log line 2: loss scale: 'x' is not a number",
        ),
        (
            written(tmp_path, 'run: {"nodes": 1, "world_size": 2, "speed": 3}\n', "c.log"),
            "c.log line 1: the run line has speed, which this version does not know",
        ),
        (
            written(tmp_path, "run: {" + "[" * 200_000 + "\n", "d.log"),
            "d.log line 1: not a run line",
        ),
    ):
        with time_limit(), pytest.raises(ValueError, match=message):
            read_log(path)
    with pytest.raises(ValueError, match="--vocab-size is missing"):
        _ = Job(values={**A100_JOB.values, "vocab_size": None}).run
    with pytest.raises(
        ValueError, match="9 ranks .* not divisible by --tensor-model-parallel-size 8 x"
    ):
        _ = Job(values=A100_JOB.values, ranks=9).dp


@pytest.mark.parametrize(("_", "field", "line"), refusals("run_line"))
def test_a_run_line_with_what_no_run_has_is_refused_with_its_file(tmp_path, _, field, line):
    name, value = field.split(" ", 1)
    at = OUR_LOG.index("run: {")
    end = OUR_LOG.index("\n", at)
    values = json.loads(OUR_LOG[at + len("run: ") : end])
    others = [f"{json.dumps(key)}: {json.dumps(old)}" for key, old in values.items() if key != name]
    changed = ", ".join([f'"{name}": {value}', *others])
    with pytest.raises(ValueError, match="run.log line 2: the run line is damaged: ") as refused:
        read_log(written(tmp_path, f"{OUR_LOG[:at]}run: {{{changed}}}{OUR_LOG[end:]}"))
    assert_refusal(str(refused.value), line)
