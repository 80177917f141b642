"""What a layer's experts cost: their parameters, matmuls, saved activations and communicated bytes. Pure integers, no torch.

Legend: s sequence, b micro-batch, h hidden, f width of an expert, e experts, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace

from ..config.layout import sequence_parts
from ..config.run_config import ModelConfig, RunConfig
from .activations import (
    FP32_BYTES,
    Collective,
    MatmulCollectives,
    Record,
    activation_bytes,
    all_reduce,
    element_bytes,
    linear,
    residual_bytes,
    tokens_per_microbatch,
)


def typical_mlp(model: ModelConfig) -> str:
    """The row of MLPS that stands for all layers where these are taken as equal."""
    return "experts" if model.num_experts else model.activation


def mlp_width(model: ModelConfig) -> int:
    """Elements of a token between the two matmuls of the MLP, or of all its experts."""
    if not model.num_experts:
        return model.ffn_hidden_size
    return model.moe_router_topk * (model.moe_ffn_hidden_size or 0) + (model.moe_shared_expert_intermediate_size or 0)


def _pair_bytes(run: RunConfig, tp: int) -> tuple[int, int, int]:
    """Bytes of a tensor with a row for each token and each of its experts, (n, h) and (n, f), and of the shared one's (s, b, f)."""
    model, rows, width = run.model, tokens_per_microbatch(run), element_bytes(run)
    pairs = rows * model.moe_router_topk
    return (pairs * model.hidden_size * width, pairs * (model.moe_ffn_hidden_size or 0) * width // tp,
            rows * (model.moe_shared_expert_intermediate_size or 0) * width // tp)


def waiting_bytes(run: RunConfig, tp: int) -> int:
    """What experts keep between the two halves of a split backward: the router's input, and both operands of all matmuls.

    Of the experts, inputs and gradients of results in the order of experts, what the second matmul reads, and the gradient of the
    gates; of the shared expert, which has the router's input, the gradient of its result, the gates and their gradient.
    """
    hidden, inner, shared = _pair_bytes(run, tp)
    return activation_bytes(run) * (2 if shared else 1) + 2 * hidden + 3 * inner + 4 * shared


def pair_working_bytes(run: RunConfig, tp: int) -> int:
    """Tensors of all pairs that the experts' backward needs for itself, without what the shared expert's has freed before it."""
    hidden, inner, shared = _pair_bytes(run, tp)
    return 3 * hidden + 5 * inner - 2 * shared - residual_bytes(run, tp) * run.model.moe_shared_expert_gate


NUMBER_BYTES = 3 * 8  # kept of a token and one of its experts: the expert, and where the pair is in the order of experts and back
COUNT_BYTES = 4  # of a number of tokens, which ranks add up as FP32


def expert_records(run: RunConfig, tp: int) -> tuple[Record, ...]:
    """The operations of a layer's experts. An expert's matmuls have the mean number of rows."""
    model, width, rows = run.model, element_bytes(run), tokens_per_microbatch(run)
    e, h, f, parts = model.num_experts or 0, model.hidden_size, (model.moe_ffn_hidden_size or 0) // tp, sequence_parts(run, tp)
    pairs, own = rows * model.moe_router_topk, rows // parts
    each = -(-pairs // e)
    router = e * h + e * model.moe_router_enable_expert_bias
    tables = len(model.balances) + bool(model.moe_z_loss_coeff) + (model.moe_router_pre_softmax or
                                                                    model.moe_router_score_function == "sigmoid")
    kept = own * (e + 1) * tables + e * len(model.balances)
    counted, into, back = _expert_collectives(run, tp)

    def grouped(name: str, outputs: int, inputs: int, saved: int) -> Record:
        matmul = linear(name, pairs, outputs, inputs, 0, saved, (), ())
        return replace(matmul, gemm=(each, outputs, inputs), gemm_count=e, parameters=e * outputs * inputs)

    return (
        replace(linear("router", own, e, h, 0, residual_bytes(run, tp) + kept * FP32_BYTES, counted, ()),
                parameters=router, replicated=router),
        Record(name="order", forward=into, backward=back,
               saved_bytes=pairs * (FP32_BYTES + NUMBER_BYTES) + pairs // parts * FP32_BYTES + activation_bytes(run) * (parts > 1)),
        grouped("linear_fc1", 2 * f, h, 0),
        Record(name="swiglu", saved_bytes=pairs * 2 * f * width),
        grouped("linear_fc2", h, f, 0),
        Record(name="experts_sum", forward=MatmulCollectives.from_run(run, tp).out,
               backward=MatmulCollectives.from_run(run, tp).out_backward),
        *(_shared_expert(run, tp) if model.moe_shared_expert_intermediate_size else ()),
    )


def _expert_collectives(run: RunConfig, tp: int) -> tuple[tuple[Collective, ...], ...]:
    """(of balancing losses, of what enters the experts, of its gradients)."""
    pairs, whole = tokens_per_microbatch(run) * run.model.moe_router_topk, activation_bytes(run)
    if sequence_parts(run, tp) == 1:
        return (), (), (*all_reduce(pairs * FP32_BYTES, tp), *all_reduce(whole, tp))
    samples = {"aux_loss": 1, "seq_aux_loss": run.batch.micro_batch_size}
    counts = tuple(Collective("all_reduce", "tp", (run.model.num_experts or 0) * samples[kind] * COUNT_BYTES)
                   for kind, _ in run.model.balances)
    sizes = whole, pairs * FP32_BYTES
    gathers = (*(Collective("all_gather", "tp", size // tp) for size in sizes), Collective("all_gather", "tp", pairs * 8 // tp))
    return counts, gathers, tuple(Collective("reduce_scatter", "tp", size) for size in sizes)


def _shared_expert(run: RunConfig, tp: int) -> tuple[Record, ...]:
    model, around, rows = run.model, MatmulCollectives.from_run(run, tp), tokens_per_microbatch(run)
    h, f, gated = model.hidden_size, (model.moe_shared_expert_intermediate_size or 0) // tp, model.moe_shared_expert_gate
    own = rows // sequence_parts(run, tp)
    kept = residual_bytes(run, tp) + own * (FP32_BYTES + element_bytes(run) % FP32_BYTES)
    gate = replace(linear("shared_gate", own, 1, h, 0, kept, (), ()), replicated=h)
    return (linear("shared_fc1", rows, 2 * f, h, 0, 0, around.into, around.into_backward),
            Record(name="swiglu", saved_bytes=rows * 2 * f * element_bytes(run)),
            linear("shared_fc2", rows, h, f, 0, 0, around.out, around.out_backward), *[gate] * gated)
