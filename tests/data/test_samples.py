"""A rank's samples: from a shared reader, and with --skip-samples."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.batches import RampUp, length
from fugaku_megatron.config.sample_rules import Skips
from fugaku_megatron.config.training import TrainingConfig
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.data.reader_group import ReaderBatches, ReaderGroup, build_reader_group
from fugaku_megatron.data.sampler import micro_batches
from fugaku_megatron.run.announce import skip_line
from fugaku_megatron.run.resume import Resume, resume_training
from tests.helpers import find_checkpoint, make_trainer, small_run, train
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

DATA = MockDataset(50, 8, 100, 3)


def test_a_reader_serves_the_ranks_of_its_node_that_need_data():
    def rank(world):
        nodes = find_nodes(world, "ab"[world.rank % 2])
        readers = build_reader_group(
            world, nodes, dp_rank=10 + world.rank, needs_data=world.rank != 2
        )
        return readers and (readers.dp_ranks, readers.reads)

    assert ThreadWorld(6).run(rank) == [
        ((10, 14), True),
        ((11, 13, 15), True),
        None,
        ((11, 13, 15), False),
        ((10, 14), False),
        ((11, 13, 15), False),
    ]


@pytest.mark.parametrize("dp_ranks", [(0, 1, 2), (1, 1, 0)])
def test_what_is_handed_out_is_what_each_rank_would_read(dp_ranks):
    def size(consumed):
        return 12 if consumed < 24 else 24

    def rank(world):
        readers = ReaderGroup(world, dp_ranks)
        own = micro_batches(DATA, 0, size, 2, dp_ranks[world.rank], 3)
        with closing(
            ReaderBatches(readers, DATA if readers.reads else None, 0, size, 2, 3)
        ) as shared:
            for count in (2, 2, 4, 4):
                shared.begin()
                for _ in range(count):
                    assert np.array_equal(next(shared), next(own))
                assert next(shared, None) is None  # the next iteration has not begun

    ThreadWorld(3).run(rank)


def test_an_error_of_the_reader_is_raised():
    class Broken(MockDataset):
        def __getitem__(self, index):
            raise ValueError("token id 99")

    def rank(world):
        data = Broken(50, 8, 100, 3) if world.rank == 0 else None
        with closing(
            ReaderBatches(ReaderGroup(world, (0, 1)), data, 0, lambda _: 4, 2, 2)
        ) as shared:
            shared.begin()

    with pytest.raises(ValueError, match="token id 99"):
        ThreadWorld(2).run(rank)


RANGES = [(), ("4:9",), ("0:3,3:5", "20:21"), ("7:30",), ("30:40", "35:50"), ("0:1",)]


def taken(
    ranges: tuple[str, ...], ramp: RampUp, iterations: int, position: int = 0
) -> list[list[int]]:
    """By the definition: sample after sample, those in a range left out."""
    out = {
        n for text in ranges for part in text.split(",") for n in range(*map(int, part.split(":")))
    }
    batches: list[list[int]] = []
    for _ in range(iterations):
        size = ramp(position)
        batch = []
        while len(batch) < size:
            batch += [] if position in out else [position]
            position += 1
        batches.append(batch)
    return batches


@pytest.mark.parametrize("ramp", [RampUp(8, 1, 0, 8), RampUp(4, 4, 40, 12)])
@pytest.mark.parametrize("ranges", RANGES)
def test_samples_and_length_follow_the_definition(ranges, ramp):
    skips = Skips.parse(ranges)
    batches = taken(ranges, ramp, 30)
    position = 0
    ends = [0]
    for batch in batches:
        assert list(skips.samples(position, ramp(position))) == batch
        position = batch[-1] + 1
        ends.append(position)
    for iterations, end in enumerate(ends):
        by_iterations = TrainingConfig(train_iters=iterations)
        assert length(by_iterations, ramp, skips=skips) == (iterations, end)
        whole = length(TrainingConfig(train_iters=30), ramp, iterations, end, skips)
        assert whole == (30, ends[-1]), "resumed"
        if end:
            assert length(TrainingConfig(train_samples=end), ramp, skips=skips) == (iterations, end)
            shorter, _ = length(TrainingConfig(train_samples=end - 1), ramp, skips=skips)
            assert shorter == iterations - 1, "whole iterations only"


def test_long_runs_are_not_walked_step_by_step():
    skips = Skips.parse(["1000000000:1000000010", "9000000000:9000000003"])
    assert length(TrainingConfig(train_iters=2**31 - 1), RampUp(8, 1, 0, 8), skips=skips) == (
        2**31 - 1,
        8 * (2**31 - 1) + 13,
    )


@pytest.mark.parametrize("ranges", RANGES)
def test_every_layout_takes_the_same_samples(ranges):
    data = MockDataset(1000, 6, 120, 3)
    ramp = RampUp(4, 4, 40, 12)
    skips = Skips.parse(ranges)
    expected = [data[n][:-1] for batch in taken(ranges, ramp, 6) for n in batch]
    for dp, size in ((1, 4), (2, 2), (2, 1), (4, 1)):
        parts = [micro_batches(data, 0, ramp, size, rank, dp, skips.samples) for rank in range(dp)]
        columns = [
            batch[:-1, b]
            for step in zip(*parts, strict=False)
            for batch in step
            for b in range(size)
        ]
        assert len(columns) >= len(expected) and all(map(np.array_equal, columns, expected))
    shared = ReaderBatches(ReaderGroup(SoloComm(), (0,)), data, 0, ramp, 4, 1, skips.samples)
    for batch in taken(ranges, ramp, 4):
        shared.begin()
        assert np.array_equal(
            np.concatenate(list(shared), 1), np.stack([data[n] for n in batch], 1)
        )
    shared.close()


def test_a_run_of_iterations_over_several_epochs_is_told_of_its_order():
    once, twice = (SimpleNamespace(num_epochs=count) for count in (1, 2))
    run = small_run(skip_samples=("2:3",))
    line = skip_line(run, twice)
    assert line.startswith("note: --skip-samples lengthens a run of --train-iters")
    by_samples = small_run(skip_samples=("2:3",), train_iters=None, train_samples=9)
    for others in ((run, once), (small_run(), twice), (run, None), (by_samples, twice)):
        assert skip_line(*others) is None


DROPOUT = {"num_layers": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1}


def test_a_resumed_run_goes_on_with_the_same_bits_and_says_what_changed(tmp_path):
    def start(iterations, **changes):
        run = small_run(**DROPOUT, save=str(tmp_path), load=str(tmp_path), **changes)
        resume = find_checkpoint(run, SoloComm()) if list(tmp_path.iterdir()) else Resume()
        trainer = make_trainer(SoloComm(), run)
        notes = [line for line in resume_training(trainer, resume) if "skip-samples" in line]
        progress = trainer.progress
        plan = Plan(run, trainer.layout).resumed(progress.iteration, progress.consumed_samples)
        assert plan.length.iterations == 20
        losses = [trainer.train_step().loss for _ in range(iterations)]
        if iterations == 3:
            trainer.save(str(tmp_path))
        trainer.close()
        return losses, notes

    skipped = {"skip_samples": ("20:30", "70:75")}
    whole = [step.loss for step in train(SoloComm(), small_run(**DROPOUT, **skipped), 6)]
    first, _ = start(3, **skipped)  # up to sample 58
    rest, notes = start(2, **skipped)
    assert first + rest == whole[:5] and notes == []
    assert start(2, skip_samples=("70:75",)) == (rest, []), "samples that were passed need no flag"
    _, notes = start(1)
    assert notes == [
        "note: --skip-samples leaves out nothing of the samples ahead, was 70:75: the loss curve changes from "
        "there on"
    ]
    _, notes = start(1, skip_samples=("50:60", "70:75"))
    assert notes[0].startswith(
        "note: --skip-samples leaves out 58:60,70:75 of the samples ahead, was 70:75: "
    )
    assert notes[1].startswith(
        "note: --skip-samples 50:58 lies before sample 58, where this checkpoint continues: "
    )
