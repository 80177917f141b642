"""Checkpoints between parallel layouts: the curve goes on as if nothing had changed, and a rank reads what it needs."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace

import pytest
import torch

from fugaku_megatron.checkpoint import load as load_module
from fugaku_megatron.checkpoint.load import load_shards, open_checkpoint
from fugaku_megatron.checkpoint.manifest import Folders
from fugaku_megatron.checkpoint.schema import BLOCK_BYTES
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.training.resume import find_checkpoint, resume_training
from fugaku_megatron.training.train import Trainer
from tests.helpers import load_checkpoint, make_trainer, save_checkpoint, small_run
from tests.threads import ThreadWorld

# layout -> ranks and flags. Those with TP 4 need a vocabulary that is a multiple of 4 x --make-vocab-size-divisible-by
LAYOUTS = {
    "tp2pp2dp2zero": (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 1}),
    "one": (1, {}),
    "tp4": (4, {"tensor_model_parallel_size": 4}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "dp8": (8, {}),
    "dp4zero": (4, {"zero_stage": 1}),
    "tp2dp2zero buckets": (4, {"tensor_model_parallel_size": 2, "zero_stage": 1, "ddp_bucket_size": 5000}),
    "pp2dp2": (4, {"pipeline_model_parallel_size": 2, "pipeline_split": "3,1"}),
    "pp2dp2zero interleaved": (4, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "zero_stage": 1}),
    "tp2pp2 in a V": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}),
}
FIRST, AFTER = 3, 5  # iterations before the save, and compared after it
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def of(name: str, **changes):
    """The run in a layout."""
    return small_run(**{"make_vocab_size_divisible_by": 4, **DROPOUT, **LAYOUTS[name][1], **changes})


def trained(world, name: str, source: str | None, target: str | None, iterations: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of so many iterations, from one checkpoint to another."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, of(name))
    if source:
        trainer.load(source)
        assert trainer.progress.consumed_samples == 16 * trainer.progress.iteration > 0
    results = [trainer.train_step() for _ in range(iterations)]
    if target:
        trainer.save(target)
    trainer.close()
    return [(result.loss, result.grad_norm) for result in results]


def curve(name: str, source=None, target=None, iterations: int = AFTER) -> list[tuple[float, float]]:
    ranks = ThreadWorld(LAYOUTS[name][0]).run(trained, name, source and str(source), target and str(target), iterations)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory, what came next) of a run with TP 2 x PP 2 x DP 2 and ZeRO-1."""
    directory = tmp_path_factory.mktemp("saved")
    curve("tp2pp2dp2zero", target=directory, iterations=FIRST)
    return directory, curve("tp2pp2dp2zero", directory)


def difference(found, expected) -> float:
    """The largest relative difference of losses; gradient norms are held to ten times that."""
    losses, norms = (max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(found, expected, strict=True)) for i in (0, 1))
    assert norms < 1e-5, norms
    return losses


@pytest.mark.parametrize("name", ["one", "tp4", "dp8", "tp2dp2zero buckets", *(
    pytest.param(name, marks=pytest.mark.full) for name in ("pp4", "dp4zero", "pp2dp2")), "pp2dp2zero interleaved",
    "tp2pp2 in a V"])
def test_a_run_goes_on_in_another_layout_and_back_again(name, saved, tmp_path):
    directory, expected = saved
    assert difference(curve(name, directory), expected) <= 1e-6
    curve(name, directory, tmp_path, 0)  # nothing but the layout has changed
    assert curve("tp2pp2dp2zero", tmp_path, iterations=2) == expected[:2], "the same bits"


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and moments as global tensors, put together over all ranks. Collective."""
    whole: dict[str, torch.Tensor] = {}
    pieces = [(s.key, s.global_shape, s.piece, s.tensor.clone()) for s in trainer.optimizer.checkpoint_shards()]
    for key, shape, piece, tensor in (part for rank in trainer.world.all_gather_object(pieces) for part in rank):
        target = whole.setdefault(key, torch.full(shape, torch.nan))
        part = target[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))].contiguous()
        part.view(-1)[piece.start : piece.start + piece.numel] = tensor.view(-1)
        target[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))] = part
    return whole


def loaded(name: str, directory, **changes) -> dict[str, torch.Tensor]:
    def load(world):
        torch.set_num_threads(1)
        trainer = make_trainer(world, of(name, **changes))
        trainer.load(str(directory))
        return everything(trainer)

    return ThreadWorld(LAYOUTS[name][0]).run(load)[0]


@pytest.fixture(scope="module")
def tensors(saved):
    return loaded("tp2pp2dp2zero", saved[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bit_of_weights_and_moments_arrives(name, saved, tensors):
    result = loaded(name, saved[0])
    for key in result:
        assert torch.equal(result[key], tensors[key]), key
    assert {f"{kind}/embedding.word_embeddings.weight" for kind in KINDS} <= result.keys()
    assert any("output_layer" in key for key in result) == ("pp" in name and "V" not in name), "in a V one stage has both ends"


def test_a_tied_copy_comes_from_the_embedding_where_the_checkpoint_has_one_only(saved, tensors, tmp_path):
    curve("one", saved[0], tmp_path, 0)
    result = loaded("pp2dp2", tmp_path)
    for kind in KINDS:
        assert torch.equal(result[f"{kind}/output_layer.weight"], tensors[f"{kind}/embedding.word_embeddings.weight"])


@pytest.mark.parametrize(("divisor", "rows"), [(28, 112), (33, 99)])
def test_the_vocabulary_is_padded_anew(divisor, rows, saved, tensors):
    """96 tokens: rows that the checkpoint lacks begin as those of a new run do."""
    result = loaded("pp2dp2", saved[0], make_vocab_size_divisible_by=divisor)
    fresh = everything(make_trainer(SoloComm(), of("one", make_vocab_size_divisible_by=divisor)))
    for kind in KINDS:
        key = f"{kind}/embedding.word_embeddings.weight"
        assert result[key].shape[0] == rows and torch.equal(result[key][:96], tensors[key])
        assert torch.equal(result[key][96:], fresh[key][96:]) and torch.equal(result[f"{kind}/output_layer.weight"], result[key])


def test_rows_beyond_the_tokens_are_dropped(tmp_path, tensors, saved):
    def widened(world):
        trainer = make_trainer(world, of("one", make_vocab_size_divisible_by=64))
        trainer.load(str(saved[0]))
        trainer.save(str(tmp_path))

    ThreadWorld(1).run(widened)
    result = loaded("tp4", tmp_path)
    assert all(torch.equal(result[key], tensors[key]) for key in result)


def notes(name: str, directory, **changes) -> list[str]:
    def resumed(world):
        run = of(name, load=str(directory), **changes)
        return resume_training(make_trainer(world, run), find_checkpoint(run, world))[1:]

    return ThreadWorld(LAYOUTS[name][0]).run(resumed)[0]


def test_the_log_says_what_follows_the_layout(saved, tmp_path):
    assert notes("tp2pp2dp2zero", saved[0]) == []
    assert notes("tp4", saved[0]) == ["note: saved with TP 2 x PP 2 x DP 2 x ZeRO shards 2, goes on with TP 4 x PP 1 x DP 1 x ZeRO "
                                      "shards 1"]
    (_, note) = notes("tp4", saved[0], make_vocab_size_divisible_by=32)
    assert note == ("note: the padded vocabulary has 128 rows, had 96, and those beyond the 96 tokens count in the loss; give "
                    "--make-vocab-size-divisible-by 24 to keep 96")

    def save(world):
        trainer = make_trainer(world, of("dp8", global_batch_size=None))
        trainer.train_step()
        trainer.save(str(tmp_path))
        trainer.close()

    ThreadWorld(8).run(save)
    (_, note, *_) = notes("one", tmp_path, global_batch_size=None)
    assert note == ("note: the global batch size is 2, was 16, micro-batch x data-parallel size each time: give "
                    "--global-batch-size 16 to go on with the same curve")


# What a rank reads --------------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 4096, 2048  # 32 MiB in FP32
MIB = 1 << 20


def stored(directory, ranks: int = 1) -> torch.Tensor:
    """A matrix in rows over so many ranks, and a vector on each of them; returns the matrix."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)

    def save(comm):
        part = whole.chunk(ranks)[comm.rank]
        shards = [Shard("matrix", part, (ROWS, COLUMNS), (comm.rank * len(part), 0), tuple(part.shape)),
                  Shard(f"vector {comm.rank}", torch.ones(7), (7,), (0,), (7,))]
        save_checkpoint(directory, 1, shards, {}, comm, {}, {})

    ThreadWorld(ranks).run(save)
    return whole


def read(directory, shard: Shard) -> tuple[int, int]:
    """(bytes read, peak of what Python holds beside the shards) of loading one shard."""
    checkpoint = open_checkpoint(directory, SoloComm())
    tracemalloc.start()
    try:
        count = load_shards(checkpoint, [shard], Folders(SoloComm()))
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_are_read_with_little_more_than_themselves(ranks, tmp_path):
    whole = stored(tmp_path, ranks)
    part = Shard("matrix", torch.zeros(1000, COLUMNS), (ROWS, COLUMNS), (555, 0), (1000, COLUMNS))
    count, peak = read(tmp_path, part)
    assert torch.equal(part.tensor, whole[555:1555])
    assert count <= part.tensor.nbytes + 2 * ranks * 2 * BLOCK_BYTES and peak < 16 * MIB
    flat = Shard("matrix", torch.zeros(12_345), (ROWS, COLUMNS), (0, 0), (ROWS, COLUMNS), 2_000_001)
    count, _ = read(tmp_path, flat)
    assert torch.equal(flat.tensor, whole.view(-1)[2_000_001:2_012_346]) and count <= 4 * BLOCK_BYTES


def test_columns_take_no_more_memory_than_rows(tmp_path):
    whole = stored(tmp_path)
    part = Shard("matrix", torch.zeros(ROWS, 512), (ROWS, COLUMNS), (0, 700), (ROWS, 512))
    count, peak = read(tmp_path, part)
    assert torch.equal(part.tensor, whole[:, 700:1212])
    assert count <= whole.nbytes + 2 * BLOCK_BYTES and peak < 16 * MIB, "64 MiB are allowed"


def test_a_rank_opens_only_files_that_hold_what_it_needs(tmp_path, monkeypatch):
    stored(tmp_path, 4)
    opened, original = [], load_module.read_shards
    monkeypatch.setattr(load_module, "read_shards", lambda path, work: opened.append(path.name) or original(path, work))
    read(tmp_path, Shard("matrix", torch.zeros(100, COLUMNS), (ROWS, COLUMNS), (1000, 0), (100, COLUMNS)))
    assert opened == ["rank_00000.safetensors", "rank_00001.safetensors"]
    for name in ("rank_00002.safetensors", "rank_00003.safetensors"):
        os.truncate(tmp_path / "iter_0000001" / name, 10)
    read(tmp_path, Shard("vector 1", torch.zeros(7), (7,), (0,), (7,)))


def test_the_same_layout_reads_its_own_files_and_no_records_pass_by(saved, monkeypatch):
    monkeypatch.setattr(load_module, "_search_all", None)
    loaded("tp2pp2dp2zero", saved[0])


@pytest.mark.parametrize(("changes", "problem"), [
    ({"key": "absent"}, "has no absent"),
    ({"global_shape": (16, 6)}, r"global shape is \[8, 6\] in .*iter_0000001, \[16, 6\] in this run"),
    ({"global_shape": (8, 6, 1), "offset": (0, 0, 0), "slice_shape": (8, 6, 1)}, r"global shape is \[8, 6\] in "),
    ({"tensor": torch.zeros(8, 6).bfloat16()}, "dtype is float32 in .*iter_0000001, bfloat16 in this run"),
])
def test_what_does_not_fit_is_named_with_both_sides(changes, problem, tmp_path):
    shard = Shard("w", torch.ones(8, 6), (8, 6), (0, 0), (8, 6))
    save_checkpoint(tmp_path, 1, [shard], {}, SoloComm(), {}, {})
    with pytest.raises(ValueError, match=problem):
        load_checkpoint(tmp_path, [replace(shard, **changes)], SoloComm())


def test_a_gap_is_named_and_nothing_is_copied(tmp_path):
    half = Shard("w", torch.ones(4, 6), (8, 6), (4, 0), (4, 6))
    save_checkpoint(tmp_path, 1, [half], {}, SoloComm(), {}, {})
    whole = Shard("w", torch.zeros(8, 6), (8, 6), (0, 0), (8, 6))
    with pytest.raises(ValueError, match=r"hold 24 of the 48 elements \[0, 48\) of the slice \[8, 6\] at \[0, 0\]"):
        load_checkpoint(tmp_path, [whole], SoloComm())
    assert not whole.tensor.any()
