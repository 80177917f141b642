"""plan --mtbf: its table, JSON, picture and spare nodes, and what it refuses."""

import json
import shlex

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.planner.fault_costs import modelled
from fugaku_megatron.planner.fault_model import KINDS, Faults
from fugaku_megatron.planner.fault_plan import HOUR, FaultPlan
from tests.planner.test_fault_costs import LAYOUT_30B, best_plan

pytestmark = pytest.mark.unit


def printed(command, capsys):
    assert program.main(shlex.split(command)) == 0
    return capsys.readouterr().out


def test_the_table_has_every_way_to_copy_with_its_intervals(capsys):
    text = printed(f"{LAYOUT_30B} --mtbf 2000 --simulate 2", capsys)
    assert "a node fails every 2000 h, the job every 5 h 12 min" in text
    rows = [line for line in text.splitlines() if "--save-interval" in line]
    flags = [row.split("|")[-2].split() for row in rows]
    given = {word for each in flags for word in each if word.startswith("--")}
    assert len(flags) == 4
    assert given == {"--save-interval", "--async-save", "--save-local", "--save-memory"}
    assert all(" +- " in row for row in rows) and "spare nodes that pay" in text
    assert "|  model | loading: --save " in text


def test_json_has_the_same_figures(capsys):
    found = json.loads(printed(f"{LAYOUT_30B} --mtbf 2000 --json", capsys))[
        "effective_training_time"
    ]
    shares = [choice["share"] for choice in found["choices"]]
    hours = [choice["lost_node_hours"] for choice in found["choices"]]
    assert shares == sorted(shares) and hours == sorted(hours, reverse=True)
    assert found["hours_between_faults"] == pytest.approx(2000 / 384)
    for choice in found["choices"]:
        assert sum(choice["causes"].values()) == pytest.approx(1)
        assert choice["simulated"] is None


def test_more_faults_cost_more_and_copies_become_more_frequent(capsys):
    rare, frequent = (
        json.loads(printed(f"{LAYOUT_30B} --mtbf {hours} --json --file-system-gbs 1", capsys))[
            "effective_training_time"
        ]
        for hours in (20000, 1000)
    )
    assert rare["choices"][-1]["share"] > frequent["choices"][-1]["share"]

    def interval(found):
        (plain,) = [each["flags"] for each in found["choices"] if each["flags"].count("--") == 1]
        return int(plain.split()[1])

    assert interval(rare) > interval(frequent)


def test_spare_nodes_pay_if_nodes_are_lost_in_an_allocation():
    plan = best_plan()
    costs = modelled(plan, 100.0)

    def spares(mtbf, shares=(0, 1, 0)):
        faults = Faults(384, mtbf * HOUR, dict(zip(KINDS, shares, strict=True)))
        found = FaultPlan(plan, faults, costs, 24.0, 30.0, None).spares
        return min(found, key=found.__getitem__)

    assert spares(1e6) == 0
    assert spares(1e3, (1, 0, 0)) == 0  # no node is lost
    assert 0 < spares(1e4) < spares(1e3)
    # One more than the mean of 24 x 384 / 1000 would do half of the time.
    assert 6 < spares(1e3) < 20


def test_the_picture_replaces_the_pipelines(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "share.png"
    assert f"wrote {path}" in printed(f"{LAYOUT_30B} --mtbf 2000 --png {path}", capsys)
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--mtbf -1", "--mtbf is -1.0: pass a number above 0"),
        ("--mtbf 0", "--mtbf is 0.0: pass a number above 0"),
        ("--mtbf nan", "--mtbf is nan: pass a number above 0"),
        ("--mtbf inf", "--mtbf inf: pass hours up to 1e+09"),
        ("--mtbf 1", "--mtbf 1: 384 nodes fail every 9 s, and a restart takes"),
        ("--simulate 3", "--simulate goes with --mtbf: pass both"),
        ("--costs-from here", "--costs-from goes with --mtbf: pass both"),
        ("--mtbf 1e4 --costs-from nowhere", "--costs-from nowhere: there is no hours.jsonl in it"),
        ("--mtbf 1e4 --fault-shares 1 1 1", "pass three shares from 0 to 1 whose sum is 1"),
        ("--mtbf 1e4 --fault-shares 2 -1 0", "pass three shares from 0 to 1 whose sum is 1"),
        ("--mtbf 1e4 --simulate -3", "--simulate is -3.0: pass a number above 0"),
        (
            "--mtbf 1e4 --simulate 1e7",
            "would have more than 3e+07 copies and faults: pass fewer days",
        ),
        ("--mtbf 1e4 --allocation 0", "--allocation is 0.0: pass a number above 0"),
        ("--mtbf 1e4 --features", "--features prints its own table"),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    assert program.main(shlex.split(f"{LAYOUT_30B} {flags}")) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
