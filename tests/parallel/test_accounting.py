"""The formulas against what the model really has, computes and sends, and against rows of the benchmark tables."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout, check_split, check_world_size
from fugaku_megatron.costs import accounting, buckets
from fugaku_megatron.costs.accounting import Collective
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.nn.passes import Pass
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, make_trainer, mock, small_run
from tests.recording import record
from tests.threads import ThreadWorld

LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (8, 2, 2), (4, 1, 1)]  # world, tp, pp


def sizes(tp: int, pp: int) -> dict[str, int]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}


@pytest.mark.parametrize(("world", "tp", "pp"), LAYOUTS)
def test_parameters_are_those_of_the_stages(world, tp, pp):
    run = small_run(**sizes(tp, pp))
    held = ThreadWorld(world).run(lambda comm: sum(p.numel() for p in make_trainer(comm, run).stage.parameters()))
    layout = Layout.from_run(run, world)
    assert held == [accounting.stage_parameters(run, layout, rank // tp % pp) for rank in range(world)]


def test_parameters_of_published_models():
    assert accounting.parameters(make_run("124m", {"make_vocab_size_divisible_by": 1})) == 124_439_808  # GPT-2's own count
    assert accounting.parameters(make_run("30b", {})) == pytest.approx(30e9, rel=0.01)


def addmm_flops(out, a, b, **_) -> int:
    return 2 * a[0] * a[1] * b[1]


def counted_flops(run) -> tuple[int, int]:
    """What torch counts in a forward and in a backward of one micro-batch of one sample."""
    trainer = make_trainer(SoloComm(), run, Ops.build("torch"))  # torch counts the FLOPs of its own kernels only
    tokens = torch.zeros(16, 1, dtype=torch.int64)
    # torch knows addmm, not its in-place form, by which weight gradients are accumulated
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops})
    with counter, sdpa_kernel(SDPBackend.MATH):  # torch counts no FLOPs in its flash kernel for CPUs
        loss = trainer.stage.chunks[0](tokens, tokens, Pass(first_sample=0))
    forward = counter.get_total_flops()
    with counter:
        loss.backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flops_are_torchs(dropout):
    run = small_run(num_layers=2, attention_dropout=dropout, micro_batch_size=1)
    records = [r for _, r in accounting.stage_records(run, Layout.from_run(run, 1), 0)]
    assert counted_flops(run) == (sum(r.flops_forward for r in records), sum(r.flops_backward for r in records))


def by_blocks(run, place: str, collectives: tuple[Collective, ...]) -> list[Collective]:
    """The messages that take the place of a layer's collectives with --tp-comm-overlap: the bytes that reach other ranks."""
    if place != "layer" or not run.parallel.tp_comm_overlap:
        return list(collectives)
    tp = run.parallel.tensor_model_parallel_size
    bytes = {"all_gather": lambda c: (tp - 1) * c.bytes, "reduce_scatter": lambda c: c.bytes // tp * (tp - 1)}
    return [Collective(verb, "tp", bytes[c.verb](c)) for c in collectives for verb in ("send", "recv")]


def expected_traffic(run, layout, stage: int) -> dict[tuple[str, str], int]:
    """Bytes per (verb, group) of one iteration, without the few bytes of norms and losses."""
    expected: dict[tuple[str, str], int] = {}
    microbatches = layout.microbatches(run, layout.global_batch_size(run))
    records = list(accounting.stage_records(run, layout, stage))
    per_microbatch = [c for place, r in records for c in by_blocks(run, place, (*r.forward, *r.backward))]
    if run.training.recompute_granularity == "full":  # groups of one layer
        again = [c for r in accounting.recomputed_records(run, layout.tp, last=True) for c in by_blocks(run, "layer", r.forward)]
        per_microbatch += again * sum(map(len, accounting.stage_layers(run, stage)))
    for c in per_microbatch * microbatches + buckets.gradient_collectives(run, layout, stage):
        expected[c.verb, c.group] = expected.get((c.verb, c.group), 0) + c.bytes
    sends = (stage > 0) + (stage < layout.pp - 1)
    if sends:
        expected["send", "pp"] = expected["recv", "pp"] = sends * microbatches * accounting.residual_bytes(run, layout.tp)
    return expected


def check_bytes(run, world: int) -> None:
    """What every rank communicates in an iteration is what accounting says."""
    layout = Layout.from_run(run, world)

    def traffic(comm):
        torch.set_num_threads(1)
        groups = record(grid_groups(comm, run))
        trainer = Trainer(run, comm, groups, mock(run))
        trainer.train_step()
        trainer.close()
        return groups.tp.tally()

    small = 64  # bytes: norms, counts and losses
    for rank, tally in enumerate(ThreadWorld(world).run(traffic)):
        measured = {(verb, group): bytes for (group, verb), (calls, bytes) in tally.items()}
        for key, bytes in expected_traffic(run, layout, rank // layout.tp % layout.pp).items():
            assert bytes <= measured[key] <= bytes + small, (rank, key, bytes, measured[key])


BUCKETS = {"zero_stage": 1, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000,
           "grad_reduce_in_bf16": True}


@pytest.mark.parametrize("changes", [{}, {"zero_stage": 1}, {"recompute_granularity": "full"}, BUCKETS],
                         ids=["plain", "zero", "full", "buckets"])
@pytest.mark.parametrize(("world", "tp", "pp"), LAYOUTS)
def test_bytes_are_those_communicated(world, tp, pp, changes):
    check_bytes(small_run(**changes, **sizes(tp, pp)), world)


@pytest.mark.parametrize("changes", [{}, {"zero_stage": 1, "bf16": True}, {"recompute_granularity": "full"},
                                     {"zero_stage": 1, "overlap_grad_reduce": True, "ddp_bucket_size": 5000}])
@pytest.mark.parametrize(("world", "tp", "pp"), [layout for layout in LAYOUTS if layout[1] > 1])
def test_bytes_with_sequence_parallelism(world, tp, pp, changes):
    check_bytes(small_run(**changes, **sizes(tp, pp), sequence_parallel=True), world)
    check_bytes(small_run(**changes, **sizes(tp, pp), sequence_parallel=True, tp_comm_overlap=True), world)


@pytest.mark.parametrize(("world", "sizes"), [(10, "start 8 or 16 ranks"), (17, "start 16 or 24 ranks"), (3, "start 8 ranks")])
def test_an_indivisible_world_names_flags_and_remedy(world, sizes):
    with pytest.raises(ValueError) as error:
        check_world_size(world, 2, 4)
    for part in (f"world size {world} ", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 4", sizes):
        assert part in str(error.value)


@pytest.mark.parametrize(("tp", "pp", "flag"), [
    (0, 1, "--tensor-model-parallel-size is 0"), (1, -1, "--pipeline-model-parallel-size is -1")])
def test_sizes_below_one_are_named(tp, pp, flag):
    with pytest.raises(ValueError, match=flag):
        check_world_size(4, tp, pp)


@pytest.mark.parametrize(("recipe", "changes", "seconds", "ranks", "tflops"), [
    ("124m", {"recompute_granularity": "full"}, 1020.3, 1, 1.092),
    ("124m", {}, 1489.7, 1, 0.561),
    ("30b", {"recompute_granularity": "full", **sizes(4, 48)}, 3534.9, 192, 1.16),
])
def test_hardware_flops_reproduce_the_tables(recipe, changes, seconds, ranks, tflops):
    run = make_run(recipe, changes)
    assert accounting.hardware_flops(run, run.batch.global_batch_size) / seconds / ranks / 1e12 == pytest.approx(tflops, rel=1e-3)


def test_parameter_flops_reproduce_the_tables():
    # The A100 table's 187B row: h 13824, 80 layers, 40 nodes of 8, 160.29 s, printed 120.05
    run = make_run(None, {"num_layers": 80, "hidden_size": 13824, "num_attention_heads": 108, "seq_length": 2048,
                          "vocab_size": 50257, "micro_batch_size": 1, "global_batch_size": 2048,
                          "recompute_granularity": "full", "train_iters": 1})
    assert accounting.parameter_flops(run, 2048) / 160.29 / 320 / 1e12 == pytest.approx(120.02, abs=0.005)
    split = make_run(None, {**asdict(run.model), **asdict(run.batch), **sizes(8, 10), "recompute_granularity": "full"})
    assert accounting.parameter_flops(split, 2048, replicas=True) / 160.29 / 320 / 1e12 == pytest.approx(120.05, abs=0.008)


def test_model_flops_against_hardware_flops():
    run = make_run("30b", {"recompute_granularity": "full"})
    assert accounting.model_flops(run, 1536) / accounting.hardware_flops(run, 1536) == pytest.approx(0.735, abs=1e-3)


@pytest.mark.parametrize(("recipe", "pp", "changes", "layers"), [
    ("124m", 2, {}, [8, 4]),  # the logits weigh as much as four and a half layers
    ("124m", 2, {"pipeline_split": "even"}, [6, 6]),
    ("124m", 2, {"pipeline_split": "8,4"}, [8, 4]),
    ("124m", 4, {}, [3, 4, 4, 1]),
    ("124m", 5, {}, [2, 3, 3, 3, 1]),  # no even split
    ("30b", 48, {}, [1] * 48),
])
def test_stages_cost_alike(recipe, pp, changes, layers):
    run = make_run(recipe, {"pipeline_model_parallel_size": pp, "vocab_size": 50257, **changes})
    check_split(run)
    assert list(accounting.pipeline_split(run)) == layers
    assert accounting.stage_layers(run, pp - 1) == [range(sum(layers[:-1]), sum(layers))]
    assert accounting.parameters(run) == accounting.parameters(make_run(recipe, {"vocab_size": 50257}))


@pytest.mark.parametrize(("pp", "split", "message"), [
    (5, "even", "--num-layers 12 is not divisible by --pipeline-model-parallel-size 5"),
    (13, "balanced", "--num-layers 12 is below --pipeline-model-parallel-size 13"),
    (2, "9,4", "--pipeline-split 9,4 has 2 stages and 13 layers, .* pass 2 numbers that sum to 12"),
    (2, "4,4,4", "has 3 stages and 12 layers"),
])
def test_layers_that_cannot_be_cut(pp, split, message):
    with pytest.raises(ValueError, match=message):
        Layout.from_run(make_run("124m", {"pipeline_model_parallel_size": pp, "pipeline_split": split}), 2 * pp)


def test_a_sequence_that_cannot_be_cut():
    changes = {"seq_length": 1022, "tensor_model_parallel_size": 4}
    Layout.from_run(make_run("124m", changes), 4)
    with pytest.raises(ValueError, match="^--seq-length 1022 is not divisible by --tensor-model-parallel-size 4, into which "
                                         "--sequence-parallel cuts it: change one, or leave the flag out$"):
        Layout.from_run(make_run("124m", {**changes, "sequence_parallel": True}), 4)


@pytest.mark.parametrize(("global_batch", "ramp", "message"), [
    (7, None, "^--global-batch-size 7 is not divisible by --micro-batch-size 2 x data-parallel size 2 = 4: use 4 or 8$"),
    (16, (2, 2, 100), "^--rampup-batch-size 2 2 100: its batch size 2 is not divisible by .* = 4: pass .* multiples of 4$"),
    (16, (4, 6, 100), "^--rampup-batch-size 4 6 100: its batch size 10 is not divisible"),
])
def test_a_batch_that_does_not_divide_names_the_flag_it_comes_from(global_batch, ramp, message):
    run = make_run("124m", {"micro_batch_size": 2, "global_batch_size": global_batch, "rampup_batch_size": ramp})
    with pytest.raises(ValueError, match=message):
        Layout.from_run(run, 2)
