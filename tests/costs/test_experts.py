"""The formulas in costs/ against models with experts: parameters, FLOPs, messages and memory."""

import contextlib

import pytest

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import mlp
from fugaku_megatron.costs.buckets import bucket_elements, updated_elements
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.costs.stages import stage_records
from fugaku_megatron.training.trainer import Trainer
from tests.checks.allocations import (
    MICROBATCHES,
    MODEL,
    STAGES,
    check_peak,
)
from tests.checks.costs import (
    check_bytes,
    check_flops,
    check_kept,
    check_parameters,
    expected_traffic,
    held_bytes,
)
from tests.checks.experts import (
    BALANCED,
    BIASED,
    EXPERTS,
    SHARED,
    SINKHORN,
)
from tests.helpers import (
    PP2,
    grid_groups,
    lay_out,
    mock,
    small_run,
)
from tests.recording import record
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


EP2 = {"expert_model_parallel_size": 2}


OLMOE = {
    **EXPERTS,
    "qk_layernorm": True,
    "qk_layernorm_all_heads": True,
    "position_embedding_type": "rope",
    "moe_router_pre_softmax": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


def test_norms_over_all_heads():
    check_parameters(small_run(**OLMOE, **PP2), 2)
    check_kept(small_run(**OLMOE))


COSTED = [
    {**EXPERTS},
    {**EXPERTS, **SHARED, **BALANCED, "moe_layer_freq": "2"},
    {**EXPERTS, **SHARED, **BIASED, **BALANCED},
    {**EXPERTS, **SHARED, "swiglu": False, **SINKHORN, "moe_router_topk": 1},
]
ADAPTED = {**COSTED[2], "lora_rank": 4}


@pytest.mark.parametrize("model", COSTED)
def test_parameters_and_flops(model):
    check_parameters(*lay_out("tp2 pp2", model))
    check_flops(small_run(**{**model, "micro_batch_size": 1}))


@pytest.mark.parametrize("model", COSTED)
@pytest.mark.parametrize("layout", ["tp2 dp2", "tp2 dp2 sequence zero"])
def test_bytes_are_those_communicated(model, layout):
    check_bytes(*lay_out(layout, model))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (COSTED[2], "dp4 ep2 overlap"),
        (COSTED[2], "tp2 dp2 ep2 etp1 sequence zero moe_expert_capacity_factor=8.0"),
        (COSTED[2], "dp2 ep2 full"),
        (COSTED[2], "tp2 pp2 dp2 ep2 sequence"),
        (ADAPTED, "tp2 dp2 ep2 sequence"),
        (ADAPTED, "tp2 dp2 ep2 etp1 sequence zero moe_expert_capacity_factor=8.0"),
    ],
)
def test_bytes_of_divided_experts(model, layout):
    """Per group; how many rows a rank sends back depends on the tokens, so that these are compared as sums over ranks."""
    run, world = lay_out(layout, model)
    layout = Layout.from_run(run, world)
    check_parameters(run, world)

    def rank(comm):
        groups = record(grid_groups(comm, run))
        with contextlib.closing(Trainer(Plan(run, layout), comm, groups, mock(run))) as trainer:
            trainer.train_step()
            sizes = [
                [b.end - b.start for b in trainer.optimizer.flat.buckets if b.expert == expert]
                for expert in (False, True)
            ]
        return groups.tp.tally(), sizes

    results = ThreadWorld(world).run(rank)
    stages = [rank // layout.tp % layout.pp for rank in range(world)]
    for verb, group in (
        ("all_to_all", "ep"),
        ("all_to_all", "etp"),
        ("all_gather", "ep"),
        ("all_gather", "etp"),
        ("all_reduce", "edp"),
        ("reduce_scatter", "edp"),
        ("all_gather", "edp"),
    ):
        measured = sum(tally.get((group, verb), (0, 0))[1] for tally, _ in results)
        expected = sum(
            expected_traffic(run, layout, stage).get((verb, group), 0) for stage in stages
        )
        ranks = {"ep": layout.ep, "etp": layout.etp or layout.tp, "edp": layout.edp}[group]
        assert measured == expected or ranks == 1 and not expected, (verb, group)
    for stage, (_, (others, divided)) in zip(stages, results):
        assert sum(others) + sum(divided) == sum(bucket_elements(run, layout, stage))
        shards = (layout.dp, layout.edp) if run.parallel.zero_stage else (1, 1)
        assert sum(others) // shards[0] + sum(divided) // shards[1] == sum(
            updated_elements(run, layout, stage)
        )


@pytest.mark.parametrize("layout", ["dp2 ep2", "tp2 dp2 ep2 sequence", "tp2 dp2 ep4 etp1 sequence"])
def test_divided_experts_keep_what_the_formula_says(layout):
    """In the mean over ranks, because those with more tokens keep more."""
    run, world = lay_out(layout, COSTED[2])
    held = ThreadWorld(world).run(held_bytes, run)
    records = stage_records(run, 0)
    # `held_bytes` leaves int64 out
    numbers = (
        mlp.routed_pairs(run) * mlp.NUMBER_BYTES + mlp.computed_pairs(run) * mlp.RECEIVED_BYTES
    )
    assert sum(held) / world == pytest.approx(
        sum(r.saved_bytes for r in records) - 4 * numbers, rel=0.02
    )


@pytest.mark.parametrize("layout", ["tp2 pp2", "tp2 pp2 sequence", "tp2 pp2 etp1 sequence"])
def test_bytes_of_adapters_of_experts(layout):
    """The last stage needs an input gradient, and sums it over ranks that share an expert."""
    run, world = lay_out(layout, ADAPTED)
    check_parameters(run, world)
    check_bytes(run, world, stages={1})


@pytest.mark.parametrize("model", [COSTED[0], COSTED[2], COSTED[3], ADAPTED])
@pytest.mark.parametrize("layout", ["", "tp2 sequence", "full", "bf16"])
def test_saved_bytes_are_those_that_autograd_keeps(model, layout):
    check_kept(lay_out(layout, model)[0])


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (0, {}),
        (3, SHARED),
        (3, {"pipeline_schedule": "zb-h1"}),
        (0, {"lora_rank": 4}),
        (0, {**EP2, **SHARED, "pipeline_schedule": "zb-h1"}),
        (0, {**SHARED, "swiglu": False}),
        (0, {"swiglu": False, "openai_gelu": True, "pipeline_schedule": "zb-h1"}),
    ],
)
def test_the_peak_of_a_stage(stage, changes):
    widths = {"num_attention_heads": 8, "kv_channels": 16, "moe_ffn_hidden_size": 96}
    wide = (
        {"moe_shared_expert_intermediate_size": 128} if "moe_shared_expert_gate" in changes else {}
    )
    replicas = changes.get("expert_model_parallel_size", 1)
    run = small_run(
        **{
            **MODEL,
            **EXPERTS,
            **widths,
            **changes,
            **wide,
            "global_batch_size": 2 * MICROBATCHES * replicas,
        }
    )
    check_peak(SoloComm(stage, STAGES * replicas), run)
