"""The operations of Llama's, Mistral's and Qwen's blocks against plain formulas in double precision, both backends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.host import kernels
from fugaku_megatron.nn.ops import BACKENDS, DropoutKey, Ops, recompute
from tests.parallel.test_ops import DTYPES, KEY, B, H, S, check, close, each_dtype, ops, parameter, random
from tests.threads import ThreadWorld

__all__ = ["ops"]  # the fixture
F_WIDTH, D, POSITIONS = 20, 8, 9


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-3) * weight


@each_dtype
def test_rms_norm(ops, name):
    dtype, tolerance = DTYPES[name]
    check(lambda x, w: ops.rms_norm(x, w, 1e-3), plain_rms_norm, [random(S, B, H, dtype=dtype) * 3 + 1],
          [random(H, seed=1, dtype=dtype)], tolerance)


@each_dtype
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("bias", [True, False])
def test_bias_dropout_add_rms_norm(ops, name, p, bias):
    """Both results are used, as in a layer."""
    dtype, tolerance = DTYPES[name]
    keep = ops.dropout(torch.ones(S, B, H), p, KEY).double()

    def plain(x, r, w, *b):
        total = r + (x + (b[0] if b else 0)) * keep
        return total + plain_rms_norm(total, w)

    def both(x, r, w, *b):
        total, normed = ops.bias_dropout_add_rms_norm(x, b[0] if b else None, r, p, KEY, w, 1e-3)
        return total + normed

    weights = [random(H, seed=i, dtype=dtype) for i in range(1, 3 if bias else 2)]
    check(both, plain, [random(S, B, H, dtype=dtype), random(S, B, H, seed=5, dtype=dtype)], weights, 4 * tolerance)


def plain_gated_mlp(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None) -> Tensor:
    gates, values = (x @ w.t() + (0 if b1 is None else b1[i]) for i, w in enumerate(w1))
    return (F.silu(gates) * values) @ w2.t()


@each_dtype
@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp(ops, name, bias):
    dtype, tolerance = DTYPES[name]
    weights = [random(2, F_WIDTH, H, seed=1, dtype=dtype), random(H, F_WIDTH, seed=3, dtype=dtype) / 4,
               *([random(2, F_WIDTH, seed=2, dtype=dtype)] if bias else [])]
    check(lambda x, w1, w2, b1=None: ops.gated_mlp(x, w1, b1, w2), plain_gated_mlp, [random(S, B, H, dtype=dtype)], weights,
          4 * tolerance)


def test_gated_mlp_without_values_has_the_same_gradients(ops):
    x, weights = random(S, B, H), [random(2, F_WIDTH, H, seed=1), random(H, F_WIDTH, seed=3)]
    found = []
    for needs_values in (True, False):
        leaf, (w1, w2) = x.clone().requires_grad_(), map(parameter, weights)
        y = ops.gated_mlp(leaf, w1, None, w2, needs_values)
        assert y.shape == x.shape
        y.backward(random(S, B, H, seed=9))
        found.append((leaf.grad, w1.main_grad, w2.main_grad))
    assert all(torch.equal(*pair) for pair in zip(*found))


def test_gated_mlp_of_parts_of_the_sequence():
    """Two ranks with half of the sequence and of the width each, against one rank with all."""
    x, w1, w2, dy = random(4, B, H), random(2, F_WIDTH, H, seed=1), random(H, F_WIDTH, seed=3), random(4, B, H, seed=7)
    leaf, whole1, whole2 = x.clone().requires_grad_(), parameter(w1), parameter(w2)
    Ops.build().gated_mlp(leaf, whole1, None, whole2).backward(dy)

    def half(comm):
        torch.set_num_threads(1)
        own, half1, half2 = (t.chunk(2, d)[comm.rank].contiguous() for t, d in ((x, 0), (w1, 1), (w2, 1)))
        own, half1, half2 = own.requires_grad_(), parameter(half1), parameter(half2)
        Ops.build().gated_mlp(own, half1, None, half2, sequence=comm).backward(dy)
        return own.grad, half1.main_grad, half2.main_grad

    for parts, expected, dim in zip(zip(*ThreadWorld(2).run(half)), (leaf.grad, whole1.main_grad, whole2.main_grad), (0, 1, 1)):
        close(torch.cat(parts, dim), expected.double(), 1e-6)


def wide_gated_mlp(ops, dtype, put_off=False):
    """Gradients of a gated MLP whose width takes several of the parts in which the native backward goes through it."""
    x, dy = random(S, B, H, dtype=dtype).requires_grad_(), random(S, B, H, seed=9, dtype=dtype)
    w1, b1, w2 = (parameter(random(*shape, dtype=dtype)) for shape in ((2, 1100, H), (2, 1100), (H, 1100)))
    y = ops.gated_mlp(x, w1, b1, w2)
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
    for other in (wide_gated_mlp(Ops.build(), dtype, put_off=True), wide_gated_mlp(Ops.build(keep_packed_weights=True), dtype)):
        assert all(torch.equal(*pair) for pair in zip(found, other))
    for ours, theirs in zip(found, wide_gated_mlp(Ops.build("torch"), dtype)):
        close(ours, theirs.double(), tolerance)


def test_a_gated_mlp_sums_in_fp16_on_request():
    """Eight products at a time, in all of its products; only the bias's gradient is a sum of something else, of what they left."""
    with kernels.target("portable"):
        chunked, again, exact = (wide_gated_mlp(Ops.build(fp16_chunk=chunk), torch.float16, put_off)
                                 for chunk, put_off in ((8, False), (8, True), (0, False)))
    for ours, same, other in zip(chunked, again, exact, strict=True):
        close(ours, other.double(), 1e-2)
        assert torch.equal(ours, same) and not torch.equal(ours, other)


def test_a_gated_mlp_keeps_its_input_and_the_products_result(ops):
    x = random(S, B, H).requires_grad_()
    y = ops.gated_mlp(x, parameter(random(2, F_WIDTH, H)), None, parameter(random(H, F_WIDTH)))
    node = y.grad_fn if y.grad_fn.name().endswith("GatedMLPBackward") else y.grad_fn.next_functions[0][0]
    assert sum(t.numel() for t in node.saved_tensors) == S * B * (H + 2 * F_WIDTH)


def angles(size: int) -> tuple[Tensor, Tensor]:
    turns = random(POSITIONS, size // 2, seed=4)
    return torch.cos(turns), torch.sin(turns)


def plain_rotary(qkv: Tensor, heads: int, groups: int, size: int, interleaved: bool, first: int, weights: list[Tensor]) -> Tensor:
    """Token by token and head by head, as complex numbers."""
    each, out = heads // groups, qkv.clone().view(*qkv.shape[:2], groups, heads // groups + 2, D)
    cos, sin = (a.double()[first : first + len(qkv)] for a in angles(size)) if size else (None, None)
    slots = []
    for slot in range(each + 2):
        x = out[..., slot, :]
        if weights and slot <= each:
            x = plain_rms_norm(x, weights[slot == each])
        if size and slot <= each:
            a, b = (x[..., 0:size:2], x[..., 1:size:2]) if interleaved else (x[..., : size // 2], x[..., size // 2 : size])
            z = torch.complex(a, b) * torch.complex(cos, sin)[:, None, None]
            pair = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
            x = torch.cat((pair, x[..., size:]), -1)
        slots.append(x)
    return torch.stack(slots, -2).reshape(qkv.shape)


@each_dtype
@pytest.mark.parametrize(("heads", "groups", "size", "interleaved", "norm"), [
    (2, 2, D, False, False), (4, 2, D, True, False), (4, 1, D // 2, False, True), (4, 2, 0, False, True), (2, 1, 4, True, True)])
def test_rotary(ops, name, heads, groups, size, interleaved, norm):
    dtype, tolerance = DTYPES[name]
    qkv = random(S, B, (heads + 2 * groups) * D, dtype=dtype)
    turns = angles(size) if size else None
    check(lambda x, *w: ops.rotary(x, turns, heads, groups, D, interleaved, 3, *w, epsilon=1e-3),
          lambda x, *w: plain_rotary(x, heads, groups, size, interleaved, 3, w), [qkv],
          [random(D, seed=i, dtype=dtype) for i in (1, 2)] if norm else [], 2 * tolerance)


def plain_attention(qkv: Tensor, groups: int, window: int | None, keep: Tensor) -> Tensor:
    """Row by row, each head with its group's key and value."""
    s, b, width = qkv.shape
    each = width // (groups * D) - 2
    slots, heads = qkv.view(s, b, groups, each + 2, D), []
    for head in range(groups * each):
        group, query = divmod(head, each)
        q, k, v = (slots[:, :, group, slot].transpose(0, 1) for slot in (query, each, each + 1))  # (b, s, d)
        distance = torch.arange(s)[:, None] - torch.arange(s)
        scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill((distance < 0) | (distance >= (window or s)), float("-inf"))
        heads.append((torch.softmax(scores, -1) * keep[:, head]) @ v)
    return torch.cat(heads, -1).transpose(0, 1)


@each_dtype
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize(("heads", "groups", "window"), [(4, 2, None), (4, 1, 3), (2, 2, 1), (3, 3, 4), (4, 2, 7), (6, 2, 2)])
def test_attention_of_groups_and_windows(ops, name, p, heads, groups, window):
    dtype, tolerance = DTYPES[name]
    key = DropoutKey(5, 9, 40, sample_dim=0, row0=6)
    keep = ops.dropout(torch.ones(B, heads, 6, 6), p, key).double()
    check(lambda x: ops.attention(x, D, p, key, groups, window), lambda x: plain_attention(x, groups, window, keep),
          [random(6, B, (heads + 2 * groups) * D, dtype=dtype)], [], 4 * tolerance)


@pytest.mark.parametrize(("heads", "groups", "window", "d"), [(6, 2, None, 16), (4, 1, 70, 64), (3, 3, 20, 80), (7, 1, 300, 8)])
def test_native_attention_equals_torchs_over_many_tiles(heads, groups, window, d):
    """With dropout, and recomputed in backward; a tensor-parallel rank's heads begin at row0."""
    s, key = 210, DropoutKey(5, 9, 40, sample_dim=0, row0=210 * heads)
    qkv, dout, found = random(s, 2, (heads + 2 * groups) * d), random(s, 2, heads * d, seed=3), []
    for backend in BACKENDS:
        ops, leaf = Ops.build(backend), qkv.clone().requires_grad_()
        out = recompute(lambda x, ops=ops: ops.attention(x, d, 0.2, key, groups, window), leaf)
        out.backward(dout)
        found.append((out.detach(), leaf.grad))
    for native, other in zip(*found):
        close(native, other.double(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_attention_to_kept_keys_equals_torchs(dtype):
    """Three steps of two of three samples; the caches go round."""
    heads, groups, d, slots = 6, 2, 16, 3
    caches = [[random(3, groups, slots, d, seed=i, dtype=dtype) for i in range(2)] for _ in BACKENDS]
    for position in range(4, 7):
        qkv, positions = random(2, 1, (heads + 2 * groups) * d, seed=position, dtype=dtype), torch.tensor([position, position - 4])
        native, other = (Ops.build(backend).cached_attention(qkv, *cache, torch.tensor([2, 0]), positions)
                         for backend, cache in zip(BACKENDS, caches))
        close(native, other.double(), 1e-5 if dtype == torch.float32 else 2e-2)
        assert all(torch.equal(*pair) for pair in zip(*caches))


def test_attention_of_a_ranks_groups_is_that_of_all():
    """Half of the heads with their groups, as tensor-parallel ranks hold them: the same bits and the same dropout."""
    s, d, ops = 50, 8, Ops.build()
    qkv = random(s, 2, (6 + 2 * 2) * d)
    whole = ops.attention(qkv, d, 0.3, DropoutKey(5, 9, 40, sample_dim=0), 2, 20)
    halves = [ops.attention(half, d, 0.3, DropoutKey(5, 9, 40, sample_dim=0, row0=s * 3 * rank), 1, 20)
              for rank, half in enumerate(qkv.chunk(2, -1))]
    assert torch.equal(torch.cat(halves, -1), whole)


def test_packed_copies_of_a_gated_weight_are_kept():
    """The product takes the two matrices as one, which is the same one at every call."""
    ops = Ops.build(keep_packed_weights=True)
    x, w1, w2 = random(S, B, H).requires_grad_(), parameter(random(2, F_WIDTH, H)), parameter(random(H, F_WIDTH))
    for _ in range(3):
        ops.gated_mlp(x, w1, None, w2).sum().backward()
    assert len(ops.weight_cache._entries) == 4  # two weights, forward and backward
