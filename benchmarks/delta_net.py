"""The gated delta rule, its convolution and its norm against the code of Hugging Face's transformers (models/qwen3_next).

The baseline of the rule is torch_chunk_gated_delta_rule, forward and by autograd; of one token torch_recurrent_gated_delta_rule; of
the convolution torch's conv1d with SiLU, as the model calls it; of the norm Qwen3NextRMSNormGated. Both sides normalise queries and
keys. Both read (s, b, channels); torch's side works on views of it. FLOPs are counted as in kernels_sve/kernels.inc. Default sizes
are those of Qwen3-Next and of Qwen3.5 and Qwen3.6 with experts, at tensor-parallel size 8: 2 key heads, 4 value heads, 128 columns.
Time grows linearly with --seq-length. Needs transformers.

    python -m benchmarks delta_net --only delta_rule
    python -m benchmarks delta_net --seq-length 131072 --key-heads 1 --value-heads 1 --only delta_rule_forward
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.config.fields import check
from fugaku_megatron.host import kernels
from fugaku_megatron.nn.ops.delta_net import DeltaHeads

from . import driver, preloads
from .driver import DTYPES, Call, Case, relative_error

TORCH_HERE = True
TAPS = 4
EPSILON = 1e-6
TRANSFORMERS = "transformers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of a rank's layer."""
    driver.add_arguments(parser)
    parser.add_argument("--seq-length", type=int, default=8192, metavar="N")
    for name, default in (
        ("key-heads", 2),
        ("value-heads", 4),
        ("key-size", 128),
        ("value-size", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.set_defaults(mkl=preloads.BOTH)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the rule in forward, with backward, and of the next token; the convolution and the norm."""
    heads = DeltaHeads(options.key_heads, options.value_heads, options.key_size, options.value_size)
    check(
        heads.value_heads % heads.key_heads == 0,
        f"--value-heads {heads.value_heads}: pass a multiple of --key-heads, {heads.key_heads}",
    )
    torch.manual_seed(0)
    yield from rules(options, heads)
    yield decoding(options, heads)
    yield convolution(options, heads)
    yield norm(options, heads)


def channels(heads: DeltaHeads) -> int:
    return 2 * heads.key_heads * heads.key_size + heads.value_heads * heads.value_size


def reference(name: str) -> Any:
    """Return an object of transformers' model."""
    try:
        from transformers.models.qwen3_next import modeling_qwen3_next
    except ImportError as error:
        raise ValueError(
            "benchmarks delta_net: a package is missing: pip install transformers"
        ) from error
    return getattr(modeling_qwen3_next, name)


def rules(options: argparse.Namespace, heads: DeltaHeads) -> Iterator[Case]:
    """Yield the rule in forward, and in forward with backward."""
    s = options.seq_length
    b = options.micro_batch_size
    n = heads.value_heads
    dtype = DTYPES[options.dtype]
    qkv = torch.randn(s, b, channels(heads)).to(dtype)
    decay = -torch.rand(s, b, n) / 8
    beta = torch.rand(s, b, n)
    segments = -(-s // kernels.DELTA_SEGMENT)
    states = torch.zeros(segments + 1, b, n, heads.key_size, heads.value_size)
    out = torch.empty(s, b, n * heads.value_size, dtype=dtype)
    dout = torch.randn(out.shape).to(dtype)
    dqkv = torch.empty_like(qkv)
    ddecay = torch.empty_like(decay)
    dbeta = torch.empty_like(beta)
    dstate = torch.zeros(states.shape[1:])
    forward = Call("delta_rule_forward", qkv, decay, beta, states, out)
    backward = Call(
        "delta_rule_backward", qkv, decay, beta, states, dout, dstate, dqkv, ddecay, dbeta
    )
    leaves = [x.detach().clone().requires_grad_() for x in (qkv, decay, beta)]
    chunk_rule = reference("torch_chunk_gated_delta_rule")

    def their_forward() -> Tensor:
        return called(chunk_rule, heads, *leaves)

    def their_both() -> None:
        for leaf in leaves:
            leaf.grad = None
        their_forward().backward(dout)

    def forward_error() -> float:
        with torch.no_grad():
            return relative_error(out, their_forward().double())

    def gradient_error() -> float:
        their_both()
        pairs = zip((dqkv, ddecay, dbeta), leaves, strict=True)
        return max(relative_error(ours, leaf.grad.double()) for ours, leaf in pairs)

    common: dict[str, Any] = {
        "shape": (s, *heads),
        "baseline": TRANSFORMERS,
        "details": {"micro_batch_size": b},
    }
    yield Case(
        op="delta_rule_forward",
        calls=(forward,),
        baseline_run=torch.no_grad()(their_forward),
        error=forward_error,
        **common,
    )
    yield Case(
        op="delta_rule",
        calls=(forward, backward),
        baseline_run=their_both,
        error=gradient_error,
        **common,
    )


def called(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    heads: DeltaHeads,
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    **state: Any,
) -> Tensor:
    """Return the result (s, b, value_heads value_size) of a function of transformers, which takes (b, s, heads, size)."""
    queries, keys, values = heads.split(qkv)
    queries, keys, values = (x.transpose(0, 1) for x in (queries, keys, values.flatten(2, 3)))
    results, _ = rule(
        queries,
        keys,
        values,
        g=decay.transpose(0, 1),
        beta=beta.transpose(0, 1),
        use_qk_l2norm_in_kernel=True,
        **state,
    )
    return results.transpose(0, 1).flatten(2)


def decoding(options: argparse.Namespace, heads: DeltaHeads) -> Case:
    """Return the case of one token of each of --micro-batch-size samples."""
    rows = options.micro_batch_size
    qkv = torch.randn(rows, channels(heads)).to(DTYPES[options.dtype])
    decay = -torch.rand(rows, heads.value_heads) / 8
    beta = torch.rand(rows, heads.value_heads)
    states = torch.randn(rows, heads.value_heads, heads.key_size, heads.value_size)
    first = states.clone()
    out = torch.empty(rows, heads.value_heads * heads.value_size, dtype=qkv.dtype)
    step = reference("torch_recurrent_gated_delta_rule")

    def baseline() -> Tensor:
        one = (x.unsqueeze(0) for x in (qkv, decay, beta))
        return called(step, heads, *one, initial_state=first, output_final_state=True)[0]

    return Case(
        op="delta_rule_decode",
        shape=tuple(heads),
        calls=(Call("delta_rule_decode", qkv, decay, beta, states, torch.arange(rows), out),),
        baseline=TRANSFORMERS,
        baseline_run=torch.no_grad()(baseline),
        error=lambda: relative_error(out, baseline().double()),
        details={"micro_batch_size": rows},
    )


def convolution(options: argparse.Namespace, heads: DeltaHeads) -> Case:
    """Return the case of forward and backward."""
    b = options.micro_batch_size
    dtype = DTYPES[options.dtype]
    x = torch.randn(options.seq_length, b, channels(heads)).to(dtype)
    weight = torch.randn(channels(heads), TAPS).to(dtype)
    y = torch.empty_like(x)
    dy = torch.randn_like(x)
    dx = torch.empty_like(x)
    dweight = torch.zeros(weight.shape)
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]

    def baseline() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        rows = leaves[0].permute(1, 2, 0)
        total = F.conv1d(rows, leaves[1].unsqueeze(1), padding=TAPS - 1, groups=rows.shape[1])
        result = F.silu(total[..., : rows.shape[-1]]).permute(2, 0, 1)
        result.backward(dy)
        return result.detach()

    def error() -> float:
        result = baseline()
        return max(map(relative_error, (y, dx), (result.double(), leaves[0].grad.double())))

    return Case(
        op="convolution",
        shape=tuple(x.shape),
        calls=(
            Call("convolution_forward", x, weight, y),
            Call("convolution_backward", dy, x, weight, dx, dweight),
        ),
        baseline=TRANSFORMERS,
        baseline_run=baseline,
        error=error,
    )


def norm(options: argparse.Namespace, heads: DeltaHeads) -> Case:
    """Return the case of forward and backward."""
    tokens = options.seq_length * options.micro_batch_size
    dtype = DTYPES[options.dtype]
    shape = (tokens, heads.value_heads, heads.value_size)
    x, gate, dy = (torch.randn(shape).to(dtype) for _ in range(3))
    weight = torch.randn(heads.value_size).to(dtype)
    y, dx, dgate = (torch.empty_like(x) for _ in range(3))
    dweight = torch.zeros(weight.shape)
    module = reference("Qwen3NextRMSNormGated")(heads.value_size, EPSILON).to(dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    leaves = [t.detach().clone().requires_grad_() for t in (x, gate)]

    def baseline() -> Tensor:
        for leaf in (*leaves, module.weight):
            leaf.grad = None
        result = module(*leaves)
        result.backward(dy)
        return result.detach()

    def error() -> float:
        wanted = (baseline(), *(leaf.grad for leaf in leaves))
        return max(relative_error(*pair) for pair in zip((y, dx, dgate), wanted, strict=True))

    return Case(
        op="gated_norm",
        shape=shape,
        calls=(
            Call("gated_norm", x, gate, weight, y, EPSILON),
            Call("gated_norm_backward", dy, x, gate, weight, dx, dgate, dweight, EPSILON),
        ),
        baseline=TRANSFORMERS,
        baseline_run=baseline,
        error=error,
    )


measure, text = driver.family(cases)
