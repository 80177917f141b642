"""Checkpoints between parallel layouts: the curve goes on as if nothing had changed."""

import pytest
import torch

from fugaku_megatron.checkpoint import load as load_module
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.run.resume import resume_training
from fugaku_megatron.training.trainer import Trainer
from tests.helpers import DROPOUT, find_checkpoint, make_trainer, run_layout, small_run
from tests.llama_models import DELTA_NETS

pytestmark = pytest.mark.parallel

ALL = "tp2 pp2 dp2 zero"
ONE = "dp1"
UNEVEN = "pp2 dp2 pipeline_split='3,1'"
OTHERS = (
    ONE,
    "tp4 sequence",
    "tp2 dp2 zero ddp_bucket_size=5000",
    "pp2 dp2 zero num_layers_per_virtual_pipeline_stage=1",
    "tp2 pp2 zbv",
)
FIRST, AFTER = 2, 2  # iterations before the save, and compared after it
FLAGS = {"global_batch_size": 8, "make_vocab_size_divisible_by": 4, "swiglu": True, **DROPOUT}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def trained(
    world, run, source: str | None, target: str | None, iterations: int
) -> list[tuple[float, float]]:
    """Return losses and gradient norms, from one checkpoint to another."""
    trainer = make_trainer(world, run)
    if source:
        trainer.load(source)
        assert trainer.progress.consumed_samples == 8 * trainer.progress.iteration > 0
    results = [trainer.train_step() for _ in range(iterations)]
    if target:
        trainer.save(target)
    trainer.close()
    return [(result.loss, result.grad_norm) for result in results]


def curve(
    layout: str, source=None, target=None, iterations: int = AFTER, flags=FLAGS
) -> list[tuple[float, float]]:
    directories = (source and str(source), target and str(target))
    ranks = run_layout(layout, trained, flags, *directories, iterations)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of a run with TP 2 x PP 2 x DP 2 and ZeRO-1, and its next figures."""
    directory = tmp_path_factory.mktemp("saved")
    curve(ALL, target=directory, iterations=FIRST)
    return directory, curve(ALL, directory)


def difference(found, expected) -> float:
    """The largest relative difference of losses; gradient norms are held to ten times that."""
    losses, norms = (
        max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(found, expected, strict=True))
        for i in (0, 1)
    )
    assert norms < 1e-5, norms
    return losses


@pytest.mark.parametrize("layout", OTHERS)
def test_a_run_goes_on_in_another_layout_and_back_again(layout, saved, tmp_path):
    directory, expected = saved
    assert difference(curve(layout, directory), expected) <= 1e-6
    curve(layout, directory, tmp_path, 0)  # nothing but the layout has changed
    assert curve(ALL, tmp_path, iterations=2) == expected[:2], "the same bits"


def test_gated_delta_nets_go_on_with_the_same_bits_and_in_another_layout(tmp_path):
    flags = {**FLAGS, **DELTA_NETS}
    straight = curve(ALL, iterations=FIRST + AFTER, flags=flags)
    curve(ALL, target=tmp_path, iterations=FIRST, flags=flags)
    assert curve(ALL, tmp_path, flags=flags) == straight[FIRST:]
    assert difference(curve(ONE, tmp_path, flags=flags), straight[FIRST:]) <= 1e-6


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and moments as global tensors, put together over all ranks. Collective."""
    whole: dict[str, torch.Tensor] = {}
    pieces = [
        (s.key, s.global_shape, s.piece, s.tensor.clone())
        for s in trainer.optimizer.checkpoint_shards()
    ]
    for key, shape, piece, tensor in (
        part for rank in trainer.world.all_gather_object(pieces) for part in rank
    ):
        target = whole.setdefault(key, torch.full(shape, torch.nan))
        place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
        part = target[place].contiguous()
        part.view(-1)[piece.start : piece.start + piece.numel] = tensor.view(-1)
        target[place] = part
    return whole


def loaded(layout: str, directory, target=None, **changes) -> dict[str, torch.Tensor]:
    """Return the weights and moments that a layout loads, and saves in `target`."""

    def load(world, run):
        trainer = make_trainer(world, run)
        trainer.load(str(directory))
        if target:
            trainer.save(str(target))
        return everything(trainer)

    return run_layout(layout, load, {**FLAGS, **changes})[0]


@pytest.fixture(scope="module")
def tensors(saved):
    return loaded(ALL, saved[0])


@pytest.mark.parametrize("layout", [ALL, *OTHERS, "dp4", UNEVEN])
def test_every_bit_of_weights_and_moments_arrives(layout, saved, tensors):
    result = loaded(layout, saved[0])
    for key in result:
        assert torch.equal(result[key], tensors[key]), key
    assert {f"{kind}/embedding.word_embeddings.weight" for kind in KINDS} <= result.keys()
    has_copy = "pp2" in layout and "zbv" not in layout  # in a V one stage has both ends
    assert any("output_layer" in key for key in result) == has_copy


def test_a_tied_copy_comes_from_the_embedding_where_the_checkpoint_has_one_only(
    saved, tensors, tmp_path
):
    curve(ONE, saved[0], tmp_path, 0)
    result = loaded(UNEVEN, tmp_path)
    for kind in KINDS:
        assert torch.equal(
            result[f"{kind}/output_layer.weight"],
            tensors[f"{kind}/embedding.word_embeddings.weight"],
        )


@pytest.mark.parametrize(("divisor", "rows"), [(28, 112), (33, 99)])
def test_the_vocabulary_is_padded_anew(divisor, rows, saved, tensors, tmp_path):
    """96 tokens: rows that the checkpoint lacks begin as in a new run, and rows beyond the tokens are dropped."""
    result = loaded(UNEVEN, saved[0], tmp_path, make_vocab_size_divisible_by=divisor)
    back = loaded(ONE, tmp_path)
    assert all(torch.equal(back[key], tensors[key]) for key in back)
    run = small_run(**{**FLAGS, "make_vocab_size_divisible_by": divisor})
    fresh = everything(make_trainer(SoloComm(), run))
    for kind in KINDS:
        key = f"{kind}/embedding.word_embeddings.weight"
        assert result[key].shape[0] == rows and torch.equal(result[key][:96], tensors[key])
        assert torch.equal(result[key][96:], fresh[key][96:]) and torch.equal(
            result[f"{kind}/output_layer.weight"], result[key]
        )


def notes(layout: str, directory, **changes) -> list[str]:
    def resumed(world, run):
        return resume_training(make_trainer(world, run), find_checkpoint(run, world))[1:]

    return run_layout(layout, resumed, {**FLAGS, "load": str(directory), **changes})[0]


def test_the_log_says_what_follows_the_layout(saved, tmp_path):
    assert notes(ALL, saved[0]) == []
    assert notes("tp4 sequence", saved[0]) == [
        "note: saved with TP 2 x PP 2 x DP 2 x ZeRO shards 2, continues with TP 4 x PP 1 x DP 1 x "
        "ZeRO shards 1"
    ]
    longer = {"make_vocab_size_divisible_by": 32}
    assert len(notes("tp4 sequence", saved[0], **longer)) == 1, "masked padding changes nothing"
    (_, _, note) = notes("tp4 sequence", saved[0], **longer, mask_vocab_padding="no")
    assert note == (
        "note: the padded vocabulary has 128 rows, had 96, and those beyond the 96 tokens count in the loss; pass "
        "--make-vocab-size-divisible-by 24 to keep 96"
    )

    def save(world, run):
        trainer = make_trainer(world, run)
        trainer.train_step()
        trainer.save(str(tmp_path))
        trainer.close()

    run_layout("dp4", save, {**FLAGS, "global_batch_size": None})
    (_, note, *_) = notes(ONE, tmp_path, global_batch_size=None)
    assert note == (
        "note: the global batch size is 2, was 8, micro-batch x data-parallel size each time: pass "
        "--global-batch-size 8 to continue with the same curve"
    )


def test_the_same_layout_reads_its_own_files_and_no_records_pass_by(saved, monkeypatch):
    monkeypatch.setattr(load_module, "_search_all", None)
    loaded(ALL, saved[0])
