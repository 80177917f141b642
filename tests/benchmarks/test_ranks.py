"""python -m benchmarks schedule, collectives and two_hosts: real ranks, a row per schedule or job, JSON and picture."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import child, collectives, schedule, two_hosts
from benchmarks.__main__ import main
from fugaku_megatron.pipeline.timeline import Span, _result, _source
from tests.mpi import launch, slow_link
from tests.mpi.launch import words
from tests.mpi.pretraining import PROGRAM, TINY, losses, pretrain

pytestmark = [
    pytest.mark.system,
    pytest.mark.mpi,
    pytest.mark.skipif(launch.mpich() is None, reason=launch.MISSING["mpich"]),
]
PNG = b"\x89PNG"


@pytest.fixture
def measured(tmp_path, capsys):
    """Run a benchmark; return its JSON and its output."""

    def run(*command: object) -> tuple[dict, str]:
        main(words(*command, f"--json {tmp_path}/a.json"))
        return json.loads((tmp_path / "a.json").read_text()), capsys.readouterr().out

    return run


def idle(plan, spans: list[Span]) -> list[float]:
    """Return the idle seconds before each computation, sorted: from the arrival of its inputs to its begin."""
    ends = {_result(plan.placement, span.stage, span): span.end for span in spans} | {None: 0.0}
    found = []
    free = dict.fromkeys(range(plan.placement.stages), 0.0)
    for span in sorted(spans, key=lambda span: span.start):
        ready = max(free[span.stage], ends[_source(plan.placement, span.stage, span)])
        found.append(span.start - ready)
        free[span.stage] = span.end
    return sorted(found)


def test_collectives_beside_gloo(measured):
    result, said = measured("collectives --ranks 2 --mebibytes 0.01 --rounds 2")
    assert [row["verb"] for row in result["rows"]] == list(collectives.VERBS)
    for row in result["rows"]:
        assert row["ranks"] == 2 and 0 < row["fugaku"] < 1e4
        assert row["ratio"] == row["gloo"] / row["fugaku"]
        assert row["verb"] in said


def test_every_schedule_follows_its_list(measured, tmp_path):
    """Sleepers wake late on a busy machine. Four times in five the next computation begins soon after."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    command = f"schedule --stages 2 --microbatches 4 --slot-ms 50 --chunks 3 --png {picture}"
    rows = measured(command)[0]["rows"]
    assert picture.read_bytes().startswith(PNG)
    assert [(row["schedule"], row["chunks"]) for row in rows] == [
        ("1f1b", 1),
        ("interleaved", 3),
        ("zb-h1", 1),
        ("zb-h1", 3),
        ("zbv", 2),
    ]
    assert rows[0]["list_seconds"] == pytest.approx(0.05 * 3 * (4 + 2 - 1))
    assert rows[0]["ratio_to_1f1b"] == 1
    for plan, row in zip(schedule.schedules(2, 4, [3]), rows, strict=True):
        waits = idle(plan, [Span(*fields) for fields in row["spans"]])
        assert waits[0] >= 0 and waits[len(waits) * 4 // 5] < 0.05 / 2 / row["chunks"], waits
        assert row["measured_seconds"] >= row["list_seconds"]
        assert row["ratio_to_1f1b"] == pytest.approx(
            rows[0]["measured_seconds"] / row["measured_seconds"]
        )
    assert max(row["list_seconds"] for row in rows[1:]) < rows[0]["list_seconds"] / 1.1


@pytest.fixture
def hosts(monkeypatch):
    """A quick job's command with fewer layers and narrower experts, if there can be two hosts."""
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    for name, smaller in {
        "data": {"num_layers": 6},
        "experts": {"moe_ffn_hidden_size": 128},
    }.items():
        mode = two_hosts.MODES[name]
        jobs = {job: {**model, **smaller} for job, model in mode.jobs.items()}
        monkeypatch.setitem(two_hosts.MODES, name, replace(mode, jobs=jobs))
    return "two_hosts --seq-length 64 --micro-batches 2 --rounds 1"


@pytest.mark.full
def test_bytes_and_seconds_of_a_link(measured, hosts):
    result, printed = measured(hosts)
    rows = {row["job"]: row for row in result["rows"]}
    gradients = (
        4 * 5.0e6
    )  # what a rank of two sends in a reduce-scatter and an all-gather: each half of them
    sent = {"blocking": gradients, "overlapped": gradients, "overlapped, BF16": gradients / 2}
    assert list(rows) == list(sent)
    for name, row in rows.items():
        assert row["sent"] == pytest.approx([sent[name]] * 2, rel=0.1)
        assert (
            row["wire_seconds"] == pytest.approx(8 * max(row["sent"]) / 1e9)
            and row["seconds"] > row["wire_seconds"]
        )
    assert rows["overlapped"]["loss"] == rows["blocking"]["loss"]
    assert (
        result["rounds"][0]["blocking"]["computation"] > 0
        and "without its sums and gathers" in printed
    )


@pytest.mark.full
def test_rows_between_matmuls(measured, hosts):
    """Tensor-parallel hosts send as many bytes overlapped as blocking."""
    rows = {row["job"]: row for row in measured(hosts, "--tensor-parallel")[0]["rows"]}
    exchanges = 2 * (
        2 * 10 + 2 + 2
    )  # micro-batches x (layers x exchanges of each, embedding and head)
    half = 64 // 2 * 1024 * 4
    assert rows["blocking"]["sent"] == pytest.approx([exchanges * half] * 2, rel=0.1)
    assert rows["overlapped"]["sent"] == pytest.approx([exchanges * half] * 2, rel=0.1)


@pytest.mark.full
def test_a_sequence_of_two_hosts(measured, hosts):
    """Rows for heads and back, forward and backward: queries, keys, values and context of half of the sequence, half of each.

    Keys and values: of one part from the first host, whose second part the second one does not see, and of both from the other;
    in backward again, and the gradients the other way.
    """
    result, _ = measured(hosts, "--context-parallel --seq-length 512 --micro-batches 1")
    heads, keys = result["rows"]
    assert (heads["job"], keys["job"]) == ("a2a", "p2p")
    half = 8 * 2 * 4 * 256 // 2 * 256 * 4  # layers x ways x widths x rows x h x bytes
    assert heads["sent"] == pytest.approx([half] * 2, rel=0.1)
    assert keys["sent"] == pytest.approx([half, half * 5 / 4], rel=0.1)
    assert keys["wire_seconds"] == pytest.approx(8 * keys["sent"][1] / 1e9)


@pytest.mark.full
def test_rows_of_experts(measured, hosts):
    """There and back, and gradients the same ways: half a token's two rows, and as many bytes in groups as at once."""
    result, _ = measured(hosts, "--experts")
    rows = {row["job"]: row for row in result["rows"]}
    assert list(rows) == ["blocking", "overlapped"]
    half = 2 * 2 * 4 * 64 * 512 * 4  # micro-batches x layers x ways x rows x h x bytes
    assert all(
        row["sent"] == pytest.approx([half] * 2, rel=0.3) for row in rows.values()
    )  # as routers choose
    assert rows["overlapped"]["loss"] == pytest.approx(rows["blocking"]["loss"], rel=0.02)


def run_on_hosts(mpich, rate: str, *program: object) -> str:
    """Run a Python program with a rank on each host and return its output."""
    with two_hosts.two_hosts(rate):
        first, second = (
            two_hosts.on_host(host, words(sys.executable, *program)) for host in two_hosts.HOSTS
        )
        done = subprocess.run(
            [child.mpiexec(), *first, ":", *second],
            env={**mpich.variables(), **two_hosts.NETWORK},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
        )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2"], ids=["dp2", "pp2"])
def test_documents_train_alike_on_two_hosts(hosts, mpich, tmp_path, layout):
    """Over a slow link, as on one host."""
    flags = (
        f"{TINY} {layout} --train-iters 6 --reset-attention-mask --reset-position-ids "
        "--eod-mask-loss --tokenizer-type NullTokenizer --hidden-dropout 0.1 --save"
    )
    pretrain(mpich, 2, flags, tmp_path / "one")
    run_on_hosts(mpich, "10mbit", PROGRAM, flags, tmp_path / "two")
    one = losses(tmp_path / "one")
    assert len(one) == 6 and losses(tmp_path / "two") == one


@pytest.mark.full
def test_rows_in_groups_hide_most_of_a_slow_link(hosts, mpich):
    """Experts compute, or sleep, as long as their rows need on the link, in forward and twice as long in backward."""
    rows = 1600
    rate = 20e6
    wire = 2 * rows * slow_link.WIDTH * 4 * 8 / rate  # there and back

    def exposed(groups: int) -> float:
        seconds = float(run_on_hosts(mpich, "20mbit", slow_link.__file__, rows, wire, groups))
        return (seconds - 3 * wire) / (2 * wire)

    assert exposed(1) > 0.7 and exposed(8) < 0.4  # 0.08 on an idle machine


def test_exposed_is_the_median_of_differences_within_rounds():
    def turn(computation, blocking, overlapped):
        together = {"sent": [40e6, 50e6], "waiting": 0.05, "loss": 1.0, "computation": computation}
        return {
            "blocking": {"seconds": blocking, **together},
            "overlapped": {"seconds": overlapped, **together},
            "overlapped, BF16": {"seconds": computation, **together},
        }

    parser = argparse.ArgumentParser()
    two_hosts.add_arguments(parser)
    rounds = [
        turn(4.0, 4.5, 4.1),
        turn(5.0, 5.5, 5.1),
        turn(6.0, 6.5, 7.0),
    ]  # the machine became slower and slower
    result = two_hosts.report(parser.parse_args([]), rounds, 1e9, busy=False)
    rows = {row["job"]: row for row in result["rows"]}
    assert (
        rows["blocking"]["computation_seconds"] == 5.0 and rows["blocking"]["wire_seconds"] == 0.4
    )
    assert rows["blocking"]["exposed_seconds"] == pytest.approx(0.5) and rows["overlapped"][
        "exposed_seconds"
    ] == pytest.approx(0.1)
    assert rows["overlapped"]["waiting_seconds"] == 0.05
    assert rows["overlapped"]["exposed_share"] == pytest.approx(0.25) and rows["overlapped"][
        "ratio"
    ] == pytest.approx(5.5 / 5.1)
