"""The predictions of docs/predictions.md: the newest row of each is what its command prints, and older rows stay as they were made."""

import json
import re
import shlex

import pytest

from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.planner import predict
from tests.docs.doc_commands import ROOT, blocks

pytestmark = pytest.mark.unit

PAGE = "docs/predictions.md"
HEADER = "| prediction | made | version | value | range | measured | in the range |"
NUMBER = r"[\d.]+"


def table() -> list[list[str]]:
    """Return the cells of the table's rows."""
    lines = (ROOT / PAGE).read_text().splitlines()
    first = lines.index(HEADER) + 2
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def commands() -> dict[str, tuple[str, list[str]]]:
    """Return (place in the command's JSON, words of the command) by prediction."""
    found = {}
    for block in blocks(PAGE):
        names: list[tuple[str, str]] = []
        for line in block.replace("\\\n", " ").splitlines():
            if named := re.fullmatch(r"# (P\d+): (\S+)", line):
                names.append(named.groups())
            elif line:
                words = shlex.split(line)[2:]
                found |= {name: (place, words) for name, place in names}
                names = []
    return found


NEWEST = {row[0]: row for row in table()}


def at(found: dict, place: str) -> dict:
    """Return the object that contains the last name of `place`."""
    for name in place.split(".")[:-1]:
        found = found[name]
    return found


def digits(x: float) -> str:
    """Return four significant digits without an exponent."""
    return f"{float(f'{x:.4g}'):.10g}"


def range_of(cell: str) -> tuple[float, float]:
    low, high = re.fullmatch(rf"({NUMBER}) to ({NUMBER})", cell).groups()
    return float(low), float(high)


@pytest.mark.parametrize("name", NEWEST)
def test_the_newest_row_is_what_the_command_prints(name, capsys):
    place, words = commands()[name]
    parser = Parser()
    predict.add_arguments(parser)
    assert predict.main(parser.parse_args([*words, "--json"])) == 0
    found = at(json.loads(capsys.readouterr().out), place)
    now = [found[place.split(".")[-1]], found["lower"], found["upper"]]
    _, _, _, value, bounds, _, _ = NEWEST[name]
    printed = [float(value), *range_of(bounds)]
    shown = f"{digits(now[0])} | {digits(now[1])} to {digits(now[2])}"
    assert printed == [pytest.approx(x, rel=2e-3, abs=1e-4) for x in now], (
        f"the model moved from {name}: add a row below it, with the date and the version, {shown}"
    )


def test_every_prediction_has_one_command_and_a_value_in_its_range():
    assert list(NEWEST) == [f"P{n + 1}" for n in range(len(NEWEST))] == list(commands())
    assert len(NEWEST) >= 12
    for _, made, version, value, bounds, measured, verdict in table():
        low, high = range_of(bounds)
        assert low <= float(value) <= high
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", made)
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert (measured == "") == (verdict == "")
        if measured:
            hit = low <= float(re.match(NUMBER, measured)[0]) <= high
            assert verdict == {True: "yes", False: "no"}[hit]


def test_a_later_row_of_a_prediction_is_newer():
    for name in NEWEST:
        made = [row[1] for row in table() if row[0] == name]
        assert made == sorted(made)
