"""Some kills of the campaign `python -m tests.campaigns.memory`, and its accounting."""

from __future__ import annotations

import random

import pytest

from tests.campaigns.memory.__main__ import Campaign, draw_kinds, table
from tests.campaigns.memory.trial import (
    INTERVAL,
    KILLS,
    LAYOUTS,
    MEMORY,
    NODE,
    NOTHING,
    PARTNERS,
    SAVE,
    SAVES,
    SPARE,
    Kill,
    starts,
)

pytestmark = pytest.mark.campaigns


FIRST, *OTHERS = enumerate(LAYOUTS)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(FIRST[0], id=FIRST[1]),
        *(pytest.param(number, id=name, marks=pytest.mark.full) for number, name in OTHERS),
    ],
)
def test_kills_repeat_few_iterations_and_change_no_bit(number, mpi, tmp_path):
    record = Campaign(tmp_path, 31, [mpi]).run(number, kills=2)
    assert record["right"], record["text"][-5000:]
    assert all(kill.repeated <= INTERVAL for kill in record["kills"] if kill.kind != PARTNERS)


LOG = """starting anew
 iteration        1/      20 | ...
 iteration        2/      20 | ...
supervise: restart 1 of 9 from iteration 0
 iteration        1/      20 | ...
 iteration        5/      20 | ...
supervise: restart 2 of 9 from iteration 0 or newer copies in memory
resumed from copies in memory (--save-memory) at iteration 3
supervise: restart 3 of 9 from iteration 2 or newer copies in memory
resumed from /save at iteration 2
 iteration        3/      20 | ...
"""


def test_repeated_iterations_are_counted_from_the_log():
    assert list(starts(LOG)) == [(NOTHING, 2), (MEMORY, 2), (SAVE, 1)]


def test_limits_of_repeated_iterations():
    assert Kill(NODE, MEMORY, INTERVAL).is_right and not Kill(NODE, SAVE, INTERVAL + 1).is_right
    assert Kill(PARTNERS, SAVE, SAVES).is_right and not Kill(PARTNERS, SAVE, SAVES + 1).is_right


def test_the_table_counts_kills():
    kills = [Kill(NODE, MEMORY, 1), Kill(NODE, SAVE, 9)]
    text = table([{"layout": "DP 4", "kills": kills, "same": False}], "command")
    assert "| one node, which comes back empty | DP 4 | 2 | 1 | 1 | 0 | 5, 9 | 1 | 1 |" in text
    assert text.splitlines()[-1].startswith("| sum |  | 2 | 1 | 1 |")


def test_a_run_has_one_spare_and_one_lost_group():
    for seed in range(20):
        kinds = draw_kinds(random.Random(seed))
        assert len(kinds) == KILLS and kinds.count(SPARE) == kinds.count(PARTNERS) == 1
