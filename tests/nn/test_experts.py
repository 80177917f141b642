"""Experts: routing against a plain reference, balance, checkpoints and costs."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layer_kinds import marked_layers
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import NONBLOCKING, VERBS, Observed
from fugaku_megatron.nn.experts import Route, in_turn
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.ops import Ops, recompute
from fugaku_megatron.observe.export.history import History, read_history
from fugaku_megatron.observe.export.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.observe.log import expert_load
from fugaku_megatron.observe.log.iteration_metrics import parse_line
from fugaku_megatron.run.loop import Session
from fugaku_megatron.training import expert_counts
from tests.checks.experts import (
    ALL,
    BALANCED,
    BIASED,
    CAPACITY,
    EXPERTS,
    SHARED,
    SINKHORN,
    layer_of,
    plain_experts,
)
from tests.helpers import (
    build_trainer,
    grid_groups,
    make_trainer,
    mock,
    rows,
    run_layout,
    small_run,
    whole_tensors,
)
from tests.threads import ThreadComm, ThreadWorld

pytestmark = pytest.mark.parallel

GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
VARIANTS = {
    "softmax of the chosen": {},
    "softmax of all": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "one expert": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "groups": {**GROUPS, **BIASED},
    "groups of softmax": {**GROUPS, "moe_router_pre_softmax": True},
    "shared": SHARED,
    "capacity": CAPACITY,
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
    ours.pop("router.expert_bias", None)
    torch.testing.assert_close(
        {name: p.main_grad for name, p in ours.items()},
        {name: theirs[name].grad for name in ours},
        rtol=1e-5,
        atol=2e-5,
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
    ours, chosen = native.route(logits, bias, model)
    theirs, expected = plain.route(logits, bias, model)
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
            fractions = hits.sum(0) / (len(own) * model.moe_router_topk)
            means = own.mean(0)
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
    """Gradients come from the balancing losses alone."""
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


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_chooses_evenly_in_training_alone(topk):
    """Megatron-LM's iteration makes the choice, the logits the score; evaluation takes the best."""
    run = small_run(**{**EXPERTS, **SINKHORN, "moe_router_topk": topk})
    mlp, ours, _ = layer_of(run, Ops.build())
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)) + 0.5
    logits = x.view(32, 32) @ ours["router.weight"].detach().t()
    cost = logits.exp()
    d1 = torch.ones(8)
    error = 1.0
    while error > 1e-4:
        d0 = 1 / 32 / ((d1 * cost).sum(1) + 1e-8)
        last = d1
        d1 = 1 / 8 / ((d0[:, None] * cost).sum(0) + 1e-8)
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
        writer = MetricsWriter(4, 2, LogOutputs(writers=[History(tmp_path / "history.jsonl")]))
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


EP2 = {"expert_model_parallel_size": 2}


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
        run = small_run(**{**EXPERTS, **EP2, **changes})
        log = [""]

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
    """Each rank has other rows. Ranks that share an expert have rows from different segments."""

    def turns(comm):
        ep = comm.split(comm.rank % sharing, comm.rank)
        etp = comm.split(comm.rank // sharing, comm.rank)
        counts = torch.randint(
            100, (4 * ep.size,), generator=torch.Generator().manual_seed(comm.rank)
        )
        return Route.of(Ops.build("torch"), tuple(counts.tolist()), 4, ep, etp)[1]

    found = ThreadWorld(ranks).run(turns)
    assert sorted(found[0]) == [0, 1, 2, 3] and found == [found[0] for _ in range(ranks)]


@pytest.mark.parametrize(
    ("layout", "precision", "tolerance"),
    [
        ("dp4 ep4", "", 2e-6),
        ("dp4 ep4 zero", "bf16", 2e-3),
        ("tp2 dp2 ep2 sequence", "", 2e-6),
    ],
)
def test_one_expert_may_have_all_tokens(layout, precision, tolerance):
    """Ranks without a token for their experts send and receive all the same."""

    def rank(comm, run):
        with contextlib.closing(make_trainer(comm, run)) as trainer:
            for layer in trainer.stage.layers:
                layer.mlp.router.weight.data.zero_()
            results = [trainer.train_step() for _ in range(2)]
        return [(result.loss, result.grad_norm, result.experts.flatten()) for result in results]

    flags = {**EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True}
    (alone,) = run_layout(precision, rank, flags)
    assert alone[0][2].view(4, -1)[:, :8].amax(1).tolist() == [8 * 16] * 4
    for results in run_layout(f"{layout} {precision}", rank, flags):
        for (*figures, tokens), (*expected, chosen) in zip(results, alone, strict=True):
            assert figures == pytest.approx(expected, rel=tolerance)
            assert torch.equal(tokens, chosen) or precision


MOVES = {
    "dp4 ep4": "tp1",
    "tp1": "tp2 dp2 ep4 etp1 sequence",
    "tp2 dp2 sequence zero": "pp2",
    "tp2 dp2 ep2 sequence zero": "dp4 ep4 zero",
    "tp2 dp2 ep4 etp1 sequence zero": "dp4 ep2",
    "pp2 dp2 ep2": "tp2 etp1 sequence",
    "pp2 dp2 ep2 zero zbv": "pp2 dp2 ep2 zero interleaved",
    "pp2 dp2 ep2 zero interleaved": "pp2 dp2 ep2 zero zb-h1",
    "pp2 dp2 ep2 zero zb-h1": "tp2 dp2 ep2 sequence",
    "cp4 ep2": "tp1",
}
RARE_MOVES = ("tp2 dp2 sequence zero", "dp4 ep4", "pp2 dp2 ep2 zero interleaved")


@pytest.mark.parametrize("layout", rows(MOVES, RARE_MOVES))
def test_a_checkpoint_moves_between_layouts(tmp_path, layout):
    def train_on(comm, run, load):
        with contextlib.closing(make_trainer(comm, run)) as trainer:
            if load:
                trainer.load(str(tmp_path))
            else:
                trainer.train_step()
                trainer.save(str(tmp_path))
            return [trainer.train_step().loss for _ in range(2)], whole_tensors(trainer, "weight")

    losses, weights = run_layout(layout, train_on, ALL, False)[0]
    again, found = run_layout(MOVES[layout], train_on, ALL, True)[0]
    assert again == pytest.approx(losses, rel=1e-6)
    assert weights.keys() >= found.keys() - {"output_layer.weight"}
    for name in weights.keys() & found.keys():
        torch.testing.assert_close(found[name], weights[name], rtol=1e-4, atol=1e-4)


# Costs --------------------------------------------------------------------------------------------------------------------------


# Mistakes -----------------------------------------------------------------------------------------------------------------------


def test_layers_with_experts():
    assert marked_layers("moe_layer_freq", "2", 5) == (True, False, True, False, True)
    for pattern in ("([0]*1+[1]*3)", "[0, 1, 1, 1]", "([0]*1)+([1]*(1+2))"):
        assert marked_layers("moe_layer_freq", pattern, 4) == (False, True, True, True)
    pattern = "([0]*1+[1]*2)*2"
    assert marked_layers("moe_layer_freq", pattern, 6) == (False, True, True, False, True, True)
