"""The record of an iteration, its log line both ways, and intervals."""

import dataclasses
import math

import pytest

from fugaku_megatron.logs.iteration import METRICS, IterationMetrics, parse_line, parse_log
from tests.helpers import A100


@pytest.mark.parametrize("line", A100)
def test_a_printed_line_comes_back_the_same(line):
    assert parse_line(line).format_line() == line


def test_every_field_is_read():
    assert parse_line(A100[0]) == IterationMetrics(
        iteration=2, train_iters=95367, consumed_samples=4096, consumed_tokens=8388608, elapsed_seconds=769.99,
        learning_rate=3.787e-06, global_batch_size=2048, lm_loss=63.84045, loss_scale=4096.0, grad_norm=15906.21,
        num_zeros=0.0, skipped=0, nans=0, samples_per_second=2.66, tflops=108.47)


def test_params_norm_stands_between_num_zeros_and_skipped_iterations():
    line = dataclasses.replace(parse_line(A100[0]), params_norm=238.9876).format_line()
    assert " | num zeros: 0.0 | params norm: 238.988 | number of skipped iterations:   0 |" in line
    assert parse_line(line).params_norm == 238.988


def test_fields_of_our_own_stand_behind_megatrons():
    ours = dataclasses.replace(parse_line(A100[0]), minor_faults=1234, system_seconds=0.5, clock_ghz=2.0, resident_mib=812.0,
                               shared_mib=64.0)
    line = ours.format_line()
    assert line == A100[0] + (" minor faults: 1234 | system time (s): 0.500 | clock (GHz): 2.00 | memory per rank (MiB): 812 | "
                              "shared memory (MiB): 64 |")
    assert parse_line(line) == ours


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(IterationMetrics)[2:]])
def test_any_field_may_be_absent(field):
    whole = dataclasses.replace(parse_line(A100[0]), params_norm=1.0, tokens_per_second=5447.7, minor_faults=5, system_seconds=0.5,
                                clock_ghz=2.0, resident_mib=812.0, shared_mib=64.0)
    without = dataclasses.replace(whole, **{field: None})
    assert parse_line(without.format_line()) == without
    assert len(without.format_line()) < len(whole.format_line())


def test_prefixes_unknown_fields_milliseconds_and_nan_are_read():
    parsed = parse_line("10:31:07 [rank 3]: iteration 12/ 100 | elapsed time per iteration (ms): 1250.0 |"
                        " curriculum seqlen: 64 | lm loss: NAN | grad norm: inf |")
    assert (parsed.iteration, parsed.train_iters, parsed.elapsed_seconds, parsed.grad_norm) == (12, 100, 1.25, math.inf)
    assert math.isnan(parsed.lm_loss) and parsed.consumed_samples is None


def test_other_lines_are_refused_by_name_and_passed_over_in_a_log():
    with pytest.raises(ValueError, match="not a log line of an iteration: 'saving checkpoint'"):
        parse_line(" saving checkpoint\n")
    with pytest.raises(ValueError, match="loss scale: 'x' is not a number"):
        parse_line("iteration 1/ 2 | loss scale: x |")
    assert parse_log(["hello", A100[0], "", "time | iteration", A100[1]]) == [parse_line(line) for line in A100]


def test_every_field_says_how_it_is_printed_and_averaged():
    assert [f.name for f in dataclasses.fields(IterationMetrics)] == ["iteration", "train_iters", *(name for name, _ in METRICS)]
    tags = [tag for _, metadata in METRICS for tag in (metadata["tag"], metadata["interval_tag"]) if tag]
    assert len({metadata["label"] for _, metadata in METRICS}) == len(METRICS) and len(set(tags)) == len(tags)


def test_an_interval_of_one_iteration_adds_only_what_follows_from_the_others():
    one = IterationMetrics(3, 9, consumed_samples=8, elapsed_seconds=2.0, global_batch_size=8, lm_loss=10.0, skipped=0, tflops=1.5)
    assert IterationMetrics.from_interval([one]) == dataclasses.replace(one, nans=0, samples_per_second=4.0)


def test_rates_of_an_interval_are_means_over_its_time():
    parts = [IterationMetrics(i, 9, elapsed_seconds=seconds, global_batch_size=size, lm_loss=1.0, skipped=0, tflops=rate)
             for i, seconds, size, rate in ((1, 1.0, 4, 2.0), (2, 3.0, 8, 6.0))]
    whole = IterationMetrics.from_interval(parts)
    assert (whole.elapsed_seconds, whole.samples_per_second, whole.tflops) == (2.0, 3.0, 5.0)


def test_tokens_per_second_follow_from_samples_and_tokens_and_come_back():
    parts = [IterationMetrics(i, 9, consumed_samples=4 * i, consumed_tokens=4096 * i, elapsed_seconds=seconds, global_batch_size=4,
                              lm_loss=1.0, skipped=0, tflops=0.0123) for i, seconds in ((1, 1.0), (2, 3.0))]
    line = IterationMetrics.from_interval(parts).format_line()
    assert " samples per second: 2.000 | tokens per second: 2048.0 | TFLOPs: 0.0123 |" in line
    assert parse_line(line).tokens_per_second == 2048.0 and parse_line(line).format_line() == line
    assert parse_line(A100[0]).tokens_per_second is None


@pytest.mark.parametrize("rate, printed", [(108.468, "108.47"), (0.1, "0.10"), (0.06, "0.0600"), (0.01234, "0.0123"),
                                           (0.000456789, "0.000457"), (0.0, "0.00"), (math.nan, "nan")])
def test_tflops_of_small_models_keep_three_digits(rate, printed):
    line = IterationMetrics(1, 2, tflops=rate).format_line()
    assert line.endswith(f" TFLOPs: {printed} |") and parse_line(line).format_line() == line
