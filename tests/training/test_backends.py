"""Native and torch kernels train alike over random models, data and layouts, and as one rank does."""

import random
from typing import Any

import numpy as np
import pytest

from fugaku_megatron.data.chat.chat_files import ChatFiles, ChatWriter, signed
from tests.checks.documents import RESETS
from tests.checks.layouts import chats_of, texts, train_together

pytestmark = pytest.mark.parallel

RUNS = 12
# What one rank does without.
SHARING = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "cp_comm_type",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "recompute_granularity",
)
MODELS: tuple[dict[str, Any], ...] = (
    {},
    {"swiglu": True, "normalization": "RMSNorm", "qk_layernorm": True},
    {"use_z_loss": True, "z_loss_strength": 0.01},
    {
        "num_experts": 4,
        "moe_ffn_hidden_size": 12,
        "disable_bias_linear": True,
        "moe_aux_loss_coeff": (0.05,),
        "moe_z_loss_coeff": 0.01,
        "moe_expert_capacity_factor": 0.75,
    },
)
POSITIONS: tuple[dict[str, Any], ...] = (
    {"max_position_embeddings": 64},
    {"position_embedding_type": "rope"},
    {
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "rope_dynamic_factor": 2.0,
        "rope_scaling_original_max_position_embeddings": 4,
    },
)
DATA: tuple[dict[str, Any], ...] = (
    {},
    RESETS,
    {"sft": True, "mock_data": False, "data_path": ("chats",)},
)


def drawn(number: int) -> tuple[dict[str, Any], int]:
    """Return the flags of a run, and its ranks. The first numbers have few heads for each rank."""
    draw = random.Random(number)
    tp, cp, pp = draw.choice(((1, 2, 1), (1, 2, 2), (2, 2, 1), (1, 3, 1), (2, 1, 1), (1, 4, 1)))
    heads = tp * (cp if number % 2 else 2 * cp)
    flags = {
        "num_layers": 2,
        "init_method_std": 0.2,
        "num_attention_heads": heads,
        "kv_channels": 8,
        "hidden_size": 8 * heads,
        "seq_length": 4 * tp * cp * draw.choice((1, 2, 3)),
        "micro_batch_size": draw.choice((1, 2, 3)),
        "attention_dropout": draw.choice((0.0, 0.2, 0.2)),
        "hidden_dropout": draw.choice((0.0, 0.1)),
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "pipeline_model_parallel_size": pp,
        "recompute_granularity": draw.choice((None, "selective", "full")),
        **draw.choice(MODELS),
        **draw.choice(POSITIONS),
        **draw.choice(DATA),
    }
    flags["global_batch_size"] = 2 * flags["micro_batch_size"]
    if tp > 1:
        flags["sequence_parallel"] = draw.random() < 0.5
    if cp > 1:
        flags["cp_comm_type"] = ("a2a" if number % 2 else draw.choice(("p2p", "allgather")),)
        if "num_experts" in flags and tp == 1:
            flags["expert_model_parallel_size"] = 2 if cp % 2 == 0 else 1
    if draw.random() < 0.4:
        flags["window_size"] = "4,0"
    if draw.random() < 0.5:
        flags |= {"group_query_attention": True, "num_query_groups": tp}
    return flags, tp * cp * pp


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ChatFiles:
    prefix = tmp_path_factory.mktemp("backends") / "chats"
    generator = np.random.default_rng(0)
    with ChatWriter(prefix, "<u2") as writer:
        for _ in range(40):
            size = int(generator.integers(2, 9))
            ids = generator.integers(4, 90, size)
            writer.add_document(signed(ids, np.arange(size) >= size // 2))
    return ChatFiles(prefix)


@pytest.mark.parametrize("number", range(RUNS))
def test_both_backends_train_as_one_rank(number, files):
    flags, ranks = drawn(number)
    alone = {name: value for name, value in flags.items() if name not in SHARING}
    data = chats_of(files) if flags.get("sft") else texts
    wanted = train_together(1, {**alone, "kernels": "native"}, data).figures
    for backend in ("native", "torch"):
        found = train_together(ranks, {**flags, "kernels": backend}, data).figures
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6), (backend, flags)
