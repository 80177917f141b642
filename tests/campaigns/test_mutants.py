"""Published bugs of the campaign `python -m tests.campaigns.mutants`."""

from __future__ import annotations

import pytest

from fugaku_megatron.run import check_layout
from tests.campaigns.mutants.program import Program
from tests.campaigns.mutants.published import PUBLISHED
from tests.campaigns.mutants.trial import NAMED, check_once, result_of

pytestmark = pytest.mark.campaigns

FAST = (
    "norm gradients of sequence shards are not summed",
    "the head's input gradient is not summed",
)


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
