"""Published bugs, made in this program one by one: --check-layout finds them and names the first wrong tensor."""

from __future__ import annotations

import pytest

from fugaku_megatron.run import check_layout
from tests.campaigns.mutants.program import Program
from tests.campaigns.mutants.published import OF_PATHS, PUBLISHED
from tests.campaigns.mutants.trial import check_once
from tests.helpers import rows

pytestmark = pytest.mark.campaigns

FAST = (
    "norm gradients of sequence shards are not summed",
    "the head's input gradient is not summed",
)
BUGS = {bug.name: bug for bug in (*PUBLISHED, *OF_PATHS)}


@pytest.mark.parametrize("name", rows(BUGS, BUGS.keys() - FAST))
def test_a_published_bug_is_found_and_named(name, monkeypatch):
    # The process is that of other tests, which measure what torch allocates.
    monkeypatch.setattr(check_layout, "configure_process", lambda *arguments: None)
    bug = BUGS[name]
    before = check_once(bug.layout, bug.flags)
    assert not before.problem
    program = Program(bug.file)
    assert program.replace(bug.changed())
    try:
        found = check_once(bug.layout, bug.flags)
    finally:
        program.restore()
    assert f": {found.first_change(before)}," in found.problem
    assert all(words in found.problem for words in bug.words), found.problem
    assert not check_once(bug.layout, bug.flags).problem
