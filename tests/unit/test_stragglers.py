"""Which ranks are slow, from the seconds of all."""

from dataclasses import replace

import pytest

from fugaku_megatron.logs.rank_table import Interval, find, parse_interval


def interval(computation, data=None, tp=1, pp=1, iteration_seconds=2.0):
    data = data or [0.0] * len(computation)
    rest = [iteration_seconds - c - d for c, d in zip(computation, data, strict=True)]
    return Interval(10, tp, pp, {"computation": computation, "data": data, "reductions": rest})


def named(found):
    return [(s.rank, s.stage, s.phase) for s in found]


def test_a_rank_that_computes_longer_than_its_like():
    found = find(interval([1.0, 1.0, 1.3, 1.05]), [1.0])
    assert named(found) == [(2, 0, "computation")]
    assert found[0].text("node7") == ("rank 2 (stage 0, node7): computation 1.300 s per iteration, 30 % slower than the median of "
                                      "its stage (1.000 s)")


def test_the_slowest_comes_first():
    assert named(find(interval([1.0, 1.3, 1.0, 1.6, 1.0]), [1.0])) == [(3, 0, "computation"), (1, 0, "computation")]


def test_stages_are_compared_among_themselves():
    times = [1.0, 1.5] * 3  # tp 1, pp 2: stages alternate
    assert named(find(interval(times, pp=2), [1.0, 1.0])) == []
    assert named(find(interval([*times[:4], 1.3, 1.5], pp=2), [1.0, 1.0])) == [(4, 0, "computation")]


def test_stages_of_few_ranks_are_compared_by_their_work():
    times = [1.0, 1.5, 2.0]
    assert named(find(interval(times, pp=3, iteration_seconds=3.0), [1.0, 1.5, 2.0])) == []
    assert named(find(interval(times, pp=3, iteration_seconds=3.0), [1.0, 1.5, 1.5])) == [(2, 2, "computation")]


def test_data_should_not_be_waited_for():
    found = find(interval([1.0, 1.0], data=[0.5, 0.0]), [1.0])
    assert named(found) == [(0, 0, "data")] and found[0].text("a") == "rank 0 (stage 0, a): data 0.500 s per iteration"


def test_a_record_is_read_back():
    original = interval([1.0, 1.25], tp=2)
    assert parse_interval(original.line()) == original
    assert replace(original, tp=1).stage(1) == 0 and original.layout == (2, 2, 1)


@pytest.mark.parametrize("line", ["", "iteration 1/ 2 |", "{}", "[]", '{"iteration": 1, "tp": 1, "pp": 1, "seconds": {}}',
                                  '{"iteration": 1, "tp": 1, "pp": 1, "seconds": {"data": [1], "computation": [1, 2]}}',
                                  '{"iteration": 1, "tp": 0, "pp": 1, "seconds": {"data": [1]}}',
                                  '{"iteration": 1, "tp": 1, "pp": 1, "seconds": {"data": ["1"]}}'])
def test_another_line_is_refused(line):
    with pytest.raises(ValueError, match="not a record of --log-ranks"):
        parse_interval(line)
