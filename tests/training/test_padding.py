"""Padding in packed chats changes no number: next to other texts, in dynamic positions and in the log."""

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
from fugaku_megatron.costs.flops import hardware_flops
from fugaku_megatron.data.chat.chat_dataset import ChatDataset
from fugaku_megatron.data.chat.chat_files import ChatFiles
from fugaku_megatron.data.dataset import DatasetConfig
from fugaku_megatron.data.marks import COUNTED, PADDED, TokenCounts
from fugaku_megatron.data.sampler import fetch
from fugaku_megatron.inference.loading import model_of
from fugaku_megatron.inference.scoring import Request, score
from fugaku_megatron.nn.attention.rotary_angles import document_angles, rotary_angles
from fugaku_megatron.observe.export.history import History
from fugaku_megatron.observe.export.metrics_writer import LogOutputs, MetricsWriter
from fugaku_megatron.run.loop import Session
from fugaku_megatron.training.trainer import Trainer
from tests.checks.chats import CHAT_LENGTH, PADDED_CHATS, packed, write_chats, write_random_chats
from tests.checks.experts import BALANCED, BIASED, BY_POSITION, CAPACITY, EXPERTS, SINKHORN
from tests.checks.layouts import chats_of
from tests.helpers import make_trainer, small_run, whole_tensors
from tests.llama_models import FAMILIES, copy_to, theirs

pytestmark = pytest.mark.parallel

CHATS_OF_EXPERTS = {**PADDED_CHATS, **EXPERTS}
DYNAMIC = {"rope_dynamic_factor": 2.0, "rope_scaling_original_max_position_embeddings": 6}
LONGROPE = {
    "longrope_short_factors": (1.0, 1.5, 2.0, 2.5),
    "longrope_long_factors": (4.0, 4.5, 5.0, 5.5),
    "longrope_attention_factor": 1.2,
    "rope_scaling_original_max_position_embeddings": 6,
}
VARIANTS = {
    "sigmoid": {**CHATS_OF_EXPERTS, **BALANCED, **BIASED},
    "sinkhorn": {**CHATS_OF_EXPERTS, **SINKHORN},
    "capacity": {**CHATS_OF_EXPERTS, **BALANCED, **CAPACITY},
    "capacity by position": {**CHATS_OF_EXPERTS, **BY_POSITION},
    "dynamic rope": {**PADDED_CHATS, **DYNAMIC},
}


@pytest.fixture
def files(tmp_path) -> ChatFiles:
    return write_random_chats(tmp_path / "chats")


def chat_trainer(run: RunConfig, files: ChatFiles) -> Trainer:
    """Build a trainer of one rank on packed chats."""
    return make_trainer(SoloComm(), run, data=chats_of(files)(run))


@pytest.mark.parametrize("variant", ["sigmoid", "sinkhorn", "dynamic rope"])
def test_samples_from_which_nothing_is_predicted(variant, tmp_path, capsys):
    """Two samples of chats of one token, of which every token is padding, and a third one with a
    trained token: the log has no NaN.
    """
    sizes = {"seq_length": 8, "micro_batch_size": 1, "global_batch_size": 1}
    run = small_run(**{**VARIANTS[variant], **sizes}, log_interval=1)
    files = write_chats(tmp_path / "c", [1] * 18 + [CHAT_LENGTH])
    with contextlib.closing(chat_trainer(run, files)) as t:
        epoch = [t.train[index] for index in range(3)]
        t.train = sorted(epoch, key=lambda sample: (sample[1] & COUNTED).sum())
        writer = MetricsWriter(3, 1, LogOutputs(writers=[History(tmp_path / "history.jsonl")]))
        Session(t, writer, 3, ()).run()
        writer.close()
    printed = capsys.readouterr().out + (tmp_path / "history.jsonl").read_text()
    assert printed.count("lm loss: 0.0") == 2
    assert not re.search(r"\bnan\b(?! iter)", printed, re.IGNORECASE)


# A type of rope_scaling: our flags, and transformers' names.
LENGTHENED = {
    "dynamic": (DYNAMIC, {"factor": 2.0}),
    "longrope": (
        LONGROPE,
        {
            "short_factor": [*LONGROPE["longrope_short_factors"]],
            "long_factor": [*LONGROPE["longrope_long_factors"]],
            "attention_factor": 1.2,
            "original_max_position_embeddings": 6,
        },
    ),
}
LENGTHS = (3, 14, 6, 9, 2, 7, 12, 5)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("kind", LENGTHENED)
def test_rope_follows_the_length_of_each_chat(kind, backend, tmp_path):
    """As transformers computes each chat alone."""
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    files = write_chats(tmp_path / "c", LENGTHS)
    changes = {
        **FAMILIES["llama"],
        "use_rope_scaling": False,
        **LENGTHENED[kind][0],
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
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 100.0, **LENGTHENED[kind][1]}
    model.config.max_position_embeddings = DYNAMIC["rope_scaling_original_max_position_embeddings"]
    with contextlib.closing(chat_trainer(run, files)) as trainer:
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
    model = small_run(**VARIANTS["dynamic rope"]).model
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
    run = small_run(**{**VARIANTS[variant], **packed(24)})
    with contextlib.closing(chat_trainer(run, files)) as trainer:
        weights = whole_tensors(trainer, "weight")
    model = model_of(run, weights, weights.__getitem__)
    random = np.random.default_rng(3)
    requests = [Request(random.integers(1, 96, size), size - 1) for size in (3, 20, 7, 12, 5)]
    torch.testing.assert_close(
        score(model, requests, 5), score(model, requests, 1), rtol=1e-6, atol=1e-6
    )


def test_flops_of_the_log_leave_padding_out_of_the_experts():
    """Padding saves forward and backward FLOPs in each layer: two experts with three matrices for each token."""
    run = small_run(**{**CHATS_OF_EXPERTS, **packed(24)})
    every, some = (hardware_flops(run, 4, None, padded) for padded in (0, 10))
    assert every - some == pytest.approx(10 * 3 * 2 * (2 * 2 * 3 * 32 * 24))
    dense = small_run(**PADDED_CHATS, **packed(24))
    assert hardware_flops(dense, 4, None, 10) == hardware_flops(dense, 4)


def test_marks_of_padding(files):
    """Each chat's last token and the tokens after the last chat are padding. Counts are for inputs only."""
    dataset = ChatDataset(files, "train", range(8), 4, DatasetConfig(24, 3))
    sample = dataset[0]
    assert np.flatnonzero(sample[1] & PADDED).tolist() == [8, *range(17, 25)]
    work = TokenCounts.of(np.stack([fetch(dataset, range(2))]))
    assert (work.padded, work.samples) == (2 * (1 + 7), 2)
    alone = ChatDataset(files, "train", range(8), 8, DatasetConfig(8, 3))
    assert TokenCounts.of(np.stack([fetch(alone, range(8))])).padded == 0
