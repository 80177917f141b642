"""Operations of dense MLPs and of experts: parameters, matmuls, saved activations and communicated bytes.

Ranks are assumed to have equally many tokens for their experts. Legend: as in `layers`, f expert width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..config.model import ModelConfig
from ..config.rows import ACTIVATIONS
from ..config.run_config import RunConfig
from .records import (
    COMBINE,
    DISPATCH,
    EXPERTS,
    SHARED,
    Collective,
    Collectives,
    MatmulCollectives,
    Record,
    Records,
    linear,
)
from .sizes import FP32_BYTES


def mlp_width(model: ModelConfig) -> int:
    """Return a token's elements between the two matmuls, over its experts."""
    if not model.num_experts:
        return model.ffn_hidden_size
    return model.moe_router_topk * model.expert_width + model.shared_expert_width


def mlp_records(run: RunConfig, name: str, width: int, saved_bytes: int = 0) -> Records:
    """Return both matmuls, named `name`_fc1 and `name`_fc2, and the activation.

    width: of all ranks. saved_bytes: of the input.
    """
    model = run.model
    around = MatmulCollectives.from_run(run)
    rows = run.tokens_per_microbatch
    h = model.hidden_size
    f = width // run.tp
    fc1 = model.fc1_widths * f
    biases = (0, 0) if model.disable_bias_linear else (fc1, h)
    scalars = len(ACTIVATIONS[model.activation].parameters)
    return (
        around.column(f"{name}_fc1", (rows, fc1, h), bias=biases[0], saved_bytes=saved_bytes),
        Record(
            name=model.activation,
            parameters=scalars,
            replicated=scalars,
            of_heads=scalars,
            saved_bytes=rows * fc1 * run.element_bytes,
        ),
        around.row(f"{name}_fc2", (rows, h, f), bias=biases[1], replicated=biases[1]),
    )


# Expert groups of a rank, at most: neither the first dispatch nor the last combine is overlapped.
EXCHANGED_GROUPS = 8


def exchanged_groups(held: int) -> int:
    """Return how many equal expert groups are sent one after another."""
    return max(groups for groups in range(1, EXCHANGED_GROUPS + 1) if held % groups == 0)


def routed_pairs(run: RunConfig) -> int:
    """Count the (token, expert) pairs that a rank routes."""
    return run.tokens_per_microbatch * run.model.moe_router_topk // run.sequence_shards


def computed_pairs(run: RunConfig) -> int:
    """Count the (token, expert) pairs that a rank's experts compute."""
    return run.tokens_per_microbatch * run.model.moe_router_topk * run.etp // run.tp


class PairBytes(NamedTuple):
    """Routed tensors' bytes on a rank: (pairs, h), (pairs, f), and the shared expert's (s, b, f)."""

    hidden: int
    inner: int
    shared: int


def _pair_bytes(run: RunConfig) -> PairBytes:
    model = run.model
    width = run.element_bytes
    pairs = computed_pairs(run)
    shared = model.shared_expert_width
    return PairBytes(
        hidden=pairs * model.hidden_size * width,
        inner=pairs * model.expert_width * width // run.etp,
        shared=run.tokens_per_microbatch * shared * width // run.tp,
    )


def waiting_bytes(run: RunConfig) -> int:
    """Return the bytes that experts keep between the halves of a split backward.

    Experts: inputs, output gradients, the second matmul's input and the pre-activation's gradient. Shared expert: the output gradient,
    the pre-activation and its gradient; the router saves the input.
    """
    hidden, inner, shared = _pair_bytes(run)
    widths = run.model.fc1_widths
    return (
        run.activation_bytes * (2 if shared else 1)
        + 2 * hidden
        + (1 + widths) * inner
        + 2 * widths * shared
    )


def pair_working_bytes(run: RunConfig) -> int:
    """Return the temporary bytes of the experts' backward, less the memory that the shared expert's
    backward has freed.

    The pre-activation's gradient exists first with the output gradients and the second matmul's
    input, then with the input and its gradient.
    """
    hidden, inner, shared = _pair_bytes(run)
    widths = run.model.fc1_widths
    freed = widths * shared
    if run.model.moe_shared_expert_gate:
        freed += run.residual_bytes
    return hidden + max(hidden, inner) + widths * inner - freed


# Saved indices of a pair: its expert, and its positions in expert order and in token order.
NUMBER_BYTES = 3 * 8
# Saved indices of a received row: its positions in this rank's expert order and in arrival order.
RECEIVED_BYTES = 2 * 8
COUNT_BYTES = 4  # a token count, reduced as FP32


def expert_records(run: RunConfig) -> Records:
    """Return the operations in a layer's experts, each with the mean number of rows."""
    model = run.model
    divided = run.parallel.divides_experts
    pairs = computed_pairs(run)
    h = model.hidden_size
    f = model.expert_width // run.etp
    local_experts = model.expert_count // run.ep
    mean_rows = -(-pairs // local_experts)
    around = _divided_collectives(run) if divided else _expert_collectives(run)

    def grouped(name: str, outputs: int, inputs: int, replicated: int = 0) -> Record:
        matmul = linear(name, (pairs, outputs, inputs))
        bias = 0 if model.disable_bias_linear else outputs
        size = local_experts * (outputs * inputs + bias)
        return replace(
            matmul,
            gemm=(mean_rows, outputs, inputs),
            gemm_count=local_experts,
            grouped=True,
            expert_step=EXPERTS,
            parameters=size,
            replicated=replicated,
            of_heads=replicated,
            divided=size if divided else 0,
        )

    # Ranks that share an expert have its second bias.
    is_shared = not divided or run.etp > 1
    second_bias = local_experts * h if is_shared and not model.disable_bias_linear else 0

    activation_bytes = pairs * model.fc1_widths * f * run.element_bytes
    shared = model.moe_shared_expert_intermediate_size
    return (
        _router(run),
        Record(
            name="order",
            expert_step=DISPATCH,
            forward=around.into,
            backward=around.into_backward,
            saved_bytes=_order_bytes(run),
        ),
        grouped("linear_fc1", model.fc1_widths * f, h),
        Record(name=model.activation, saved_bytes=activation_bytes),
        replace(grouped("linear_fc2", h, f, second_bias), ends_layer=True),
        Record(
            name="experts_sum",
            expert_step=COMBINE,
            ends_layer=True,
            forward=around.out,
            backward=around.out_backward,
        ),
        *(_shared_expert(run, shared) if shared else ()),
    )


def _router(run: RunConfig) -> Record:
    model = run.model
    e = model.expert_count
    shards = run.sequence_shards
    rows = run.tokens_per_microbatch // shards
    parameters = e * model.hidden_size
    if model.moe_router_enable_expert_bias:
        parameters += e
    if not model.disable_bias_linear:
        parameters += e
    tables = len(model.balances)  # saved (rows, e + 1) tables; users of the logits share one
    if (
        model.moe_z_loss_coeff
        or model.moe_router_pre_softmax
        or model.moe_router_score_function == "sigmoid"
    ):
        tables += 1
    if model.sinkhorn:
        tables += 1
    saved = rows * (e + 1) * tables + e * len(model.balances)
    return replace(
        linear(
            "router",
            (rows, e, model.hidden_size),
            saved_bytes=run.residual_bytes + saved * FP32_BYTES,
            forward=_balance_collectives(run, shards),
        ),
        parameters=parameters,
        replicated=parameters,
        quantizes=False,
    )


def _order_bytes(run: RunConfig) -> int:
    """Return the saved bytes of the dispatch order, and of the experts' input if different."""
    here = computed_pairs(run)
    if run.parallel.divides_experts:
        received = here * (FP32_BYTES + RECEIVED_BYTES) + _pair_bytes(run).hidden
        return routed_pairs(run) * NUMBER_BYTES + received
    shards = run.sequence_shards
    saved = here * (FP32_BYTES + NUMBER_BYTES) + here // shards * FP32_BYTES
    return saved + run.activation_bytes if shards > 1 else saved


def _balance_collectives(run: RunConfig, shards: int) -> Collectives:
    experts = run.model.expert_count
    if shards == 1:
        return ()
    if run.model.sinkhorn:
        logits = run.tokens_per_microbatch // shards * experts * FP32_BYTES
        return (Collective("all_gather", "tp", logits),)
    samples = {"aux_loss": 1, "seq_aux_loss": run.batch.micro_batch_size}
    return tuple(
        Collective("all_reduce", "tp", experts * samples[kind] * COUNT_BYTES)
        for kind, _ in run.model.balances
    )


def _expert_collectives(run: RunConfig) -> MatmulCollectives:
    pairs = run.tokens_per_microbatch * run.model.moe_router_topk
    rows, scores, chosen = (
        MatmulCollectives.from_run(run, size)
        for size in (run.activation_bytes, pairs * FP32_BYTES, pairs * 8)
    )
    return replace(
        rows,
        into=(*rows.into, *scores.into, *chosen.into),
        into_backward=(*scores.into_backward[-1:], *rows.into_backward[-1:]),
    )


def _divided_collectives(run: RunConfig) -> MatmulCollectives:
    model = run.model
    row = run.model.hidden_size * run.element_bytes
    e = run.model.expert_count
    chosen = routed_pairs(run)
    here = computed_pairs(run)

    def sent(rows: int, *sizes: int, group: str = "ep") -> Collectives:
        ranks = run.ep if group == "ep" else run.etp
        if ranks == 1:
            return ()
        return tuple(Collective("all_to_all", group, rows * size) for size in sizes)

    capacity = (
        model.moe_expert_capacity_factor is not None
        and chosen < run.tokens_per_microbatch * model.moe_router_topk
    )
    counts = []
    if capacity:
        counts += [Collective("all_gather", "tp", chosen * size) for size in (FP32_BYTES, 8)]
    counts += [
        Collective("all_gather", group, e * 8)
        for group, ranks in (("ep", run.ep), ("etp", run.etp))
        if ranks > 1
    ]
    if run.ep > 1 and run.etp > 1 and (groups := exchanged_groups(e // run.ep)) > 1:
        counts.append(Collective("all_reduce", "etp", groups * 8))  # for the order of groups
    dispatch = (*sent(chosen, row, FP32_BYTES), *sent(here, row, FP32_BYTES, group="etp"))
    return MatmulCollectives(
        into=(*counts, *dispatch),
        into_backward=dispatch[::-1],
        out=(*sent(here, row, group="etp"), *sent(chosen, row)),
        out_backward=(*sent(chosen, row), *sent(here, row, group="etp")),
    )


def _shared_expert(run: RunConfig, width: int) -> Records:
    mlp = mlp_records(run, "shared", width)
    records = tuple(replace(record, expert_step=SHARED) for record in mlp)
    if not run.model.moe_shared_expert_gate:
        return records
    own = run.tokens_per_microbatch // run.sequence_shards
    h = run.model.hidden_size
    saved = run.residual_bytes + own * (FP32_BYTES + run.element_bytes % FP32_BYTES)
    gate = linear("shared_gate", (own, 1, h), saved_bytes=saved, replicated=h)
    return *records, replace(gate, quantizes=False)
