"""Experts: routing against a plain reference, balance, the same training in every layout, and costs."""

import contextlib
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.experts import experts_in
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import accounting, experts, memory, run_schedule
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import NONBLOCKING, VERBS, Observed
from fugaku_megatron.nn.experts import Order, Route, in_turn, kept
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.gradients import parts
from fugaku_megatron.nn.ops import Ops, recompute
from fugaku_megatron.observe import expert_load
from fugaku_megatron.observe.history import read_history
from fugaku_megatron.observe.iteration_metrics import parse_line
from fugaku_megatron.observe.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.planner import software, work
from fugaku_megatron.run.loop import Session
from fugaku_megatron.training import expert_counts
from fugaku_megatron.training.trainer import Trainer
from tests.checks.accounting import (
    check_bytes,
    check_flops,
    check_kept,
    check_parameters,
    expected_traffic,
    held_bytes,
)
from tests.checks.allocations import MICROBATCHES, MODEL, STAGES, allocated_peak
from tests.checks.experts import (
    EXPERTS,
    layer_of,
    plain_experts,
)
from tests.helpers import (
    CP2,
    CP4,
    OVERLAP,
    P2P,
    PP2,
    TP2,
    build_trainer,
    grid_groups,
    make_trainer,
    mock,
    rows,
    small_run,
    train,
    whole_tensors,
)
from tests.recording import record
from tests.threads import ThreadComm, ThreadWorld

SHARED = {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
}
BALANCED = {"moe_aux_loss_coeff": (0.1,), "moe_z_loss_coeff": 0.01}
ALL = {**EXPERTS, **SHARED, **BIASED, **BALANCED, "moe_layer_freq": "[0]+[1]*3", "lr": 1e-2}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
VARIANTS = {
    "softmax of the chosen": {},
    "softmax of all": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "one expert": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "groups": {**GROUPS, **BIASED},
    "groups of softmax": {**GROUPS, "moe_router_pre_softmax": True},
    "shared": SHARED,
    "capacity": {"moe_expert_capacity_factor": 0.75},
    "capacity by position": {
        "moe_expert_capacity_factor": 0.6,
        "moe_token_drop_policy": "position",
    },
    "exact GELU": {"swiglu": False},
    "GELU": {**SHARED, "swiglu": False, "openai_gelu": True},
    "squared ReLU": {"swiglu": False, "squared_relu": True},
    "GEGLU": {"swiglu": False, "geglu": True},
}


# The reference: token by token, expert by expert, with torch's own gradients -----------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_those_of_the_reference(variant, backend):
    run = small_run(**{**EXPERTS, **VARIANTS[variant]})
    mlp, ours, theirs = layer_of(run, Ops.build(backend))
    x, dy = (torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    x.requires_grad_()
    y = mlp(x, Pass(first_sample=0))
    y.backward(dy)
    plain = x.detach().view(32, 32).clone().requires_grad_()
    expected = plain_experts(theirs, plain, run.model)
    expected.backward(dy.view(32, 32))
    torch.testing.assert_close(y.view(32, 32), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.view(32, 32), plain.grad, rtol=1e-5, atol=1e-5)
    for name, p in ours.items():
        if name != "router.expert_bias":
            torch.testing.assert_close(
                p.main_grad,
                theirs[name].grad,
                rtol=1e-5,
                atol=2e-5,
                msg=lambda m, n=name: f"{n}: {m}",
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near(dtype):
    run = small_run(
        **EXPERTS,
        **SHARED,
        **{torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}}[dtype],
    )
    mlp, ours, theirs = layer_of(run, Ops.build())
    x = (
        torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
        .to(dtype)
        .requires_grad_()
    )
    y = mlp(x, Pass(first_sample=0))
    y.sum().backward()
    expected = plain_experts(theirs, x.detach().float().view(32, 32), run.model)
    expected.sum().backward()
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.float().view(32, 32), expected, rtol=0, atol=0.03 * expected.abs().max().item()
    )
    for name, p in ours.items():
        scale = theirs[name].grad.abs().max().item()
        torch.testing.assert_close(
            p.main_grad,
            theirs[name].grad,
            rtol=0,
            atol=0.05 * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_an_expert_without_tokens_keeps_its_gradient():
    """One expert takes every token: nothing is computed for the others, whose gradients stay 0."""
    run = small_run(**{**EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True})
    mlp, ours, _ = layer_of(run, Ops.build())
    ours["router.weight"].data.zero_()
    ours["router.weight"].data[3] = 1.0
    x = torch.rand(16, 2, 32, requires_grad=True)
    mlp(x, Pass(first_sample=7)).sum().backward()
    gradients = ours["experts.linear_fc1.weight"].main_grad
    assert gradients[3].abs().min() > 0 and gradients[[0, 1, 2, 4, 5, 6, 7]].abs().max() == 0
    assert (
        mlp.router.take_load().tolist()[:8] == [0, 0, 0, 32, 0, 0, 0, 0]
        and mlp.router.take_load().sum() == 0
    )


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_order_and_capacity(backend):
    chosen, ops = (
        torch.tensor([[2, 0], [2, 1], [0, 2], [2, 0]]),
        Ops.build(backend),
    )
    order = Order.of(ops, chosen, 4)
    assert order.counts == (3, 1, 4, 0) and order.pairs.tolist() == [1, 4, 7, 3, 0, 2, 5, 6]
    assert list(parts(order.counts)) == [(0, slice(0, 3)), (1, slice(3, 4)), (2, slice(4, 8))]
    assert order.dispatch(torch.arange(4.0)[:, None]).flatten().tolist() == [0, 2, 3, 1, 0, 1, 2, 3]
    assert order.combine(torch.arange(8.0)[:, None]).tolist() == [[4.0], [8.0], [7.0], [9.0]]
    model = small_run(
        **EXPERTS, moe_expert_capacity_factor=2.0
    ).model  # ceil(8 / 8 x 2) = 2 of each
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3], [0.8, 0.2]])
    assert kept(scores, chosen, model).tolist() == [
        [False, True],
        [True, True],
        [True, False],
        [True, False],
    ]
    dropped = Order.of(ops, chosen, 4, kept(scores, chosen, model))
    assert dropped.counts == (2, 1, 2, 0) and dropped.combine(torch.ones(5, 1)).tolist() == [
        [1.0],
        [2.0],
        [1.0],
        [1.0],
    ]
    nothing = Order.of(ops, chosen, 4, torch.zeros_like(chosen, dtype=torch.bool))
    assert (
        nothing.counts == (0, 0, 0, 0) and nothing.combine(torch.ones(0, 1)).tolist() == [[0.0]] * 4
    )


@pytest.mark.parametrize(
    "variant", ["softmax of the chosen", "softmax of all", "sigmoid", "groups", "groups of softmax"]
)
def test_both_backends_choose_the_same_of_equal_scores(variant):
    """The expert with the lower number, also of groups; many logits are equal."""
    model = small_run(**{**EXPERTS, "num_experts": 16, **VARIANTS[variant]}).model
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).mul_(2).round_()
    bias = torch.arange(16.0).remainder_(3).div_(4) if model.moe_router_enable_expert_bias else None
    native, plain = (Ops.build(name) for name in ("native", "torch"))
    (ours, chosen), (theirs, expected) = (
        native.route(logits, bias, model),
        plain.route(logits, bias, model),
    )
    assert (
        torch.equal(chosen, expected) and sum(len(set(row)) < 16 for row in logits.tolist()) == 64
    )
    torch.testing.assert_close(ours, theirs)


# Balance ------------------------------------------------------------------------------------------------------------------------


def plain_balance(logits: Tensor, samples: int, model) -> Tensor:
    """Megatron-LM's sums, with its own names, of logits (s b, e)."""
    sigmoid = model.moe_router_score_function == "sigmoid"
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    scores = scores / scores.sum(-1, keepdim=True)
    total = model.moe_z_loss_coeff * torch.logsumexp(logits, -1).square().mean()
    for kind, coefficient in zip(model.moe_router_load_balancing_type, model.moe_aux_loss_coeff):
        for sequence in range(samples if kind == "seq_aux_loss" else 1):
            own = scores[sequence::samples] if kind == "seq_aux_loss" else scores
            hits = torch.zeros_like(own).scatter(1, own.topk(model.moe_router_topk).indices, 1.0)
            fractions, means = hits.sum(0) / (len(own) * model.moe_router_topk), own.mean(0)
            share = samples if kind == "seq_aux_loss" else 1
            total = total + coefficient * model.num_experts * (fractions * means).sum() / share
    return total


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"moe_router_score_function": "sigmoid"},
        {
            "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
            "moe_aux_loss_coeff": (0.1, 0.3),
        },
    ],
)
def test_balancing_losses_reach_the_router(variant, again):
    """The gradients of the losses alone: of the output nothing is asked."""
    run = small_run(**{**EXPERTS, **BALANCED, **variant})
    mlp, ours, theirs = layer_of(run, Ops.build())
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    at = Pass(first_sample=4, balance_factor=0.25)
    y = recompute(mlp, x, at) if again else mlp(x, at)
    (0.0 * y).sum().backward()
    plain = x.detach().view(32, 32).clone().requires_grad_()
    expected = plain_balance(plain @ theirs["router.weight"].t(), 2, run.model)
    (0.25 * expected).backward()
    torch.testing.assert_close(
        ours["router.weight"].main_grad, theirs["router.weight"].grad, rtol=1e-4, atol=1e-7
    )
    torch.testing.assert_close(x.grad.view(32, 32), plain.grad, rtol=1e-4, atol=1e-7)
    load = mlp.router.take_load()
    assert load[:8].sum() == 64, "tokens are counted once, recomputed or not"


SINKHORN = {"moe_router_load_balancing_type": ("sinkhorn",), "moe_router_topk": 1}


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_chooses_evenly_in_training_alone(topk):
    """Megatron-LM's iteration makes the choice, the logits the score; evaluation takes the best."""
    run = small_run(**{**EXPERTS, **SINKHORN, "moe_router_topk": topk})
    mlp, ours, _ = layer_of(run, Ops.build())
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)) + 0.5
    logits = x.view(32, 32) @ ours["router.weight"].detach().t()
    cost, d1, error = logits.exp(), torch.ones(8), 1.0
    while error > 1e-4:
        d0 = 1 / 32 / ((d1 * cost).sum(1) + 1e-8)
        last, d1 = d1, 1 / 8 / ((d0[:, None] * cost).sum(0) + 1e-8)
        error = (last - d1).abs().mean()
    scores = torch.sigmoid(logits) if topk == 1 else torch.softmax(logits, -1)
    for at, ranked in (
        (Pass(first_sample=0), d1 * cost * d0[:, None]),
        (Pass(first_sample=0, training=False), scores),
    ):
        found, chosen = mlp.router(x, at)
        assert torch.equal(chosen, ranked.topk(topk).indices)
        torch.testing.assert_close(found, scores.gather(1, chosen))
    even, best = (
        ranked.topk(topk).indices.flatten().bincount(minlength=8).max()
        for ranked in (d1 * cost * d0[:, None], scores)
    )
    assert even < best


def test_the_bias_moves_against_the_load():
    run = small_run(**{**EXPERTS, **BIASED})
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        router = trainer.stage.layers[1].mlp.router
        result = trainer.train_step()
        tokens = result.experts[1, :8]
        assert tokens.sum() == 8 * 16 * 2
        expected = -0.1 * torch.sign(tokens - tokens.mean()).float()
        torch.testing.assert_close(router.expert_bias.detach(), expected)


def test_the_log_has_losses_and_loads(tmp_path, capsys):
    """Every expert's load is in the history, and experts without a token are named."""
    run = small_run(
        **{
            **EXPERTS,
            **BALANCED,
            "num_experts": 64,
            "seq_length": 8,
            "global_batch_size": 2,
            "log_interval": 2,
        }
    )
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        writer = MetricsWriter(4, 2, LogOutputs(history=tmp_path / "history.jsonl"))
        Session(trainer, writer, 4, ()).run()
        writer.close()
    lines = [parse_line(line) for line in capsys.readouterr().out.splitlines() if "lm loss" in line]
    assert len(lines) == 2 and all(
        0.5 < line.load_balancing_loss < 4 and line.router_z_loss > 1 for line in lines
    )
    records = read_history(tmp_path / "history.jsonl")
    loads = torch.tensor([record["loads"] for record in records if record["kind"] == "experts"])
    assert (
        loads.shape == (2, 4, 64)
        and loads.mean() == pytest.approx(1, abs=1e-3)
        and lines[0].largest_load > 2
    )
    idle = [record["text"] for record in records if record["kind"] == "event"]
    assert len(idle) == 2 and "without a token since the last report: expert " in idle[0]


def test_the_log_names_the_rank_with_most_tokens(capsys):
    """One of four ranks with two experts each has every token: the others wait for it."""
    run = small_run(
        **{
            **EXPERTS,
            "expert_model_parallel_size": 4,
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
        }
    )
    watch = expert_load.ExpertWatch(run.model, MetricsWriter(1, 1), 4)
    table = torch.zeros(4, 10, dtype=torch.float64)
    table[:, 5] = 256
    watch.end(SimpleNamespace(experts=table))
    watch.report(1)
    assert "the rank with experts 4 to 5 computes 4.00 of the mean" in capsys.readouterr().out


def test_a_repeated_iteration_does_not_change_the_loads():
    """--rerun-on-spike repeats an iteration before its update, with layers that share the weights alone."""
    with contextlib.closing(make_trainer(SoloComm(), small_run(**EXPERTS))) as trainer:
        trainer.before_update = lambda consumed, loss: (
            expert_counts.reset_loads(trainer.stage) or loss
        )
        assert trainer.train_step().experts[:, :8].sum(1).tolist() == [8 * 16 * 2] * 4


# Layouts ------------------------------------------------------------------------------------------------------------------------

SEQUENCE = {**TP2, "sequence_parallel": True}
LAYOUTS = [
    (2, TP2),
    (2, SEQUENCE),
    (2, {**SEQUENCE, "tp_comm_overlap": True}),
    (2, PP2),
    (2, {**PP2, "pipeline_schedule": "zb-h1"}),
    (2, {**PP2, "num_virtual_stages_per_pipeline_rank": 2}),
    (2, OVERLAP),
    (1, {"recompute_granularity": "full"}),
    (1, {"cache_packed_weights": True}),
    (4, {**SEQUENCE, **PP2, "pipeline_schedule": "zb-h1"}),
    (4, {**PP2, **OVERLAP, "pipeline_schedule": "zbv"}),
]


def figures(world, run) -> list[float]:
    return [
        x
        for result in train(world, run, 2)
        for x in (result.loss, result.grad_norm, *result.experts.flatten().tolist())
    ]


@functools.cache
def alone(kind: str) -> list[float]:
    """Return the figures of one rank."""
    return figures(SoloComm(), small_run(**TRAINED[kind]))


def check_layout(kind: str, world: int, changes: dict) -> None:
    """Compare losses, gradient norms, every expert's tokens and both balancing losses with one rank."""
    for found in ThreadWorld(world).run(
        lambda comm: figures(comm, small_run(**{**TRAINED[kind], **changes}))
    ):
        assert found == pytest.approx(alone(kind), rel=2e-6, abs=1e-9)


PLAIN = {"swiglu": False, "squared_relu": True}
EVEN = {**EXPERTS, **SHARED, **SINKHORN, "moe_z_loss_coeff": 0.01, "moe_layer_freq": "[0]+[1]*3"}
CAPPED = {**ALL, "moe_expert_capacity_factor": 1.0}
TRAINED = {
    "all": ALL,
    "without gates": {**ALL, **PLAIN},
    "sinkhorn": EVEN,
    "probs": {**CAPPED, "moe_token_drop_policy": "probs"},
    "position": {**CAPPED, "moe_token_drop_policy": "position"},
}


@pytest.mark.parametrize(("world", "changes"), LAYOUTS)
def test_training_is_the_same_in_every_layout(world, changes):
    check_layout("all", world, changes)


EP2, EP4 = ({"expert_model_parallel_size": size} for size in (2, 4))
ETP1 = {**SEQUENCE, "expert_tensor_parallel_size": 1}
ZERO = {"zero_stage": 1}
DIVIDED = {
    "EP2": (2, EP2),
    "EP2, ZeRO-1, overlap": (4, {**EP2, **OVERLAP}),
    "EP4": (4, {**EP4, **ZERO}),
    "EP2 x TP2": (4, {**EP2, **SEQUENCE}),
    "EP2 x TP2 of whole experts": (4, {**EP2, **ETP1, **ZERO}),
    "EP4 over TP2 and DP2": (4, {**EP4, **ETP1}),
    "whole experts": (2, ETP1),
    "CP2 of whole experts": (2, CP2),
    "CP2 x EP2": (2, {**CP2, **EP2, **P2P}),
    "CP2 x EP4 x TP2": (8, {**CP2, **EP4, **ETP1, **ZERO}),
    "CP2 x EP2 x zbv": (4, {**CP2, **EP2, **PP2, "pipeline_schedule": "zbv"}),
    "EP2 in a node": (4, {**EP2, **ZERO}),
    "EP2, recompute": (2, {**EP2, "recompute_granularity": "full"}),
    "EP2, torch": (2, {**EP2, "kernels": "torch"}),
    "EP2 x PP2 x DP4": (8, {**EP2, **PP2, **ZERO}),
    "interleaved": (4, {**EP2, **PP2, **ZERO, "num_virtual_stages_per_pipeline_rank": 2}),
    "zb-h1": (4, {**EP2, **PP2, **OVERLAP, "pipeline_schedule": "zb-h1"}),
    "zbv": (4, {**EP2, **PP2, **ZERO, "pipeline_schedule": "zbv"}),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_divided_experts_train_as_one_rank_does(case, monkeypatch):
    world, changes = DIVIDED[case]
    monkeypatch.setattr(ThreadComm, "inside_node", case == "EP2 in a node")
    check_layout("all", world, changes)


LETTERS = {
    "iall_to_all": "s",
    "wait": "w",
    "all_to_all": "b",
    "grouped_linear_forward": "F",
    "grouped_linear_data_gradient": "D",
    "grouped_linear_weight_gradient": "W",
    "linear_forward": "f",
    "linear_data_gradient": "d",
}
ONE = {
    "num_experts": 2,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
}  # on each rank, and one group
APART = ("ssssssss" + "wwFFs" * 4 + "wwww", "ssss" + "wDWWDss" * 4 + "w" * 8)
SHARING = (
    "ssssssss" + "ff" + "wwFFs" * 4 + "ff" + "wwww",
    "ssss" + "dd" + "wDWWDss" * 4 + "dd" + "w" * 8,
)


@pytest.mark.parametrize(
    ("changes", "near", "expected"),
    [
        ({}, False, APART),
        (SHARED, False, SHARING),
        ({**SHARED, **ONE}, False, ("ssffwwFFsffw", "sddwDWWDssddww")),
        ({}, True, ("bbFFb", "bDWWDbb")),
        (SHARED, True, ("ssffwwFFb", "bDWWDssddww")),
    ],
)
def test_rows_are_on_their_way_while_others_are_computed(changes, near, expected, monkeypatch):
    """Four groups of experts are sent (s), waited for (w), computed (F, D, W) and sent back, next to the shared expert (f, d).

    Inside a node they block (b), because all threads of the ranks copy rows.
    """
    monkeypatch.setattr(ThreadComm, "inside_node", near)

    def rank(comm):
        run, log = small_run(**{**EXPERTS, **EP2, **changes}), [""]

        def observe(name, call, args, kwargs):
            log[-1] += LETTERS.get(name, "")
            result = call(*args, **kwargs)
            return Observed(result, ("wait",), observe) if name in NONBLOCKING else result

        groups = grid_groups(comm, run)
        trainer = build_trainer(
            run,
            comm,
            mock(run),
            groups=replace(groups, ep=Observed(groups.ep, VERBS, observe)),
            ops=Ops.build("native", kernels=Observed(kernels, tuple(LETTERS), observe)),
        )
        with contextlib.closing(trainer):
            trainer.optimizer.zero_grad()
            log[:] = [""]
            y = trainer.stage.layers[0].mlp(
                torch.randn(16, 1, 32, requires_grad=True), Pass(first_sample=0)
            )
            log.append("")
            y.sum().backward()
        return tuple(log)

    assert ThreadWorld(2).run(rank) == [expected] * 2


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([5], [0]), ([9, 4], [1, 0]), ([0, 7, 3, 9, 1, 2, 8, 4], [0, 5, 7, 6, 3, 1, 2, 4])],
)
def test_small_groups_come_first_and_last(rows, expected):
    assert in_turn(rows) == expected


@pytest.mark.parametrize(("ranks", "sharing"), [(4, 1), (4, 2)])
def test_ranks_agree_on_the_order_of_groups(ranks, sharing):
    """Each of them has other rows. A rank of those that share an expert has them from another part of the sequence."""

    def turns(comm):
        ep, etp = (
            comm.split(comm.rank % sharing, comm.rank),
            comm.split(comm.rank // sharing, comm.rank),
        )
        counts = torch.randint(
            100, (4 * ep.size,), generator=torch.Generator().manual_seed(comm.rank)
        )
        return Route.of(Ops.build("torch"), tuple(counts.tolist()), 4, ep, etp)[1]

    found = ThreadWorld(ranks).run(turns)
    assert sorted(found[0]) == [0, 1, 2, 3] and found == [found[0] for _ in range(ranks)]


OTHERS = [
    ("without gates", 4, {**CP4, **EP2}),
    ("without gates", 4, {**EP2, **PP2, **OVERLAP, "pipeline_schedule": "zb-h1"}),
    ("sinkhorn", 2, SEQUENCE),
    ("sinkhorn", 4, {**CP4, **EP2}),
    ("probs", 4, {**SEQUENCE, **PP2}),
    ("probs", 4, {**EP4, **ETP1}),
    ("probs", 4, {**CP2, **EP2, **SEQUENCE}),
    ("position", 4, {**EP2, **SEQUENCE, **ZERO}),
    ("position", 4, CP4),
]


@pytest.mark.parametrize(("kind", "world", "changes"), OTHERS)
def test_other_experts_train_the_same_in_every_layout(kind, world, changes):
    """Without gates, with Sinkhorn's balance, and with a capacity by either policy."""
    check_layout(kind, world, changes)


@pytest.mark.full
@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize(
    "case",
    [
        "EP2",
        "EP4",
        "EP2 x TP2",
        "EP2 x PP2 x DP4",
        "interleaved",
        "zb-h1",
        "zbv",
        "CP2 x EP2",
        "CP2 x EP4 x TP2",
        "CP2 x EP2 x zbv",
    ],
)
def test_ten_losses_of_divided_experts(case, capacity):
    run, (world, changes) = (
        {**ALL, "lr": 1e-3, "moe_expert_capacity_factor": capacity},
        DIVIDED[case],
    )
    alone = [result.loss for result in train(SoloComm(), small_run(**run), 10)]
    for results in ThreadWorld(world).run(
        lambda comm: train(comm, small_run(**{**run, **changes}), 10)
    ):
        assert [result.loss for result in results] == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("changes", [EP4, {**EP4, "bf16": True, **ZERO}, {**EP2, **SEQUENCE}])
def test_one_expert_may_have_all_tokens(changes):
    """Ranks whose experts have no token send and receive all the same."""

    def rank(comm, **changes):
        run = small_run(
            **{**EXPERTS, **changes, "moe_router_topk": 1, "moe_router_pre_softmax": True}
        )
        with contextlib.closing(make_trainer(comm, run)) as trainer:
            for layer in trainer.stage.layers:
                layer.mlp.router.weight.data.zero_()
            results = [trainer.train_step() for _ in range(2)]
        return [(result.loss, result.grad_norm, result.experts.flatten()) for result in results]

    alone = rank(SoloComm(), **{name: value for name, value in changes.items() if name == "bf16"})
    assert alone[0][2].view(4, -1)[:, :8].amax(1).tolist() == [8 * 16] * 4
    for results in ThreadWorld(4).run(lambda comm: rank(comm, **changes)):
        for (loss, norm, tokens), (expected, size, chosen) in zip(results, alone):
            assert (loss, norm) == pytest.approx(
                (expected, size), rel=2e-3 if "bf16" in changes else 2e-6
            )
            assert torch.equal(tokens, chosen) or "bf16" in changes


ZB_H1 = 4, {**EP2, **PP2, **ZERO, "pipeline_schedule": "zb-h1"}
MOVES = {
    "TP2 x DP2 to PP2": ((4, {**SEQUENCE, **ZERO}), (2, PP2)),
    "EP2 x TP2 to EP4": ((4, {**EP2, **SEQUENCE, **ZERO}), (4, {**EP4, **ZERO})),
    "EP4 to one rank": ((4, EP4), (1, {})),
    "one rank to EP4 over TP2": ((1, {}), (4, {**EP4, **ETP1})),
    "EP4 over TP2 to EP2 of DP4": ((4, {**EP4, **ETP1, **ZERO}), (4, EP2)),
    "EP2 x PP2 to whole experts": ((4, {**EP2, **PP2}), (2, ETP1)),
    "zbv to interleaved": (DIVIDED["zbv"], DIVIDED["interleaved"]),
    "interleaved to zb-h1": (DIVIDED["interleaved"], ZB_H1),
    "CP4 x EP2 to one rank": ((4, {**CP4, **EP2}), (1, {})),
    "zb-h1 to EP2 x TP2": (ZB_H1, DIVIDED["EP2 x TP2"]),
}


MOVED_RARELY = ("TP2 x DP2 to PP2", "EP4 to one rank", "interleaved to zb-h1")


@pytest.mark.parametrize("move", rows(MOVES, MOVED_RARELY))
def test_a_checkpoint_moves_between_layouts(tmp_path, move):
    (ranks, first), (others, second) = MOVES[move]

    def save(comm):
        with contextlib.closing(make_trainer(comm, small_run(**ALL, **first))) as trainer:
            trainer.train_step()
            trainer.save(str(tmp_path))
            return [trainer.train_step().loss for _ in range(2)], whole_tensors(trainer, "weight")

    def load(comm):
        with contextlib.closing(make_trainer(comm, small_run(**ALL, **second))) as trainer:
            trainer.load(str(tmp_path))
            return [trainer.train_step().loss for _ in range(2)], whole_tensors(trainer, "weight")

    (losses, weights), (again, found) = (
        ThreadWorld(ranks).run(save)[0],
        ThreadWorld(others).run(load)[0],
    )
    assert again == pytest.approx(losses, rel=1e-6) and weights.keys() >= found.keys() - {
        "output_layer.weight"
    }
    for name in weights.keys() & found.keys():
        torch.testing.assert_close(found[name], weights[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"bf16": True, **ZERO}, {**EP2, **OVERLAP}, {**EP2, "bf16": True}]
)
def test_a_resumed_run_has_the_same_bits(tmp_path, changes):
    """The bias of the experts, which no gradient moves, among them."""
    run = small_run(**ALL, **PP2, **changes)

    def rank(comm):
        with contextlib.closing(make_trainer(comm, run)) as trainer:
            trainer.train_step()
            trainer.save(str(tmp_path))
            going_on = [trainer.train_step() for _ in range(2)]
        with contextlib.closing(make_trainer(comm, run)) as trainer:
            trainer.load(str(tmp_path))
            return going_on, [trainer.train_step() for _ in range(2)]

    for going_on, resumed in ThreadWorld(4).run(rank):
        assert [(r.loss, r.grad_norm) for r in going_on] == [(r.loss, r.grad_norm) for r in resumed]
        assert all(torch.equal(a.experts, b.experts) for a, b in zip(going_on, resumed))


# Costs --------------------------------------------------------------------------------------------------------------------------

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
    {**EXPERTS, **SHARED, "swiglu": False, **SINKHORN},
]
ADAPTED = {**COSTED[2], "lora_rank": 4}


@pytest.mark.parametrize("model", COSTED)
def test_parameters_and_flops(model):
    check_parameters(small_run(**model, **TP2, **PP2), 4)
    check_flops(small_run(**{**model, "micro_batch_size": 1}))


@pytest.mark.parametrize("model", COSTED)
@pytest.mark.parametrize("changes", [TP2, {**SEQUENCE, "zero_stage": 1}])
def test_bytes_are_those_communicated(model, changes):
    check_bytes(small_run(**model, **changes), 4)


CAPACITY = {"moe_expert_capacity_factor": 8.0}  # nothing is dropped
WHOLE_EXPERTS = {**EP2, **ETP1, **CAPACITY, **ZERO}


@pytest.mark.parametrize(
    ("model", "world", "changes"),
    [
        (COSTED[2], 4, {**EP2, **OVERLAP}),
        (COSTED[2], 4, WHOLE_EXPERTS),
        (COSTED[2], 2, {**EP2, "recompute_granularity": "full"}),
        (COSTED[2], 8, {**EP2, **SEQUENCE, **PP2}),
        (ADAPTED, 4, {**EP2, **SEQUENCE}),
        (ADAPTED, 4, WHOLE_EXPERTS),
    ],
)
def test_bytes_of_divided_experts(model, world, changes):
    """Per group; how many rows a rank sends back depends on the tokens, so that these are compared as sums over ranks."""
    run = small_run(**model, **changes)
    layout = Layout.from_run(run, world)
    check_parameters(run, world)

    def rank(comm):
        groups = record(grid_groups(comm, run))
        with contextlib.closing(Trainer(run, layout, comm, groups, mock(run))) as trainer:
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
        assert sum(others) + sum(divided) == sum(memory.bucket_elements(run, layout, stage))
        shards = (layout.dp, layout.edp) if run.parallel.zero_stage else (1, 1)
        assert sum(others) // shards[0] + sum(divided) // shards[1] == sum(
            memory.updated_elements(run, layout, stage)
        )


@pytest.mark.parametrize(
    ("world", "changes"), [(2, EP2), (4, {**EP2, **SEQUENCE}), (4, {**EP4, **ETP1})]
)
def test_divided_experts_keep_what_the_formula_says(world, changes):
    """In the mean over ranks, because those with more tokens keep more."""
    run = small_run(**COSTED[2], **changes)
    held = ThreadWorld(world).run(held_bytes, run)
    tp, records = (
        run.parallel.tensor_model_parallel_size,
        accounting.stage_records(run, Layout.from_run(run, world), 0),
    )
    division = experts.Division.of(run, tp)
    numbers = (
        division.chosen * experts.NUMBER_BYTES + division.here * experts.RECEIVED_BYTES
    )  # `held_bytes` leaves int64 out
    assert sum(held) / world == pytest.approx(
        sum(r.saved_bytes for r in records) - 4 * numbers, rel=0.02
    )


@pytest.mark.parametrize("changes", [TP2, SEQUENCE, ETP1])
def test_bytes_of_adapters_of_experts(changes):
    """The last stage, whose input has a gradient, sums parts of what all ranks that share an expert hold over them."""
    run = small_run(**ADAPTED, **PP2, **changes)
    check_parameters(run, 4)
    check_bytes(run, 4, stages={1})


@pytest.mark.parametrize("model", [COSTED[0], COSTED[2], COSTED[3], ADAPTED])
@pytest.mark.parametrize(
    "changes", [{}, SEQUENCE, {"recompute_granularity": "full"}, {"bf16": True}]
)
def test_saved_bytes_are_those_that_autograd_keeps(model, changes):
    check_kept(small_run(**model, **changes))


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
    """A rank allocates for activations in a step what the formula says, within a twentieth."""
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
    layout = Layout.from_run(run, STAGES * replicas)
    predicted = memory.stage_memory(
        run, layout, stage, run_schedule.build_schedule(run, MICROBATCHES).in_flight(stage)
    )
    expected = predicted.activations + predicted.logits
    assert allocated_peak(SoloComm(stage, STAGES * replicas), run) == pytest.approx(
        expected, rel=0.05
    )


A3B = {
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 128,
    "qk_layernorm": True,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "vocab_size": 151936,
    "make_vocab_size_divisible_by": 1,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    **EXPERTS,
    "ffn_hidden_size": 6144,
    "moe_ffn_hidden_size": 768,
    "num_experts": 128,
    "moe_router_topk": 8,
    "bf16": True,
}  # Qwen3-30B-A3B


def test_the_published_numbers_of_a_30b_a3b():
    """30,532,122,624 parameters, of which 3.3 B are active; 18 bytes each, 14 with BF16 moments."""
    run = small_run(**A3B)
    assert accounting.parameters(run) == 30_532_122_624
    assert accounting.active_parameters(run) == pytest.approx(3.35e9, rel=0.002)
    bf16 = {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
    }
    for changes, total in (({}, 549e9), (bf16, 427e9)):
        changed = small_run(**A3B, **changes)
        found = memory.stage_memory(
            changed,
            Layout.from_run(changed, 1),
            0,
            run_schedule.build_schedule(changed, 1).in_flight(0),
        )
        assert found.weights + found.gradients + found.optimizer == pytest.approx(total, rel=0.002)
    linear = (
        48 * (2048 * (32 + 8) * 128 + 32 * 128 * 2048 + 8 * 3 * 768 * 2048 + 128 * 2048)
        + 2048 * 151936
    )
    attention = (
        48 * 32 * 128 * 1024 * 2
    )  # of a token, below the diagonal: two matmuls of half of 1024 pairs
    assert accounting.model_flops(run, 1) == pytest.approx(
        1024 * 3 * (2 * linear + attention), rel=1e-6
    )
    layer = work.phases(run, 1, software.load("fugaku_megatron"))["layer_forward"]
    assert [(p.m, p.n, p.k, p.times) for p in layer.matmuls if p.times > 1] == [
        (64, 1536, 2048, 128),
        (64, 2048, 768, 128),
    ]


def test_a_scaled_down_a3b_holds_what_the_formula_says():
    """With BF16 moments: every buffer of weights, gradients and the optimizer, and what a step allocates, together."""
    run = small_run(
        **{
            **A3B,
            "num_layers": 4,
            "hidden_size": 128,
            "kv_channels": 16,
            "num_attention_heads": 8,
            "seq_length": 128,
            "ffn_hidden_size": 384,
            "moe_ffn_hidden_size": 48,
            "num_experts": 32,
            "vocab_size": 512,
            "num_query_groups": 2,
            "global_batch_size": 2,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        }
    )
    found = memory.stage_memory(
        run, Layout.from_run(run, 1), 0, run_schedule.build_schedule(run, 2).in_flight(0)
    )
    with contextlib.closing(make_trainer(SoloComm(), run)) as trainer:
        trainer.train_step()
        held = [
            tensor for p in trainer.optimizer.flat.parameters for tensor in (p.data, p.main_grad)
        ]
        held += [
            tensor
            for part in trainer.optimizer.shards
            for tensor in vars(part).values()
            if isinstance(tensor, Tensor)
        ]
        buffers = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in held
        }
    total = found.weights + found.gradients + found.optimizer
    assert sum(buffers.values()) == pytest.approx(total, rel=0.01)
    step = allocated_peak(SoloComm(), run)
    assert sum(buffers.values()) + step == pytest.approx(
        total + found.activations + found.logits, rel=0.05
    )
    assert step == pytest.approx(found.activations + found.logits, rel=0.05)


# Mistakes -----------------------------------------------------------------------------------------------------------------------


def test_layers_with_experts():
    assert experts_in("2", 5) == (True, False, True, False, True)
    assert (
        experts_in("([0]*1+[1]*3)", 4) == (False, True, True, True) == experts_in("[0, 1, 1, 1]", 4)
    )
