"""Averages of intervals, TensorBoard, history, peak memory."""

import dataclasses
import errno
import io
import json
import math
import os
import subprocess
import sys

import pytest

from fugaku_megatron.logs import metrics
from fugaku_megatron.logs.iteration import IterationMetrics, parse_log
from fugaku_megatron.logs.metrics import MetricsWriter


def _step(iteration, **changes):
    step = {"consumed_samples": 8, "consumed_tokens": 8192, "elapsed_seconds": 2.0, "learning_rate": 1e-4,
            "global_batch_size": 8, "lm_loss": 10.0, "loss_scale": 1.0, "skipped": 0, "tflops": 1.5}
    return IterationMetrics(iteration, 10, **{**step, **changes})


def test_faults_and_system_time_are_means_and_the_clock_is_the_last():
    writer = MetricsWriter(10, 2, stream=io.StringIO())
    writer.add(_step(1, minor_faults=100, system_seconds=0.5))
    got = writer.add(_step(2, minor_faults=301, system_seconds=1.5, clock_ghz=2.2))
    assert (got.minor_faults, got.system_seconds, got.clock_ghz) == (200, 1.0, 2.2)


def test_validation_lines_are_megatrons():
    rule, text, last = metrics.format_validation(1000, 2.5)
    assert text == " validation loss at iteration 1000 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
    assert rule == last == "-" * (len(text) + 1)
    assert metrics.parse_validation_line(text) == (1000, 2.5, 12.18249)
    cut = metrics.format_validation(1, 99.0)[1]
    assert metrics.parse_validation_line(cut)[2] == pytest.approx(math.exp(20), rel=1e-6)
    with pytest.raises(ValueError, match="not a validation line: '---'"):
        metrics.parse_validation_line("---")


def test_an_interval_is_averaged_and_printed_once():
    stream = io.StringIO()
    writer = MetricsWriter(10, 2, stream=stream)
    assert writer.add(_step(1, elapsed_seconds=3.0, lm_loss=11.0, grad_norm=5.0)) is None
    assert stream.getvalue() == ""
    second = _step(2, consumed_samples=16, elapsed_seconds=1.0, lm_loss=9.0, grad_norm=4.0, learning_rate=2e-4)
    got = writer.add(second)
    assert got == IterationMetrics(
        iteration=2, train_iters=10, consumed_samples=16, consumed_tokens=8192, elapsed_seconds=2.0,
        learning_rate=2e-4, global_batch_size=8, lm_loss=10.0, loss_scale=1.0, grad_norm=4.0, skipped=0, nans=0,
        samples_per_second=4.0, tokens_per_second=2048.0, tflops=1.5)
    assert stream.getvalue() == got.format_line() + "\n"
    writer.add(_step(3))
    assert writer.add(_step(4)).lm_loss == 10.0  # the interval before is forgotten


def test_a_growing_batch_counts_the_samples_really_done():
    writer = MetricsWriter(10, 2, stream=io.StringIO())
    writer.add(_step(1, global_batch_size=4, elapsed_seconds=1.0))
    assert writer.add(_step(2, global_batch_size=8, elapsed_seconds=2.0)).samples_per_second == 4.0


def test_skipped_iterations_are_counted_and_do_not_enter_the_loss():
    writer = MetricsWriter(10, 3, stream=io.StringIO())
    writer.add(_step(1, lm_loss=math.inf, skipped=1))
    writer.add(_step(2, lm_loss=7.0, skipped=1))
    got = writer.add(_step(3, lm_loss=5.0))
    assert (got.lm_loss, got.skipped, got.nans) == (5.0, 2, 1)
    writer = MetricsWriter(10, 1, stream=io.StringIO())
    line = writer.add(_step(1, lm_loss=math.nan, skipped=1)).format_line()
    assert "| lm loss: NAN |" in line and "number of skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_a_rank_that_does_not_print_averages_and_writes_nothing(tmp_path):
    stream = io.StringIO()
    writer = MetricsWriter(10, 1, printing=False, live="on", stream=stream, tensorboard_dir=tmp_path / "tb",
                           history_path=tmp_path / "history")
    assert writer.add(_step(1)).lm_loss == 10.0
    writer.validation(1, 3.0, 8)
    writer.close()
    assert stream.getvalue() == "" and list(tmp_path.iterdir()) == []


def test_a_log_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match="--log-interval must be at least 1, got 0"):
        MetricsWriter(10, 0)


def test_history_holds_training_and_validation_and_a_restart_drops_what_it_repeats(tmp_path):
    path = tmp_path / "logs" / "history.jsonl"
    writer = MetricsWriter(10, 1, stream=io.StringIO(), history_path=path)
    lines = [writer.add(_step(i, lm_loss=10.0 - i)) for i in (1, 2, 3)]
    writer.validation(3, 7.5, 24)
    writer.close()
    records = metrics.read_history(path)
    assert records[:3] == [{"kind": "train", **dataclasses.asdict(line)} for line in lines]
    assert records[3] == {"kind": "validation", "iteration": 3, "consumed_samples": 24, "lm_loss": 7.5}
    writer = MetricsWriter(10, 1, stream=io.StringIO(), history_path=path, start_iteration=2)
    writer.add(_step(3, lm_loss=6.0))
    writer.close()
    assert [(r["iteration"], r["lm_loss"]) for r in metrics.read_history(path)] == [(1, 9.0), (2, 8.0), (3, 6.0)]


def test_the_end_of_a_run_flushes_an_interval_once(tmp_path):
    stream = io.StringIO()
    writer = MetricsWriter(10, 4, stream=stream, history_path=tmp_path / "history.jsonl")
    for iteration in range(1, 7):
        writer.add(_step(iteration, lm_loss=float(iteration)))
    got = writer.flush()
    assert (got.iteration, got.lm_loss, writer.flush()) == (6, 5.5, None)
    assert [line.iteration for line in parse_log(stream.getvalue().splitlines())] == [4, 6]
    assert [record["iteration"] for record in metrics.read_history(tmp_path / "history.jsonl")] == [4, 6]


def test_a_full_disk_delays_the_history_and_ends_no_run(tmp_path, monkeypatch):
    stream, path = io.StringIO(), tmp_path / "history.jsonl"
    writer = MetricsWriter(10, 1, stream=stream, history_path=path)

    class Full(io.FileIO):
        full = True

        def write(self, data):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    disk = Full(path, "a")
    writer._history = io.TextIOWrapper(io.BufferedWriter(disk))
    writer.add(_step(1))
    assert "history.jsonl: not written yet: No space left on device" in stream.getvalue()
    disk.full = False
    writer.add(_step(2))
    disk.full = True
    writer.add(_step(3))
    writer.close()
    assert [record["iteration"] for record in metrics.read_history(path)] == [1, 2]


def test_a_history_cut_by_a_crash_is_read_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "history.jsonl"
    whole = json.dumps({"kind": "train", "iteration": 1})
    path.write_text(whole + "\n" + whole[:9])
    assert metrics.read_history(path) == [{"kind": "train", "iteration": 1}]
    path.write_text(whole[:9] + "\n" + whole + "\n")
    with pytest.raises(ValueError, match="history.jsonl line 1 is not JSON"):
        metrics.read_history(path)


def test_tensorboard_has_megatrons_tags(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = MetricsWriter(10, 2, stream=io.StringIO(), tensorboard_dir=tmp_path)
    for i in (1, 2):
        writer.add(_step(i, consumed_samples=8 * i, lm_loss=10.0 - i, grad_norm=1.5))
    writer.validation(2, 3.0, 16)
    writer.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    both = {"lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "lm loss validation",
            "lm loss validation ppl"}
    expected = both | {f"{tag} vs samples" for tag in both} | {"iteration-time", "throughput"}
    assert set(events.Tags()["scalars"]) == expected
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(1, 9.0), (2, 8.0)]
    assert [(e.step, e.value) for e in events.Scalars("lm loss vs samples")] == [(8, 9.0), (16, 8.0)]
    assert [(e.step, e.value) for e in events.Scalars("throughput")] == [(2, 1.5)]


@pytest.mark.parametrize("printing", [True, False])
def test_missing_tensorboard_is_one_clear_error_on_every_rank(tmp_path, monkeypatch, printing):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--tensorboard-dir .*: a package is missing: pip install tensorboard"):
        MetricsWriter(10, 1, printing=printing, tensorboard_dir=tmp_path)


@pytest.mark.system
def test_tensorboard_is_imported_only_when_asked_for():
    code = ("import io, sys; from fugaku_megatron.logs.metrics import MetricsWriter;"
            "MetricsWriter(2, 1, stream=io.StringIO());"
            "print([name for name in ('tensorboard', 'matplotlib') if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.system
def test_peak_memory_grows_with_what_the_process_held():
    code = ("from fugaku_megatron.host.allocator import peak_memory_mib as peak; before = peak();"
            "x = bytearray(b'x' * (96 << 20)); print(peak() - before)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 90 < float(result.stdout) < 200


def test_peak_memory_of_all_ranks_in_one_line():
    text = metrics.format_peak_memory([790.2, 811.6, 800.0])
    assert text == "peak memory per rank: max 812 MiB (rank 1), min 790 MiB"
    assert metrics.parse_peak_memory(["hello", text]) == 812 and metrics.parse_peak_memory(["hello"]) is None


@pytest.mark.parametrize("make, problem", [
    (lambda path: path.mkdir(), "not a regular file"),
    (os.mkfifo, "not a regular file"),
    (lambda path: path.write_text("[" * 200_000 + "\n\n"), "line 1: brackets"),
    (lambda path: path.write_text("{}\n"), "line 1 has no iteration"),
    (lambda path: path.write_text("[1]\n"), "line 1 has no iteration"),
    (lambda path: path.write_bytes(b'{"iteration": 1}\n\xff\xfe\n\n'), "line 2 is not JSON: .* move the file away"),
])
def test_a_history_that_cannot_be_continued_is_refused_with_its_name(tmp_path, make, problem):
    path = tmp_path / "history.jsonl"
    make(path)
    with pytest.raises(ValueError, match=problem) as raised:
        MetricsWriter(10, 1, stream=io.StringIO(), history_path=path)
    assert str(path) in str(raised.value)
