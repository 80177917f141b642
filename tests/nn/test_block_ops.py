"""More of the operations of Llama's, Mistral's and Qwen's blocks, whose formulas are in test_ops.py."""

from functools import partial

import pytest
import torch
from torch import Tensor

from fugaku_megatron.host import kernels
from fugaku_megatron.nn.attention.heads import Heads
from fugaku_megatron.nn.dropout_key import Dropout
from fugaku_megatron.nn.ops import BACKENDS, DropoutKey, Ops, recompute
from fugaku_megatron.nn.ops.activation import Activation
from fugaku_megatron.nn.ops.mlp import MLPWeights
from fugaku_megatron.nn.ops.rotary import HeadNorms, Rotary
from tests.checks.ops import (
    DTYPES,
    B,
    H,
    S,
    check,
    close,
    each_dtype,
    ops,
    parameter,
    plain_rms_norm,
    random,
)

pytestmark = pytest.mark.parallel

__all__ = ["ops"]  # the fixture
F_WIDTH = 20
D = 8
POSITIONS = 9


def wide_gated_mlp(ops, dtype, put_off=False):
    """Gradients of a gated MLP whose width takes several of the parts in which the native backward goes through it."""
    x = random(S, B, H, dtype=dtype).requires_grad_()
    dy = random(S, B, H, seed=9, dtype=dtype)
    w1, b1, w2 = (
        parameter(random(*shape, dtype=dtype)) for shape in ((2, 1100, H), (2, 1100), (H, 1100))
    )
    y = ops.mlp(x, MLPWeights(w1, b1, w2, Activation("swiglu")))
    if put_off:
        with ops.weight_gradients.put_off() as waiting:
            y.backward(dy)
        waiting.run()
    else:
        y.backward(dy)
    return y.detach(), x.grad, w1.main_grad, b1.main_grad, w2.main_grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_wide_gated_mlp_by_parts_of_its_columns(dtype, tolerance):
    """The same bits at once, with weight gradients put off and with packed weights, and torch's numbers."""
    found = wide_gated_mlp(Ops.build(), dtype)
    for other in (
        wide_gated_mlp(Ops.build(), dtype, put_off=True),
        wide_gated_mlp(Ops.build(keep_packed_weights=True), dtype),
    ):
        assert all(torch.equal(*pair) for pair in zip(found, other))
    for ours, theirs in zip(found, wide_gated_mlp(Ops.build("torch"), dtype)):
        close(ours, theirs.double(), tolerance)


def test_a_gated_mlp_sums_in_fp16_on_request():
    """Eight terms at a time, in all of its matmuls; only the bias's gradient is another sum, of what they left."""
    with kernels.target("portable"):
        chunked, again, exact = (
            wide_gated_mlp(Ops.build(fp16_sum_length=chunk), torch.float16, put_off)
            for chunk, put_off in ((8, False), (8, True), (0, False))
        )
    for ours, same, other in zip(chunked, again, exact, strict=True):
        close(ours, other.double(), 1e-2)
        assert torch.equal(ours, same) and not torch.equal(ours, other)


def angles(size: int) -> tuple[Tensor, Tensor]:
    turns = random(POSITIONS, size // 2, seed=4)
    return torch.cos(turns), torch.sin(turns)


def plain_rotary(
    qkv: Tensor,
    heads: int,
    groups: int,
    size: int,
    interleaved: bool,
    first: int,
    weights: list[Tensor],
) -> Tensor:
    """Token by token and head by head, as complex numbers."""
    each = heads // groups
    out = qkv.clone().view(*qkv.shape[:2], groups, heads // groups + 2, D)
    cos, sin = (
        (a.double()[first : first + len(qkv)] for a in angles(size)) if size else (None, None)
    )
    slots = []
    for slot in range(each + 2):
        x = out[..., slot, :]
        if weights and slot <= each:
            x = plain_rms_norm(x, weights[slot == each])
        if size and slot <= each:
            a, b = (
                (x[..., 0:size:2], x[..., 1:size:2])
                if interleaved
                else (x[..., : size // 2], x[..., size // 2 : size])
            )
            z = torch.complex(a, b) * torch.complex(cos, sin)[:, None, None]
            pair = (
                torch.stack((z.real, z.imag), -1).flatten(-2)
                if interleaved
                else torch.cat((z.real, z.imag), -1)
            )
            x = torch.cat((pair, x[..., size:]), -1)
        slots.append(x)
    return torch.stack(slots, -2).reshape(qkv.shape)


@each_dtype
@pytest.mark.parametrize(
    ("heads", "groups", "size", "interleaved", "norm"),
    [
        (2, 2, D, False, False),
        (4, 2, D, True, False),
        (4, 1, D // 2, False, True),
        (4, 2, 0, False, True),
        (2, 1, 4, True, True),
    ],
)
def test_rotary(ops, name, heads, groups, size, interleaved, norm):
    dtype, tolerance = DTYPES[name]
    qkv = random(S, B, (heads + 2 * groups) * D, dtype=dtype)
    turns = None
    if size:
        cosines, sines = angles(size)
        turns = (cosines[3:], sines[3:])

    def rotary(x, *weights):
        norms = HeadNorms(*weights, epsilon=1e-3) if norm else None
        return ops.rotary(x, Rotary(turns, Heads(heads, groups, D), interleaved, norms))

    check(
        rotary,
        lambda x, *w: plain_rotary(x, heads, groups, size, interleaved, 3, w),
        [qkv],
        [random(D, seed=i, dtype=dtype) for i in (1, 2)] if norm else [],
        2 * tolerance,
    )


@pytest.mark.parametrize(
    ("heads", "groups", "window", "d"), [(6, 2, None, 16), (4, 1, 70, 64), (3, 3, 20, 80)]
)
def test_native_attention_equals_torchs_over_many_tiles(heads, groups, window, d):
    """With dropout, and recomputed in backward; a tensor-parallel rank's heads begin at row0."""
    s = 210
    key = DropoutKey(5, 9, 40, sample_dim=0, row0=210 * heads)
    qkv = random(s, 2, (heads + 2 * groups) * d)
    dout = random(s, 2, heads * d, seed=3)
    found = []
    for backend in BACKENDS:
        ops = Ops.build(backend)
        leaf = qkv.clone().requires_grad_()
        attention = partial(
            ops.attention,
            heads=Heads(heads, groups, d),
            dropped=Dropout(0.2, key),
            window=window,
        )
        out = recompute(attention, leaf)
        out.backward(dout)
        found.append((out.detach(), leaf.grad))
    for native, other in zip(*found):
        close(native, other.double(), 1e-5)


def test_packed_copies_of_a_gated_weight_are_kept():
    """The matmul takes the two matrices as one, which is the same one at every call."""
    ops = Ops.build(keep_packed_weights=True)
    x = random(S, B, H).requires_grad_()
    w1 = parameter(random(2, F_WIDTH, H))
    w2 = parameter(random(H, F_WIDTH))
    for _ in range(3):
        ops.mlp(x, MLPWeights(w1, None, w2, Activation("swiglu"))).sum().backward()
    assert len(ops.weight_cache._entries) == 4  # two weights, forward and backward
