"""python -m benchmarks two_hosts: two network namespaces with an MPI rank each; skipped with the reason where there can be none."""

import argparse
import json

import pytest

from benchmarks import two_hosts

pytestmark = pytest.mark.mpi
QUICK = ["--seq-length", "64", "--micro-batch-size", "1", "--micro-batches", "2", "--iterations", "2", "--rounds", "1"]


def options(*words):
    parser = argparse.ArgumentParser()
    two_hosts.add_arguments(parser)
    return parser.parse_args(words)


def test_bytes_and_seconds_of_a_link(tmp_path, capsys):
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    report = tmp_path / "hosts.json"
    two_hosts.run(options(*QUICK, "--json", str(report)))
    result = json.loads(report.read_text())
    rows = {row["job"]: row for row in result["rows"]}
    assert list(rows) == ["blocking", "overlapped", "overlapped, BF16"]
    gradients = 4 * 22.1e6  # what a rank of two sends in a reduce-scatter and an all-gather: each half of them
    assert rows["blocking"]["bytes"] == pytest.approx(gradients, rel=0.1)
    assert rows["overlapped"]["bytes"] == pytest.approx(gradients, rel=0.1)
    assert rows["overlapped, BF16"]["bytes"] == pytest.approx(gradients / 2, rel=0.1)
    for row in rows.values():
        assert row["wire_seconds"] == pytest.approx(8 * row["bytes"] / 1e9) and row["seconds"] > row["wire_seconds"]
    assert "computation alone" in capsys.readouterr().out


@pytest.mark.parametrize("words, message", [
    (("--rate", "fast"), "--rate fast: write it as 1gbit or 500mbit"), (("--rounds", "0"), "--rounds 0: give 1 or more"),
    (("--iterations", "1"), "--iterations 1: give 2 or more")])
def test_mistakes_are_one_line(words, message):
    with pytest.raises(ValueError, match=message):
        two_hosts.run(options(*words))
