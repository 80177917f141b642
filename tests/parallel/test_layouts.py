"""Every layout, schedule and option trains as one rank does, and what only changes the order of work keeps every bit."""

import functools
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch

from fugaku_megatron.comm.base import Comm
from tests.helpers import (
    ALLGATHER,
    CP2,
    CP4,
    DROPOUT,
    OVERLAP,
    P2P,
    PP2,
    TP2,
    TP2PP2,
    make_trainer,
    small_run,
    whole_tensors,
)
from tests.llama_models import FAMILIES
from tests.threads import ThreadWorld

BASE = {"global_batch_size": 8, **DROPOUT}
PP4 = {"pipeline_model_parallel_size": 4}
SEQUENCE, TORCH = {"sequence_parallel": True}, {"kernels": "torch"}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
BLOCK = {**FULL, "recompute_method": "block"}
INTERLEAVED, ZB_H1, ZBV = (
    {"num_virtual_stages_per_pipeline_rank": 2},
    {"pipeline_schedule": "zb-h1"},
    {"pipeline_schedule": "zbv"},
)
MOMENTS = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
LAYERS_8 = {"num_layers": 8}
# What no published family mixes: every bias, interleaved rope of half a head, and norms of queries and keys without positions.
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt of 8 layers": LAYERS_8,
    "moments in bf16": MOMENTS,
    **FAMILIES,
    "qwen3 of 4 layers": {**FAMILIES["qwen3"], "num_layers": 4},
    "llama of 4 layers": {**FAMILIES["llama"], "num_layers": 4},
    "biases": {
        "num_layers": 2,
        "swiglu": True,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
    },
    "no positions": {
        "num_layers": 2,
        "normalization": "RMSNorm",
        "position_embedding_type": "none",
        "qk_layernorm": True,
        "group_query_attention": True,
        "num_query_groups": 4,
        "kv_channels": 12,
        "window_size": "2,0",
    },
}
ROWS = [  # ranks, model, flags: every option once at least, and pairs of them rather than all combinations
    (2, "gpt", {**TP2, **SELECTIVE}),
    (2, "gpt", {**TP2, **SEQUENCE, **SELECTIVE, **TORCH}),
    (4, "gpt", {"tensor_model_parallel_size": 4, "make_vocab_size_divisible_by": 4, **SEQUENCE}),
    (2, "gpt", {**PP2, "pipeline_split": "3,1"}),
    (4, "gpt", {**PP4, **FULL}),
    (2, "gpt", {"zero_stage": 1, **SELECTIVE}),
    (4, "gpt", OVERLAP),
    (8, "gpt", TP2PP2),
    (8, "gpt", {**TP2PP2, **SEQUENCE, **OVERLAP, **FULL, "recompute_num_layers": 2}),
    (4, "gpt of 8 layers", {**PP4, "num_layers_per_virtual_pipeline_stage": 1}),
    (4, "gpt", {**PP2, **INTERLEAVED, **OVERLAP}),
    (4, "gpt", {**PP4, **ZB_H1}),
    (2, "gpt", {**PP2, **ZB_H1, **INTERLEAVED, **FULL}),
    (4, "gpt", {**PP2, **ZB_H1, **INTERLEAVED, **OVERLAP}),
    (2, "gpt", {**PP2, **ZBV, **BLOCK, "zero_bubble_max_pending_backward": 3}),
    (8, "gpt", {**TP2PP2, **ZBV, **SEQUENCE, **OVERLAP}),
    (8, "moments in bf16", {**TP2PP2, **OVERLAP}),
    (4, "llama", {**TP2PP2, **SEQUENCE, **TORCH}),
    (2, "llama of 4 layers", {**PP2, **ZBV, "zero_stage": 1}),
    (4, "mistral", {**TP2, **OVERLAP}),
    (4, "qwen2", TP2PP2),
    (4, "qwen3 of 4 layers", {**PP2, **FULL}),
    (2, "qwen3", {**TP2, **SEQUENCE, "tp_comm_overlap": True, **SELECTIVE}),
    (8, "biases", {**TP2PP2, **OVERLAP}),
    (4, "no positions", {**TP2, "zero_stage": 1}),
    (2, "gpt", {**CP2, **SELECTIVE}),
    (4, "gpt", {**CP4, "zero_stage": 1}),
    (4, "gpt", {**CP2, **PP2, **ZBV, **FULL, **TORCH}),
    (4, "gpt", {**CP2, **TP2, "tp_comm_overlap": True, **SEQUENCE}),
    (2, "llama", CP2),
    (4, "qwen3", {**CP2, **TP2, **SEQUENCE}),
    (4, "biases", {**CP2, **PP2}),
    (4, "no positions", {**CP2, **OVERLAP}),
    (2, "gpt", {**CP2, **P2P, **SELECTIVE}),
    (4, "gpt", {**CP4, **P2P, "zero_stage": 1}),
    (4, "gpt", {**CP4, **ALLGATHER, **TORCH}),
    (8, "gpt", {**CP2, **TP2PP2, **P2P, **SEQUENCE, **OVERLAP}),
    (4, "gpt", {**CP2, **PP2, **ALLGATHER, **ZBV, **FULL}),
    (4, "llama", {**CP4, **P2P, **TORCH}),
    (2, "gpt", {**CP2, "cp_comm_type": ("p2p", "a2a", "allgather", "a2a+p2p")}),
]
RARE_ROWS = [  # `make test-full` alone runs these
    (4, "gpt", {**TP2PP2, **SEQUENCE}),
    (2, "gpt", {**PP2, **INTERLEAVED, **SELECTIVE}),
    (4, "gpt of 8 layers", {**PP4, **ZBV, **FULL}),
    (2, "qwen3", {**CP2, **TORCH}),
    (4, "llama", {**CP4, **OVERLAP}),
    (4, "qwen3", {**CP2, **TP2, **P2P, **SEQUENCE}),
    (2, "llama", {**CP2, **ALLGATHER}),
    (4, "no positions", {**CP2, **ALLGATHER, **OVERLAP}),
    (8, "gpt", {**CP2, **TP2PP2, **SEQUENCE, **OVERLAP}),
    (4, "no positions", {**CP4, **P2P}),
]
SMOKE = [  # of ROWS, in `make check`
    (4, "gpt", {**PP4, **FULL}),
    (8, "gpt", TP2PP2),
    (8, "gpt", {**TP2PP2, **SEQUENCE, **OVERLAP, **FULL, "recompute_num_layers": 2}),
    (4, "gpt", {**PP2, **ZB_H1, **INTERLEAVED, **OVERLAP}),
    (8, "gpt", {**TP2PP2, **ZBV, **SEQUENCE, **OVERLAP}),
]


class Trained(NamedTuple):
    """Results of a run: losses, the last of an evaluation in between; gradient norms; the first gradients; the last weights."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def trained(world: Comm, changes: dict[str, Any]) -> Trained:
    with closing(make_trainer(world, small_run(**{**BASE, **changes}))) as trainer:
        first = trainer.train_step()
        gradients = whole_tensors(trainer, "grad")
        second = trainer.train_step()
        evaluated = trainer.evaluate(trainer.valid, 0, 1)
        results = [first, second, trainer.train_step()]
    losses = [
        *(result.loss for result in results),
        evaluated,
    ]  # closed: no weight is on its way any more
    return Trained(
        losses,
        [result.grad_norm for result in results],
        gradients,
        whole_tensors(trainer, "weight"),
    )


def together(ranks: int, **changes: Any) -> Trained:
    """Train on all ranks and return the result on which they agree."""
    first, *others = ThreadWorld(ranks).run(trained, changes)
    assert all((other.losses, other.norms) == (first.losses, first.norms) for other in others)
    return first


@functools.cache
def together_once(ranks: int, *changes: tuple[str, Any]) -> Trained:
    """Return `together(ranks, **dict(changes))`, of which several rows need the same."""
    return together(ranks, **dict(changes))


def alone(model: str) -> Trained:
    return together_once(1, *MODELS[model].items())


def words(changes: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in changes.items())


def marks(row: tuple[int, str, dict[str, Any]]) -> list[pytest.MarkDecorator]:
    if row in SMOKE:
        return [pytest.mark.smoke]
    if row in RARE_ROWS:
        return [pytest.mark.full]
    return []


@pytest.mark.parametrize(
    ("ranks", "model", "changes"),
    [
        pytest.param(*row, id=f"{row[1]} {words(row[2])}", marks=marks(row))
        for row in (*ROWS, *RARE_ROWS)
    ],
)
def test_a_layout_trains_as_one_rank(ranks, model, changes):
    """With dropout; the third iteration depends on every gradient of the first two."""
    expected, found = alone(model), together(ranks, **MODELS[model], **changes)
    assert found.losses == pytest.approx(expected.losses, rel=5e-6) and len(set(found.losses)) == 4
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    words, head = (
        found.weights.get(f"{name}.weight")
        for name in ("embedding.word_embeddings", "output_layer")
    )
    assert head is None or "output_layer.weight" in expected.weights or torch.equal(head, words), (
        "tied copies stay equal"
    )
    if "zero_stage" in changes:
        return  # with ZeRO-1 each rank keeps a part of the sums
    for name, gradient in expected.gradients.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(
            found.gradients[name] / scale,
            gradient / scale,
            rtol=0,
            atol=1e-6,
            msg=lambda m, name=name: f"{name}: {m}",
        )


def test_dropout_is_at_work():
    assert (
        together(1, hidden_dropout=0.0).losses
        != alone("gpt").losses
        != together(1, attention_dropout=0.0).losses
    )


TP2_SEQUENCE = {**TP2, **SEQUENCE}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SAME_BITS = [  # ranks, flags, and those that change no bit
    (1, {}, SEQUENCE),
    (1, {}, {**FULL, "recompute_num_layers": 2}),
    (1, {}, {**BLOCK, "recompute_num_layers": 2}),
    (1, {}, SELECTIVE),
    (4, {"clip_grad": 0.3}, {"zero_stage": 1}),
    (2, {"clip_grad": 0.0}, {"zero_stage": 1}),
    (2, {**PP2, "bf16": True}, {"cache_packed_weights": True}),
    (4, {**PP4, "global_batch_size": 16}, {**ZB_H1, "zero_bubble_max_pending_backward": 6}),
    (4, PP4, ZB_H1),
    (2, PP2, {**FULL, "recompute_part_layers": (1, 2)}),
    (2, {**PP2, **ZB_H1}, {**FULL, "recompute_part_layers": (9, 9)}),
    (2, {**PP2, **INTERLEAVED, **LAYERS_8}, {**FULL, "recompute_part_layers": (2, 0, 1, 2)}),
    (2, {**PP2, **ZBV, **LAYERS_8}, {**FULL, "recompute_part_layers": (2, 0, 1, 2)}),
    (
        2,
        {**TP2_SEQUENCE, "bf16": True},
        {"tp_comm_overlap": True},
    ),  # a sum of two ranks has no order
    (2, {**TP2_SEQUENCE, **FULL, **TORCH}, {"tp_comm_overlap": True}),
    (
        2,
        {**TP2_SEQUENCE, "disable_bias_linear": True, "cache_packed_weights": True},
        {"tp_comm_overlap": True},
    ),
    (4, {**TP2_SEQUENCE, **PP2, **ZBV, **SELECTIVE, "swiglu": True}, {"tp_comm_overlap": True}),
    (
        8,
        {**TP2PP2, "bf16": True, "ddp_bucket_size": 20_000, "clip_grad": 0.3},
        {"overlap_grad_reduce": True},
    ),
    (
        8,
        {**TP2PP2, **SEQUENCE, "zero_stage": 1, "ddp_bucket_size": 1, "clip_grad": 0.3},
        OVERLAPPED,
    ),
    (
        4,
        {**PP2, "zero_stage": 1, "ddp_bucket_size": 20_000, "grad_reduce_in_bf16": True},
        OVERLAPPED,
    ),
    (4, {**PP2, "clip_grad": 0.0}, {**OVERLAP, "ddp_bucket_size": 1}),
]


@pytest.mark.parametrize(
    ("ranks", "common", "option"),
    [pytest.param(*row, id=f"{words(row[2])} with {words(row[1])}") for row in SAME_BITS],
)
def test_an_option_changes_no_bit(ranks, common, option):
    """No bit of losses and weights changes; norms are sums of other parts where buckets or shards are others."""
    plain = together_once(ranks, *common.items())
    found = together(ranks, **common, **option)
    assert found.losses == plain.losses and found.norms == pytest.approx(plain.norms, rel=1e-6)
    assert all(torch.equal(found.weights[name], weight) for name, weight in plain.weights.items())


def test_blocks_of_rows_on_four_ranks_agree():
    changes = {"tensor_model_parallel_size": 4, "make_vocab_size_divisible_by": 4, **SEQUENCE}
    found = together(4, **changes, tp_comm_overlap=True)
    assert found.losses == pytest.approx(together(4, **changes).losses, rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "model", "ranks", "changes"),
    [
        ("bf16", "gpt", 2, {"zero_stage": 1}),
        ("fp16", "gpt", 4, {**TP2PP2, **SEQUENCE}),
        ("bf16", "qwen3", 4, TP2PP2),
    ],
)
def test_low_precision_stays_close(precision, model, ranks, changes):
    flags = {**MODELS[model], precision: True, "initial_loss_scale": 1024.0}
    one, found = together(1, **flags), together(ranks, **flags, **changes)
    assert found.losses == pytest.approx(one.losses, rel=0.02) and one.losses == pytest.approx(
        alone(model).losses, rel=0.02
    )
    assert found.norms == pytest.approx(one.norms, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "copies", "tables"),
    [(ZBV, [False] * 4, [1, 0, 0, 0]), (INTERLEAVED, [True, False, False, True], [1, 0, 0, 1])],
)
def test_a_stage_with_both_ends_has_the_tied_weight_once(schedule, copies, tables):
    def tied(world: Comm) -> tuple[bool, int]:
        trainer = make_trainer(world, small_run(vocab_size=112, **LAYERS_8, **PP4, **schedule))
        rows = [len(p) for p in trainer.optimizer.flat.parameters]
        return trainer.stage.tied_copy is not None, rows.count(trainer.run.model.vocab_size)

    assert ThreadWorld(4).run(tied) == list(zip(copies, tables, strict=True))
