"""The planner: what it keeps, why it drops the rest, its ranking against the tables, its text, JSON, picture and command line."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from fugaku_megatron import arguments
from fugaku_megatron.accounting import Layout
from fugaku_megatron.perf import __main__ as door
from fugaku_megatron.perf import explain, plan
from fugaku_megatron.perf.model import System
from fugaku_megatron.perf.request import run_of, system_of

A100_181B = ("plan --machine a100 --nodes 48 --num-layers 72 --hidden-size 14336 --num-attention-heads 64 --seq-length 2048 "
             "--global-batch-size 2048 --vocab-size 250680 --bf16 --ramp-divisible --train-tokens 300e9")
SEEDS_30B = ("plan --recipe 30b --nodes 6144 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 48 "
             "--checkpoint-activations --software this --against torch1.10 --explain")
SEEDS_124M = "plan --recipe 124m --nodes 1 --checkpoint-activations --software this --against torch1.10+tcmalloc --explain"


def said(command: str, capsys) -> str:
    assert door.run(shlex.split(command)) == 0
    return capsys.readouterr().out


def test_the_tables_winner_on_48_a100_nodes_is_within_the_first_five(capsys):
    plans = json.loads(said(A100_181B + " --json", capsys))["plans"]
    chosen = [(p["tp"], p["pp"], p["micro_batch_size"], p["recompute"]) for p in plans]
    assert (4, 12, 2, "full") in chosen[:5]
    assert all(p["dp"] % 4 == 0 for p in plans)
    times = [p["seconds_per_iteration"] for p in plans]
    assert times == sorted(times) and len(plans) == 10
    assert plans[0]["days"] == pytest.approx(300e9 / 2048 / 2048 * times[0] / 86400)


def test_12288_nodes(capsys):
    text = said("plan --recipe 30b --nodes 12288 --train-tokens 300e9", capsys)
    assert "12288 nodes of a64fx" in text and "dropped:" in text and "stage   0 |F" in text


def test_the_command_line_is_the_trainers_own(capsys):
    best = json.loads(said("plan --recipe 30b --nodes 384 --micro-batch-size 1 --json", capsys))["plans"][0]
    words = shlex.split(best["command"])
    run = arguments.parse(words[words.index("pretrain_gpt.py") + 1:]).run
    layout = Layout.of(run, int(words[words.index("-n") + 1]))
    assert (layout.dp, layout.tp, layout.pp) == (best["dp"], best["tp"], best["pp"])
    assert run.batch.micro_batch_size == best["micro_batch_size"] and run.parallel.zero_stage == best["zero_stage"]


def test_flags_that_are_given_hold(capsys):
    command = "plan --recipe 30b --nodes 384 --tensor-model-parallel-size 8 --checkpoint-activations --json"
    plans = json.loads(said(command, capsys))["plans"]
    assert {p["tp"] for p in plans} == {8} and {p["recompute"] for p in plans} == {"full"}
    assert len({p["pp"] for p in plans}) > 1


def test_only_what_the_software_offers(capsys):
    plans = json.loads(said("plan --recipe 30b --nodes 384 --software torch1.10 --json", capsys))["plans"]
    assert {p["zero_stage"] for p in plans} == {0} and {p["ranks_per_node"] for p in plans} == {1}


def test_no_plan_runs_out_of_memory_and_reasons_are_counted():
    args = _parsed("plan --recipe 30b --nodes 384 --micro-batch-size 1")
    system = system_of(args)
    held = plan.held_fields(args)
    found = plan.search(run_of(args, system, plan.OWN), system, held)
    assert all(p.memory_mib <= 28.5 * 1024 / p.system.ranks_per_node for p in found.plans)
    assert found.dropped["out of memory"] > 0 and len(found.plans) + sum(found.dropped.values()) == len(
        list(plan.candidates(run_of(args, system, plan.OWN), system, held)))


def _parsed(command: str):
    parser = door.arguments.Parser(prog="plan", allow_abbrev=False)
    plan.add_arguments(parser)
    return parser.parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("command, start", [(SEEDS_30B, 252.05), (SEEDS_124M, 1020.3)])
def test_explain_names_every_change_from_the_tables_software(command, start, capsys):
    text = said(command, capsys)
    named = ("fewer faults", "native kernels", "ranks per CMG", "schedule and layout", "overlap", "model")
    assert all(name in text for name in named)
    args = _parsed(command)
    system = system_of(args)
    run = run_of(args, system, plan.OWN)
    best = plan.search(run, system, frozenset()).plans[0]
    found = explain.changes(run, system, args.against, best)
    assert found[0].seconds == pytest.approx(start, rel=0.08)
    assert all(b.seconds <= a.seconds * 1.0001 for a, b in zip(found, found[1:]))


def test_removing_a_cause_never_costs_time():
    args = _parsed("plan --recipe 30b --nodes 384 --micro-batch-size 1 --zero-stage 1 --tensor-model-parallel-size 4")
    best = plan.search(run_of(args, system_of(args), plan.OWN), system_of(args), plan.held_fields(args)).plans[0]
    gains = explain.gains(best)
    assert min(gains.values()) >= 0 and gains["gemm"] == max(gains.values())


def test_the_picture_file(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    said(f"plan --recipe 124m --nodes 16 --png {tmp_path / 'p.png'}", capsys)
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("command, message", [
    ("plan --recipe 30b --nodes 1", "no layout runs"), ("plan --recipe 30b --nodes 384 --against torch1.10", "--against goes with"),
    ("plan --recipe 30b --nodes 384 --train-tokens 0", "--train-tokens is 0"), ("plan --recipe 30b", "--nodes"),
    ("plan --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --nodes 2", "--global-batch-size must be given"),
    ("plam --nodes 1", "did you mean plan")])
def test_mistakes_are_one_line(command, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["perf", *shlex.split(command)])
    assert door.main() == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_ranks_of_a_node_are_searched_as_the_machine_has_them():
    args = _parsed("plan --recipe 124m --nodes 4 --ranks-per-node 4")
    system = system_of(args)
    found = plan.search(run_of(args, system, plan.OWN), system, plan.held_fields(args))
    assert isinstance(system, System) and {p.system.ranks_per_node for p in found.plans} == {4}
