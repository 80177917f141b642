"""What a layer's experts cost: their parameters, matmuls, saved activations and communicated bytes. Pure integers, no torch.

Where ranks have different experts, every expert is taken to have as many tokens.
Legend: s sequence, b micro-batch, h hidden, f width of an expert, e experts, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    return model.moe_router_topk * (model.moe_ffn_hidden_size or 0) + (
        model.moe_shared_expert_intermediate_size or 0
    )


EXCHANGED_GROUPS = 8  # of the experts of a rank, at most: the rows of the first there, and of the last back, hide nothing


def exchanged_groups(held: int) -> int:
    """Groups of equally many of the `held` experts of a rank, whose rows are sent one after another."""
    return max(groups for groups in range(1, EXCHANGED_GROUPS + 1) if held % groups == 0)


@dataclass(frozen=True)
class Division:
    """How ranks share experts: ep of them have different ones, and etp share each. divided: in another way than other matrices.

    chosen: pairs of a token and an expert that a rank routes itself. here: those that its experts compute.
    """

    ep: int
    etp: int
    divided: bool
    chosen: int
    here: int

    @staticmethod
    def of(run: RunConfig, tp: int) -> Division:
        parallel = run.parallel
        pairs = tokens_per_microbatch(run) * run.model.moe_router_topk
        etp = parallel.expert_tensor_parallel_size or tp
        return Division(
            parallel.expert_model_parallel_size,
            etp,
            parallel.divides_experts,
            pairs // sequence_parts(run, tp),
            pairs * etp // tp,
        )


def _pair_bytes(run: RunConfig, tp: int) -> tuple[int, int, int]:
    """Bytes of tensors with a row for each pair that a rank's experts compute, (n, h) and (n, f); of the shared one's (s, b, f)."""
    model = run.model
    rows = tokens_per_microbatch(run)
    width = element_bytes(run)
    division = Division.of(run, tp)
    return (
        division.here * model.hidden_size * width,
        division.here * (model.moe_ffn_hidden_size or 0) * width // division.etp,
        rows * (model.moe_shared_expert_intermediate_size or 0) * width // tp,
    )


def waiting_bytes(run: RunConfig, tp: int) -> int:
    """What experts keep between the two halves of a split backward: the router's input, and both operands of all matmuls.

    Of the experts, inputs and gradients of results in the order of experts, what the second matmul reads, and the gradient of the
    activation's argument; of the shared expert, which has the router's input, the gradient of its result, that argument and its
    gradient.
    """
    (hidden, inner, shared) = _pair_bytes(run, tp)
    widths = run.model.fc1_widths
    return (
        activation_bytes(run) * (2 if shared else 1)
        + 2 * hidden
        + (1 + widths) * inner
        + 2 * widths * shared
    )


def pair_working_bytes(run: RunConfig, tp: int) -> int:
    """Tensors of all pairs that the experts' backward needs for itself, without what the shared expert's has freed before it.

    The gradient of the activation's argument, and with it first that of the results and what the second matmul reads, then the
    input and its gradient.
    """
    (hidden, inner, shared) = _pair_bytes(run, tp)
    widths = run.model.fc1_widths
    freed = widths * shared + residual_bytes(run, tp) * run.model.moe_shared_expert_gate
    return hidden + max(hidden, inner) + widths * inner - freed


NUMBER_BYTES = (
    3 * 8
)  # kept of a token and one of its experts: the expert, and where the pair is in the order of experts and back
RECEIVED_BYTES = (
    2 * 8
)  # kept of a row that has come: where it is in the order of this rank's experts, and back
COUNT_BYTES = 4  # of a number of tokens, which ranks add up as FP32


def expert_records(run: RunConfig, tp: int) -> tuple[Record, ...]:
    """The operations of a layer's experts. An expert's matmuls have the mean number of rows."""
    model = run.model
    width = element_bytes(run)
    rows = tokens_per_microbatch(run)
    division = Division.of(run, tp)
    e = model.num_experts or 0
    h = model.hidden_size
    f = model.moe_ffn_hidden_size or 0
    parts = sequence_parts(run, tp)
    own = rows // parts
    held = e // division.ep
    f = f // division.etp
    each = -(-division.here // held)
    router = e * h + e * model.moe_router_enable_expert_bias
    of_logits = (
        bool(model.moe_z_loss_coeff)
        or model.moe_router_pre_softmax
        or model.moe_router_score_function == "sigmoid"
    )
    tables = len(model.balances) + of_logits + model.sinkhorn  # those that need logits share them
    kept = own * (e + 1) * tables + e * len(model.balances)
    around = (
        _divided_collectives(run, division) if division.divided else _expert_collectives(run, tp)
    )

    def grouped(name: str, outputs: int, inputs: int, saved: int) -> Record:
        matmul = linear(name, division.here, outputs, inputs, 0, saved, (), ())
        size = held * outputs * inputs
        return replace(
            matmul,
            gemm=(each, outputs, inputs),
            gemm_count=held,
            grouped=True,
            parameters=size,
            divided=size * division.divided,
        )

    return (
        replace(
            linear(
                "router",
                own,
                e,
                h,
                0,
                residual_bytes(run, tp) + kept * FP32_BYTES,
                _counted(run, parts),
                (),
            ),
            parameters=router,
            replicated=router,
        ),
        Record(
            name="order",
            forward=around.into,
            backward=around.into_backward,
            saved_bytes=_order_bytes(run, tp, division),
        ),
        grouped("linear_fc1", model.fc1_widths * f, h, 0),
        Record(name=model.activation, saved_bytes=division.here * model.fc1_widths * f * width),
        grouped("linear_fc2", h, f, 0),
        Record(name="experts_sum", forward=around.out, backward=around.out_backward),
        *(_shared_expert(run, tp) if model.moe_shared_expert_intermediate_size else ()),
    )


def _order_bytes(run: RunConfig, tp: int, division: Division) -> int:
    """What is kept of the pairs' order, with the input of the experts where it is not the layer's."""
    parts = sequence_parts(run, tp)
    here = division.here
    if division.divided:
        return (
            division.chosen * NUMBER_BYTES
            + here * (FP32_BYTES + RECEIVED_BYTES)
            + _pair_bytes(run, tp)[0]
        )
    return (
        here * (FP32_BYTES + NUMBER_BYTES)
        + here // parts * FP32_BYTES
        + activation_bytes(run) * (parts > 1)
    )


def _counted(run: RunConfig, parts: int) -> tuple[Collective, ...]:
    """The sums of balancing losses over ranks that share the sequence, or all their logits for an even choice."""
    if run.model.sinkhorn and parts > 1:
        return (
            Collective(
                "all_gather",
                "tp",
                tokens_per_microbatch(run) // parts * (run.model.num_experts or 0) * FP32_BYTES,
            ),
        )
    samples = {"aux_loss": 1, "seq_aux_loss": run.batch.micro_batch_size}
    return tuple(
        Collective("all_reduce", "tp", (run.model.num_experts or 0) * samples[kind] * COUNT_BYTES)
        for kind, _ in run.model.balances
        if parts > 1
    )


def _expert_collectives(run: RunConfig, tp: int) -> MatmulCollectives:
    """Around experts that are split as other matrices are: of what enters them, and their sum."""
    around = MatmulCollectives.from_run(run, tp)
    whole = activation_bytes(run)
    pairs = tokens_per_microbatch(run) * run.model.moe_router_topk
    if sequence_parts(run, tp) == 1:
        return replace(
            around,
            into=(),
            into_backward=(*all_reduce(pairs * FP32_BYTES, tp), *all_reduce(whole, tp)),
        )
    sizes = whole, pairs * FP32_BYTES
    gathers = (
        *(Collective("all_gather", "tp", size // tp) for size in sizes),
        Collective("all_gather", "tp", pairs * 8 // tp),
    )
    return replace(
        around,
        into=gathers,
        into_backward=tuple(Collective("reduce_scatter", "tp", size) for size in sizes),
    )


def _divided_collectives(run: RunConfig, division: Division) -> MatmulCollectives:
    """Around experts that are divided among ranks: numbers of rows, rows and scores there and back, gradients the same ways."""
    model = run.model
    row = run.model.hidden_size * element_bytes(run)
    e = run.model.num_experts or 0
    chosen = division.chosen
    here = division.here

    def sent(rows: int, *sizes: int, near: bool = False) -> tuple[Collective, ...]:
        group, ranks = ("etp", division.etp) if near else ("ep", division.ep)
        return tuple(Collective("all_to_all", group, rows * size) for size in sizes if ranks > 1)

    capacity = (
        model.moe_expert_capacity_factor is not None
        and chosen < tokens_per_microbatch(run) * model.moe_router_topk
    )
    counts = [Collective("all_gather", "tp", chosen * size) for size in (FP32_BYTES, 8) if capacity]
    counts += [
        Collective("all_gather", group, e * 8)
        for group, ranks in (("ep", division.ep), ("etp", division.etp))
        if ranks > 1
    ]
    if division.ep > 1 and division.etp > 1 and (groups := exchanged_groups(e // division.ep)) > 1:
        counts.append(Collective("all_reduce", "etp", groups * 8))  # for the order of groups
    there = (*sent(chosen, row, FP32_BYTES), *sent(here, row, FP32_BYTES, near=True))
    return MatmulCollectives(
        into=(*counts, *there),
        into_backward=there[::-1],
        out=(*sent(here, row, near=True), *sent(chosen, row)),
        out_backward=(*sent(chosen, row), *sent(here, row, near=True)),
    )


def _shared_expert(run: RunConfig, tp: int) -> tuple[Record, ...]:
    model = run.model
    around = MatmulCollectives.from_run(run, tp)
    rows = tokens_per_microbatch(run)
    h = model.hidden_size
    f = (model.moe_shared_expert_intermediate_size or 0) // tp
    gated = model.moe_shared_expert_gate
    own = rows // sequence_parts(run, tp)
    kept = residual_bytes(run, tp) + own * (FP32_BYTES + element_bytes(run) % FP32_BYTES)
    gate = replace(linear("shared_gate", own, 1, h, 0, kept, (), ()), replicated=h)
    return (
        linear(
            "shared_fc1", rows, model.fc1_widths * f, h, 0, 0, around.into, around.into_backward
        ),
        Record(name=model.activation, saved_bytes=rows * model.fc1_widths * f * element_bytes(run)),
        linear("shared_fc2", rows, h, f, 0, 0, around.out, around.out_backward),
        *[gate] * gated,
    )
