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
from fugaku_megatron.pipeline.instruction_lists import one_f_one_b, with_messages
from fugaku_megatron.pipeline.instructions import (
    BACKWARD,
    FORWARD,
    RECEIVES,
    RECV_FORWARD,
    SENDS,
    Instruction,
)
from fugaku_megatron.pipeline.schedule import Schedule
from fugaku_megatron.pipeline.schedule_names import ZERO_BUBBLE_RECEIVES
from tests.checks.instruction_lists import custom, shuffled
from tests.helpers import (
    assert_near,
    flat_gradients,
    grid_groups,
    make_trainer,
    run_layout,
    train,
    whole_tensors,
)

pytestmark = pytest.mark.parallel

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}


def ahead(lists: Schedule, stage: int, extra: int = 2) -> list[Instruction]:
    """Return 1F1B with forwards `extra` micro-batches further ahead."""
    microbatches = lists.microbatches
    fill = min(lists.placement.stages - stage - 1 + extra, microbatches)
    order = [Instruction(FORWARD, m) for m in range(fill)]
    for m in range(microbatches):
        if fill + m < microbatches:
            order.append(Instruction(FORWARD, fill + m))
        order.append(Instruction(BACKWARD, m))
    return with_messages(lists.placement, stage, order)


def micro_batch_losses(world, run, make) -> list[list[torch.Tensor]]:
    """Return every micro-batch's loss in data order, for two iterations with constant weights."""
    trainer = make_trainer(world, run, make_schedule=custom(make))
    losses = []
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
    ("layout", "make"),
    [
        ("", shuffled),
        ("pp2", ahead),
        ("pp4", partial(ahead, extra=5)),
        ("tp2 pp2 dp2 zero", shuffled),
    ],
)
def test_every_micro_batch_has_the_same_loss_to_the_bit(layout, make):
    """Dropout is on, so masks are the same, too. The learning rate is too small to move a weight: the order of the sums of
    gradients changes their last bits, which must neither hide nor feign a difference."""
    flags = {**DROPOUT, "lr": 1e-30, "weight_decay": 0.0}
    expected = run_layout(layout, micro_batch_losses, flags, one_f_one_b)
    losses = run_layout(layout, micro_batch_losses, flags, make)
    assert any(len(part) for rank in expected for part in rank)
    for ours, theirs in zip(losses, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_forwards_that_run_ahead_train_to_the_same_bits():
    """Every gradient is still summed in data order: a stage's own by its backwards, the head's by the last stage's forwards."""

    def curve(world, run, make):
        return [result.loss for result in train(world, run, 3, make_schedule=custom(make))]

    expected, ours = (
        run_layout("tp2 pp2 dp2 zero", curve, DROPOUT, make)[0] for make in (one_f_one_b, ahead)
    )
    assert ours == expected


@pytest.mark.parametrize("layout", ["pp4", "tp2 pp2 dp2"])
def test_a_shuffled_order_has_the_same_gradients_but_for_rounding(layout):
    def gradients(world, run, make):
        trainer = make_trainer(world, run, make_schedule=custom(make))
        trainer.train_step()
        trainer.close()
        return whole_tensors(trainer, "grad")

    expected, ours = (
        run_layout(layout, gradients, DROPOUT, make)[0] for make in (one_f_one_b, shuffled)
    )
    assert_near(ours, expected, 1e-6)


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
    "layout",
    [
        "pp2 zb-h1",
        "pp2 zb-h1 interleaved",
        "pp4 zb-h1 zero_bubble_max_pending_backward=6",
        "pp2 zbv",
    ],
)
def test_messages_arrive_in_the_order_of_their_receives(layout):
    """Zero-bubble schedules post two receives of a channel ahead: message n must be the micro-batch of receive n."""

    def step(world, run):
        groups = grid_groups(world, run)
        order = MessageOrder(groups.pp.rank)
        groups = replace(groups, pp=Observed(groups.pp, ("isend", "irecv"), order.message))
        with contextlib.closing(
            make_trainer(world, run, groups=groups, watch=order.watch)
        ) as trainer:
            trainer.train_step()
        return order

    orders = run_layout(layout, step, {"global_batch_size": 8})
    sent = {}
    received = {}
    for order in orders:
        sent |= {channel: dict(enumerate(numbers)) for channel, numbers in order.sent.items()}
        received |= order.received
        assert max(order.ahead) == ZERO_BUBBLE_RECEIVES
    assert sent == received and len(sent) >= 2 * (len(orders) - 1)
    assert {len(numbers) for numbers in sent.values()} == {4}


# Backward in two halves ---------------------------------------------------------------------------------------------------------


def late_gradients(world, run, backend, split: bool) -> torch.Tensor:
    """Return flat gradients after three micro-batches. split: weight gradients are one micro-batch late"""
    trainer = make_trainer(
        world, run, Ops.build(backend, keep_packed_weights=run.system.cache_packed_weights)
    )
    chunk = trainer.stage.chunks[0]
    late = None
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


TORCH_GEMM = {"gemm": "torch"}
NATIVE_GEMM = dict.fromkeys(FAMILIES, "torch") | {"gemm": "native"}


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("native", "bf16"),
        ("torch", ""),
        (TORCH_GEMM, "disable_bias_linear"),
        (NATIVE_GEMM, ""),
        (TORCH_GEMM, "tp2"),
        ("native", "tp2 sequence"),
        ("torch", "full"),
        (NATIVE_GEMM, "selective"),
        ("native", "packed disable_bias_linear"),
    ],
    ids=str,
)
def test_split_and_whole_backward_have_the_same_bits(backend, layout):
    whole, split = (
        run_layout(layout, late_gradients, DROPOUT, backend, halves) for halves in (False, True)
    )
    for ours, theirs in zip(split, whole, strict=True):
        assert ours.abs().max() > 0 and torch.equal(ours, theirs)
