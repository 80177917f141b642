"""python -m benchmarks two_hosts: two network namespaces with an MPI rank each; skipped with the reason where there can be none."""

import argparse
import json

import pytest

from benchmarks import two_hosts

pytestmark = pytest.mark.mpi
QUICK = ["--seq-length", "64", "--micro-batches", "2", "--rounds", "1"]


def options(*words):
    parser = argparse.ArgumentParser()
    two_hosts.add_arguments(parser)
    return parser.parse_args(words)


def test_bytes_and_seconds_of_a_link(tmp_path, capsys):
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    report, picture = tmp_path / "hosts.json", tmp_path / "hosts.png"
    two_hosts.run(options(*QUICK, "--json", str(report), "--png", str(picture)))
    result = json.loads(report.read_text())
    rows = {row["job"]: row for row in result["rows"]}
    assert list(rows) == ["blocking", "overlapped", "overlapped, BF16"]
    gradients = 4 * 20.9e6  # what a rank of two sends in a reduce-scatter and an all-gather: each half of them
    assert rows["blocking"]["bytes"] == pytest.approx(gradients, rel=0.1)
    assert rows["overlapped"]["bytes"] == pytest.approx(gradients, rel=0.1)
    assert rows["overlapped, BF16"]["bytes"] == pytest.approx(gradients / 2, rel=0.1)
    for row in rows.values():
        assert row["wire_seconds"] == pytest.approx(8 * row["bytes"] / 1e9) and row["seconds"] > row["wire_seconds"]
    assert rows["overlapped"]["loss"] == rows["blocking"]["loss"]
    assert result["rounds"][0]["blocking"]["computation"] > 0
    assert "without its sums and gathers" in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")


def test_rows_between_products(tmp_path):
    """Tensor-parallel hosts: as many bytes behind the products as before and after them. What is not gathered has any values."""
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    report = tmp_path / "hosts.json"
    two_hosts.run(options(*QUICK, "--tensor-parallel", "--json", str(report)))
    rows = {row["job"]: row for row in json.loads(report.read_text())["rows"]}
    exchanges = 2 * (2 * 10 + 2 + 2)  # micro-batches x (layers x exchanges of each, embedding and head)
    half = 64 // 2 * 1024 * 4
    assert rows["blocking"]["bytes"] == pytest.approx(exchanges * half, rel=0.1)
    assert rows["overlapped"]["bytes"] == pytest.approx(exchanges * half, rel=0.1)


def test_exposed_is_the_median_of_differences_within_rounds():
    def turn(computation, blocking, overlapped):
        together = {"sent": 50e6, "waiting": 0.05, "loss": 1.0, "computation": computation}
        return {"blocking": {"seconds": blocking, **together}, "overlapped": {"seconds": overlapped, **together},
                "overlapped, BF16": {"seconds": computation, **together}}

    rounds = [turn(4.0, 4.5, 4.1), turn(5.0, 5.5, 5.1), turn(6.0, 6.5, 7.0)]  # the machine became slower and slower
    result = two_hosts.report(options(), rounds, 1e9, busy=False)
    rows = {row["job"]: row for row in result["rows"]}
    assert rows["blocking"]["computation_seconds"] == 5.0 and rows["blocking"]["wire_seconds"] == 0.4
    assert rows["blocking"]["exposed_seconds"] == pytest.approx(0.5) and rows["overlapped"]["exposed_seconds"] == pytest.approx(0.1)
    assert rows["overlapped"]["waiting_seconds"] == 0.05
    assert rows["overlapped"]["exposed_share"] == pytest.approx(0.25) and rows["overlapped"]["ratio"] == pytest.approx(5.5 / 5.1)


@pytest.mark.parametrize("words, message", [
    (("--rate", "fast"), "--rate fast: write it as 1gbit or 500mbit"), (("--rounds", "0"), "--rounds 0: give 1 or more")])
def test_mistakes_are_one_line(words, message):
    with pytest.raises(ValueError, match=message):
        two_hosts.run(options(*words))
