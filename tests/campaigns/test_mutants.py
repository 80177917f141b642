"""The mutants of the campaign `python -m tests.campaigns.mutants`."""

from __future__ import annotations

from tests.campaigns.mutants.mutations import mutant, sites

SOURCE = """
def reached(x, y):
    if x == 1 and y:
        x.add(y)
    return x + y


def unreached(x):
    return x + 1
"""


def test_every_change_is_one_line_of_a_reached_function():
    found = [mutant(SOURCE, site) for site in sites(SOURCE, {2})]
    assert {(each.line, each.change) for each in found} == {
        (3, "x == 1 and y -> not (x == 1 and y)"),
        (3, "x == 1 and y -> x == 1 or y"),
        (3, "x == 1 -> x != 1"),
        (3, "1 -> 2"),
        (3, "1 -> 0"),
        (4, "x.add(y) -> None"),
        (5, "x + y -> x - y"),
    }
    for each in found:
        compile(each.source, "mutant", "exec")
        assert each.source.endswith("return x + 1")
