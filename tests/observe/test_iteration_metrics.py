"""Metrics of an iteration: log line both ways, interval averages, TensorBoard, history, peak memory."""

import dataclasses
import errno
import io
import math
import os

import pytest

from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.observe.export import history, metrics_writer, writers
from fugaku_megatron.observe.export.history import History
from fugaku_megatron.observe.export.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.observe.export.writers import TensorBoard, open_writers
from fugaku_megatron.observe.log.iteration_metrics import (
    METRICS,
    IterationMetrics,
    parse_line,
    parse_log,
)
from tests.helpers import A100, small_run
from tests.processes import run_python

pytestmark = pytest.mark.unit


def _step(iteration, **changes):
    step = {
        "consumed_samples": 8,
        "consumed_tokens": 8192,
        "elapsed_seconds": 2.0,
        "learning_rate": 1e-4,
        "global_batch_size": 8,
        "lm_loss": 10.0,
        "loss_scale": 1.0,
        "skipped": 0,
        "tflops": 1.5,
    }
    return IterationMetrics(iteration, 10, **{**step, **changes})


@pytest.mark.parametrize(
    ("flags", "interval"),
    [
        ({"train_iters": 3}, 1),
        ({"train_iters": 120}, 5),
        ({"train_iters": 300}, 10),
        ({"train_iters": 2000}, 100),
        ({"train_samples": 960, "train_iters": None}, 10),  # 240 iterations
        ({"train_iters": 120, "log_interval": 100}, 100),
    ],
)
def test_the_default_interval_shows_the_progress_of_a_short_run(flags, interval):
    run = small_run(**{"global_batch_size": 4, "lr_warmup_fraction": None, **flags})
    assert Plan.of(run, 1).log_interval == interval


def _writer(interval, **outputs):
    """Return a writer that prints into a text."""
    return MetricsWriter(10, interval, LogOutputs(**{"stream": io.StringIO(), **outputs}))


def test_lines_of_validation_and_of_peak_memory():
    rule, text, last = metrics_writer.format_validation(1000, 2.5)
    assert (
        text
        == " validation loss at iteration 1000 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
    )
    assert rule == last == "-" * (len(text) + 1)
    assert metrics_writer.parse_validation_line(text) == (1000, 2.5, 12.18249)
    cut = metrics_writer.format_validation(1, 99.0)[1]
    assert metrics_writer.parse_validation_line(cut)[2] == pytest.approx(math.exp(20), rel=1e-6)
    with pytest.raises(ValueError, match="not a validation line: '---'"):
        metrics_writer.parse_validation_line("---")
    text = metrics_writer.format_peak_memory([790.2, 811.6, 800.0])
    assert text == "peak memory per rank: max 812 MiB (rank 1), min 790 MiB"
    assert (
        metrics_writer.parse_peak_memory(["hello", text]) == 812
        and metrics_writer.parse_peak_memory(["hello"]) is None
    )


def test_an_interval_is_averaged_and_printed_once():
    stream = io.StringIO()
    writer = _writer(2, stream=stream)
    assert writer.add(_step(1, elapsed_seconds=3.0, lm_loss=11.0, grad_norm=5.0)) is None
    assert stream.getvalue() == ""
    second = _step(
        2, consumed_samples=16, elapsed_seconds=1.0, lm_loss=9.0, grad_norm=4.0, learning_rate=2e-4
    )
    got = writer.add(second)
    assert got == IterationMetrics(
        iteration=2,
        train_iters=10,
        consumed_samples=16,
        consumed_tokens=8192,
        elapsed_seconds=2.0,
        learning_rate=2e-4,
        global_batch_size=8,
        lm_loss=10.0,
        loss_scale=1.0,
        grad_norm=4.0,
        skipped=0,
        nans=0,
        samples_per_second=4.0,
        tokens_per_second=2048.0,
        tflops=1.5,
    )
    assert stream.getvalue() == got.format_line() + "\n"
    writer.add(_step(3))
    assert writer.add(_step(4)).lm_loss == 10.0  # the interval before is forgotten
    writer = _writer(2, stream=stream)
    writer.add(_step(1, minor_faults=100, system_seconds=0.5))
    got = writer.add(_step(2, minor_faults=301, system_seconds=1.5, clock_ghz=2.2))
    assert (got.minor_faults, got.system_seconds, got.clock_ghz) == (200, 1.0, 2.2)
    writer = _writer(2)
    writer.add(_step(1, global_batch_size=4, elapsed_seconds=1.0))
    assert writer.add(_step(2, global_batch_size=8, elapsed_seconds=2.0)).samples_per_second == 4.0


def test_skipped_iterations_are_counted_and_do_not_enter_the_loss():
    writer = _writer(3)
    writer.add(_step(1, lm_loss=math.inf, skipped=1))
    writer.add(_step(2, lm_loss=7.0, skipped=1))
    got = writer.add(_step(3, lm_loss=5.0))
    assert (got.lm_loss, got.skipped, got.nans) == (5.0, 2, 1)
    writer = _writer(1)
    line = writer.add(_step(1, lm_loss=math.nan, skipped=1)).format_line()
    assert (
        "| lm loss: NAN |" in line
        and "number of skipped iterations:   1 | number of nan iterations:   1 |" in line
    )


def test_history_holds_training_and_validation_and_a_restart_drops_what_it_repeats(tmp_path):
    path = tmp_path / "logs" / "history.jsonl"
    writer = _writer(1, writers=[History(path)])
    lines = [writer.add(_step(i, lm_loss=10.0 - i)) for i in (1, 2, 3)]
    writer.validation(3, 7.5, 24)
    writer.close()
    records = history.read_history(path)
    assert records[:3] == [{"kind": "train", **dataclasses.asdict(line)} for line in lines]
    assert records[3] == {
        "kind": "validation",
        "iteration": 3,
        "consumed_samples": 24,
        "lm_loss": 7.5,
    }
    writer = _writer(1, writers=[History(path, 2)])
    writer.add(_step(3, lm_loss=6.0))
    writer.close()
    with open(path, "a") as file:
        file.write('{"kind": "tr')  # cut by a crash
    assert [(r["iteration"], r["lm_loss"]) for r in history.read_history(path)] == [
        (1, 9.0),
        (2, 8.0),
        (3, 6.0),
    ]
    stream = io.StringIO()
    writer = MetricsWriter(
        10,
        1,
        LogOutputs(live="on", stream=stream),
        printing=False,
    )
    assert writer.add(_step(1)).lm_loss == 10.0
    writer.validation(1, 3.0, 8)
    writer.close()
    assert stream.getvalue() == "" and [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_the_end_of_a_run_flushes_an_interval_once(tmp_path):
    stream = io.StringIO()
    writer = _writer(4, stream=stream, writers=[History(tmp_path / "history.jsonl")])
    for iteration in range(1, 7):
        writer.add(_step(iteration, lm_loss=float(iteration)))
    got = writer.flush()
    assert (got.iteration, got.lm_loss, writer.flush()) == (6, 5.5, None)
    assert [line.iteration for line in parse_log(stream.getvalue().splitlines())] == [4, 6]
    assert [record["iteration"] for record in history.read_history(tmp_path / "history.jsonl")] == [
        4,
        6,
    ]


def test_a_full_disk_delays_the_history_and_ends_no_run(tmp_path, monkeypatch):
    stream = io.StringIO()
    path = tmp_path / "history.jsonl"
    history_file = History(path)
    writer = _writer(1, stream=stream, writers=[history_file])

    class Full(io.FileIO):
        full = True

        def write(self, data):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    disk = Full(path, "a")
    history_file._file = io.TextIOWrapper(io.BufferedWriter(disk))
    writer.add(_step(1))
    assert "history.jsonl: not written yet: No space left on device" in stream.getvalue()
    disk.full = False
    writer.add(_step(2))
    disk.full = True
    writer.add(_step(3))
    writer.close()
    assert [record["iteration"] for record in history.read_history(path)] == [1, 2]


def test_tensorboard_has_megatrons_tags(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    writer = _writer(2, writers=[TensorBoard(str(tmp_path))])
    for i in (1, 2):
        writer.add(_step(i, consumed_samples=8 * i, lm_loss=10.0 - i, grad_norm=1.5))
    writer.validation(2, 3.0, 16)
    writer.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    both = {
        "lm loss",
        "learning-rate",
        "batch-size",
        "loss-scale",
        "grad-norm",
        "lm loss validation",
        "lm loss validation ppl",
    }
    expected = both | {f"{tag} vs samples" for tag in both} | {"iteration-time", "throughput"}
    assert set(events.Tags()["scalars"]) == expected
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(1, 9.0), (2, 8.0)]
    assert [(e.step, e.value) for e in events.Scalars("lm loss vs samples")] == [
        (8, 9.0),
        (16, 8.0),
    ]
    assert [(e.step, e.value) for e in events.Scalars("throughput")] == [(2, 1.5)]


@pytest.mark.parametrize("printing", [True, False])
def test_missing_tensorboard_is_one_clear_error_on_every_rank(monkeypatch, printing):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="--tensorboard-dir .*: a package is missing: pip install tensorboard"
    ):
        open_writers(small_run(tensorboard_dir="events"), 0, printing, print)


@pytest.mark.system
def test_peak_memory_grows_with_what_the_process_held():
    code = (
        "from fugaku_megatron.host.allocator import peak_memory_mib as peak; before = peak();"
        "x = bytearray(b'x' * (96 << 20)); print(peak() - before)"
    )
    assert 90 < float(run_python("-c", code).stdout) < 200


@pytest.mark.parametrize(
    "make, problem",
    [
        (lambda path: path.mkdir(), "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.write_text("[" * 200_000 + "\n\n"), "line 1: brackets"),
        (
            lambda path: path.write_text('{"kind": "tr\n{"kind": "train", "iteration": 1}\n'),
            "line 1 is not JSON",
        ),
        (lambda path: path.write_text("{}\n"), "line 1 has no iteration"),
        (lambda path: path.write_text("[1]\n"), "line 1 has no iteration"),
        (
            lambda path: path.write_bytes(b'{"iteration": 1}\n\xff\xfe\n\n'),
            "line 2 is not JSON: .* move the file away",
        ),
    ],
)
def test_a_history_that_cannot_be_continued_is_refused_with_its_name(tmp_path, make, problem):
    path = tmp_path / "history.jsonl"
    make(path)
    with pytest.raises(ValueError, match=problem) as raised:
        History(path)
    assert str(path) in str(raised.value)


def test_every_field_is_read_and_printed():
    assert [parse_line(line).format_line() for line in A100] == A100
    assert [f.name for f in dataclasses.fields(IterationMetrics)] == [
        "iteration",
        "train_iters",
        *(name for name, _ in METRICS),
    ]
    assert parse_line(A100[0]) == IterationMetrics(
        iteration=2,
        train_iters=95367,
        consumed_samples=4096,
        consumed_tokens=8388608,
        elapsed_seconds=769.99,
        learning_rate=3.787e-06,
        global_batch_size=2048,
        lm_loss=63.84045,
        loss_scale=4096.0,
        grad_norm=15906.21,
        num_zeros=0.0,
        skipped=0,
        nans=0,
        samples_per_second=2.66,
        tflops=108.47,
    )


def test_fields_of_our_own_stand_after_megatrons():
    line = dataclasses.replace(parse_line(A100[0]), params_norm=238.9876).format_line()
    assert " | num zeros: 0.0 | params norm: 238.988 | number of skipped iterations:   0 |" in line
    assert parse_line(line).params_norm == 238.988
    ours = dataclasses.replace(
        parse_line(A100[0]),
        minor_faults=1234,
        system_seconds=0.5,
        clock_ghz=2.0,
        resident_mib=812.0,
        shared_mib=64.0,
    )
    line = ours.format_line()
    assert line == A100[0] + (
        " minor faults: 1234 | system time (s): 0.500 | clock (GHz): 2.00 | memory per rank (MiB): 812 | "
        "shared memory (MiB): 64 |"
    )
    assert parse_line(line) == ours


def test_other_lines_and_fields():
    parsed = parse_line(
        "10:31:07 [rank 3]: iteration 12/ 100 | elapsed time per iteration (ms): 1250.0 |"
        " curriculum seqlen: 64 | lm loss: NAN | grad norm: inf |"
    )
    assert (parsed.iteration, parsed.train_iters, parsed.elapsed_seconds, parsed.grad_norm) == (
        12,
        100,
        1.25,
        math.inf,
    )
    assert math.isnan(parsed.lm_loss) and parsed.consumed_samples is None
    with pytest.raises(ValueError, match="not a log line of an iteration: 'saving checkpoint'"):
        parse_line(" saving checkpoint\n")
    with pytest.raises(ValueError, match="loss scale: 'x' is not a number"):
        parse_line("iteration 1/ 2 | loss scale: x |")
    assert parse_log(["hello", A100[0], "", "time | iteration", A100[1]]) == [
        parse_line(line) for line in A100
    ]


@pytest.mark.parametrize(
    "rate, printed",
    [
        (108.468, "108.47"),
        (0.1, "0.10"),
        (0.06, "0.0600"),
        (0.01234, "0.0123"),
        (0.000456789, "0.000457"),
        (0.0, "0.00"),
        (math.nan, "nan"),
    ],
)
def test_tflops_of_small_models_keep_three_digits(rate, printed):
    line = IterationMetrics(1, 2, tflops=rate).format_line()
    assert line.endswith(f" TFLOPs: {printed} |") and parse_line(line).format_line() == line
