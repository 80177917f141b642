"""The mutants of the campaign `python -m tests.campaigns.mutants`, and a few of its published bugs."""

from __future__ import annotations

import pytest

from fugaku_megatron.run import check_layout
from tests.campaigns.mutants.mutations import mutant, sites
from tests.campaigns.mutants.program import Program
from tests.campaigns.mutants.published import OF_PATHS, PUBLISHED
from tests.campaigns.mutants.trial import NAMED, check_once, result_of

SOURCE = """
def changed(x: int, y=1) -> int:
    if x == 1 and y:
        x.add(y, 2.0, keep=True)
    raise ValueError(x + y)


UNCHANGED = 1 + 1
"""
FAST = (
    "norm gradients of sequence shards are not summed",
    "the head's input gradient is not summed",
)


def test_every_change_is_one_line_of_a_function():
    found = [mutant(SOURCE, site) for site in sites(SOURCE)]
    assert {(each.line, each.change) for each in found} == {
        (3, "x == 1 and y -> not (x == 1 and y)"),
        (3, "x == 1 and y -> x == 1 or y"),
        (3, "x == 1 -> x != 1"),
        (3, "1 -> 2"),
        (3, "1 -> 0"),
        (4, "x.add(y, 2.0, keep=True) -> x.add(y, 2.0, keep=True) if False else None"),
        (4, "x.add(y, 2.0, keep=True) -> x.add(2.0, y, keep=True)"),
        (4, "x.add(y, 2.0, keep=True) -> x.add(y, 2.0)"),
        (4, "True -> False"),
    }
    for each in found:
        compile(each.tree, "mutant", "exec")


def test_published_bugs_are_changes_of_this_program():
    """Each changed file compiles, and has another text."""
    assert len({bug.name for bug in PUBLISHED}) == len(PUBLISHED) >= 15
    for bug in (*PUBLISHED, *OF_PATHS):
        compile(bug.changed(), bug.file, "exec")


@pytest.mark.parametrize(
    "bug", [bug for bug in PUBLISHED if bug.name in FAST], ids=lambda bug: bug.name
)
def test_a_published_bug_is_found_and_named(bug, capsys, monkeypatch):
    # The process is that of other tests, which measure what torch allocates.
    monkeypatch.setattr(check_layout, "configure_process", lambda *arguments: None)
    before = check_once(bug.layout, bug.flags)
    assert not before.problem
    program = Program([bug.file])
    assert program.replace(bug.file, bug.changed())
    try:
        result = result_of(bug.layout, bug.flags, before)
    finally:
        program.replace_with_original(bug.file)
    assert result.kind == NAMED, result
    assert all(words in result.text for words in bug.words), result.text
    assert not check_once(bug.layout, bug.flags).problem
