"""Work in other orders than 1F1B's: forwards and backwards of micro-batches, and weight gradients after input gradients."""

import contextlib
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch

from fugaku_megatron.host.observed import Observed
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.ops import FAMILIES, Ops, backward
from fugaku_megatron.pipeline import schedule
from fugaku_megatron.pipeline.instructions import (
    BACKWARD,
    FORWARD,
    RECEIVES,
    RECV_FORWARD,
    SENDS,
    Instruction,
)
from fugaku_megatron.pipeline.schedule_names import ZERO_BUBBLE_RECEIVES
from tests.checks.instruction_lists import custom, shuffled
from tests.helpers import (
    PP2,
    TP2,
    TP2PP2,
    flat_gradients,
    grid_groups,
    make_trainer,
    small_run,
    train,
    whole_tensors,
)
from tests.threads import ThreadWorld

PP4, TP2PP2DP2 = (4, {"pipeline_model_parallel_size": 4}), (8, {**TP2PP2, "zero_stage": 1})
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}


def ahead(lists: schedule.Schedule, stage: int, extra: int = 2) -> list[Instruction]:
    """1F1B whose forwards run `extra` micro-batches further ahead."""
    microbatches = lists.microbatches
    fill = min(lists.placement.stages - stage - 1 + extra, microbatches)
    order = [Instruction(FORWARD, m) for m in range(fill)]
    for m in range(microbatches):
        if fill + m < microbatches:
            order.append(Instruction(FORWARD, fill + m))
        order.append(Instruction(BACKWARD, m))
    return schedule.with_messages(lists.placement, stage, order)


def micro_batch_losses(world, run, make) -> list[list[torch.Tensor]]:
    """The losses of every micro-batch of two iterations whose weights do not change, in data order."""
    trainer, losses = make_trainer(world, run, make_schedule=custom(make)), []
    mean = trainer._mean_loss
    trainer._mean_loss = lambda values: (
        losses.append(torch.stack(values) if values else torch.zeros(0)),
        mean(values),
    )[1]
    for _ in range(2):
        trainer.train_step()
    trainer.close()
    return losses


@pytest.mark.parametrize(
    ("ranks", "layout", "make"),
    [(1, {}, shuffled), (2, PP2, ahead), (*PP4, partial(ahead, extra=5)), (*TP2PP2DP2, shuffled)],
)
def test_every_micro_batch_has_the_same_loss_to_the_bit(ranks, layout, make):
    """Dropout is on, so masks are the same, too. The learning rate is too small to move a weight: the order of the sums of
    gradients changes their last bits, which must neither hide nor feign a difference."""
    run = small_run(**DROPOUT, **layout, lr=1e-30, weight_decay=0.0)
    expected = ThreadWorld(ranks).run(
        lambda world: micro_batch_losses(world, run, schedule.one_f_one_b)
    )
    losses = ThreadWorld(ranks).run(lambda world: micro_batch_losses(world, run, make))
    assert any(len(part) for rank in expected for part in rank)
    for ours, theirs in zip(losses, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_forwards_that_run_ahead_train_to_the_same_bits():
    """Every gradient is still summed in data order: a stage's own by its backwards, the head's by the last stage's forwards."""
    run = small_run(**DROPOUT, **TP2PP2DP2[1])
    curves = [
        ThreadWorld(8).run(
            lambda world, m=make: [r.loss for r in train(world, run, 3, make_schedule=custom(m))]
        )[0]
        for make in (schedule.one_f_one_b, ahead)
    ]
    assert curves[0] == curves[1]


@pytest.mark.parametrize(("ranks", "layout"), [PP4, (8, TP2PP2)])
def test_a_shuffled_order_has_the_same_gradients_but_for_rounding(ranks, layout):
    def gradients(world, make):
        trainer = make_trainer(world, small_run(**DROPOUT, **layout), make_schedule=custom(make))
        trainer.train_step()
        trainer.close()
        return whole_tensors(trainer, "grad")

    expected, ours = (
        ThreadWorld(ranks).run(lambda world, m=make: gradients(world, m))[0]
        for make in (schedule.one_f_one_b, shuffled)
    )
    for key, gradient in expected.items():
        torch.testing.assert_close(
            ours[key], gradient, rtol=0, atol=1e-6 * gradient.abs().max().item()
        )


# Messages ------------------------------------------------------------------------------------------------------------------------


class MessageOrder:
    """The micro-batches that a rank sends and receives on each channel, (sender, receiver, tag).

    received: number of the irecv -> micro-batch of the instruction that takes its tensor
    ahead: receives of a channel that are posted when one of its instructions begins
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.microbatch = 0
        self.sent = defaultdict(list)
        self.posted = defaultdict(list)
        self.received = defaultdict(dict)
        self.ahead = set()

    def message(self, verb, call, args, kwargs):
        tensor, other, tag = args
        if verb == "isend":
            self.sent[self.rank, other, tag].append(self.microbatch)
        else:
            self.posted[other, self.rank, tag].append(tensor)
        return call(*args, **kwargs)

    def watch(self, executor):
        def receive(op, call, args, kwargs):
            (instruction,) = args
            other, tag = executor.placement.peer(self.rank, instruction)
            posted = self.posted[other, self.rank, tag]
            received = self.received[other, self.rank, tag]
            self.ahead.add(len(posted) - len(received))
            call(*args, **kwargs)
            held = executor.inputs if op == RECV_FORWARD else executor.gradients
            tensor = held[instruction.model_chunk, instruction.microbatch]
            number = [each is tensor for each in posted].index(True)
            received[number] = instruction.microbatch

        def send(op, call, args, kwargs):
            self.microbatch = args[0].microbatch
            call(*args, **kwargs)

        return Observed(Observed(executor, RECEIVES, receive), SENDS, send)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {**PP2, "pipeline_schedule": "zb-h1"}),
        (2, {**PP2, "pipeline_schedule": "zb-h1", "num_virtual_stages_per_pipeline_rank": 2}),
        (4, {**PP4[1], "pipeline_schedule": "zb-h1", "zero_bubble_max_pending_backward": 6}),
        (2, {**PP2, "pipeline_schedule": "zbv"}),
    ],
)
def test_messages_arrive_in_the_order_of_their_receives(ranks, layout):
    """Zero-bubble schedules post two receives of a channel ahead: message n must be the micro-batch of receive n."""
    run = small_run(**layout, global_batch_size=8)

    def step(world):
        groups = grid_groups(world, run)
        order = MessageOrder(groups.pp.rank)
        groups = replace(groups, pp=Observed(groups.pp, ("isend", "irecv"), order.message))
        with contextlib.closing(
            make_trainer(world, run, groups=groups, watch=order.watch)
        ) as trainer:
            trainer.train_step()
        return order

    orders = ThreadWorld(ranks).run(step)
    sent, received = {}, {}
    for order in orders:
        sent |= {channel: dict(enumerate(numbers)) for channel, numbers in order.sent.items()}
        received |= order.received
        assert max(order.ahead) == ZERO_BUBBLE_RECEIVES
    assert sent == received and len(sent) >= 2 * (ranks - 1)
    assert {len(numbers) for numbers in sent.values()} == {4}


# Backward in two halves ---------------------------------------------------------------------------------------------------------


def late_gradients(world, run, backend, split: bool) -> torch.Tensor:
    """The flat gradients of three micro-batches, whose weight gradients are computed one micro-batch late where split."""
    trainer = make_trainer(
        world, run, Ops.build(backend, keep_packed_weights=run.system.cache_packed_weights)
    )
    chunk, late = trainer.stage.chunks[0], None
    trainer.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(5)
    for sample in range(0, 6, 2):
        tokens, labels = torch.randint(
            0, run.model.vocab_size, (2, run.model.seq_length, 2), generator=generator
        )
        loss = (
            chunk(
                tokens,
                labels,
                Pass(first_sample=sample, recompute=run.training.recompute_granularity),
                0.25,
            )
            * 0.25
        )
        if not split:
            backward(loss, None)
            continue
        weights = [p for p in chunk.layers[0].parameters() if p.dim() == 2]
        starts = [p.main_grad.clone() for p in weights]
        with trainer.ops.weight_gradients.put_off() as waiting:
            backward(loss, None)
        assert all(
            torch.equal(now.main_grad, then) for now, then in zip(weights, starts, strict=True)
        ), "they wait"
        if late is not None:
            late.run()
        late = waiting
    if late is not None:
        late.run()
    trainer.close()
    return flat_gradients(trainer)


TORCH_GEMM, NATIVE_GEMM = {"gemm": "torch"}, dict.fromkeys(FAMILIES, "torch") | {"gemm": "native"}


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("native", {"bf16": True}),
        ("torch", {}),
        (TORCH_GEMM, {"disable_bias_linear": True}),
        (NATIVE_GEMM, {}),
        (TORCH_GEMM, TP2),
        ("native", {**TP2, "sequence_parallel": True}),
        ("torch", {"recompute_granularity": "full"}),
        (NATIVE_GEMM, {"recompute_granularity": "selective"}),
        ("native", {"cache_packed_weights": True, "disable_bias_linear": True}),
    ],
    ids=str,
)
def test_split_and_whole_backward_have_the_same_bits(backend, changes):
    run = small_run(**DROPOUT, **changes)
    whole, split = (
        ThreadWorld(run.parallel.tensor_model_parallel_size).run(
            late_gradients, run, backend, halves
        )
        for halves in (False, True)
    )
    for ours, theirs in zip(split, whole, strict=True):
        assert ours.abs().max() > 0 and torch.equal(ours, theirs)
