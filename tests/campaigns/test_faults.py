"""Outcomes of campaigns, and the fault campaign's table. The campaign: make faults; a short one: make faults-short."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.campaigns import reliability_page, results
from tests.campaigns.faults import jobs, report
from tests.campaigns.faults.trial import Outcome
from tests.campaigns.results import Results, revision

pytestmark = pytest.mark.campaigns


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path):
    path = tmp_path / "faults.jsonl"
    stopped = Outcome(1, "stop", "DP 2", different=True)
    Results(path, 7).add(1, asdict(stopped))
    resumed = Results(path, 7)
    assert resumed.missing(range(3)) == [0, 2]
    (record,) = resumed.of(range(3))
    assert Outcome.of(record) == stopped and record["revision"] == revision()
    resumed.add(0, asdict(Outcome(0, "kill", "TP 2")))
    assert [each["kind"] for each in Results(path, 7).of(range(3))] == ["kill", "stop"]
    assert Results(path, 8).missing([1]) == [1]


@pytest.mark.parametrize("words", ["--count 0", "--count x", "--coun 3", "--first"])
def test_a_mistake_is_one_line(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        results.parser("faults", None, count=1).parse_args(words.split())
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("python -m tests.campaigns.faults: error: ")
    )


def test_iterations_that_are_done_again_are_counted():
    log = "".join(f" iteration {n:8d}/      20 | ...\n" for n in (1, 2, 3, 4, 5, 4, 5, 6, 3, 4))
    assert jobs.lost_iterations(log) == 4 and jobs.last_iteration(log) == 4


def test_the_report_counts_by_kind_and_replaces_its_table(tmp_path):
    found = [
        Outcome(0, "kill", "DP 2"),
        Outcome(1, "kill", "DP 2", lost=2, traceback=True),
        Outcome(2, "kill", "TP 2", hit=False),
    ]
    document = tmp_path / "reliability.md"
    begin, end = reliability_page.marks("faults")
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    reliability_page.write("faults", report.table(found, "the command"), document)
    text = document.read_text()
    assert "| SIGKILL of a rank | 2 | 1 | 0 | 0 | 1 | `--only kill` |\n| sum | 2 | 1 |" in text
    assert "old" not in text and text.endswith("after\n")


@pytest.mark.parametrize("campaign", ["audits", "faults", "memory", "rehearsal"])
def test_the_document_has_a_place_for_the_table(campaign):
    text = reliability_page.DOCUMENT.read_text()
    assert all(mark in text for mark in reliability_page.marks(campaign))
