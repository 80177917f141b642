"""The operations of a gated delta net against a plain recurrence under torch's autograd in double precision."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.nn.ops.delta_net import DeltaGates, DeltaHeads
from tests.checks.ops import check, close, ops, parameter, random

pytestmark = pytest.mark.parallel

__all__ = ["ops"]  # the fixture

B = 2
HEADS = DeltaHeads(key_heads=2, value_heads=4, key_size=8, value_size=12)
WIDTH = 2 * 2 * 8 + 4 * 12
DECAYS = {"near 0": (-30.0, -1.0), "near 1": (-1e-3, 0.0), "mixed": (-40.0, 0.0)}


class Inputs(NamedTuple):
    qkv: Tensor
    decay: Tensor
    beta: Tensor
    state: Tensor
    dout: Tensor
    dstate: Tensor


@cache
def inputs(s: int, decays: str, dtype: torch.dtype = torch.float32) -> Inputs:
    low, high = DECAYS[decays]
    n = HEADS.value_heads
    uniform = torch.rand(s, B, n, generator=torch.Generator().manual_seed(s))
    if decays == "mixed":
        uniform = uniform**8
    return Inputs(
        random(s, B, WIDTH, dtype=dtype),
        low + (high - low) * (1 - uniform if decays == "mixed" else uniform),
        torch.rand(s, B, n, generator=torch.Generator().manual_seed(1)),
        random(B, n, 8, 12, seed=3),
        random(s, B, n * 12, seed=4, dtype=dtype),
        random(B, n, 8, 12, seed=5),
    )


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def plain_rule(
    qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token by token."""
    results = []
    queries, keys, values = HEADS.split(qkv)
    values = values.flatten(2, 3)
    queries, keys = (unit(x).repeat_interleave(2, 2).unsqueeze(-1) for x in (queries, keys))
    for t in range(len(qkv)):
        if starts is not None and t > 0:
            state = state * (starts[:, t] < t)[:, None, None, None]
        state = state * decay[t, :, :, None, None].exp()
        update = beta[t].unsqueeze(-1) * (values[t] - (keys[t] * state).sum(-2))
        state = state + keys[t] * update.unsqueeze(-2)
        results.append((queries[t] * state).sum(-2).flatten(1) / 8**0.5)
    return torch.stack(results), state


@cache
def expected(s: int, decays: str, dtype: torch.dtype, boundaries: tuple[int, ...]) -> list[Tensor]:
    """Results, final state, and the gradients of all inputs."""
    given = inputs(s, decays, dtype)
    leaves = [x.double().requires_grad_() for x in given[:4]]
    outputs = plain_rule(*leaves, starts_at(s, boundaries))
    gradients = torch.autograd.grad(outputs, leaves, [x.double() for x in given[4:]])
    return [x.detach() for x in (*outputs, *gradients)]


@cache
def starts_at(s: int, boundaries: tuple[int, ...]) -> Tensor | None:
    """Documents that begin at these tokens of the first sample; the second sample is one document."""
    if not boundaries:
        return None
    starts = torch.zeros(B, s, dtype=torch.int32)
    for boundary in boundaries:
        starts[0, boundary:] = boundary
    return starts


def found(ops, given: Inputs, starts: Tensor | None) -> list[Tensor]:
    qkv, decay, beta, state = (x.clone().requires_grad_() for x in given[:4])
    outputs = ops.gated_delta_rule(qkv, DeltaGates(decay, beta), HEADS, starts, state)
    gradients = torch.autograd.grad(outputs, (qkv, decay, beta, state), given[4:])
    return [*outputs, *gradients]


def relatively_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        actual.double(), expected, rtol=0, atol=tolerance * expected.abs().max().item()
    )


FP32 = (torch.float32, 1e-5)
BF16 = (torch.bfloat16, 1e-2)
CASES = [
    (1, "near 0", (), FP32),
    (2, "near 1", (), FP32),
    (63, "mixed", (), FP32),
    (64, "near 0", (), FP32),
    (65, "near 1", (), FP32),
    (127, "mixed", (), FP32),
    (200, "near 0", (), FP32),
    (200, "near 1", (), FP32),
    (1000, "near 1", (), FP32),
    (200, "near 1", (5, 64, 70, 71, 130), FP32),
    (130, "mixed", (128, 129), FP32),
    (200, "near 1", (5, 64, 70, 71, 130), BF16),
    (65, "mixed", (), BF16),
]


@pytest.mark.parametrize(("s", "decays", "boundaries", "precision"), CASES)
def test_the_rule_is_its_recurrence(ops, s, decays, boundaries, precision):
    """Results, final state and every gradient."""
    dtype, tolerance = precision
    wanted = expected(s, decays, dtype, boundaries)
    results = found(ops, inputs(s, decays, dtype), starts_at(s, boundaries))
    assert results[0].dtype == results[2].dtype == dtype
    for actual, exact in zip(results, wanted, strict=True):
        relatively_close(actual, exact, tolerance)


def test_a_state_without_a_value_is_zero(ops):
    qkv, decay, beta, state, *_ = inputs(65, "near 1")
    results = ops.gated_delta_rule(qkv, DeltaGates(decay, beta), HEADS)
    others = ops.gated_delta_rule(
        qkv, DeltaGates(decay, beta), HEADS, state=torch.zeros_like(state)
    )
    assert all(map(torch.equal, results, others))


def test_generation_continues_the_rule(ops):
    """Rows are samples in another order; a state that no row names is unchanged."""
    given = inputs(65, "near 1")
    wanted, wanted_state, *_ = expected(65, "near 1", torch.float32, ())
    _, state = ops.gated_delta_rule(
        given.qkv[:63], DeltaGates(given.decay[:63], given.beta[:63]), HEADS, None, given.state
    )
    states = torch.cat((state[1:], torch.ones_like(state[:1]), state[:1]))
    samples = torch.tensor([2, 0])
    for t in (63, 64):
        rows = [x[t].unsqueeze(1) for x in (given.qkv, given.decay, given.beta)]
        out = ops.cached_delta_rule(rows[0], DeltaGates(*rows[1:]), HEADS, states, samples)
        relatively_close(out.squeeze(1), wanted[t], 1e-5)
    relatively_close(states[samples], wanted_state, 1e-5)
    assert (states[1] == 1).all()


def plain_gates(alpha: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    return torch.cat((-a_log.exp() * F.softplus(alpha + dt_bias), beta.sigmoid()))


def plain_convolution(x: Tensor, weight: Tensor) -> Tensor:
    channels, width = weight.shape
    padded = F.pad(x.permute(1, 2, 0), (width - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=channels)).permute(2, 0, 1)


def plain_gated_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-3) * weight * F.silu(gate)


def gates_of(ops, *arguments: Tensor) -> Tensor:
    return torch.cat(ops.delta_gates(*arguments)).to(arguments[0].dtype)


OPERATIONS = {
    "gates": (gates_of, plain_gates, [(7, B, 5), (7, B, 5)], [(5,), (5,)]),
    "convolution": (
        lambda o, x, w: o.causal_convolution(x, w),
        plain_convolution,
        [(9, B, 21)],
        [(21, 4)],
    ),
    "convolution of one token": (
        lambda o, x, w: o.causal_convolution(x, w),
        plain_convolution,
        [(1, B, 21)],
        [(21, 4)],
    ),
    "norm": (
        lambda o, *a: o.gated_rms_norm(*a, 1e-3),
        plain_gated_norm,
        [(7, B, 3, 20), (7, B, 3, 20)],
        [(20,)],
    ),
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_its_formula(ops, operation, dtype, tolerance):
    op, plain, shapes, weights = OPERATIONS[operation]
    check(
        lambda *a: op(ops, *a),
        plain,
        [random(*shape, seed=7 * i, dtype=dtype) for i, shape in enumerate(shapes)],
        [random(*shape, seed=i, dtype=dtype) for i, shape in enumerate(weights, 1)],
        2 * tolerance,
    )


def test_inputs_may_be_slices(ops):
    x = random(7, B, 3, 20)
    wide = random(7, B, 80, seed=1)
    weight = parameter(random(20))
    gate = wide[..., 10:70].unflatten(-1, (3, 20))
    normed = ops.gated_rms_norm(x, gate, weight, 1e-3)
    close(normed, plain_gated_norm(x, gate, weight).double(), 1e-6)
    channels = parameter(random(60, 4))
    convolved = ops.causal_convolution(wide[..., 10:70], channels)
    close(convolved, plain_convolution(wide[..., 10:70], channels).double(), 1e-6)


def convolved(ops, x, weight, starts, earlier) -> list[Tensor]:
    """Result and gradients."""
    x, earlier = (None if t is None else t.clone().requires_grad_() for t in (x, earlier))
    channels = parameter(weight)
    y = ops.causal_convolution(x, channels, starts, earlier)
    y.backward(random(*y.shape, seed=8))
    return [y.detach(), x.grad, channels.main_grad, *([] if earlier is None else [earlier.grad])]


def test_a_convolution_by_documents(ops):
    x = random(12, 1, 21)
    weight = random(21, 4)
    bounds = (0, 1, 3, 8, 12)
    starts = torch.cat(
        [torch.full((1, j - i), i, dtype=torch.int32) for i, j in zip(bounds, bounds[1:])], 1
    )
    dy = random(12, 1, 21, seed=8)
    y, dx, dweight = convolved(ops, x, weight, starts, None)
    total = torch.full_like(weight, 0.5)
    for i, j in zip(bounds, bounds[1:]):
        channels = parameter(weight)
        piece = x[i:j].clone().requires_grad_()
        alone = ops.causal_convolution(piece, channels)
        alone.backward(dy[i:j])
        close(y[i:j], alone.double(), 1e-6)
        close(dx[i:j], piece.grad.double(), 1e-6)
        total += channels.main_grad - 0.5
    close(dweight, total.double(), 1e-6)


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_a_convolution_after_earlier_inputs(ops, cut):
    """The end of a sequence with the last inputs before it; in generation token by token."""
    x = random(10, B, 21)
    weight = random(21, 4)
    leaf = x.clone().requires_grad_()
    whole = ops.causal_convolution(leaf, parameter(weight))
    padded = torch.cat((torch.zeros(3, B, 21), x))
    rest, *_, dearlier = convolved(ops, x[cut:], weight, None, padded[cut : cut + 3])
    close(rest, whole[cut:].detach().double(), 1e-6)
    (dx,) = torch.autograd.grad(whole[cut:], leaf, random(10 - cut, B, 21, seed=8))
    visible = min(cut, 3)
    close(dearlier[3 - visible :], dx[cut - visible : cut].double(), 1e-6)

    inputs = torch.zeros(3, 3, 21)
    inputs[[2, 0]] = padded[cut : cut + 3].transpose(0, 1)
    samples = torch.tensor([2, 0])
    for t in range(cut, 10):
        y = ops.cached_convolution(x[t].unsqueeze(1), parameter(weight), inputs, samples)
        close(y.squeeze(1), whole[t].detach().double(), 1e-6)
    assert torch.equal(inputs[[2, 0]], x[-3:].transpose(0, 1)) and not inputs[1].any()
