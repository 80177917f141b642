"""Padding of packed chats changes no number: the same chats in samples of any length, in every layout, and next to other texts."""

import contextlib
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs import accounting
from fugaku_megatron.data.chat_dataset import ChatDataset, ChatFiles, ChatWriter, signed
from fugaku_megatron.data.dataset import DatasetConfig
from fugaku_megatron.data.marks import COUNTED, PADDED, TokenCounts
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.inference.loading import model_of
from fugaku_megatron.inference.scoring import Request, score
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.nn.positions import document_angles, rotary_angles
from fugaku_megatron.observe.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.run.loop import Session
from fugaku_megatron.training.trainer import Trainer
from tests.checks.chats import write_chats
from tests.helpers import CP2, CP4, P2P, PP2, TP2, build_trainer, small_run, whole_tensors
from tests.llama_models import FAMILIES, copy_to, theirs
from tests.threads import ThreadWorld

LENGTH = 9  # of each chat: its last token is a label alone in a sample of 8
PACKINGS = {8: 8, 16: 8, 24: 4, 32: 3, 64: 2}  # sequence length -> samples for eight chats
MODEL = {
    "num_layers": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "init_method_std": 0.2,
    "sft": True,
    "mock_data": False,
    "data_path": ("chats",),
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 24}
SINKHORN = {"moe_router_load_balancing_type": ("sinkhorn",)}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
}
BALANCED = {"moe_aux_loss_coeff": (0.1,), "moe_z_loss_coeff": 0.01}
CAPACITY = {"moe_expert_capacity_factor": 0.75}
BY_POSITION = {**CAPACITY, "moe_token_drop_policy": "position"}
VARIANTS = {
    "dense": {},
    "losses": {**EXPERTS, **BALANCED},
    "losses of sigmoids": {**EXPERTS, **BALANCED, **BIASED},
    "shared expert": {**EXPERTS, **BALANCED, "moe_shared_expert_intermediate_size": 20},
    "capacity": {**EXPERTS, **BALANCED, **CAPACITY},
    "capacity by position": {**EXPERTS, **BY_POSITION},
    "sinkhorn": {**EXPERTS, **SINKHORN},
    "sinkhorn of one expert": {**EXPERTS, **SINKHORN, "moe_router_topk": 1, **CAPACITY},
    "dynamic rope": {
        "rope_dynamic_factor": 2.0,
        "rope_scaling_original_max_position_embeddings": 4,
    },
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ChatFiles:
    """Eight chats of one length, the second half of each trained."""
    prefix = tmp_path_factory.mktemp("padding") / "chats"
    random = np.random.default_rng(1)
    with ChatWriter(prefix, "<u2") as writer:
        for _ in range(8):
            ids = random.integers(1, 96, size=LENGTH)
            writer.add_document(signed(ids, np.arange(LENGTH) >= LENGTH // 2))
    return ChatFiles(prefix)


def run_of(length: int, **changes) -> RunConfig:
    """The eight chats are one micro-batch."""
    samples = PACKINGS[length]
    sizes = {"seq_length": length, "micro_batch_size": samples, "global_batch_size": samples}
    return small_run(**{**MODEL, **sizes, **changes})


def trainer_of(world, run: RunConfig, files: ChatFiles) -> Trainer:
    torch.set_num_threads(1)
    dataset = ChatDataset(
        files, "train", range(len(files)), 64, DatasetConfig(run.model.seq_length, 3)
    )
    ops = Ops.build("torch" if run.system.kernels == "torch" else "native")
    return build_trainer(run, world, dataset, dataset, ops=ops)


def figures(world, run: RunConfig, files: ChatFiles) -> list[float]:
    """Losses, norms, each expert's tokens and balancing losses of two iterations, and the loss of an evaluation."""
    with contextlib.closing(trainer_of(world, run, files)) as trainer:
        found = []
        for _ in range(2):
            result = trainer.train_step()
            found += [result.loss, result.grad_norm, result.work.counted]
            if result.experts is not None:
                found += result.experts.flatten().tolist()
        return [*found, trainer.evaluate(trainer.valid, 0, 1)]


EXPECTED: dict[str, list[float]] = {}


def expected(variant: str, files: ChatFiles) -> list[float]:
    """Return the figures of one rank without padding."""
    if variant not in EXPECTED:
        EXPECTED[variant] = figures(SoloComm(), run_of(8, **VARIANTS[variant]), files)
    return EXPECTED[variant]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("length", [24, 32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_chats_train_alike_in_samples_of_any_length(variant, length, backend, files):
    run = run_of(length, **VARIANTS[variant], kernels=backend)
    assert figures(SoloComm(), run, files) == pytest.approx(
        expected(variant, files), rel=2e-5, abs=1e-8
    )


SEQUENCE = {**TP2, "sequence_parallel": True}
ETP1 = {**SEQUENCE, "expert_tensor_parallel_size": 1}
LAYOUTS = {
    "tp2": (2, 24, TP2),
    "sequence": (2, 24, SEQUENCE),
    "pp2": (2, 32, PP2),
    "zb-h1": (2, 32, {**PP2, "pipeline_schedule": "zb-h1"}),
    "recompute": (1, 24, {"recompute_granularity": "full"}),
    "selective": (1, 24, {"recompute_granularity": "selective"}),
    "cp2": (2, 24, CP2),
    "cp4 with a rank of padding": (4, 64, {**CP4, **P2P}),
    "cp2 x tp2 x pp2": (8, 64, {**CP2, **SEQUENCE, **PP2}),
    "whole experts": (2, 24, ETP1),
    "ep2": (2, 24, {**ETP1, "expert_model_parallel_size": 2}),
    "cp2 x ep2": (2, 64, {**CP2, **P2P, "expert_model_parallel_size": 2}),
    "cp2 x ep4": (4, 64, {**CP2, **ETP1, "expert_model_parallel_size": 4}),
}
OTHERS = ("sequence", "cp2", "cp4 with a rank of padding", "pp2")  # for what depends on fewer ranks
LAYOUT_CASES = [
    *((layout, variant) for layout in LAYOUTS for variant in ("losses of sigmoids", "capacity")),
    *((layout, variant) for layout in OTHERS for variant in ("sinkhorn", "dynamic rope")),
    ("cp2 x ep2", "capacity by position"),
    ("sequence", "capacity by position"),
]


@pytest.mark.parametrize(("layout", "variant"), LAYOUT_CASES)
def test_padding_changes_no_number_in_any_layout(layout, variant, files):
    ranks, length, changes = LAYOUTS[layout]
    run = run_of(length, **VARIANTS[variant], **changes)
    for found in ThreadWorld(ranks).run(figures, run, files):
        assert found == pytest.approx(expected(variant, files), rel=2e-5, abs=1e-8)


@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, {}), (2, PP2)], ids=["", "dp2", "pp2"])
def test_a_token_weighs_the_same_in_every_micro_batch(ranks, changes, files):
    """A token weighs the same in the router's z-loss, in samples of seven chats and of one, each a micro-batch."""
    one = {**EXPERTS, "moe_z_loss_coeff": 0.1, "micro_batch_size": 1}
    without = figures(SoloComm(), run_of(8, **one), files)
    for found in ThreadWorld(ranks).run(figures, run_of(64, **one, **changes), files):
        assert found == pytest.approx(without, rel=2e-5, abs=1e-8)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("variant", ["losses of sigmoids", "capacity by position", "sinkhorn"])
def test_ranks_may_have_nothing_but_padding(variant, backend, tmp_path):
    """One of four ranks with different experts has the one chat in a long sample; the others have padding."""
    one = {"micro_batch_size": 1, "global_batch_size": 1, "kernels": backend, **VARIANTS[variant]}
    files = write_chats(tmp_path / "c", [LENGTH])
    without = figures(SoloComm(), run_of(8, **one), files)
    run = run_of(64, **one, **CP4, **P2P, expert_model_parallel_size=4)
    for found in ThreadWorld(4).run(figures, run, files):
        assert found == pytest.approx(without, rel=2e-5, abs=1e-8)


@pytest.mark.parametrize("variant", ["losses of sigmoids", "sinkhorn", "dynamic rope"])
def test_samples_from_which_nothing_is_predicted(variant, tmp_path, capsys):
    """Two samples of chats of one token, of which every token is padding, and a third one with a
    trained token: the log has no NaN.
    """
    run = run_of(8, **VARIANTS[variant], micro_batch_size=1, global_batch_size=1, log_interval=1)
    files = write_chats(tmp_path / "c", [1] * 18 + [LENGTH])
    with contextlib.closing(trainer_of(SoloComm(), run, files)) as t:
        epoch = [t.train[index] for index in range(3)]
        t.train = sorted(epoch, key=lambda sample: (sample[1] & COUNTED).sum())
        writer = MetricsWriter(3, 1, LogOutputs(history=tmp_path / "history.jsonl"))
        Session(t, writer, 3, ()).run()
        writer.close()
    printed = capsys.readouterr().out + (tmp_path / "history.jsonl").read_text()
    assert printed.count("lm loss: 0.0") == 2
    assert not re.search(r"\bnan\b(?! iter)", printed, re.IGNORECASE)


@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, CP2), (2, SEQUENCE)])
def test_balancing_losses_of_each_sample_leave_padding_out(ranks, changes, files):
    """Half of each sample is padding. A sample's loss is the loss of its tokens."""
    kinds = {
        **EXPERTS,
        "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
        "moe_aux_loss_coeff": (0.1, 0.3),
    }
    without = figures(SoloComm(), run_of(8, **kinds), files)
    for found in ThreadWorld(ranks).run(figures, run_of(16, **kinds, **changes), files):
        assert found == pytest.approx(without, rel=2e-5, abs=1e-8)


LENGTHS = (3, 14, 6, 9, 2, 7, 12, 5)
DYNAMIC = {
    **VARIANTS["dynamic rope"],
    "rope_scaling_original_max_position_embeddings": 6,
}


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_dynamic_rope_follows_the_length_of_each_chat(backend, tmp_path):
    """As transformers computes each chat alone."""
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    files = write_chats(tmp_path / "c", LENGTHS)
    changes = {
        **FAMILIES["llama"],
        "use_rope_scaling": False,
        **DYNAMIC,
        "rotary_base": 100.0,
        "sft": True,
        "mock_data": False,
        "data_path": ("chats",),
        "seq_length": 20,
        "max_position_embeddings": 64,
        "micro_batch_size": 1,
        "global_batch_size": 3,
        "init_method_std": 0.3,
        "kernels": backend,
    }
    run = small_run(**changes)
    model = theirs("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    model.config.max_position_embeddings = DYNAMIC["rope_scaling_original_max_position_embeddings"]
    with contextlib.closing(trainer_of(SoloComm(), run, files)) as trainer:
        ours = {p.spec.name: p for p in trainer.optimizer.flat.parameters}
        copy_to(model, ours, "llama")
        result = trainer.train_step()
        chats = [chat for i in range(3) for chat in trainer.train.chats_of(i)]
    total = 0.0
    for chat in chats:
        model.model.rotary_emb = LlamaRotaryEmbedding(model.config)  # it remembers the longest
        tokens = torch.from_numpy(files.get(chat).astype(np.int64))
        logits = model(tokens[None, :-1]).logits[0]
        losses = F.cross_entropy(logits, tokens[1:], reduction="none")
        total += losses[torch.from_numpy(files.trained(chat, len(tokens)))[1:]].sum().item()
    assert sorted(chats) == [*range(8)] and result.work.counted == sum(LENGTHS) - 2 * 8
    assert result.loss == pytest.approx(total / result.work.counted, rel=1e-5)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(0, 12))
@settings(max_examples=50)
def test_angles_of_tokens_are_those_of_their_document_alone(lengths, padded):
    """Angles are right in two samples with the documents in both orders, and padding after the first."""
    model = run_of(8, **DYNAMIC).model
    s = sum(lengths) + padded
    columns = [
        torch.cat([torch.arange(n) for n in (*order, padded)]).int()
        for order in (lengths, lengths[::-1])
    ]
    padding = torch.zeros(s, 2, dtype=torch.bool)
    padding[s - padded :] = True
    angles, rows = document_angles(model, torch.stack(columns, 1), padding)
    for column, order in enumerate((lengths, lengths[::-1])):
        alone = [rotary_angles(model, torch.arange(n), n) for n in order]
        for found, parts in zip(angles, zip(*alone, strict=True), strict=True):
            assert torch.equal(found[rows[: s - padded, column].long()], torch.cat(parts))


@pytest.mark.parametrize("variant", ["capacity", "capacity by position", "dynamic rope"])
def test_scores_of_a_text_do_not_depend_on_the_texts_next_to_it(variant, files):
    """Shorter ones are filled up to the length of the longest."""
    run = run_of(24, **VARIANTS[variant])
    with contextlib.closing(trainer_of(SoloComm(), run, files)) as trainer:
        weights = whole_tensors(trainer, "weight")
    model = model_of(run, weights, weights.__getitem__)
    random = np.random.default_rng(3)
    requests = [Request(random.integers(1, 96, size), size - 1) for size in (3, 20, 7, 12, 5)]
    torch.testing.assert_close(
        score(model, requests, 5), score(model, requests, 1), rtol=1e-6, atol=1e-6
    )


def test_flops_of_the_log_leave_padding_out_of_the_experts():
    """Padding saves the FLOPs of forward and backward in each layer: two experts of a token, with three matrices."""
    run = run_of(24, **EXPERTS)
    every, some = (accounting.hardware_flops(run, 4, None, padded) for padded in (0, 10))
    assert every - some == pytest.approx(10 * 3 * 2 * (2 * 2 * 3 * 32 * 24))
    dense = run_of(24)
    assert accounting.hardware_flops(dense, 4, None, 10) == accounting.hardware_flops(dense, 4)


def test_marks_of_padding(files):
    """The last token of each chat, and what follows the last chat; the work counts those that are inputs."""
    dataset = ChatDataset(files, "train", range(8), 4, DatasetConfig(24, 3))
    sample = dataset[0]
    assert np.flatnonzero(sample[1] & PADDED).tolist() == [8, *range(17, 25)]
    work = TokenCounts.of(np.stack([fetch(dataset, range(2))]))
    assert (work.padded, work.samples) == (2 * (1 + 7), 2)
    alone = ChatDataset(files, "train", range(8), 8, DatasetConfig(8, 3))
    assert TokenCounts.of(np.stack([fetch(alone, range(8))])).padded == 0
