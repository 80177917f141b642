"""The fault campaign's report. The campaign: make faults; a short one: make faults-short."""

from __future__ import annotations

import pytest

from tests.campaigns import reliability_page
from tests.campaigns.faults import __main__ as faults
from tests.campaigns.faults import jobs, report
from tests.campaigns.faults.kinds import KINDS
from tests.campaigns.faults.trial import Outcome

pytestmark = [pytest.mark.campaigns, pytest.mark.mpi]


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path):
    path = tmp_path / "faults.json"
    kinds = ["kill", "stop"]
    report.Record.start(path, 7, kinds, resume=True).add(Outcome(1, "stop", "DP 2", different=True))
    resumed = report.Record.start(path, 7, kinds, resume=True)
    assert resumed.numbers == {1} and resumed.revisions["1"] == report.revision()
    resumed.add(Outcome(0, "kill", "TP 2"))
    assert report.Record.start(path, 7, kinds, resume=True).numbers == {0, 1}
    assert (
        "--seed 7 --count 2` and" in resumed.table()
        and "| sum | 2 | 0 | 1 | 0 | 0 | |" in resumed.table()
    )
    with pytest.raises(ValueError, match="has the campaign of seed 7, not 8"):
        report.Record.start(path, 8, kinds, resume=True)


def test_iterations_that_are_done_again_are_counted():
    log = "".join(f" iteration {n:8d}/      20 | ...\n" for n in (1, 2, 3, 4, 5, 4, 5, 6, 3, 4))
    assert jobs.lost_iterations(log) == 4 and jobs.last_iteration(log) == 4


def test_the_report_counts_by_kind_and_replaces_its_table(tmp_path):
    found = [
        Outcome(0, "kill", "DP 2"),
        Outcome(1, "kill", "DP 2", lost=2, traceback=True),
        Outcome(2, "kill", "TP 2", hit=False),
    ]
    rows = report.counts(found, 7)
    assert rows["kill"] == {
        "tried": 2,
        "lost": 1,
        "different": 0,
        "unnamed": 0,
        "tracebacks": 1,
        "missed": 1,
        "seed": 7,
    }
    document = tmp_path / "reliability.md"
    begin, end = reliability_page.marks("faults")
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    reliability_page.write("faults", report.table(rows, "the command"), document)
    text = document.read_text()
    assert (
        "| SIGKILL of a rank | 2 | 1 | 0 | 0 | 1 | `--only kill` |" in text
        and "old" not in text
        and text.endswith("after\n")
    )


def test_the_document_has_a_place_for_the_table():
    text = reliability_page.DOCUMENT.read_text()
    begin, end = reliability_page.marks("faults")
    assert begin in text and end in text and all(kind.what for kind in KINDS.values())


@pytest.mark.parametrize(
    "words, answer",
    [
        (["--only", "none"], "--only none: give some of kill"),
        (["--kinds", "none"], "--kinds none: give some of kill"),
        (["--count", "0"], "--count 0 --first 0: give at least 1 and 0"),
        (["--workers", "0"], "--workers 0: give at least 1"),
        (["--resume"], "--resume needs --json"),
    ],
)
def test_mistakes_are_one_line(words, answer, capsys):
    assert faults.main(words) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and answer in message
