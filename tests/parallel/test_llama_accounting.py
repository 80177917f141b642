"""Llama, Mistral, Qwen2 and Qwen3: what accounting says of them against what the model has, computes, sends and keeps."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import accounting, memory, run_schedule
from fugaku_megatron.perf import search, software, work
from fugaku_megatron.perf.model import System
from tests.helpers import make_trainer, small_run
from tests.llama_models import FAMILIES
from tests.parallel.test_accounting import check_bytes, counted_flops, sizes
from tests.parallel.test_memory import held_bytes
from tests.threads import ThreadWorld
from tests.unit.test_schedule_memory import MICROBATCHES, MODEL, STAGES, allocated_peak

each_family = pytest.mark.parametrize("family", FAMILIES)
QWEN3 = FAMILIES["qwen3"]


@pytest.mark.parametrize(("recipe", "count"), [
    ("llama-3.2-1b", 1_235_814_400), ("llama-3.1-8b", 8_030_261_248), ("qwen2.5-0.5b", 494_032_768), ("qwen3-0.6b", 596_049_920),
    ("tinyllama-1.1b", 1_100_048_384), ("mistral-7b", 7_241_732_096)])
def test_recipes_have_the_published_number_of_parameters(recipe, count):
    assert accounting.parameters(make_run(recipe, {})) == count


@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (4, 2, 2)])
@each_family
def test_parameters_are_those_of_the_stages(family, world, tp, pp):
    run = small_run(**FAMILIES[family], **sizes(tp, pp))
    held = ThreadWorld(world).run(lambda comm: sum(p.numel() for p in make_trainer(comm, run).stage.parameters()))
    assert held == [accounting.stage_parameters(run, Layout.from_run(run, world), rank // tp % pp) for rank in range(world)]


@each_family
def test_flops_are_torchs(family):
    run = small_run(**{**FAMILIES[family], "micro_batch_size": 1})
    records = [r for _, r in accounting.stage_records(run, Layout.from_run(run, 1), 0)]
    assert counted_flops(run) == (sum(r.flops_forward for r in records), sum(r.flops_backward for r in records))


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": True, "tp_comm_overlap": True}, {"zero_stage": 1}])
def test_bytes_are_those_communicated(changes):
    check_bytes(small_run(**QWEN3, **sizes(2, 2), **changes), 4)


TP2 = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"recompute_granularity": "selective"}, {"recompute_granularity": "full"},
                                     TP2, {**TP2, "sequence_parallel": True}])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_saved_bytes_are_those_that_autograd_keeps(family, changes):
    run = small_run(**FAMILIES[family], **changes)
    tp = run.parallel.tensor_model_parallel_size
    kept = memory.part_kept_bytes(run, tp, 2, accounting.part_recompute_groups(run, 0))[0]
    outside = sum(r.saved_bytes for place, r in accounting.stage_records(run, Layout.from_run(run, tp), 0) if place != "layer")
    for held in ThreadWorld(tp).run(held_bytes, run):
        assert held == pytest.approx(kept + outside, rel=0.02)


@pytest.mark.parametrize(("stage", "changes"), [
    (0, {}), (3, {}), (3, {"recompute_granularity": "selective"}), (1, {"recompute_granularity": "full"}),
    (0, {"pipeline_schedule": "zb-h1"})])
def test_peak(stage, changes):
    widths = {"ffn_hidden_size": 192, "num_attention_heads": 8, "kv_channels": 16}
    changes = {**QWEN3, **MODEL, **widths, **changes}
    run = small_run(**changes)
    predicted = memory.stage_memory(run, Layout.from_run(run, STAGES), stage, run_schedule.of_run(run, MICROBATCHES).held(stage))
    assert allocated_peak(SoloComm(stage, STAGES), run) == pytest.approx(predicted.activations + predicted.logits, rel=0.05)


def test_flops_of_an_iteration():
    """Of GPT-2's formulas and of a block with other widths: products of 2 FLOPs, backward twice forward."""
    run = make_run("llama-3.2-1b", {"seq_length": 4096})
    layer = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192  # qkv, projection, MLP
    expected = 4096 * (6 * (16 * layer + 128256 * 2048) + 6 * 16 * 2048 * 4096)  # with half of attention's square
    assert accounting.model_flops(run, 1) == pytest.approx(expected, rel=1e-12)
    mistral = make_run("mistral-7b", {})  # 8192 tokens, of which a token sees the last 4096: 3/4 of the triangle
    whole = make_run("mistral-7b", {"window_size": None})
    assert accounting.model_flops(whole, 1) - accounting.model_flops(mistral, 1) == pytest.approx(
        32 * 12 * 4096 * 8192**2 / 8, rel=1e-9)
    products = [work.phases(run, 1, software.load("fugaku_megatron"))["layer_forward"].products for run in (whole, mistral)]
    assert [{p.seen for p in each if p.attention} for each in products] == [{0.5}, {0.375}]


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # tied, and not
def test_resumes_to_the_bit_and_in_another_layout(family, tmp_path):
    run = small_run(**{**FAMILIES[family], "hidden_dropout": 0.1}, **TP2, zero_stage=1, ddp_bucket_size=3000)

    def ranks(world, save=None, load=None, run=run):
        torch.set_num_threads(1)
        trainer = make_trainer(world, run)
        if load:
            trainer.load(load)
        losses = [trainer.train_step().loss for _ in range(2)]
        if save:
            trainer.save(save)
            losses += [trainer.train_step().loss for _ in range(2)]
        trainer.close()
        return losses

    path = str(tmp_path)
    straight = ThreadWorld(4).run(ranks, path)[0][2:]
    assert ThreadWorld(4).run(ranks, None, path)[0] == straight
    other = small_run(**{**FAMILIES[family], "hidden_dropout": 0.1}, pipeline_model_parallel_size=2)
    elsewhere = ThreadWorld(2).run(ranks, None, path, other)[0]
    torch.testing.assert_close(torch.tensor(elsewhere), torch.tensor(straight), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("changes", "message"), [
    ({"window_size": "3,0"}, "--window-size None .this run: 3,0."), ({"swiglu": False}, "--swiglu True"),
    ({"position_embedding_type": "none"}, "--position-embedding-type rope .this run: none.")])
def test_another_block_is_refused(changes, message, tmp_path):
    run = small_run(**FAMILIES["llama"])
    make_trainer(SoloComm(), run).save(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        make_trainer(SoloComm(), small_run(**{**FAMILIES["llama"], **changes})).load(str(tmp_path))


def test_groups_that_ranks_cannot_share_are_refused():
    run = small_run(**{**FAMILIES["llama"], "tensor_model_parallel_size": 4})
    with pytest.raises(ValueError, match="^--num-query-groups 2 is not divisible by --tensor-model-parallel-size 4: change one of"):
        Layout.from_run(run, 4)


def test_the_planner_leaves_groups_whole():
    """14 heads in 2 groups: TP is 1 or 2."""
    found = search.candidates(make_run("qwen2.5-0.5b", {}), System.from_names("a64fx", "fugaku_megatron", 28), frozenset())
    assert {run.parallel.tensor_model_parallel_size for run, _ in (each for each in found if not isinstance(each, str))} == {1, 2}


def test_biases_are_not_decayed():
    """A gated MLP's biases have two dimensions."""
    run = small_run(**{**FAMILIES["llama"], "disable_bias_linear": False, "weight_decay": 0.5})
    flat = make_trainer(SoloComm(), run).optimizer.flat
    decayed = {p.spec.name.split(".")[-1] for p, start in zip(flat.parameters, flat.starts)
               if any(r.decayed and r.start <= start < r.end for r in flat.ranges(0, flat.numel))}
    assert decayed == {"weight"} and any(p.dim() == 2 and p.spec.name.endswith(".bias") for p in flat.parameters)


def test_two_ranks_have_the_gate_of_their_own_values():
    """Initial weights do not depend on the number of ranks, though the gate and what it multiplies are one tensor."""
    run, parts = small_run(**FAMILIES["llama"]), small_run(**FAMILIES["llama"], **TP2)
    name = "decoder.layers.1.mlp.linear_fc1.weight"

    def weight(world, run):
        return next(p for p in make_trainer(world, run).optimizer.flat.parameters if p.spec.name == name).detach().clone()

    whole, halves = weight(SoloComm(), run), ThreadWorld(2).run(weight, parts)
    assert torch.equal(torch.cat(halves, 1), whole) and not torch.isclose(whole[0], whole[1]).any(1).all()
