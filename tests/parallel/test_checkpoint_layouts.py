"""Checkpoints between parallel layouts: the curve goes on as if nothing had changed."""

import pytest
import torch

from fugaku_megatron.checkpoint import load as load_module
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.run.resume import resume_training
from fugaku_megatron.training.trainer import Trainer
from tests.helpers import DROPOUT, PP2, TP2, TP2PP2, find_checkpoint, make_trainer, small_run
from tests.threads import ThreadWorld

# layout -> ranks and flags. Those with TP 4 need a vocabulary that is a multiple of 4 x --make-vocab-size-divisible-by
ALL = "tp2pp2dp2zero"
LAYOUTS = {
    ALL: (8, {**TP2PP2, "zero_stage": 1}),
    "one": (1, {}),
    "tp4": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
    "dp4": (4, {}),
    "tp2dp2zero buckets": (4, {**TP2, "zero_stage": 1, "ddp_bucket_size": 5000}),
    "pp2dp2": (4, {**PP2, "pipeline_split": "3,1"}),
    "pp2dp2zero interleaved": (
        4,
        {**PP2, "num_layers_per_virtual_pipeline_stage": 1, "zero_stage": 1},
    ),
    "tp2pp2 in a V": (4, {**TP2PP2, "pipeline_schedule": "zbv"}),
}
FIRST, AFTER = 2, 2  # iterations before the save, and compared after it
SAMPLES = 8  # of a global batch
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def of(name: str, **changes):
    """The run in a layout."""
    return small_run(
        **{
            "global_batch_size": SAMPLES,
            "make_vocab_size_divisible_by": 4,
            "swiglu": True,
            **DROPOUT,
            **LAYOUTS[name][1],
            **changes,
        }
    )


def trained(
    world, name: str, source: str | None, target: str | None, iterations: int
) -> list[tuple[float, float]]:
    """Losses and gradient norms of so many iterations, from one checkpoint to another."""
    trainer = make_trainer(world, of(name))
    if source:
        trainer.load(source)
        assert trainer.progress.consumed_samples == SAMPLES * trainer.progress.iteration > 0
    results = [trainer.train_step() for _ in range(iterations)]
    if target:
        trainer.save(target)
    trainer.close()
    return [(result.loss, result.grad_norm) for result in results]


def curve(
    name: str, source=None, target=None, iterations: int = AFTER
) -> list[tuple[float, float]]:
    ranks = ThreadWorld(LAYOUTS[name][0]).run(
        trained, name, source and str(source), target and str(target), iterations
    )
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory, what came next) of a run with TP 2 x PP 2 x DP 2 and ZeRO-1."""
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


@pytest.mark.parametrize(
    "name", ["one", "tp4", "tp2dp2zero buckets", "pp2dp2zero interleaved", "tp2pp2 in a V"]
)
def test_a_run_goes_on_in_another_layout_and_back_again(name, saved, tmp_path):
    directory, expected = saved
    assert difference(curve(name, directory), expected) <= 1e-6
    curve(name, directory, tmp_path, 0)  # nothing but the layout has changed
    assert curve(ALL, tmp_path, iterations=2) == expected[:2], "the same bits"


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
        part = target[
            tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
        ].contiguous()
        part.view(-1)[piece.start : piece.start + piece.numel] = tensor.view(-1)
        target[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))] = part
    return whole


def loaded(name: str, directory, target=None, **changes) -> dict[str, torch.Tensor]:
    """Weights and moments that a layout loads, and saves in `target`."""

    def load(world):
        trainer = make_trainer(world, of(name, **changes))
        trainer.load(str(directory))
        if target:
            trainer.save(str(target))
        return everything(trainer)

    return ThreadWorld(LAYOUTS[name][0]).run(load)[0]


@pytest.fixture(scope="module")
def tensors(saved):
    return loaded(ALL, saved[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bit_of_weights_and_moments_arrives(name, saved, tensors):
    result = loaded(name, saved[0])
    for key in result:
        assert torch.equal(result[key], tensors[key]), key
    assert {f"{kind}/embedding.word_embeddings.weight" for kind in KINDS} <= result.keys()
    assert any("output_layer" in key for key in result) == ("pp" in name and "V" not in name), (
        "in a V one stage has both ends"
    )


def test_a_tied_copy_comes_from_the_embedding_where_the_checkpoint_has_one_only(
    saved, tensors, tmp_path
):
    curve("one", saved[0], tmp_path, 0)
    result = loaded("pp2dp2", tmp_path)
    for kind in KINDS:
        assert torch.equal(
            result[f"{kind}/output_layer.weight"],
            tensors[f"{kind}/embedding.word_embeddings.weight"],
        )


@pytest.mark.parametrize(("divisor", "rows"), [(28, 112), (33, 99)])
def test_the_vocabulary_is_padded_anew(divisor, rows, saved, tensors, tmp_path):
    """96 tokens: rows that the checkpoint lacks begin as in a new run, and rows beyond the tokens are dropped."""
    result = loaded("pp2dp2", saved[0], tmp_path, make_vocab_size_divisible_by=divisor)
    back = loaded("one", tmp_path)
    assert all(torch.equal(back[key], tensors[key]) for key in back)
    fresh = everything(make_trainer(SoloComm(), of("one", make_vocab_size_divisible_by=divisor)))
    for kind in KINDS:
        key = f"{kind}/embedding.word_embeddings.weight"
        assert result[key].shape[0] == rows and torch.equal(result[key][:96], tensors[key])
        assert torch.equal(result[key][96:], fresh[key][96:]) and torch.equal(
            result[f"{kind}/output_layer.weight"], result[key]
        )


def notes(name: str, directory, **changes) -> list[str]:
    def resumed(world):
        run = of(name, load=str(directory), **changes)
        return resume_training(make_trainer(world, run), find_checkpoint(run, world))[1:]

    return ThreadWorld(LAYOUTS[name][0]).run(resumed)[0]


def test_the_log_says_what_follows_the_layout(saved, tmp_path):
    assert notes(ALL, saved[0]) == []
    assert notes("tp4", saved[0]) == [
        "note: saved with TP 2 x PP 2 x DP 2 x ZeRO shards 2, continues with TP 4 x PP 1 x DP 1 x "
        "ZeRO shards 1"
    ]
    (_, note) = notes("tp4", saved[0], make_vocab_size_divisible_by=32)
    assert note == (
        "note: the padded vocabulary has 128 rows, had 96, and those beyond the 96 tokens count in the loss; pass "
        "--make-vocab-size-divisible-by 24 to keep 96"
    )

    def save(world):
        trainer = make_trainer(world, of("dp4", global_batch_size=None))
        trainer.train_step()
        trainer.save(str(tmp_path))
        trainer.close()

    ThreadWorld(4).run(save)
    (_, note, *_) = notes("one", tmp_path, global_batch_size=None)
    assert note == (
        "note: the global batch size is 2, was 8, micro-batch x data-parallel size each time: pass "
        "--global-batch-size 8 to continue with the same curve"
    )


def test_the_same_layout_reads_its_own_files_and_no_records_pass_by(saved, monkeypatch):
    monkeypatch.setattr(load_module, "_search_all", None)
    loaded(ALL, saved[0])
