"""Native and torch kernels train alike over random models, data and layouts, and as one rank does."""

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.data.chat_dataset import ChatDataset, ChatFiles, ChatWriter, signed
from fugaku_megatron.data.dataset import DatasetConfig
from fugaku_megatron.data.marks import mark
from fugaku_megatron.nn.ops import Ops
from tests.checks.documents import EOD, Texts
from tests.helpers import build_trainer, small_run
from tests.threads import ThreadWorld

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
    {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
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


def course(world, run: RunConfig, files: ChatFiles) -> list[float]:
    """Losses, norms and what experts count of two iterations, and the loss of an evaluation."""
    torch.set_num_threads(1)
    data: Any = Texts(run.model.vocab_size, run.model.seq_length, 64, 7)
    if run.data.sft:
        data = ChatDataset(
            files, "train", range(len(files)), 16, DatasetConfig(run.model.seq_length, 1)
        )
    elif run.data.marked:
        data = mark(data, EOD, run.data.eod_mask_loss)
    ops = Ops.build(run.system.kernels)
    trainer = build_trainer(run, world, data, data, ops=ops)
    with contextlib.closing(trainer):
        found = []
        for _ in range(2):
            result = trainer.train_step()
            found += [result.loss, result.grad_norm]
            if result.experts is not None:
                found += result.experts.flatten().tolist()
            if result.z_loss is not None:
                found.append(result.z_loss)
        return [*found, trainer.evaluate(trainer.valid, 3, 1)]


@pytest.mark.parametrize("number", range(RUNS))
def test_both_backends_train_as_one_rank(number, files):
    flags, ranks = drawn(number)
    alone = {name: value for name, value in flags.items() if name not in SHARING}
    wanted = course(SoloComm(), small_run(**alone, kernels="native"), files)
    for backend in ("native", "torch"):
        run = small_run(**flags, kernels=backend)
        Layout.from_run(run, ranks)
        for found in ThreadWorld(ranks).run(course, run, files):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6), (backend, flags)
