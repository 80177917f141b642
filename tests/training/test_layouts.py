"""Every model trains in every layout as on one rank, and options that only reorder work change no bit."""

import functools
from typing import Any, NamedTuple

import pytest
import torch

from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.run_config import RunConfig
from tests import llama_models
from tests.checks.adapters import ADAPTED_EXPERTS, QWEN
from tests.checks.adapters import DELTA_NETS as ADAPTED_DELTA_NETS
from tests.checks.chats import CHAT_LENGTH, PADDED_CHATS, packed, write_chats, write_random_chats
from tests.checks.documents import RESETS
from tests.checks.experts import (
    ALL,
    BALANCED,
    BIASED,
    BY_POSITION,
    CAPACITY,
    EXPERTS,
    SHARED,
    SINKHORN,
)
from tests.checks.layouts import (
    Data,
    Trained,
    assert_as_on_one_rank,
    assert_gradients_as_on_one_rank,
    chats_of,
    random_tokens,
    texts,
    train,
    train_together,
)
from tests.checks.moments import BF16_MOMENTS, EIGHT
from tests.checks.moments import SIZES as UNEVEN
from tests.helpers import DROPOUT, make_trainer, parse_layout, run_layout, small_run
from tests.llama_models import FAMILIES
from tests.threads import ThreadComm

pytestmark = pytest.mark.parallel


class Model(NamedTuple):
    """A model, the name of its data, and the largest relative difference between its layouts."""

    flags: dict[str, Any]
    data: str = "tokens"
    tolerance: float = 5e-6
    iterations: int = 2


BASE = {"global_batch_size": 8, **DROPOUT}
ROPE = {"position_embedding_type": "rope"}
LORA = {**QWEN, "lora_dropout": 0.25, **DROPOUT}
TEN = {"lr": 1e-3, "hidden_dropout": 0.1}
IN_INT8 = {"bf16": True, "int8": True}
ALL_IN_INT8 = {**IN_INT8, "int8_wgrad": True, "int8_head": True}
CAPPED = {"moe_expert_capacity_factor": 1.0}
QUICK = {"quick_geglu": True, "activation_func_clamp_value": 0.05, "glu_linear_offset": 1.0}
PLAIN = {"swiglu": False, "squared_relu": True}
ATTENTION = {"lora_target": "q_proj,k_proj,v_proj,o_proj"}
EVEN = {**EXPERTS, **SHARED, **SINKHORN, "moe_router_topk": 1, "moe_z_loss_coeff": 0.01}
CHATS = {**PADDED_CHATS, **packed(8)}
CHATS_OF_EXPERTS = {**CHATS, **EXPERTS, **packed(8)}
BALANCED_CHATS = {**CHATS_OF_EXPERTS, **BALANCED}
ONE_CHAT = {"micro_batch_size": 1, "global_batch_size": 1}
DYNAMIC_ROPE = {"rope_dynamic_factor": 2.0, "rope_scaling_original_max_position_embeddings": 4}
DELTA_NETS = {**BASE, **llama_models.DELTA_NETS, "apply_layernorm_1p": True}
MODELS = {
    "gpt": Model(BASE),
    "gpt of 8 layers": Model({**BASE, "num_layers": 8}),
    "gpt in bf16": Model({**BASE, "bf16": True}, tolerance=0.02),
    "gpt in fp16": Model({**BASE, "fp16": True, "initial_loss_scale": 1024.0}, tolerance=0.02),
    "gpt in int8": Model({**BASE, **IN_INT8}, tolerance=0.05),
    "gpt in bf16, ten iterations": Model(
        {**BASE, **TEN, "bf16": True}, tolerance=1e-4, iterations=10
    ),
    "gpt in int8, ten iterations": Model({**BASE, **TEN, **IN_INT8}, tolerance=1e-4, iterations=10),
    "gpt in int8 with weight gradients and head": Model({**BASE, **ALL_IN_INT8}, tolerance=0.1),
    "moments in bf16": Model({**BASE, **BF16_MOMENTS}),
    "moments in int8": Model(
        {**UNEVEN, **EIGHT, "global_batch_size": 8, "lr_decay_style": "constant"}, iterations=5
    ),
    **{family: Model({**BASE, **flags}) for family, flags in FAMILIES.items()},
    "llama of 4 layers": Model({**BASE, **FAMILIES["llama"], "num_layers": 4}),
    "qwen3 of 4 layers": Model({**BASE, **FAMILIES["qwen3"], "num_layers": 4}),
    "qwen3 in bf16": Model({**BASE, **FAMILIES["qwen3"], "bf16": True}, tolerance=0.02),
    # What no published family mixes.
    "biases": Model(
        {
            **BASE,
            **ROPE,
            "num_layers": 2,
            "swiglu": True,
            "rotary_percent": 0.5,
            "rotary_interleaved": True,
        }
    ),
    "no positions": Model(
        {
            **BASE,
            "num_layers": 2,
            "normalization": "RMSNorm",
            "position_embedding_type": "none",
            "qk_layernorm": True,
            "group_query_attention": True,
            "num_query_groups": 4,
            "kv_channels": 12,
            "window_size": "2,0",
        }
    ),
    "layers that differ": Model(
        {
            **BASE,
            **RESETS,
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": 4.0,
            "yarn_original_max_position_embeddings": 4,
            "window_size": "2,0",
            "window_attn_skip_freq": "[1,0,1,0]",
            "window_rotary_base": 100.0,
            "no_rope_freq": "4",
        },
        "texts",
    ),
    "norms over all heads": Model(
        {"qk_layernorm": True, "qk_layernorm_all_heads": True, "normalization": "RMSNorm"}
    ),
    "norms after": Model(
        {
            **BASE,
            **ROPE,
            "num_layers": 2,
            "normalization": "RMSNorm",
            "norm_placement": "post",
            "disable_bias_linear": True,
            "qk_layernorm": True,
            "qk_layernorm_all_heads": True,
            "group_query_attention": True,
            "num_query_groups": 4,
        }
    ),
    "gated attention": Model(
        {**BASE, **FAMILIES["qwen3"], "attention_output_gate": True, "apply_layernorm_1p": True}
    ),
    "gated delta nets": Model(DELTA_NETS),
    "documents in gated delta nets": Model({**DELTA_NETS, **RESETS}, "texts"),
    "gated delta nets by muon": Model(
        {**DELTA_NETS, "optimizer": "muon", "muon_extra_scale_factor": 0.2}, tolerance=1e-5
    ),
    "moments in int8 of gated delta nets": Model(
        {**UNEVEN, **DELTA_NETS, **EIGHT, "lr_decay_style": "constant"}, iterations=5
    ),
    "norms around and soft caps": Model(
        {
            **DROPOUT,
            "normalization": "RMSNorm",
            "norm_placement": "both",
            "disable_bias_linear": True,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 0.5,
            "window_size": "4,0",
        }
    ),
    "one norm for both": Model(
        {
            **BASE,
            "normalization": "LayerNormWithoutBias",
            "parallel_residual": True,
            "parallel_shared_norm": True,
        }
    ),
    "windows": Model(
        {
            **DROPOUT,
            "group_query_attention": True,
            "num_query_groups": 4,
            "num_attention_heads": 8,
            "window_size": "20,0",
            "seq_length": 64,
            "max_position_embeddings": 64,
        },
        tolerance=1e-6,
        iterations=4,
    ),
    "sinks": Model(
        {
            **BASE,
            **RESETS,
            **ROPE,
            "softmax_type": "learnable",
            **QUICK,
            "group_query_attention": True,
            "num_query_groups": 4,
            "window_size": "4,0",
            "window_attn_skip_freq": "2",
        },
        "texts",
    ),
    "one more in the denominator": Model({"softmax_type": "off-by-one", "xielu": True}),
    "experts with biases": Model(
        {**EXPERTS, **BALANCED, "swiglu": False, **QUICK, "disable_bias_linear": False},
        tolerance=2e-6,
    ),
    "documents": Model({**BASE, **RESETS}, "texts"),
    "documents with rope": Model({**BASE, **RESETS, **ROPE}, "texts"),
    "experts": Model(ALL, tolerance=2e-6),
    "experts in bf16, ten iterations": Model(
        {**ALL, **TEN, "bf16": True}, tolerance=1e-3, iterations=10
    ),
    "experts in int8, ten iterations": Model(
        {**ALL, **TEN, **IN_INT8}, tolerance=1e-3, iterations=10
    ),
    "experts without gates": Model({**ALL, **PLAIN}, tolerance=2e-6),
    "experts by sinkhorn": Model({**EVEN, "moe_layer_freq": "[0]+[1]*3"}),
    "experts of a capacity": Model({**ALL, **CAPPED}, tolerance=2e-6),
    "experts of a capacity by position": Model(
        {**ALL, **CAPPED, "moe_token_drop_policy": "position"}
    ),
    "experts, ten iterations": Model({**ALL, **TEN}, iterations=10),
    "experts of a capacity, ten iterations": Model({**ALL, **TEN, **CAPPED}, iterations=10),
    "lora": Model(LORA),
    "lora without dropout": Model(QWEN),
    "lora of attention": Model({**ADAPTED_EXPERTS, **ATTENTION}),
    "lora of attention in bf16": Model(
        {**ADAPTED_EXPERTS, **ATTENTION, "bf16": True}, tolerance=0.05
    ),
    "lora of experts": Model(ADAPTED_EXPERTS),
    "lora of experts in bf16": Model({**ADAPTED_EXPERTS, "bf16": True}, tolerance=0.05),
    "lora of all matrices of experts": Model(
        {**ADAPTED_EXPERTS, "lora_target": "gate_proj,up_proj,down_proj"}
    ),
    "lora of two matrices of experts": Model(
        {**ADAPTED_EXPERTS, "lora_target": "up_proj,down_proj"}
    ),
    "lora of gated delta nets": Model({**ADAPTED_DELTA_NETS, "lora_dropout": 0.25, **DROPOUT}),
    "lora of fc1": Model({**ADAPTED_EXPERTS, "lora_target": "linear_fc1"}),
    "lora of experts, ten iterations": Model(
        {**ADAPTED_EXPERTS, **TEN, "moe_layer_freq": "1"}, iterations=10
    ),
    "lora of experts of a capacity, ten iterations": Model(
        {**ADAPTED_EXPERTS, **TEN, **CAPPED, "moe_layer_freq": "1"}, iterations=10
    ),
    "chats": Model(CHATS, "chats"),
    "chats with dynamic rope": Model({**CHATS, **DYNAMIC_ROPE}, "chats"),
    "chats of experts": Model(BALANCED_CHATS, "chats"),
    "chats of experts by sigmoid": Model({**BALANCED_CHATS, **BIASED}, "chats"),
    "chats of a shared expert": Model(
        {**BALANCED_CHATS, "moe_shared_expert_intermediate_size": 20}, "chats"
    ),
    "chats of experts of a capacity": Model({**BALANCED_CHATS, **CAPACITY}, "chats"),
    "chats of experts of a capacity by position": Model(
        {**CHATS_OF_EXPERTS, **BY_POSITION}, "chats"
    ),
    "chats of experts by sinkhorn": Model({**CHATS_OF_EXPERTS, **SINKHORN}, "chats"),
    "chats of one expert by sinkhorn": Model(
        {**CHATS_OF_EXPERTS, **SINKHORN, **CAPACITY, "moe_router_topk": 1}, "chats"
    ),
    "chats with a z-loss of experts": Model(
        {**CHATS_OF_EXPERTS, "moe_z_loss_coeff": 0.1, "micro_batch_size": 1}, "chats"
    ),
    "chats balanced by sample": Model(
        {
            **CHATS_OF_EXPERTS,
            "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
            "moe_aux_loss_coeff": (0.1, 0.3),
        },
        "chats",
    ),
    "one chat of experts by sigmoid": Model({**BALANCED_CHATS, **BIASED, **ONE_CHAT}, "one chat"),
    "one chat of experts of a capacity by position": Model(
        {**CHATS_OF_EXPERTS, **BY_POSITION, **ONE_CHAT}, "one chat"
    ),
    "one chat of experts by sinkhorn": Model(
        {**CHATS_OF_EXPERTS, **SINKHORN, **ONE_CHAT}, "one chat"
    ),
}
LAYOUTS = {  # every option once at least, and pairs of options rather than all combinations
    "gpt": [
        "tp2 selective",
        "tp2 sequence selective torch",
        "tp4 sequence",
        "pp2 pipeline_split='3,1'",
        "pp4 full",
        "dp2 zero selective",
        "dp4 overlap",
        "tp2 pp2 dp2",
        "tp2 pp2 dp2 sequence overlap full recompute_num_layers=2",
        "pp2 dp2 interleaved overlap",
        "pp4 zb-h1",
        "pp2 zb-h1 interleaved full",
        "pp2 dp2 zb-h1 interleaved overlap",
        "pp2 zbv full recompute_method=block zero_bubble_max_pending_backward=3",
        "tp2 pp2 dp2 zbv sequence overlap",
        "cp2 selective",
        "cp4 zero",
        "cp2 pp2 zbv full torch",
        "cp2 tp2 blocks sequence",
        "cp2 p2p selective",
        "cp4 p2p zero",
        "cp4 allgather torch",
        "cp2 tp2 pp2 p2p sequence overlap",
        "cp2 pp2 allgather zbv full",
        "cp2 cp_comm_type=('p2p','a2a','allgather','a2a+p2p')",
    ],
    "gpt of 8 layers": ["pp4 num_layers_per_virtual_pipeline_stage=1"],
    "gpt in bf16": ["dp2 zero"],
    "gpt in fp16": ["tp2 pp2 sequence"],
    "gpt in int8": ["tp2", "tp2 sequence blocks", "pp2 zb-h1", "dp2 zero", "cp2", "full"],
    "gpt in int8 with weight gradients and head": ["pp2 zbv", "dp2 zero overlap", "cp2"],
    "moments in bf16": ["tp2 pp2 dp2 overlap"],
    "moments in int8": ["dp2", "dp2 zero", "tp2", "pp2", "tp2 pp2 dp2 zero"],
    "llama": ["tp2 pp2 sequence torch", "cp2", "cp4 p2p torch"],
    "llama of 4 layers": ["pp2 zbv zero"],
    "mistral": ["tp2 dp2 overlap"],
    "qwen2": ["tp2 pp2"],
    "qwen3": ["tp2 sequence blocks selective", "cp2 tp2 sequence"],
    "qwen3 of 4 layers": ["pp2 dp2 full"],
    "qwen3 in bf16": ["tp2 pp2"],
    "biases": ["tp2 pp2 dp2 overlap", "cp2 pp2"],
    "layers that differ": [
        "tp2 pp2 sequence",
        "pp2 torch full",
        "cp2 p2p selective",
    ],
    "no positions": ["tp2 dp2 zero", "cp2 dp2 overlap"],
    "norms over all heads": ["cp2", "cp2 allgather"],
    "norms after": [
        "tp2 sequence full",
        "tp2 pp2 torch",
        "cp2 tp2 p2p selective",
        "tp2 sequence blocks",
    ],
    "gated attention": ["tp2 pp2 sequence selective", "cp2 p2p", "cp2 full", "pp2 zb-h1", "torch"],
    "gated delta nets": [
        "tp2 pp2 sequence selective",
        "tp2 sequence blocks",
        "pp2 zb-h1",
        "cp2 full",
        "dp2 zero torch",
    ],
    "documents in gated delta nets": ["tp2 pp2 sequence", "cp2 selective", "torch"],
    "gated delta nets by muon": ["tp2 dp2 zero", "pp2 cp2"],
    "moments in int8 of gated delta nets": ["tp2", "pp2 dp2 zero"],
    "norms around and soft caps": ["tp2 pp2 sequence full", "cp2 selective", "cp2 p2p torch"],
    "one norm for both": ["tp2 sequence", "pp2 full"],
    "sinks": [
        "tp2 pp2 sequence",
        "cp2 selective",
        "cp2 tp2 p2p",
        "cp2 allgather torch",
        "pp2 torch",
    ],
    "one more in the denominator": ["tp2 sequence blocks", "cp2 p2p torch", "pp2 zb-h1"],
    "experts with biases": ["tp2", "tp2 dp2 ep2 sequence", "tp2 etp1 sequence", "pp2 zb-h1 torch"],
    "documents": [
        "tp2 sequence",
        "pp2 zbv",
        "micro_batch_size=1",
        "cp2 tp2 pp2 sequence zbv",
        "torch",
    ],
    "documents with rope": [
        "tp2 sequence blocks",
        "pp4",
        "dp2 overlap",
        "pp2 num_layers_per_virtual_pipeline_stage=1",
        "pp2 zbv",
        "pp2 dp2 zb-h1",
        "micro_batch_size=1",
        "micro_batch_size=8",
        "tp2 dp2 micro_batch_size=4",
        "cp2",
        "cp2 tp2 pp2 sequence zbv",
        "cp4 p2p",
        "cp2 pp2 allgather zbv",
        "full",
        "pp2 selective",
        "torch",
    ],
    "experts": [
        "tp2",
        "tp2 sequence blocks",
        "full",
        "packed",
        "tp2 pp2 sequence zb-h1",
        "pp2 dp2 overlap zbv",
        "dp4 ep2 overlap",
        "dp4 ep4 zero",
        "tp2 dp2 ep2 sequence",
        "tp2 dp2 ep2 etp1 sequence zero",
        "tp2 dp2 ep4 etp1 sequence",
        "tp2 etp1 sequence",
        "cp2",
        "cp2 ep2 p2p",
        "cp2 tp2 dp2 ep4 etp1 sequence zero",
        "cp2 pp2 ep2 zbv",
        "in a node: dp4 ep2 zero",
        "dp2 ep2 full",
        "dp2 ep2 torch",
        "pp2 dp2 ep2 zero interleaved",
        "pp2 dp2 ep2 overlap zb-h1",
        "pp2 dp2 ep2 zero zbv",
    ],
    "experts without gates": ["cp4 ep2", "pp2 dp2 ep2 overlap zb-h1"],
    "experts by sinkhorn": ["tp2 sequence", "cp4 ep2"],
    "experts of a capacity": [
        "tp2 pp2 sequence",
        "tp2 dp2 ep4 etp1 sequence",
        "cp2 tp2 ep2 sequence",
    ],
    "experts of a capacity by position": ["tp2 dp2 ep2 sequence zero", "cp4"],
    "lora": [
        "tp2 pp2",
        "tp2 pp2 sequence zb-h1",
        "pp2 zbv",
        "pp2 interleaved",
        "dp2 overlap ddp_bucket_size=500",
        "full",
        "selective",
        "packed",
        "cp2 dp2 overlap",
        "cp2 tp2 sequence",
    ],
    "lora without dropout": [
        "tp2",
        "pp2 zbv",
        "dp2 overlap ddp_bucket_size=500",
        "full",
        "cp2 tp2 sequence",
    ],
    "lora of attention": ["tp2", "tp2 dp2 ep2 sequence"],
    "lora of attention in bf16": ["tp2 dp2 ep2 sequence"],
    "lora of experts": [
        "dp2 ep2 ddp_bucket_size=500",
        "tp2 sequence",
        "tp2 torch",
        "tp2 dp2 ep2 sequence",
        "tp2 dp2 ep2 etp1 sequence",
        "pp2 dp2 ep2 zb-h1 overlap",
        "packed",
        "dp2 ep2 full",
    ],
    "lora of experts in bf16": ["tp2 dp2 ep2 sequence"],
    "lora of all matrices of experts": ["dp2 ep2 torch"],
    "lora of two matrices of experts": ["tp2 dp2 ep2 sequence"],
    "lora of gated delta nets": ["tp2 pp2 sequence selective", "cp2 full", "torch"],
    "lora of fc1": ["tp2"],
    # Chats packed into longer samples, which are filled with padding.
    "chats": ["seq_length=24", "seq_length=32 torch"],
    "chats with dynamic rope": [
        "seq_length=24",
        "seq_length=32 torch",
        "seq_length=24 tp2 sequence",
        "seq_length=32 pp2",
        "seq_length=24 cp2",
        "seq_length=64 cp4 p2p",
    ],
    "chats of experts": ["seq_length=24", "seq_length=32 torch"],
    "chats of experts by sigmoid": [
        "seq_length=24",
        "seq_length=32 torch",
        "seq_length=24 tp2",
        "seq_length=24 tp2 sequence",
        "seq_length=32 pp2 zb-h1",
        "seq_length=24 full",
        "seq_length=24 selective",
        "seq_length=24 cp2",
        "seq_length=64 cp4 p2p",
        "seq_length=64 cp2 tp2 pp2 sequence",
        "seq_length=24 tp2 etp1 sequence",
        "seq_length=24 tp2 ep2 etp1 sequence",
        "seq_length=64 cp2 ep2 p2p",
        "seq_length=64 cp2 tp2 ep4 etp1 sequence",
    ],
    "chats of a shared expert": ["seq_length=24", "seq_length=32 torch"],
    "chats of experts of a capacity": [
        "seq_length=24",
        "seq_length=32 torch",
        "seq_length=24 tp2 sequence",
        "seq_length=32 pp2",
        "seq_length=24 cp2",
        "seq_length=64 cp4 p2p",
        "seq_length=64 cp2 tp2 pp2 sequence",
        "seq_length=24 tp2 etp1 sequence",
        "seq_length=24 tp2 ep2 etp1 sequence",
        "seq_length=64 cp2 ep2 p2p",
        "seq_length=64 cp2 tp2 ep4 etp1 sequence",
    ],
    "chats of experts of a capacity by position": [
        "seq_length=24",
        "seq_length=32 torch",
        "seq_length=64 cp2 ep2 p2p",
        "seq_length=24 tp2 sequence",
    ],
    "chats of experts by sinkhorn": [
        "seq_length=24",
        "seq_length=32 torch",
        "seq_length=24 tp2 sequence",
        "seq_length=32 pp2",
        "seq_length=24 cp2",
        "seq_length=64 cp4 p2p",
    ],
    "chats of one expert by sinkhorn": ["seq_length=24", "seq_length=32 torch"],
    "chats with a z-loss of experts": [
        "seq_length=64 micro_batch_size=1",
        "seq_length=64 micro_batch_size=1 dp2",
        "seq_length=64 micro_batch_size=1 pp2",
    ],
    "chats balanced by sample": [
        "seq_length=16",
        "seq_length=16 cp2",
        "seq_length=16 tp2 sequence",
    ],
    "one chat of experts by sigmoid": [
        "seq_length=64 cp4 ep4 p2p",
        "seq_length=64 cp4 ep4 p2p torch",
    ],
    "one chat of experts of a capacity by position": [
        "seq_length=64 cp4 ep4 p2p",
        "seq_length=64 cp4 ep4 p2p torch",
    ],
    "one chat of experts by sinkhorn": [
        "seq_length=64 cp4 ep4 p2p",
        "seq_length=64 cp4 ep4 p2p torch",
    ],
}
EXPERT_LAYOUTS = [
    "dp2 ep2",
    "dp4 ep4 zero",
    "tp2 dp2 ep2 sequence",
    "pp2 dp4 ep2 zero",
    "pp2 dp2 ep2 zero interleaved",
    "pp2 dp2 ep2 overlap zb-h1",
    "pp2 dp2 ep2 zero zbv",
    "cp2 ep2 p2p",
    "cp2 tp2 dp2 ep4 etp1 sequence zero",
    "cp2 pp2 ep2 zbv",
]
ADAPTER_LAYOUTS = [
    "dp2 ep2",
    "tp2 dp2 ep2 sequence",
    "tp2 dp2 ep2 etp1 sequence",
    "pp2 dp2 ep2 overlap zb-h1",
    "tp2 pp2 dp2 ep2 sequence",
]
RARE_LAYOUTS = {  # `make test-full` alone trains in these
    "gpt": [
        "tp2 pp2 sequence",
        "pp2 interleaved selective",
        "cp2 tp2 pp2 sequence overlap",
    ],
    "gpt of 8 layers": ["pp4 zbv full"],
    "llama": ["cp4 overlap", "cp2 allgather"],
    "qwen3": ["cp2 torch", "cp2 tp2 p2p sequence"],
    "no positions": ["cp2 dp2 allgather overlap", "cp4 p2p"],
    "windows": [
        f"{layout} {cp_comm_type}"
        for cp_comm_type in ("p2p", "allgather", "a2a")
        for layout in (
            "cp2",
            "cp4",
            "cp8",
            "cp2 pp2 zbv",
            "cp2 tp2 pp2 dp2 sequence zero",
        )
    ],
    "documents": [
        "tp2 sequence blocks",
        "pp4",
        "dp2 overlap",
        "pp2 num_layers_per_virtual_pipeline_stage=1",
        "pp2 dp2 zb-h1",
        "micro_batch_size=8",
        "tp2 dp2 micro_batch_size=4",
        "cp4 p2p",
        "cp2 pp2 allgather zbv",
        "full",
        "pp2 selective",
    ],
    "experts, ten iterations": EXPERT_LAYOUTS,
    "experts of a capacity, ten iterations": EXPERT_LAYOUTS,
    "lora without dropout": [
        "tp2 pp2",
        "tp2 pp2 sequence zb-h1",
        "pp2 interleaved",
        "selective",
        "packed",
        "cp2 dp2 overlap",
    ],
    "lora of experts, ten iterations": ADAPTER_LAYOUTS,
    "lora of experts of a capacity, ten iterations": ADAPTER_LAYOUTS,
}
SMOKE = (  # of gpt, in `make check`
    "pp4 full",
    "tp2 pp2 dp2",
    "tp2 pp2 dp2 sequence overlap full recompute_num_layers=2",
    "pp2 dp2 zb-h1 interleaved overlap",
    "tp2 pp2 dp2 zbv sequence overlap",
)


@pytest.fixture(scope="module")
def one_rank(datasets):
    """Return one rank's figures for a model's name. Each model is trained once."""

    @functools.cache
    def trained(name: str) -> Trained:
        model = MODELS[name]
        return train(SoloComm(), small_run(**model.flags), datasets[model.data], model.iterations)

    return trained


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[str, Data]:
    folder = tmp_path_factory.mktemp("chats")
    return {
        "tokens": random_tokens,
        "texts": texts,
        "chats": chats_of(write_random_chats(folder / "eight")),
        "one chat": chats_of(write_chats(folder / "one", [CHAT_LENGTH])),
    }


def marks(model: str, layout: str, rare: bool) -> list[pytest.MarkDecorator]:
    if rare:
        return [pytest.mark.full]
    if model == "gpt" and layout in SMOKE:
        return [pytest.mark.smoke]
    return []


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=marks(name, layout, table is RARE_LAYOUTS))
        for table in (LAYOUTS, RARE_LAYOUTS)
        for name, layouts in table.items()
        for layout in layouts
    ],
)
def test_a_layout_trains_as_one_rank(name, layout, one_rank, datasets, monkeypatch):
    """The evaluation depends on every gradient of all iterations."""
    monkeypatch.setattr(ThreadComm, "inside_node", "in a node: " in layout)
    model = MODELS[name]
    ranks, options = parse_layout(layout.removeprefix("in a node: "))
    if model.data == "chats":
        options = {**packed(options["seq_length"]), **options}
    flags = {**model.flags, **options}
    expected = one_rank(name)
    data = datasets[model.data]
    found = train_together(ranks, flags, data, model.iterations)
    assert_as_on_one_rank(
        found,
        expected,
        run=small_run(**model.flags),
        data=data,
        iterations=model.iterations,
        tolerance=model.tolerance,
    )
    assert len(set(found.losses)) == len(found.losses)
    embedding = found.weights.get("embedding.word_embeddings.weight")
    head = found.weights.get("output_layer.weight")
    if head is not None and "output_layer.weight" not in expected.weights:
        assert torch.equal(head, embedding), "tied copies stay equal"
    if flags.get("zero_stage"):
        return  # with ZeRO-1 each rank has some of the sums
    assert_gradients_as_on_one_rank(found.gradients, expected.gradients, model.tolerance)


@pytest.mark.parametrize(
    ("low", "name"), [("gpt in bf16", "gpt"), ("gpt in fp16", "gpt"), ("qwen3 in bf16", "qwen3")]
)
def test_low_precision_stays_close(low, name, one_rank):
    assert one_rank(low).losses == pytest.approx(one_rank(name).losses, rel=0.02)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("gpt", layout) for layout in ("tp2", "pp2 zb-h1", "dp2 zero", "cp2", "full")),
        ("experts", "dp2 ep2"),
        ("experts", "tp2 dp2 ep2 sequence zero"),
    ],
)
@pytest.mark.parametrize("low", ["bf16", "int8"])
def test_ten_losses_of_a_layout_are_as_close_in_int8_as_in_bf16(low, model, layout, one_rank):
    name = f"{model} in {low}, ten iterations"
    ranks, options = parse_layout(layout)
    flags = {**MODELS[name].flags, **options}
    losses = train_together(ranks, flags, iterations=MODELS[name].iterations).losses
    assert losses == pytest.approx(one_rank(name).losses, rel=MODELS[name].tolerance)


def test_int8_stays_close(one_rank):
    exact = one_rank("gpt in bf16").losses
    for name in ("gpt in int8", "gpt in int8 with weight gradients and head"):
        losses = one_rank(name).losses
        assert losses == pytest.approx(exact, rel=0.02) and losses != exact


def test_dropout_is_at_work(one_rank):
    for option in ("hidden_dropout", "attention_dropout"):
        assert train_together(1, {**BASE, option: 0.0}).losses != one_rank("gpt").losses


# Options that change no bit -----------------------------------------------------------------------------------------------------

SAME_BITS = [  # a layout, and options that change no bit of it
    ("", "sequence"),
    ("", "full recompute_num_layers=2"),
    ("", "full recompute_method=block recompute_num_layers=2"),
    ("", "selective"),
    ("dp4 clip_grad=0.3", "zero"),
    ("dp2 clip_grad=0.0", "zero"),
    ("pp2 bf16", "packed"),
    ("pp4 global_batch_size=16", "zb-h1 zero_bubble_max_pending_backward=6"),
    ("pp4", "zb-h1"),
    ("pp2", "full recompute_part_layers=(1,2)"),
    ("pp2 zb-h1", "full recompute_part_layers=(9,9)"),
    ("pp2 interleaved num_layers=8", "full recompute_part_layers=(2,0,1,2)"),
    ("pp2 zbv num_layers=8", "full recompute_part_layers=(2,0,1,2)"),
    ("tp2 sequence bf16", "blocks"),  # a sum of two ranks has no order
    ("tp2 sequence full torch", "blocks"),
    ("tp2 sequence disable_bias_linear packed", "blocks"),
    ("tp2 pp2 sequence zbv selective swiglu", "blocks"),
    (
        "tp2 pp2 dp2 bf16 ddp_bucket_size=20_000 clip_grad=0.3",
        "overlap_grad_reduce",
    ),
    (
        "tp2 pp2 dp2 sequence zero ddp_bucket_size=1 clip_grad=0.3",
        "overlap_grad_reduce overlap_param_gather",
    ),
    (
        "pp2 dp2 zero ddp_bucket_size=20_000 grad_reduce_in_bf16",
        "overlap_grad_reduce overlap_param_gather",
    ),
    ("pp2 dp2 clip_grad=0.0", "overlap ddp_bucket_size=1"),
]


@functools.cache
def train_layout(layout: str) -> Trained:
    ranks, flags = parse_layout(layout)
    return train_together(ranks, {**BASE, **flags})


@pytest.mark.parametrize(("layout", "option"), SAME_BITS)
def test_an_option_changes_no_bit(layout, option):
    """No bit of losses and weights changes. Other buckets or shards sum norms in another order."""
    plain = train_layout(layout)
    found = train_layout(f"{layout} {option}")
    assert found.losses == plain.losses
    assert found.norms == pytest.approx(plain.norms, rel=1e-6)
    for name, weight in plain.weights.items():
        assert torch.equal(found.weights[name], weight), name


def test_blocks_of_rows_on_four_ranks_agree():
    found = train_layout("tp4 sequence blocks")
    assert found.losses == pytest.approx(train_layout("tp4 sequence").losses, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "copies", "tables"),
    [
        ("zbv", [False] * 4, [1, 0, 0, 0]),
        ("interleaved", [True, False, False, True], [1, 0, 0, 1]),
    ],
)
def test_a_stage_with_both_ends_has_the_tied_weight_once(schedule, copies, tables):

    def tied(world: Comm, run: RunConfig) -> tuple[bool, int]:
        trainer = make_trainer(world, run)
        rows = [len(p) for p in trainer.optimizer.flat.parameters]
        return trainer.stage.tied_copy is not None, rows.count(run.model.vocab_size)

    found = run_layout(f"pp4 {schedule} vocab_size=112 num_layers=8", tied)
    assert found == list(zip(copies, tables, strict=True))
