"""Faults in an iteration: the first Inf or NaN is named, and --rerun-on-spike distinguishes a broken machine from a bad batch."""

from __future__ import annotations

import json
import random
import re
from itertools import repeat
from types import SimpleNamespace

import pytest
import torch

from fugaku_megatron.cli.arguments import parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import Observed
from fugaku_megatron.nn.layers import dropout_stream
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.observe.export.history import History, read_history
from fugaku_megatron.observe.export.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.observe.numbers.fingerprints import Fingerprints
from fugaku_megatron.observe.numbers.nonfinite import find_nonfinite
from fugaku_megatron.observe.numbers.rerun import ENOUGH, WINDOW, Rerun, Spikes
from fugaku_megatron.optim.bits import bit_sum
from fugaku_megatron.run.loop import Session
from fugaku_megatron.training.trainer import Trainer
from tests.helpers import DROPOUT, OVERLAP, lay_out, make_trainer, small_run, train
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

RESULT = {"attention_forward": 1, "attention_backward": 4}  # the argument that a kernel writes


def faulty_ops(
    kernel: str, layer: int, first_sample: int, value: float = float("nan"), times: int = -1
) -> Ops:
    """Return operations with wrong attention in one layer (from 1) and micro-batch, `times` times or always (-1)."""
    left = [times]

    def call(name, function, args, kwargs):
        function(*args, **kwargs)
        if args[-3:-1] == (dropout_stream(layer, "attention"), first_sample) and left[0]:
            left[0] -= 1
            args[RESULT[name]].view(-1)[3] = value

    return Ops.build(kernels=Observed(kernels, (kernel,), call))


def explained(world, run, ops) -> str:
    trainer = make_trainer(world, run, ops)
    result = trainer.train_step()
    assert result.skipped
    before = trainer.progress
    text = find_nonfinite(trainer, 0, result.loss_scale)
    assert trainer.progress == before
    healthy = trainer.train_step()  # the data goes on where it was
    trainer.close()
    assert (
        not healthy.skipped and trainer.progress.consumed_samples == 2 * run.batch.global_batch_size
    )
    return text


@pytest.mark.parametrize(
    ("guilty", "kernel", "layout"),
    [
        (1, "attention_forward", "tp2"),
        (1, "attention_backward", "pp2"),
        (1, "attention_forward", "dp2 zero"),
        (1, "attention_backward", "dp2 overlap"),
        (1, "attention_forward", "pp2 zbv"),
        (7, "attention_backward", "tp2 pp2 dp2 sequence"),
        (1, "attention_forward", "tp2 sequence blocks"),
        (0, "attention_forward", "full"),
        (0, "attention_backward", "selective"),
    ],
    ids=str,
)
def test_rank_layer_operation_and_samples_are_named(guilty, kernel, layout):
    run, ranks = lay_out(layout, {"global_batch_size": 8})
    layer = 2 if "zbv" in layout else 4  # of the last stage
    dp = Layout.from_run(run, ranks).dp
    first = 6 if dp == 2 else 4  # the third micro-batch, or the second one of the second replica
    texts = ThreadWorld(ranks).run(
        lambda world: explained(
            world, run, faulty_ops(kernel, layer, first) if world.rank == guilty else Ops.build()
        )
    )
    assert len(set(texts)) == 1
    way = kernel.removeprefix("attention_")
    assert texts[0].startswith("first produced by rank ") and f"rank {guilty} (node " in texts[0]
    where = f"decoder.layers.{layer - 1}, micro-batch {first // (2 * dp)} (samples {first} to {first + 1})"
    assert f"{way} of attention, {where}: its inputs are finite, its result is not (" in texts[0]


def test_what_turns_queries_and_keys_is_named_by_what_comes_before_it():
    def call(name, function, args, kwargs):
        function(*args, **kwargs)
        args[3].view(-1)[7] = float("nan")

    run = small_run(num_layers=2, position_embedding_type="rope", hidden_dropout=0.1)
    trainer = make_trainer(SoloComm(), run, Ops.build(kernels=Observed(kernels, ("rotary",), call)))
    assert trainer.train_step().skipped
    text = find_nonfinite(trainer, 0, 1.0)
    trainer.close()
    assert (
        "forward of rotary, after linear, decoder.layers.0.self_attention.linear_qkv, micro-batch 0"
        in text
    )


def test_the_first_of_several_in_the_order_of_samples():
    run = small_run(num_layers=2)
    texts = ThreadWorld(2).run(
        lambda world: explained(world, run, faulty_ops("attention_forward", 1, (12, 2)[world.rank]))
    )
    assert "rank 1 (node" in texts[0] and "samples 2 to 3" in texts[0]


def test_torch_operations_are_seen_as_well():
    def overflow(name, function, args, kwargs):
        result = function(*args, **kwargs)
        args[1].mul_(float("inf") if args[5] == 6 else 1)
        return result

    ops = Ops.build("torch", kernels=Observed(kernels, ("dropout",), overflow))
    text = explained(SoloComm(), small_run(num_layers=2, attention_dropout=0.1), ops)
    assert "forward of attention, decoder.layers.0, micro-batch 3 (samples 6 to 7)" in text


def test_a_weight_that_is_not_finite_is_named():
    def broken(world) -> str:
        trainer = make_trainer(world, small_run(num_layers=2))
        if world.rank == 1:
            trainer.stage.layers[1].mlp.linear_fc1.weight.data[5, 3] = float("inf")
        text = find_nonfinite(trainer, 0, 1.0)
        trainer.close()
        return text

    texts = ThreadWorld(2).run(broken)
    assert texts[0] == texts[1] and texts[0].startswith(
        "the weights were not finite before: rank 1 (node "
    )
    assert texts[0].endswith("weight decoder.layers.1.mlp.linear_fc1.weight: 1 of 4,096 elements")


def explained_only(trainer: Trainer) -> str:
    text = find_nonfinite(trainer, 0, 1.0)
    trainer.close()
    return text


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_no_operation_made(ranks):
    texts = ThreadWorld(ranks).run(
        lambda world: explained_only(make_trainer(world, small_run(num_layers=2)))
    )
    assert set(texts) == {
        "it does not occur when the iteration is repeated from the same state: memory or network of a node "
        "may be faulty"
    }


def test_weight_gradients_and_their_sums():
    def overflow(value):
        def call(name, function, args, kwargs):
            function(*args, **kwargs)
            args[1].fill_(value)

        return Ops.build(kernels=Observed(kernels, ("add_position_backward",), call))

    run = small_run(num_layers=2)
    assert set(
        ThreadWorld(2).run(lambda world: explained_only(make_trainer(world, run, overflow(3e38))))
    ) == {"the gradients of every rank are finite, but their sum over the ranks is not"}
    text = explained_only(make_trainer(SoloComm(), run, overflow(float("inf"))))
    assert (
        "the gradient of embedding.position_embeddings.weight, after finite gradients of activations, micro-batch 0"
        in text
    )


def test_one_line_in_the_log_and_in_the_history(tmp_path, capsys):
    run = small_run(num_layers=2, train_iters=3)
    trainer = make_trainer(SoloComm(), run, faulty_ops("attention_forward", 1, 20))
    writer = MetricsWriter(
        3, 1, LogOutputs(writers=[History(tmp_path / "history.jsonl")], live="off")
    )
    Session(trainer, writer, 3, (), signals=SimpleNamespace(stop_requested=False)).run()
    trainer.close()
    writer.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "Inf or NaN" in line]
    assert len(lines) == 1 and lines[0].startswith(
        "Inf or NaN in the gradients of iteration 2: first produced by rank 0 (node "
    )
    events = [
        record for record in read_history(tmp_path / "history.jsonl") if record["kind"] == "event"
    ]
    assert events == [{"kind": "event", "iteration": 2, "text": lines[0]}] and json.dumps(events)


def told(losses, deviations=6.0) -> list[int]:
    spikes = Spikes(deviations)
    return [index for index, loss in enumerate(losses) if spikes.find(loss)]


def noisy(count: int, level: float = 3.0, noise: float = 0.05) -> list[float]:
    draw = random.Random(1)
    return [level + draw.gauss(0, noise) for _ in range(count)]


def test_noise_and_a_falling_loss_are_no_spikes():
    assert told(noisy(2000)) == []
    assert told([11.0 * 0.999**i + n - 3 for i, n in enumerate(noisy(2000))]) == []
    assert (
        told([3.0 + 0.02 * (i % 2) for i in range(100)]) == []
        and told([3.0] * 50 + [3.02] * 5) == []
    )


def test_a_spike_is_told_once_and_a_new_level_too():
    assert told([*noisy(60), 4.0, *noisy(60)]) == [60]
    assert told([*noisy(60), 4.0, 4.1, 4.2, *noisy(10), 4.0]) == [60, 73]
    assert told([*noisy(60), *noisy(WINDOW, 5.0)]) == [60]
    assert (
        told([*repeat(3.0, ENOUGH), 3.04]) == [ENOUGH]
        and told([*repeat(3.0, ENOUGH - 1), 9.0]) == []
    )


def test_a_loss_that_is_not_finite_is_told_from_the_first_iteration_on():
    assert told([float("nan"), *noisy(30), float("inf"), float("nan"), 3.0, float("nan")]) == [
        0,
        31,
        34,
    ]


def test_every_bit_counts():
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        x = torch.randn(7, 9).to(dtype)
        for part in (x, x[:, :4], x.view(-1)[:60], x.view(-1)[1:]):
            before = bit_sum(part)
            x.view(bits)[0, 2] ^= 1
            assert bit_sum(part) != before


def healthy_losses(ranks: int, run) -> list[float]:
    return [step.loss for step in ThreadWorld(ranks).run(train, run, 3)[0]]


def lines(world, run, ops: Ops, iterations: int = 3) -> tuple[list[tuple[int, str]], list[float]]:
    """Train some iterations; return the reruns' lines and the losses."""
    trainer = make_trainer(world, run, ops)
    said = []
    trainer.before_update = Rerun(
        trainer, Fingerprints(trainer), lambda iteration, text: said.append((iteration, text))
    ).before_update
    losses = [trainer.train_step().loss for _ in range(iterations)]
    trainer.close()
    return said, losses


@pytest.mark.parametrize(
    ("guilty", "kernel", "layout"),
    [
        (0, "attention_forward", "tp1"),
        (1, "attention_backward", "dp2 overlap"),
        (1, "attention_forward", "pp2"),
        (1, "attention_backward", "pp2 zbv"),
        (3, "attention_backward", "tp2 pp2"),
    ],
    ids=str,
)
def test_a_broken_machine_is_named_and_the_repetition_used(guilty, kernel, layout):
    run, ranks = lay_out(layout, DROPOUT)
    first = 16 + (6 if "overlap" in layout else 4)
    layer = 2 if "zbv" in layout else 4
    healthy = healthy_losses(ranks, run)
    assert ThreadWorld(ranks).run(lambda world: lines(world, run, Ops.build())) == [
        ([], healthy) for _ in range(ranks)
    ], "looking changes no bit"

    def rank(world):
        return lines(world, run, faulty_ops(kernel, layer, first, times=int(world.rank == guilty)))

    for said, losses in ThreadWorld(ranks).run(rank):
        ((iteration, text),) = said
        assert (
            iteration == 2
            and "has other bits: the cause is a machine, not the batch. The first difference is in "
            in text
        )
        assert f"micro-batch from sample {first}" in text
        assert (f"on rank {guilty} (node " in text) or (
            layout == "tp2 pp2" and "on ranks 2 to 3, which share" in text
        ), text
        assert losses == healthy, "as if nothing had been"


def test_a_bad_batch_is_named_by_its_samples():
    run = small_run(
        **DROPOUT, **OVERLAP, skip_samples=("3:5",)
    )  # the second iteration takes samples 18 to 33
    ops = faulty_ops("attention_forward", 1, 22, float("inf"))
    for said, _ in ThreadWorld(2).run(lambda world: lines(world, run, ops)):
        ((iteration, text),) = said
        assert iteration == 2
        assert (
            "it has the same bits, when other ranks compute the samples as well: the cause is the "
            "batch, not a machine. "
            "--skip-samples 18:34 leaves it out" in text
        )


@pytest.mark.parametrize(
    ("ranks", "guilty", "kernel", "named"),
    [
        (2, 1, "attention_forward", r"on rank 1 \(node .*\) or rank 0 \(node "),
        (2, 1, "attention_backward", r"on rank 1 \(node .*\) or rank 0 \(node "),
        (4, 3, "attention_forward", r"on rank 3 \(node .*, core \d+\)\. The run uses"),
        (4, 1, "attention_backward", r"on rank 1 \(node .*, core \d+\)\. The run uses"),
    ],
)
def test_a_core_that_repeats_its_mistake_is_no_bad_batch(ranks, guilty, kernel, named):
    """Repeat with the same bits, and with other bits if another rank computes the samples."""
    run = small_run(**DROPOUT, **OVERLAP, num_layers=1)
    healthy = healthy_losses(ranks, run)

    def rank(world):
        faulty = faulty_ops(kernel, 1, 16 + 2 * guilty)
        return lines(world, run, faulty if world.rank == guilty else Ops.build())

    for said, losses in ThreadWorld(ranks).run(rank):
        ((iteration, text),) = said
        assert iteration == 2 and "is a core that repeats its mistake, not the batch" in text
        assert re.search(named, text), text
        assert losses == pytest.approx(healthy, abs=1e-6), "the other ranks' results are used"


def test_experts_of_all_ranks_are_not_computed_elsewhere():
    experts = {"num_experts": 2, "disable_bias_linear": True, "expert_model_parallel_size": 2}
    run = small_run(**DROPOUT, **experts, num_layers=1)
    ops = faulty_ops("attention_forward", 1, 18, float("inf"))
    for said, _ in ThreadWorld(2).run(lambda world: lines(world, run, ops)):
        assert (
            "the batch, or a core that repeats its mistake (all data-parallel ranks have different experts)"
            in said[0][1]
        )


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        (
            (30, 31),
            "the batch, or a core that repeats its mistake (data-parallel size 1 has no other rank "
            "that could compute it). "
            "--skip-samples 60:62 leaves",
        ),
        ((30,), "a machine, not the batch. The first difference is in the output of the head"),
    ],
    ids=["batch", "machine"],
)
def test_a_spike_of_the_loss(calls, verdict):
    seen = []

    def call(name, function, args, kwargs):
        seen.append(name)
        loss = function(*args, **kwargs)
        return loss + loss.detach() * (0.5 * (len(seen) - 1 in calls))

    run = small_run(num_layers=1, global_batch_size=2)
    (said,), _ = lines(SoloComm(), run, Observed(Ops.build(), ("head_loss",), call), 35)
    assert (
        said[0] == 31
        and said[1].startswith("iteration 31: the loss ")
        and "of the last 30. Repeated from" in said[1]
    )
    assert verdict in said[1] and len(seen) == 36


def test_a_falling_loss_scale_is_no_spike():
    run = small_run(num_layers=2, fp16=True, initial_loss_scale=2.0**40, hysteresis=1)
    said, _ = lines(SoloComm(), run, Ops.build(), 4)
    assert said == []


def test_flags():
    numbers = parse(
        "--recipe demo --check-for-spiky-loss --loss-spike-deviations 4".split()
    ).run.numbers
    assert numbers.rerun_on_spike and numbers.loss_spike_deviations == 4.0
    assert parse("--recipe demo --loss-spike-deviations 4".split()).notes == (
        "--loss-spike-deviations has no effect without --rerun-on-spike",
    )
