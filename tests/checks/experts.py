"""An experts layer in plain torch."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.nn.ops import Ops
from tests.helpers import (
    make_trainer,
)

EXPERTS = {
    "num_experts": 8,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "moe_ffn_hidden_size": 24,
    "global_batch_size": 8,
}
SHARED = {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
}
BALANCED = {"moe_aux_loss_coeff": (0.1,), "moe_z_loss_coeff": 0.01}
SINKHORN = {"moe_router_load_balancing_type": ("sinkhorn",)}
CAPACITY = {"moe_expert_capacity_factor": 0.75}
BY_POSITION = {**CAPACITY, "moe_token_drop_policy": "position"}
ALL = {**EXPERTS, **SHARED, **BIASED, **BALANCED, "moe_layer_freq": "[0]+[1]*3", "lr": 1e-2}
VALUES = {
    "gelu_exact": F.gelu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
}  # of an activation, or of a gate


def plain_choice(logits: Tensor, bias: Tensor | None, model) -> dict[int, Tensor]:
    """Return one token's scores by expert, from logits (e,)."""
    sigmoid = model.moe_router_score_function == "sigmoid"
    k = model.moe_router_topk
    ranked = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    wish = (ranked if bias is None else ranked + bias).tolist()
    allowed = range(len(wish))
    if model.moe_router_num_groups:
        size = len(wish) // model.moe_router_num_groups
        each = k // model.moe_router_group_topk
        groups = [range(start, start + size) for start in range(0, len(wish), size)]
        best = sorted(
            groups, key=lambda group: -sum(sorted((wish[e] for e in group), reverse=True)[:each])
        )
        allowed = [e for group in best[: model.moe_router_group_topk] for e in group]
    chosen = sorted(allowed, key=lambda e: -wish[e])[:k]
    own = ranked[chosen]
    if sigmoid and k > 1 or not sigmoid and not model.moe_router_pre_softmax:
        own = own / own.sum()
    return dict(zip(chosen, own * (model.moe_router_topk_scaling_factor or 1.0)))


def plain_mlp(x: Tensor, weight1: Tensor, weight2: Tensor, model) -> Tensor:
    """Apply a plain MLP. weight1: (2, f, h) with a gate, or (f, h)"""
    value = VALUES[model.activation]
    if not model.gated:
        return value(x @ weight1.t()) @ weight2.t()
    gate, up = weight1
    return (value(x @ gate.t()) * (x @ up.t())) @ weight2.t()


def plain_experts(weights: dict[str, Tensor], x: Tensor, model) -> Tensor:
    """Apply plain experts token by token. x: (rows, h)"""
    logits = x @ weights["router.weight"].t()
    bias = weights.get("router.expert_bias")
    choices = [plain_choice(row, bias, model) for row in logits]
    capacity = math.ceil(
        len(x)
        * model.moe_router_topk
        / model.num_experts
        * (model.moe_expert_capacity_factor or 1e9)
    )
    out = [torch.zeros_like(row) for row in x]
    for e in range(model.num_experts):
        users = [(row, choice[e]) for row, choice in enumerate(choices) if e in choice]
        if model.moe_token_drop_policy == "probs":
            users = sorted(users, key=lambda user: -user[1].item())
        both = weights["experts.linear_fc1.weight"][e], weights["experts.linear_fc2.weight"][e]
        for row, score in users[:capacity]:
            out[row] = out[row] + score * plain_mlp(x[row], *both, model)
    result = torch.stack(out)
    if model.moe_shared_expert_intermediate_size:
        shared = plain_mlp(
            x,
            weights["shared_experts.linear_fc1.weight"],
            weights["shared_experts.linear_fc2.weight"],
            model,
        )
        result = result + shared * torch.sigmoid(x @ weights["shared_experts.gate.weight"].t())
    return result


def layer_of(run, ops: Ops):
    """Return an experts layer with random weights, its parameters by name, and copies as leaves."""
    trainer = make_trainer(SoloComm(), run, ops)
    trainer.optimizer.zero_grad()
    mlp = trainer.stage.layers[0].mlp
    generator = torch.Generator().manual_seed(5)
    named = {name.split(".mlp.")[1]: p for p in mlp.parameters() for name in [p.spec.name]}
    for p in named.values():
        p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return (
        mlp,
        named,
        {name: p.detach().clone().float().requires_grad_() for name, p in named.items()},
    )
