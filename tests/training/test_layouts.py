"""Every model trains in every layout as on one rank, and options that only reorder work change no bit."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.nn.parameter import GradientMemory
from fugaku_megatron.optim.flat import FlatParameter
from tests import llama_models
from tests.checks.adapters import ADAPTED_EXPERTS, LORA, QWEN
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
from tests.checks.tables import DEFINITION, Presets, parse_row
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


# Names of layouts.txt, next to those that it defines.
PRESETS: Presets = {
    **FAMILIES,
    "dropout": DROPOUT,
    "resets": RESETS,
    "uneven": UNEVEN,
    "eight": EIGHT,
    "bf16-moments": BF16_MOMENTS,
    "delta-layers": llama_models.DELTA_NETS,
    "latent": llama_models.LATENT,
    "experts": EXPERTS,
    "all": ALL,
    "shared": SHARED,
    "balanced": BALANCED,
    "biased": BIASED,
    "sinkhorn": SINKHORN,
    "capacity": CAPACITY,
    "by-position": BY_POSITION,
    "qwen": QWEN,
    "adapted-experts": ADAPTED_EXPERTS,
    "adapted-delta-nets": ADAPTED_DELTA_NETS,
    "adapted-latent": {**llama_models.LATENT, **LORA},
    "padded-chats": PADDED_CHATS,
    "packed": packed(8),
}
MODELS: dict[str, Model] = {}
CASES: list[tuple[str, str, bool]] = []  # a model, a layout, and whether it is rare


def read_table() -> None:
    """Read layouts.txt, whose head describes the format."""
    name = ""
    for line in Path(__file__).with_name("layouts.txt").read_text().splitlines():
        if definition := DEFINITION.fullmatch(line):
            PRESETS[definition[1]] = parse_row(definition[2], PRESETS)[1]
        elif section := re.fullmatch(r"\[(.*)\] (.*)", line):
            name = section[1]
            flags = parse_row(section[2], PRESETS)[1]
            of_test = {key: flags.pop(key) for key in Model._fields if key in flags}
            MODELS[name] = Model(flags, **of_test)
        elif line and not line.startswith("#"):
            CASES.append((name, line.removeprefix("rare "), line.startswith("rare ")))


read_table()
BASE = PRESETS["base"]
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


@pytest.fixture(autouse=True)
def undefined_gradients(monkeypatch):
    """Fill gradients with NaN that are to be overwritten."""
    monkeypatch.setattr(FlatParameter, "take_main_grad", taken_as(math.nan))


def taken_as(value: float, overwrite: bool = True) -> Callable[[FlatParameter], GradientMemory]:
    """Return `take_main_grad` which fills memory that is to be overwritten. overwrite: False: added to `value`"""
    take = FlatParameter.take_main_grad

    def taken(self: FlatParameter) -> GradientMemory:
        memory = take(self)
        if memory.overwrite:
            memory.values.fill_(value)
        return memory._replace(overwrite=memory.overwrite and overwrite)

    return taken


@pytest.mark.parametrize("name", MODELS)
def test_first_gradients_are_written_with_the_bits_of_a_sum(name, one_rank, datasets, monkeypatch):
    model = MODELS[name]
    monkeypatch.undo()
    monkeypatch.setattr(FlatParameter, "take_main_grad", taken_as(0.0, overwrite=False))
    added = train(SoloComm(), small_run(**model.flags), datasets[model.data], model.iterations)
    written = one_rank(name)
    assert (added.losses, added.norms) == (written.losses, written.norms)
    torch.testing.assert_close(added.gradients, written.gradients, rtol=0, atol=0)
    torch.testing.assert_close(added.weights, written.weights, rtol=0, atol=0)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[str, Data]:
    folder = tmp_path_factory.mktemp("chats")
    return {
        "tokens": random_tokens,
        "texts": texts,
        "chats": chats_of(write_random_chats(folder / "eight")),
        "one_chat": chats_of(write_chats(folder / "one", [CHAT_LENGTH])),
    }


def marks(model: str, layout: str, rare: bool) -> list[pytest.MarkDecorator]:
    if rare:
        return [pytest.mark.full]
    if model == "gpt" and layout in SMOKE:
        return [pytest.mark.smoke]
    return []


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(name, layout, marks=marks(name, layout, rare)) for name, layout, rare in CASES],
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
    ("low", "name"),
    [
        ("gpt in bf16", "gpt"),
        ("gpt in fp16", "gpt"),
        ("qwen3 in bf16", "qwen3"),
        ("experts in bf16, ten iterations", "experts, ten iterations"),
    ],
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

MTP = "mtp_num_layers=2 mtp_loss_scaling_factor=1.0 position_embedding_type=rope"

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
    (MTP, "full"),
    (f"pp2 dp2 clip_grad=0.0 {MTP}", "overlap ddp_bucket_size=1"),
    (f"pp2 {MTP}", "zb-h1"),
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
