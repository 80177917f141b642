"""Features: one table names what the trainer has, nothing else is modelled, and overlap hides no more than computation allows."""

from dataclasses import replace

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.config import features
from fugaku_megatron.config.features import FEATURES
from fugaku_megatron.config.fields import flag
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.megatron_flags import OTHER_FLAGS
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.run_config import GROUP_OF, ParallelConfig
from fugaku_megatron.costs.records import Collective
from fugaku_megatron.planner import cost, model, plan, search, software
from fugaku_megatron.planner.system import System

pytestmark = pytest.mark.unit


def ours(nodes: int, ranks_per_node: int | None = 1) -> System:
    return System.from_names("a64fx", "fugaku_megatron", nodes, ranks_per_node)


def test_a_feature_has_its_flag_and_is_modelled():
    """Only this project's trainer has features."""
    for name, feature in FEATURES.items():
        assert feature.field is None or feature.field in GROUP_OF, (
            f"{name}: the config has no {feature.field}"
        )
        assert feature.field is None or flag(feature.field) not in OTHER_FLAGS, (
            f"{name}: its flag is said to do nothing"
        )
    for name in software.names():
        code = software.load(name)
        assert code.choices.names == (
            frozenset(FEATURES) if code.style == "native" else frozenset()
        )


GRAD = frozenset({features.OVERLAP_GRAD_REDUCE})
GATHER = frozenset({features.OVERLAP_PARAM_GATHER})


def buckets(*sizes: int, verb: str = "reduce_scatter") -> list[Collective]:
    return [Collective(verb, "dp", size) for size in sizes]


TIED = [Collective("all_reduce", "embedding", 20)]
FOUR = buckets(10, 10, 10, 10)
GATHERS = buckets(10, 10, 10, 10, verb="all_gather")


@pytest.mark.parametrize(
    ("collectives", "forward", "backward", "active", "seconds"),
    [
        (FOUR, 1.0, 100.0, GRAD, 1.0),
        (buckets(40), 1.0, 100.0, GRAD, 4.0),
        (buckets(40), 1.0, 100.0, frozenset(), 4.0),  # the last
        (FOUR, 1.0, 0.4, GRAD, 4.0 - 0.4 * 3 / 4),
        (FOUR, 1.0, 0.0, GRAD, 4.0),  # no longer than the backward takes
        (
            TIED + buckets(10, 10),
            1.0,
            100.0,
            GRAD,
            2.0 + 1.0,
        ),  # the sum of the tied embedding is not overlapped
        (GATHERS, 100.0, 100.0, GATHER, 1.0),
        (GATHERS, 0.0, 100.0, GATHER, 4.0),
        (GATHERS, 100.0, 100.0, GRAD, 4.0),  # next forward
    ],
)
def test_what_overlap_leaves_exposed(collectives, forward, backward, active, seconds):
    assert cost.exposed(
        collectives, lambda c: c.bytes / 10.0, forward, backward, active
    ) == pytest.approx(seconds)


def test_the_pessimistic_network_slows_large_sums_only():
    system = ours(64)
    run = RECIPES["124m"]()
    layout = Layout(64, 1, 1, 64)
    fast, slow = (
        model.step(run, layout, system, system.parameters, slow=slow) for slow in (False, True)
    )
    assert slow.data_parallel / fast.data_parallel == pytest.approx(1.22 / 0.6, rel=0.1)
    assert slow.seconds - fast.seconds == pytest.approx(slow.data_parallel - fast.data_parallel)
    assert model.predict(run, system).slow_network == pytest.approx(slow.seconds)
    inside = ours(1, 4)
    assert (
        model.step(run, Layout(4, 4, 1, 1), inside, inside.parameters, slow=True).data_parallel
        == 0.0
    )


@pytest.mark.parametrize("flag", ["--features", "--offers"])
def test_the_table_has_every_feature(capsys, flag):
    flags = "plan --recipe 124m --nodes 4 --ranks-per-node 1 --micro-batch-size 1 --tensor-model-parallel-size 1"
    assert program.main([*flags.split(), flag]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in FEATURES) and "slow network" in text
    assert (
        program.main([*flags.split(), flag, "--json"]) == 2
        and "--features prints its own table" in capsys.readouterr().err
    )


def test_without_a_feature_the_best_plan_is_not_faster():
    run = RECIPES["30b"]()
    system = ours(384, None)
    held = frozenset(
        {
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "micro_batch_size",
            "ranks_per_node",
        }
    )
    parallel = replace(run.parallel, tensor_model_parallel_size=4, pipeline_model_parallel_size=12)
    run = replace(run, parallel=parallel, batch=replace(run.batch, micro_batch_size=1))
    best = plan.feature_plans(run, system, held)
    assert best["all"].seconds <= min(
        found.seconds for name, found in best.items() if found and name.startswith("without")
    )
    assert not any(
        p.run.parallel.zero_stage
        for p in search.search(
            run, replace(system, software=system.software.without(features.ZERO_1)), held
        ).plans
    )


def test_a_flag_that_the_software_does_nothing_with_changes_no_time_and_is_said():
    run = replace(
        RECIPES["30b"](),
        parallel=ParallelConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=48),
    )
    system = System.from_names("a64fx", "torch1.10", 192)
    switched = features.switched(run, features.SEQUENCE_PARALLEL)
    with_flag, without = (model.predict(r, system) for r in (switched, run))
    assert with_flag.seconds == without.seconds
    assert any("torch1.10 has no --sequence-parallel" in line for line in with_flag.warnings)


def test_overlapped_exchanges_wait_for_their_first_block_at_least():
    """30B at TP 4 between nodes: all but what cannot hide is hidden, and a network that is too slow is waited for."""
    run = replace(
        RECIPES["30b"](),
        parallel=ParallelConfig(
            tensor_model_parallel_size=4, pipeline_model_parallel_size=6, sequence_parallel=True
        ),
    )
    system = ours(24)
    layout = Layout(24, 4, 6, 1)
    overlapped = features.switched(run, features.TP_COMM_OVERLAP)
    waits = {}
    for name, case, machine in (
        ("blocking", run, system.machine),
        ("overlapped", overlapped, system.machine),
        ("slow", overlapped, replace(system.machine, link_gbs=0.01, injection_gbs=0.01)),
    ):
        busy = model.step(case, layout, replace(system, machine=machine), system.parameters).slowest
        waits[name] = busy.tensor_parallel
    assert (
        0 < waits["overlapped"] < 0.4 * waits["blocking"] and waits["slow"] > 10 * waits["blocking"]
    )
    bare = replace(system, software=system.software.without(features.TP_COMM_OVERLAP))
    assert (
        model.step(overlapped, layout, bare, system.parameters).slowest.tensor_parallel
        == waits["blocking"]
    )
