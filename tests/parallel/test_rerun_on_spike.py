"""--rerun-on-spike tells a broken machine from a bad batch."""

from __future__ import annotations

import random

import pytest
import torch

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.arguments import parse
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import Observed
from fugaku_megatron.nn.layers import dropout_stream
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.training.rerun import ENOUGH, WINDOW, Rerun, Spikes, bit_sum
from tests.helpers import make_trainer, small_run, train
from tests.threads import ThreadWorld

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
DROPOUT = {"num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}


# The rule ---------------------------------------------------------------------------------------------------------------------

def told(losses, deviations=6.0) -> list[int]:
    spikes = Spikes(deviations)
    return [index for index, loss in enumerate(losses) if spikes.find(loss)]


def noisy(count: int, level: float = 3.0, noise: float = 0.05) -> list[float]:
    draw = random.Random(1)
    return [level + draw.gauss(0, noise) for _ in range(count)]


def test_noise_and_a_falling_loss_are_no_spikes():
    assert told(noisy(2000)) == []
    assert told([11.0 * 0.999**i + n - 3 for i, n in enumerate(noisy(2000))]) == []
    assert told([3.0 + 0.02 * (i % 2) for i in range(100)]) == [] and told([3.0] * 50 + [3.02] * 5) == []


def test_a_spike_is_told_once_and_a_new_level_too():
    assert told([*noisy(60), 4.0, *noisy(60)]) == [60]
    assert told([*noisy(60), 4.0, 4.1, 4.2, *noisy(10), 4.0]) == [60, 73]
    assert told([*noisy(60), *noisy(WINDOW, 5.0)]) == [60]
    assert told([3.0] * ENOUGH + [3.04]) == [ENOUGH] and told([3.0] * (ENOUGH - 1) + [9.0]) == []


def test_a_loss_that_is_not_finite_is_told_from_the_first_iteration_on():
    assert told([float("nan"), *noisy(30), float("inf"), float("nan"), 3.0, float("nan")]) == [0, 31, 34]


def test_every_bit_counts():
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        x = torch.randn(7, 9).to(dtype)
        for part in (x, x[:, :4], x.view(-1)[:60], x.view(-1)[1:]):
            before = bit_sum(part)
            x.view(bits)[0, 2] ^= 1
            assert bit_sum(part) != before


# The repetition ---------------------------------------------------------------------------------------------------------------

def faulty(kernel: str, layer: int, first_sample: int, times: int, value: float) -> Ops:
    """Attention of one layer goes wrong in the micro-batch that begins at a sample, so many times."""
    left = [times]

    def call(name, function, args, kwargs):
        function(*args, **kwargs)
        if args[-3:-1] == (dropout_stream(layer, "attention"), first_sample) and left[0]:
            left[0] -= 1
            args[{"attention_forward": 1, "attention_backward": 4}[name]].view(-1)[3] = value

    return Ops.build(kernels=Observed(kernels, (kernel,), call))


def lines(world, run, ops: Ops, iterations: int = 3) -> tuple[list[tuple[int, str]], list[float]]:
    """What is said in some iterations, and their losses."""
    torch.set_num_threads(1)
    trainer, said = make_trainer(world, run, ops), []
    trainer.before_update = Rerun(trainer, lambda iteration, text: said.append((iteration, text))).before_update
    losses = [trainer.train_step().loss for _ in range(iterations)]
    trainer.close()
    return said, losses


LAYOUTS = {"one": (1, {}, 0), "dp2": (2, {"zero_stage": 1, "overlap_grad_reduce": True, "ddp_bucket_size": 1}, 1),
           "pp2": (2, {PP: 2}, 1), "zbv": (2, {PP: 2, "pipeline_schedule": "zbv"}, 1), "tp2-pp2": (4, {TP: 2, PP: 2}, 3)}


@pytest.mark.parametrize("kernel", ["attention_forward", "attention_backward"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_broken_machine_is_named_and_the_repetition_used(name, kernel):
    ranks, layout, guilty = LAYOUTS[name]
    run, first = small_run(**DROPOUT, **layout), 16 + (6 if name == "dp2" else 4)
    layer = 2 if name == "zbv" else 4

    def rank(world):
        return lines(world, run, faulty(kernel, layer, first, int(world.rank == guilty), float("nan")))

    for said, losses in ThreadWorld(ranks).run(rank):
        (iteration, text), = said
        assert iteration == 2 and "has other bits: a broken machine, not the batch. First different is " in text
        early = kernel.endswith("forward") or layout.get(PP, 1) > 1  # seen before the weight gradients
        assert (f"of the micro-batch that begins with sample {first}" in text) == early
        assert (f"on rank {guilty} (node " in text) or (name == "tp2-pp2" and "on ranks 2 to 3, which share" in text), text
        assert losses == HEALTHY[name], "as if nothing had been"


HEALTHY = {}


@pytest.fixture(autouse=True, scope="module")
def healthy_losses():
    for name, (ranks, layout, _) in LAYOUTS.items():
        results = ThreadWorld(ranks).run(lambda world, layout=layout: lines(world, small_run(**DROPOUT, **layout), Ops.build()))
        assert all(said == [] for said, _ in results)
        HEALTHY[name] = results[0][1]
        run = small_run(**DROPOUT, **layout)
        plain = ThreadWorld(ranks).run(lambda world, run=run: [step.loss for step in train(world, run, 3)])
        assert plain[0] == HEALTHY[name], "looking changes no bit"


@pytest.mark.parametrize("name", ["one", "dp2"])
def test_a_bad_batch_is_named_by_its_samples(name):
    ranks, layout, _ = LAYOUTS[name]
    run = small_run(**DROPOUT, **layout, skip_samples=("3:5",))  # the second iteration takes samples 18 to 33
    for said, _ in ThreadWorld(ranks).run(lambda world: lines(world, run, faulty("attention_forward", 1, 22, 99, float("inf")))):
        (iteration, text), = said
        assert iteration == 2 and "it has the same bits: the batch, not the machine. --skip-samples 18:34 leaves it out" in text


@pytest.mark.parametrize(("calls", "verdict"), [
    ((30, 31), "the batch, not the machine. --skip-samples 60:62 leaves"),
    ((30,), "a broken machine, not the batch. First different is the output of part 0")], ids=["batch", "machine"])
def test_a_spike_of_the_loss(calls, verdict):
    seen = []

    def call(name, function, args, kwargs):
        seen.append(name)
        loss = function(*args, **kwargs)
        return loss + loss.detach() * (0.5 * (len(seen) - 1 in calls))

    run = small_run(num_layers=1, global_batch_size=2)
    (said,), _ = lines(SoloComm(), run, Observed(Ops.build(), ("head_loss",), call), 35)
    assert said[0] == 31 and said[1].startswith("iteration 31: the loss ") and "of the last 30. Repeated from" in said[1]
    assert verdict in said[1] and len(seen) == 36


def test_a_falling_loss_scale_is_no_spike():
    run = small_run(num_layers=2, fp16=True, initial_loss_scale=2.0**40, hysteresis=1)
    said, _ = lines(SoloComm(), run, Ops.build(), 4)
    assert said == []


def test_flags():
    numbers = parse(["--recipe", "demo", "--check-for-spiky-loss", "--loss-spike-deviations", "4"]).run.numbers
    assert numbers.rerun_on_spike and numbers.loss_spike_deviations == 4.0
    with pytest.raises(ValueError, match="^--loss-spike-deviations is 0.0: pass a number above 0$"):
        parse(["--recipe", "demo", "--loss-spike-deviations", "0"])
    assert parse(["--recipe", "demo", "--loss-spike-deviations", "4"]).notes == ("--loss-spike-deviations has no effect without "
                                                                                "--rerun-on-spike",)
