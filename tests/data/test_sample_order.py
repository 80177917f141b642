"""The order of samples of a run that becomes longer or shorter: it is kept, and epochs are added to it.

In the data sets of these tests every token is a number of its own, so that the tokens that are trained can be counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fugaku_megatron as fm
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.data.build import Builder, build_datasets, build_separate_datasets
from fugaku_megatron.data.dataset import NEW_ORDER, DataOrder, Dataset
from fugaku_megatron.data.index_cache import IndexCache
from fugaku_megatron.data.indexed import IndexedDatasetWriter
from fugaku_megatron.run.checkpoint_source import Resume
from fugaku_megatron.run.data import open_data
from fugaku_megatron.run.resume import resume_training
from fugaku_megatron.run.sources import Sources
from tests.checks.library import FLAGS
from tests.helpers import find_checkpoint, make_trainer, small_run

pytestmark = pytest.mark.unit

LENGTH = 16  # tokens of a sample, without the one that it shares with the next


def write(prefix: Path, documents: int = 40, first: int = 0, longest: int = 60) -> int:
    """Write documents of the tokens from `first` on; return the token after the last one."""
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for length in np.random.default_rng(documents).integers(1, longest, documents):
            writer.add_document(np.arange(first, first + length))
            first += int(length)
    return first


def samples(dataset: Dataset, first: int, end: int) -> list[bytes]:
    return [dataset[i].tobytes() for i in range(first, end)]


def times_trained(orders: list[bytes], tokens: int) -> Counter:
    """Return the times that tokens are trained -> the number of tokens."""
    trained = np.concatenate([np.frombuffer(sample, np.int64)[:-1] for sample in orders])
    return Counter(np.bincount(trained, minlength=tokens).tolist())


def one(prefix: Path, needed: int, begun: int | None = None, **more) -> Dataset:
    train = build_datasets(
        [str(prefix)], "1", (needed, 0, 0), Builder(LENGTH, 7, begun=(begun, 0, 0), **more)
    )[0]
    assert train is not None
    return train


@pytest.mark.parametrize("lengths", [(10, 60, 61, 300), (95, 100, 200, 400), (130, 90, 170, 350)])
def test_a_run_that_becomes_longer_reads_every_token_as_often(tmp_path, lengths):
    tokens = write(tmp_path / "d")
    read: list[bytes] = []
    for needed in lengths:
        train = one(tmp_path / "d", needed, lengths[0])
        assert samples(train, 0, min(needed, len(read))) == read[:needed], "the order is kept"
        read += samples(train, len(read), needed)
        counts = times_trained(read, tokens)
        # Megatron's own order, which the run began with, is as even only where it is read to its end.
        if len(read) >= len(one(tmp_path / "d", lengths[0])):
            assert max(counts) - min(counts) <= 1, counts
    assert len(read) == max(lengths)


def test_a_run_of_one_piece_has_megatrons_order(tmp_path):
    write(tmp_path / "d")
    whole = one(tmp_path / "d", 300)
    assert samples(whole, 0, 300) == samples(one(tmp_path / "d", 300, 300), 0, 300)
    assert whole.num_epochs == one(tmp_path / "d", 300, 10).num_epochs, "no epoch too many is read"


def test_the_added_epochs_do_not_depend_on_the_pieces(tmp_path):
    write(tmp_path / "d")
    longest = samples(one(tmp_path / "d", 500, 20), 0, 500)
    for needed in (100, 180, 340):
        assert samples(one(tmp_path / "d", needed, 20), 0, needed) == longest[:needed]
    epochs = len(one(tmp_path / "d", 20))
    assert longest[epochs : 2 * epochs] != longest[2 * epochs : 3 * epochs], "each is shuffled"


def test_blends_keep_the_order_of_each_part(tmp_path):
    middle = write(tmp_path / "a", 30)
    tokens = write(tmp_path / "b", 20, middle)
    paths = ["1", str(tmp_path / "a"), "3", str(tmp_path / "b")]
    read: list[bytes] = []
    for needed in (40, 120, 400, 90):
        train = build_datasets(
            paths, "1", (needed, 0, 0), Builder(LENGTH, 7, begun=(40, None, None))
        )[0]
        assert train is not None
        assert samples(train, 0, min(needed, len(read))) == read[:needed]
        read += samples(train, len(read), needed)
    for first, end in ((0, middle), (middle, tokens)):
        own = [np.frombuffer(sample, np.int64) for sample in read]
        own = [sample[:-1] - first for sample in own if first <= sample[0] < end]
        counts = Counter(np.bincount(np.concatenate(own), minlength=end - first).tolist())
        assert max(counts) - min(counts) <= 1, counts


def test_validation_keeps_its_order_and_the_index_is_cached(tmp_path):
    write(tmp_path / "d")
    write(tmp_path / "v", 10)
    paths = ([str(tmp_path / "d")], [str(tmp_path / "v")], None)
    cache = str(tmp_path / "cache")
    for kept in (None, IndexCache(cache), IndexCache(cache)):
        begun = build_separate_datasets(paths, (10, 20, 0), Builder(LENGTH, 7, cache=kept))
        longer = build_separate_datasets(
            paths, (200, 200, 0), Builder(LENGTH, 7, cache=kept, begun=(10, 20, None))
        )
        for old, new in zip(begun[:2], longer[:2]):
            assert samples(new, 0, len(old)) == samples(old, 0, len(old))
    assert len([*Path(cache).glob("*-description.txt")]) == 4, "each order has files of its own"


def trained_by(pieces: list[int], documents: list[np.ndarray]) -> list[bytes]:
    """Return the samples of calls of `steps`."""
    changes = {"vocab_size": int(documents[-1][-1]) + 1, "eval_iters": 0}
    config = fm.Config(**{**FLAGS, **changes}, lr_decay_style="constant")
    trainer = fm.Trainer(config, documents)
    read = []
    for count in pieces:
        first = trainer._trainer.progress.consumed_samples
        steps = trainer.steps(count)
        read += samples(trainer._trainer.train, first, first + 4 * count)
        for _ in steps:
            pass
    trainer.close()
    return read


def test_steps_in_pieces_are_as_even_as_in_one_call():
    places = np.cumsum([0, *np.random.default_rng(0).integers(20, 40, 20)])
    documents = [np.arange(first, end) for first, end in zip(places, places[1:])]
    for pieces in ([9, 9, 9], [1] * 27, [3, 24]):
        counts = times_trained(trained_by(pieces, documents), int(places[-1]))
        assert max(counts) - min(counts) <= 1, (pieces, counts)
    whole = trained_by([27], documents)
    whole_counts = times_trained(whole, int(places[-1]))
    assert sum(times * number for times, number in whole_counts.items()) == 27 * 4 * LENGTH


def run_of(tmp_path, **changes):
    write(tmp_path / "d")
    flags = {"mock_data": False, "data_path": (str(tmp_path / "d"),), "vocab_size": 2000}
    flags |= {"seq_length": LENGTH, "num_layers": 1, "split": "80,20,0", "eval_iters": 1}
    return small_run(**{**flags, "train_iters": 10, "eval_interval": 5, **changes})


def data_of(run, order: DataOrder = NEW_ORDER):
    groups = Grid(1, 1, 1).groups(SoloComm())
    sources = Sources(Resume(state={"data_order": order._asdict()}))
    return open_data(Plan.of(run, 1), groups, sources)


def test_a_checkpoint_has_the_order_that_its_run_began_with(tmp_path):
    saved = str(tmp_path / "saved")
    begun = run_of(tmp_path)
    trainer = make_trainer(SoloComm(), begun)
    trainer.order = DataOrder(160, 48)
    trainer.train_step()
    trainer.save(saved)
    trainer.close()
    longer = run_of(tmp_path, train_iters=40, load=saved)
    resume = find_checkpoint(longer, SoloComm())
    assert resume.order == (160, 48) and resume.order.or_else(640, 144) == (160, 48)
    first = data_of(begun)
    second = data_of(longer, resume.order)
    for old, new, other in zip(first, second, data_of(longer)):
        assert len(new) > len(old)
        assert samples(new, 0, len(old)) == samples(old, 0, len(old))
        assert samples(other, 0, len(old)) != samples(old, 0, len(old)), "of the flags alone"
    resumed = make_trainer(SoloComm(), longer)
    assert not [line for line in resume_training(resumed, resume) if "order" in line]


def test_an_older_checkpoint_continues_in_the_order_of_the_flags_with_a_note(tmp_path):
    saved = str(tmp_path / "saved")
    trainer = make_trainer(SoloComm(), run_of(tmp_path))
    own = trainer.state
    trainer.state = lambda: {name: value for name, value in own().items() if name != "data_order"}
    trainer.train_step()
    trainer.save(saved)
    trainer.close()
    for iterations, notes in ((10, 0), (40, 1)):
        run = run_of(tmp_path, train_iters=iterations, load=saved)
        resume = find_checkpoint(run, SoloComm())
        lines = resume_training(make_trainer(SoloComm(), run), resume)
        found = [
            line for line in lines if "--train-iters is 40, was 10" in line and "order" in line
        ]
        assert len(found) == notes and resume.order == DataOrder()
    chats = replace(run, data=replace(run.data, data_path=None, mock_data=True))
    assert not [
        line
        for line in resume_training(make_trainer(SoloComm(), chats), resume)
        if "order of" in line
    ]


def test_skip_train_evaluates_in_the_order_of_one_evaluation(tmp_path):
    run = run_of(tmp_path, skip_train=True)
    alone = data_of(run)[1]
    resumed = data_of(run, DataOrder(160, 600))[1]
    assert samples(alone, 0, len(alone)) == samples(resumed, 0, len(alone))
