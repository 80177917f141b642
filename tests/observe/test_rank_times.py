"""Slow ranks in the log, with the phase."""

import socket
from types import SimpleNamespace

import pytest

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs.flops import layer_flops
from fugaku_megatron.data.marks import TokenCounts
from fugaku_megatron.host.observed import PHASES
from fugaku_megatron.observe.hang.stragglers import ATTENTION_COST, RankTimes
from fugaku_megatron.observe.log.rank_table import read
from tests.helpers import small_run
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

SECONDS = 2.0  # of an iteration


DOCUMENTS = {
    "reset_attention_mask": True,
    "seq_length": 16,
    "hidden_size": 4,
    "num_attention_heads": 1,
}


def intervals(world, computation, data=None, iterations=10, works=None, **changes):
    """Return the log's lines if the ranks compute so many seconds, one list per interval."""
    run = small_run(**changes)
    said = []
    no_wait = [0.0 for _ in range(world.size)]
    waits = iter(data or [no_wait for _ in computation])
    own = SimpleNamespace(begin=lambda: None)
    times = RankTimes(run, Layout.from_run(run, world.size), world, own, said.append)
    for number, (computes, waiting) in enumerate(zip(computation, waits, strict=True), 1):
        for change in (-0.01, 0.01) * (iterations // 2):
            c = computes[world.rank] + change
            d = waiting[world.rank]
            own.of_iteration = lambda seconds, c=c, d=d: [c, d, 0.0, 0.0, seconds - c - d]
            times.begin()
            times.end(SimpleNamespace(seconds=SECONDS, work=works and works[world.rank]))
        times.report(iterations * number)
    return said


def said(computation, **more):
    return ThreadWorld(len(computation[0])).run(
        lambda world: intervals(world, computation, **more)
    )[0]


ALIKE = [1.0] * 8
SLOW = [1.0] * 5 + [1.3] + [1.0] * 2


def test_a_rank_is_named_in_its_second_slow_interval_once_and_its_recovery_told():
    assert said([ALIKE, SLOW, SLOW, SLOW, ALIKE]) == [
        f"slow: rank 5 (stage 0, {socket.gethostname()}): computation 1.300 s per iteration, 30 % slower than the median of its "
        "stage (1.000 s)",
        "no longer slow: rank 5, computation",
    ]


def test_a_run_of_few_or_short_iterations_names_nobody(monkeypatch):
    assert said([ALIKE, SLOW, SLOW, SLOW, ALIKE], iterations=2) == []
    assert len(said([SLOW] * 10, iterations=2)) == 1  # two times ten iterations
    monkeypatch.setitem(globals(), "SECONDS", 2.0 / 8)
    quick = [[seconds / 8 for seconds in SLOW]]
    assert said(quick * 3) == [] and len(said(quick * 4)) == 1  # ten iterations last 2.5 s


def test_a_rank_that_is_slow_once_is_not_named():
    assert said([SLOW, ALIKE, SLOW, ALIKE]) == []


def test_no_more_than_three_are_named():
    lines = said([[1.0] * 6 + [1.5, 1.6, 1.7, 1.8, 1.9]] * 2, global_batch_size=22)
    assert (
        lines[0].count("computation") == 3
        and lines[0].startswith("slow: rank 10 ")
        and lines[0].endswith("; and 2 more")
    )


def test_a_rank_with_longer_documents_is_not_slow():
    """Give only rank 0 of eight long documents; the same time without them is reported."""
    run = small_run(**DOCUMENTS)
    linear, attention = layer_flops(run)
    squares = [8 * 256] + [256] * 7  # of two samples each: one document of 16 tokens, or 16 of 4
    taken = [linear * 2 + ATTENTION_COST * attention * own / 16 / 16 for own in squares]
    computation = [[seconds / taken[1] for seconds in taken]] * 3
    assert computation[0][0] > 1.3
    works = [TokenCounts(0, sum(squares), 16, own * 8 / sum(squares)) for own in squares]
    assert said(computation, works=works, **DOCUMENTS) == []
    assert len(said(computation)) == 1
    computation = [[*row[:3], 1.3, *row[4:]] for row in computation]
    (line,) = said(computation, works=works, **DOCUMENTS)
    assert line.startswith("slow: rank 3 ")


def test_every_interval_is_kept(tmp_path):
    file = tmp_path / "ranks.jsonl"
    said([[1.0, 1.1], [1.2, 1.3]], log_ranks=str(file), iterations=2)
    first, last = read(file)
    assert (first.iteration, last.iteration, first.layout) == (2, 4, (2, 1, 1, 1)) and tuple(
        last.seconds
    ) == PHASES
    assert last.seconds["computation"] == [1.2, 1.3] and last.seconds["reductions"] == [0.8, 0.7]


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path):
    path = tmp_path / "gone" / "ranks.jsonl"
    assert intervals(SoloComm(), [[1.0]] * 2, log_ranks=str(path)) == [
        f"--log-ranks {path}: no longer written: No such file or directory"
    ]
