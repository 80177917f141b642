"""The fit: its solver, errors in sample and on parts left out, and the committed values, which it finds again."""

import dataclasses

import numpy as np
import pytest

from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.planner.model import extrapolation, predict
from fugaku_megatron.planner.software import fitted
from fugaku_megatron.planner.system import System
from tools import fit
from tools.fit import MEMORY_PRIORS, PRIORS

pytestmark = pytest.mark.unit


def start(group: str) -> dict[str, float]:
    return {name: getattr(fitted(group).values, name) for name in fitted(group).names}


def errors(group: str) -> dict[str, fit.Error]:
    rows = fit.time_rows(group)
    predicted = fit.seconds(fit.cases(rows), start(group))
    return {
        name: fit.Error.from_predictions(
            name,
            [p for p, r in zip(predicted, rows) if part(r)],
            [r.seconds for r in rows if part(r)],
        )
        for name, part in fit.SHOWN[group]
    }


def test_rows_and_errors():
    rows = fit.time_rows("a64fx")
    assert [sum(r.document == d for r in rows) for d in ("000", "001", "002", "005")] == [
        19,
        15,
        14,
        13,
    ]
    assert 537.9 in [r.seconds for r in rows] and 17212.8 not in [r.seconds for r in rows]
    wrong = {name: error.mean for name, error in errors("a64fx").items() if error.mean > 0.06}
    assert wrong.keys() == {"1.3B and 13B, full recompute (005.4, 005.5)"}, (
        "TP 1 and TP 2 of 1.3B contradict each other"
    )
    assert max(wrong.values()) < 0.11
    assert errors("a100")["topology, micro-batch, TP (02-20 to 02-25)"].mean <= 0.10
    rows = [r for r in fit.time_rows("a100") if fit.SHOWN["a100"][0][1](r)]
    assert (
        fit.rank_correlation(fit.seconds(fit.cases(rows), start("a100")), [r.seconds for r in rows])
        >= 0.85
    )


MOST = {"1.3B, TP 2 (005.4)": 0.2}  # contradicts the same model without tensor parallelism
QUICK = ("TP from rows without it",)  # the command below leaves out another one


@pytest.mark.parametrize(
    "name, part",
    [
        pytest.param(name, part, id=name, marks=() if name in QUICK else pytest.mark.full)
        for name, part in fit.PARTS["a64fx"]
    ],
)
def test_parts_left_out_of_the_fit_are_predicted(name, part):
    left = fit.leave_out("a64fx", name, part, start("a64fx"))
    assert left.mean <= MOST.get(name, 0.11) and left.inside >= 0.75


def test_tensor_parallel_collectives_that_no_row_has_widen_the_range():
    system = System.from_names("a64fx", "torch1.10", 192)

    def width(tp, pp, *flags, nodes=192):
        words = [
            "--recipe",
            "30b",
            "--tensor-model-parallel-size",
            str(tp),
            "--pipeline-model-parallel-size",
            str(pp),
            "--checkpoint-activations",
            "--mock-data",
            *flags,
        ]
        found = predict(parse(words).run, dataclasses.replace(system, nodes=nodes))
        share = found.breakdown["tensor_parallel"] / found.seconds
        return found.upper / found.seconds, share

    known, share = width(4, 48)
    assert known < 1.2 and share > 0.1, "a printed row"
    far, far_share = width(56, 6, nodes=336)
    assert far > 1.6 and far_share > 0.3
    assert width(2, 48)[0] > known


def test_how_far_a_collective_is_from_fitted_ones():
    seen = [(4, 8 << 20, False, "torch1.10"), (8, 56 << 20, False, "torch1.10")]
    assert (
        extrapolation(None, seen) == extrapolation(seen[1], seen) == 0.0
        and extrapolation(seen[0], []) == 1.0
    )
    assert extrapolation((8, 8 << 20, False, "torch1.10"), seen) == 0.5, "one doubling of two"
    assert (
        extrapolation((4, 8 << 20, True, "torch1.10"), seen)
        == extrapolation((4, 8 << 20, False, "torch1.7"), seen)
        == 0.5
    )
    assert extrapolation((64, 1 << 20, False, "torch1.10"), seen) == 1.0


@pytest.mark.parametrize("group", PRIORS)
def test_memory_and_every_fate(group):
    values = {p.name: getattr(fitted(group).memory, p.name) for p in MEMORY_PRIORS[group]}
    rows = [r for r in fit.load() if r.machine == group and r.fit_memory]
    assert (
        fit.Error.from_predictions(
            "", fit.mib(fit.cases(rows), values), [r.memory_mib for r in rows]
        ).mean
        <= 0.12
    )
    wrong, judged = fit.wrong_ooms(group, values)
    assert judged > 40 and wrong == []


def test_the_tool_writes_what_it_prints_and_finds_the_committed_values(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(fit, "PRIORS", {"a64fx": PRIORS["a64fx"]})
    monkeypatch.setattr(fit, "PARTS", {"a64fx": fit.PARTS["a64fx"][:1]})
    assert fit.main(["--output", str(tmp_path / "fitted.json")]) == 0
    printed = capsys.readouterr().out
    assert (
        "62 of 62 rows right" in printed
        and "TP 6 from TP 4" in printed
        and "4 of 4 rows (100 per cent) inside" in printed
    )
    data = fit.json.loads((tmp_path / "fitted.json").read_text())["a64fx"]
    assert np.shape(data["covariance"]) == (len(PRIORS["a64fx"]),) * 2
    found = {name: parameter["value"] for name, parameter in data["parameters"].items()}
    assert found == {name: pytest.approx(value, rel=0.02) for name, value in start("a64fx").items()}
