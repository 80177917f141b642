"""Nothing is modelled that is not built, and overlap hides no more than computation allows."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from fugaku_megatron import cli
from fugaku_megatron.config import features
from fugaku_megatron.config.features import FEATURES
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.recipes import gpt_30b, gpt_124m
from fugaku_megatron.config.run_config import ParallelConfig
from fugaku_megatron.costs import buckets as gradient_buckets
from fugaku_megatron.costs.accounting import Collective
from fugaku_megatron.perf import cost, model, plan, search, software
from fugaku_megatron.perf.model import System

PERF = Path(model.__file__).parent
GRAD, GATHER = frozenset({features.OVERLAP_GRAD_REDUCE}), frozenset({features.OVERLAP_PARAM_GATHER})


def test_nothing_is_modelled_that_is_not_built():
    """Each row of FEATURES has its flag and its module (test_features.py); only this project's trainer has rows."""
    for name in software.names():
        code = software.load(name)
        assert code.choices.names == (frozenset(FEATURES) if code.style == "native" else frozenset())


def test_the_model_counts_a_feature_only_by_the_tables_names():
    """Every gain in perf/ asks for a constant of config/features.py, so that no gain goes by another name or none."""
    named = {node.attr for path in PERF.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "features"
             and node.attr.isupper() and node.attr not in ("FEATURES", "SWITCHES")}
    assert {getattr(features, name) for name in named} <= set(FEATURES) and "OVERLAP_GRAD_REDUCE" in named


def test_without_a_feature_all_communication_is_waited_for():
    run = replace(gpt_124m(), parallel=ParallelConfig(zero_stage=1))
    system, layout = System.from_names("a64fx", "fugaku_megatron", 64, 1), Layout(64, 1, 1, 64)
    bare = replace(system, software=replace(system.software, choices=software.Choices.from_names(frozenset(), (1,))))
    whole = sum(model.Network(machine=system.machine, parameters=system.parameters, layout=layout, ranks_per_node=1).seconds(
        c.verb, c.group, c.bytes) for c in gradient_buckets.gradient_collectives(run, layout, 0))
    assert model.step(run, layout, bare, system.parameters).data_parallel == pytest.approx(whole)


def buckets(*sizes: int, verb: str = "reduce_scatter") -> list[Collective]:
    return [Collective(verb, "dp", size) for size in sizes]


def exposed(collectives: list[Collective], forward: float, backward: float, active: frozenset[str]) -> float:
    return cost.exposed(collectives, lambda c: c.bytes / 10.0, forward, backward, active)


def test_the_last_bucket_is_never_hidden():
    assert exposed(buckets(10, 10, 10, 10), 1.0, 100.0, GRAD) == pytest.approx(1.0)
    assert exposed(buckets(40), 1.0, 100.0, GRAD) == exposed(buckets(40), 1.0, 100.0, frozenset()) == pytest.approx(4.0)


def test_a_reduction_hides_no_longer_than_the_backward_takes():
    assert exposed(buckets(10, 10, 10, 10), 1.0, 0.4, GRAD) == pytest.approx(4.0 - 0.4 * 3 / 4)
    assert exposed(buckets(10, 10, 10, 10), 1.0, 0.0, GRAD) == pytest.approx(4.0)


def test_the_tied_embeddings_sum_is_not_hidden():
    tied = [Collective("all_reduce", "embedding", 20)]
    assert exposed(tied + buckets(10, 10), 1.0, 100.0, GRAD) == pytest.approx(2.0 + 1.0)


def test_the_gather_hides_behind_the_next_forward_but_for_its_first_bucket():
    gathers = buckets(10, 10, 10, 10, verb="all_gather")
    assert exposed(gathers, 100.0, 100.0, GATHER) == pytest.approx(1.0)
    assert exposed(gathers, 0.0, 100.0, GATHER) == pytest.approx(4.0)
    assert exposed(gathers, 100.0, 100.0, GRAD) == pytest.approx(4.0)


def test_the_pessimistic_network_slows_large_sums_only():
    system = System.from_names("a64fx", "fugaku_megatron", 64, 1)
    run, layout = gpt_124m(), Layout(64, 1, 1, 64)
    fast, slow = (model.step(run, layout, system, system.parameters, slow=slow) for slow in (False, True))
    assert slow.data_parallel / fast.data_parallel == pytest.approx(1.22 / 0.6, rel=0.1)
    assert slow.seconds - fast.seconds == pytest.approx(slow.data_parallel - fast.data_parallel)
    assert model.predict(run, system, with_band=False).slow_network == pytest.approx(slow.seconds)
    inside = System.from_names("a64fx", "fugaku_megatron", 1, 4)
    assert model.step(run, Layout(4, 4, 1, 1), inside, inside.parameters, slow=True).data_parallel == 0.0


@pytest.mark.parametrize("flag", ["--features", "--offers"])
def test_the_table_has_every_feature(capsys, flag):
    flags = "plan --recipe 124m --nodes 4 --ranks-per-node 1 --micro-batch-size 1 --tensor-model-parallel-size 1"
    assert cli.main([*flags.split(), flag]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in FEATURES) and "slow network" in text
    assert cli.main([*flags.split(), flag, "--json"]) == 2 and "--features prints its own table" in capsys.readouterr().err


def test_without_a_feature_the_best_plan_is_no_faster():
    run = gpt_30b()
    system = System.from_names("a64fx", "fugaku_megatron", 384)
    held = frozenset({"tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "ranks_per_node"})
    parallel = replace(run.parallel, tensor_model_parallel_size=4, pipeline_model_parallel_size=12)
    run = replace(run, parallel=parallel, batch=replace(run.batch, micro_batch_size=1))
    table = plan.feature_rows(run, system, held)
    assert table[0].plan.seconds <= min(row.plan.seconds for row in table if row.plan and row.name.startswith("without"))
    assert not any(p.run.parallel.zero_stage for p in search.search(
        run, replace(system, software=system.software.without(features.ZERO_1)), held).plans)


def test_a_flag_that_the_software_does_nothing_with_changes_no_time_and_is_said():
    run = replace(gpt_30b(), parallel=ParallelConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=48))
    system = System.from_names("a64fx", "torch1.10", 192)
    switched = features.switched(run, features.SEQUENCE_PARALLEL)
    with_flag, without = (model.predict(r, system, with_band=False) for r in (switched, run))
    assert with_flag.seconds == without.seconds
    assert any("torch1.10 has no --sequence-parallel" in line for line in with_flag.warnings)


def test_exchanges_behind_products_wait_for_their_first_block_at_least():
    """30B at TP 4 between nodes: all but what cannot hide is hidden, and a network that is too slow is waited for."""
    run = replace(gpt_30b(), parallel=ParallelConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=6,
                                                     sequence_parallel=True))
    system, layout = System.from_names("a64fx", "fugaku_megatron", 24, 1), Layout(24, 4, 6, 1)
    behind = features.switched(run, features.TP_COMM_OVERLAP)
    waits = {}
    for name, case, machine in (("blocking", run, system.machine), ("behind", behind, system.machine),
                                ("slow", behind, replace(system.machine, link_gbs=0.01, injection_gbs=0.01))):
        busy = model.step(case, layout, replace(system, machine=machine), system.parameters).slowest
        waits[name] = busy.tensor_parallel
    assert 0 < waits["behind"] < 0.4 * waits["blocking"] and waits["slow"] > 10 * waits["blocking"]
    bare = replace(system, software=system.software.without(features.TP_COMM_OVERLAP))
    assert model.step(behind, layout, bare, system.parameters).slowest.tensor_parallel == waits["blocking"]


def test_exchanges_behind_products_are_tried_between_nodes_only():
    run = replace(gpt_30b(), parallel=ParallelConfig(pipeline_model_parallel_size=48))
    held = frozenset({"micro_batch_size", "recompute_granularity", "pipeline_model_parallel_size", "zero_stage"})
    for ranks, expected in ((1, {1: {False}, 2: {True}, 4: {True}}), (2, {1: {False}, 2: {False}, 4: {False, True}})):
        system, made = System.from_names("a64fx", "fugaku_megatron", 384, ranks), {}
        for candidate, _ in runnable(run, system, held | {"ranks_per_node"}):
            parallel = candidate.parallel
            if parallel.tensor_model_parallel_size == 1 or parallel.sequence_parallel:
                made.setdefault(parallel.tensor_model_parallel_size, set()).add(parallel.tp_comm_overlap)
        assert {tp: made[tp] for tp in expected} == expected


def runnable(run, system, held: frozenset[str]) -> list:
    return [candidate for candidate in search.candidates(run, system, held) if not isinstance(candidate, str)]


def test_sequence_parallelism_is_tried_where_there_is_tensor_parallelism():
    run, system = gpt_30b(), System.from_names("a64fx", "fugaku_megatron", 384, 1)
    held = frozenset({"micro_batch_size", "ranks_per_node", "recompute_granularity", "pipeline_model_parallel_size"})
    run = replace(run, parallel=ParallelConfig(pipeline_model_parallel_size=48), batch=replace(run.batch, micro_batch_size=1))
    parallel = [r.parallel for r, _ in runnable(run, system, held)]
    made = {(p.tensor_model_parallel_size > 1, p.sequence_parallel) for p in parallel}
    assert made == {(False, False), (True, False), (True, True)}
    assert not any(r.parallel.sequence_parallel for r, _ in runnable(run, system, held | {"sequence_parallel"}))
