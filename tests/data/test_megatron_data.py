"""Order and number of samples exactly as in Megatron-LM. Each test names the file there whose rule its numbers follow."""

import itertools

import numpy as np
import pytest

from fugaku_megatron.cli.arguments import make_run, parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.config.batches import RampUp, length, requested_samples, run_length
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.param_schedule import ParamSchedule
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.config.sample_rules import Skips, StepSizes
from fugaku_megatron.config.training import TrainingConfig
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.data.build import Builder, build_datasets, build_separate_datasets
from fugaku_megatron.data.data_flags import parse_data_path, parse_split, split_documents
from fugaku_megatron.data.dataset import BlendedDataset, Dataset
from fugaku_megatron.run.data import open_data
from fugaku_megatron.run.sources import Sources
from tests.checks.corpus import write
from tests.helpers import SMALL

pytestmark = pytest.mark.unit


def data_of(run: RunConfig) -> list[Dataset | None]:
    """Return a run's data on one rank: of training and of validation."""
    return open_data(Plan.of(run, 1), Grid(1, 1, 1).groups(SoloComm()), Sources())


@pytest.fixture
def two(tmp_path):
    """Write 50 and 20 documents of 40 tokens; tokens of the second data set count from 100,000."""
    return write(tmp_path / "a", [40] * 50), write(tmp_path / "b", [40] * 20, first_token=100_000)


@pytest.mark.parametrize(
    ("weights", "order"),
    [
        ((0.7, 0.2, 0.1), "01020010000102001000"),
        ((0.6, 0.3, 0.1), "01200100100120010010"),
        ((0.5, 0.3, 0.2), "01201020100120102010"),
    ],
)
def test_last_bits_of_weights_decide_equal_choices(tmp_path, weights, order):
    """megatron/core/datasets/blended_megatron_dataset_builder.py normalises the weights with numpy, and
    megatron/core/datasets/blended_dataset.py once more; helpers.cpp there chooses."""
    paths = [
        item
        for i, weight in enumerate(weights)
        for item in (str(weight), write(tmp_path / str(i), [8] * 20, 1000 * i))
    ]
    blend = build_datasets(paths, "1", (20, 0, 0), Builder(8, 1))[0]
    assert "".join(map(str, blend.dataset_index)) == order
    assert [int(blend[i][0]) // 1000 for i in range(20)] == [int(c) for c in order]


@pytest.mark.parametrize(
    ("samples", "ramp", "expected"),
    [
        (100, RampUp(8, 1, 0, 8), (12, 96)),
        (96, RampUp(8, 1, 0, 8), (12, 96)),
        (7, RampUp(8, 1, 0, 8), (0, 0)),
        (
            1000,
            RampUp(16, 16, 100, 64),
            (18, 960),
        ),  # 16 16 16 32 48 are 128 samples; (1000 - 128) // 64 = 13 iterations follow
    ],
)
def test_samples_beyond_the_last_whole_batch_are_not_trained(samples, ramp, expected):
    """megatron/training/training.py, update_train_iters: train_samples // global_batch_size after the ramp."""
    assert length(TrainingConfig(train_samples=samples), ramp) == expected


@pytest.mark.parametrize("text", ["0:4", "0:4 33:8", "0:2 10:6 100:12", "0:16"])
def test_samples_end_a_step_schedule_with_the_iteration_that_reaches_them(text):
    """megatron/training/training.py, update_train_iters: a schedule counts iterations until train_samples is reached, and a
    constant size counts whole batches."""
    steps = StepSizes.parse(text)
    for samples in range(1, 200):
        iterations = consumed = 0
        while consumed < samples:
            consumed += [size for first, size in steps.steps if first <= consumed][-1]
            iterations += 1
        assert length(TrainingConfig(train_samples=samples), steps) == (iterations, consumed)
        begun = length(TrainingConfig(train_iters=iterations // 2), steps)
        assert length(TrainingConfig(train_samples=samples), steps, *begun) == (
            iterations,
            consumed,
        ), "resumed"
    assert length(TrainingConfig(train_samples=149), StepSizes.parse("0:4")) == (38, 152)
    assert length(TrainingConfig(train_samples=149), RampUp(4, 1, 0, 4)) == (37, 148)
    skips = Skips.parse(["140:160"])
    assert length(TrainingConfig(train_samples=149), StepSizes.parse("0:4"), skips=skips) == (
        36,
        164,
    )


@pytest.mark.parametrize(
    ("flags", "requested"),
    [
        ({"train_iters": None, "train_samples": 100}, 100),  # 6 iterations of 16 use 96
        ({"train_iters": 10}, 160),
        ({"train_iters": 10, "rampup_batch_size": (4, 4, 60)}, 160),  # the ramp uses fewer
        (
            {"train_iters": 10, "skip_samples": ("5:25",)},
            180,
        ),  # more than Megatron-LM, which leaves none out
    ],
)
def test_the_order_is_made_for_as_many_samples_as_megatrons(flags, requested):
    """megatron/training/training.py, get_train_valid_test_num_samples: train_samples, or train_iters x global_batch_size."""
    run = make_run(None, {**SMALL, "global_batch_size": 16, **flags})
    assert requested_samples(run, 16, run_length(run, 16)[1]) == requested


@pytest.mark.parametrize(
    ("flags", "requested"),
    [
        (
            {"train_iters": 10},
            88,
        ),  # 4 4 8 8 8 8 and four of 12 are 88 samples, more than 10 micro-batches of every rank
        (
            {"train_iters": None, "train_samples": 85},
            88,
        ),  # the 85 samples end in the tenth iteration
        ({"train_iters": None, "train_samples": 88}, 88),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_schedule_asks_for_what_it_takes_whatever_the_layout(flags, requested, ranks):
    """megatron/training/arguments.py refuses --global-batch-size with a schedule and takes micro-batch x data-parallel size in its
    place; get_train_valid_test_num_samples multiplies --train-iters and --eval-iters by that."""
    run = make_run(
        None,
        {
            **SMALL,
            "global_batch_size": None,
            "step_batch_size_schedule": "0:4 128:8 640:12",
            "eval_iters": 3,
            "eval_interval": 5,
            **flags,
        },
    )
    layout = Layout.from_run(run, ranks)
    end = run_length(run, layout.global_batch_size(run))
    assert end == (10, 88) and 10 * run.batch.micro_batch_size * layout.dp <= end[1]
    train, valid = open_data(Plan(run, layout), Grid(1, 1, 1).groups(SoloComm()), Sources())
    assert (len(train), len(valid)) == (requested, 3 * 3 * 12)
    schedule = ParamSchedule.from_run(run, layout.global_batch_size(run))
    assert schedule.decay_samples == (run.training.train_samples or 88), (
        "10 iterations, not full batches"
    )


@pytest.mark.parametrize(("skip_train", "evaluations"), [(False, 3), (True, 1)])
def test_validation_samples_of_a_run_that_trains_nothing(skip_train, evaluations):
    """megatron/training/training.py, get_train_valid_test_num_samples: with --skip-train the samples of --eval-iters, once."""
    run = make_run(
        None,
        {**SMALL, "train_iters": 10, "eval_iters": 4, "eval_interval": 5, "skip_train": skip_train},
    )
    assert len(data_of(run)[1]) == evaluations * 4 * 16


def test_data_shorter_than_a_sample_repeats(tmp_path):
    """megatron/core/datasets/gpt_dataset.py, _get_num_epochs: as many epochs as the samples and one token need."""
    short = write(tmp_path / "short", [3, 4])  # 7 tokens; 5 samples of 8 take 41: 6 epochs
    train = build_datasets([short], "1", (5, 0, 0), Builder(8, 1))[0]
    assert (train.num_epochs, len(train), len(train.document_index)) == (6, 5, 12)
    flat = np.concatenate([train.indexed[i] for i in train.document_index])
    assert sorted(train.document_index.tolist()) == [0] * 6 + [1] * 6 and len(flat) == 42
    for i, place in enumerate(train.shuffle_index.tolist()):
        assert train[i].tolist() == flat[8 * place : 8 * place + 9].tolist()
    long = write(tmp_path / "long", [50] * 10, 1000)
    blend = build_datasets(["1", short, "3", long], "1", (40, 0, 0), Builder(8, 1))[0]
    assert sum(int(blend[i][0]) < 1000 for i in range(40)) == 10
    with pytest.raises(ValueError, match="0 tokens in 2 documents"):
        build_datasets([write(tmp_path / "empty", [0, 0])], "1", (5, 0, 0), Builder(8, 1))


@pytest.mark.parametrize(
    ("documents", "split", "legacy", "core"),
    [
        (10, "969,30,1", (10, 10, 10), (10, 10, 10)),
        (70, "969,30,1", (68, 70, 70), (68, 70, 70)),
        (50, "90,5,5", (46, 48, 50), (45, 48, 50)),  # 45, 2 and 2: one document is left for train
        (3, "1,1,0", (1, 3, 3), (2, 3, 3)),  # 2 and 2: one too many, taken from train
        (1, "1,1,1", (1, 1, 1), (0, 1, 1)),
    ],
)
def test_split_of_now_and_before_core_0_5(documents, split, legacy, core):
    """megatron/core/datasets/blended_megatron_dataset_builder.py rounds the borders; megatron/data/dataset_utils.py, which was,
    get_train_valid_test_split_, rounded the shares and moved every border by what was then left or too much."""
    shares = parse_split(split)
    for ends, old in ((legacy, True), (core, False)):
        got = [split_documents(documents, shares, i, old) for i in range(3)]
        assert got == [range(*borders) for borders in itertools.pairwise((0, *ends))]


def test_legacy_split_reaches_the_data(tmp_path):
    prefix = write(tmp_path / "corpus", [20] * 50)
    for legacy, count in ((False, 45), (True, 46)):
        train = build_datasets([prefix], "90,5,5", (10, 0, 0), Builder(8, 1), legacy_split=legacy)[
            0
        ]
        assert sorted(train.document_index.tolist()) == list(range(count))
    assert parse("--recipe demo --data-path a --legacy-split".split()).run.data.legacy_split


def test_paths_without_weights(two):
    """megatron/core/datasets/utils.py, get_blend_from_list: an odd number of items, or no number among the first of the pairs.
    megatron/core/datasets/blended_megatron_dataset_builder.py: one epoch of each, mixed by their lengths, at most their sum."""
    a, b = two
    assert parse_data_path([a, b]) == ([a, b], None) and parse_data_path([a, b, "c"]) == (
        [a, b, "c"],
        None,
    )
    train, valid, _ = build_datasets([a, b], "80,20", (150, 5, 0), Builder(8, 1))
    assert [len(d) for d in train.datasets] == [(40 * 40 - 1) // 8, (16 * 40 - 1) // 8] == [199, 79]
    expected = BlendedDataset(train.datasets, [199 / 278, 79 / 278], 150).dataset_index
    assert (
        train.dataset_index.tolist() == expected.tolist() and len(train) == 150 and len(valid) == 5
    )
    assert np.bincount(train.dataset_index).tolist() == [107, 43]
    with pytest.raises(
        ValueError,
        match="train data without weights is read once, 278 samples, and the run takes 279",
    ):
        build_datasets([a, b], "80,20", (279, 0, 0), Builder(8, 1))
    with pytest.raises(
        ValueError, match="valid data without weights is read once, .* fewer --eval-iters"
    ):
        build_datasets([a, b], "80,20", (10, 1000, 0), Builder(8, 1))


def test_a_path_for_each_split(two):
    """megatron/core/datasets/blended_megatron_dataset_builder.py: every document of each, and one
    prefix is not a blend, also with a weight."""
    a, b = two
    train, valid, test = build_separate_datasets(
        (["0.3", a, "0.7", b], [b], None), (20, 10, 5), Builder(8, 1)
    )
    whole = build_datasets(["0.3", a, "0.7", b], "1", (20, 0, 0), Builder(8, 1))[0]
    assert test is None and all(np.array_equal(train[i], whole[i]) for i in range(20))
    assert sorted(valid.document_index.tolist()) == list(range(20)) and valid.name == "valid"
    assert len(
        build_separate_datasets((["5", a], None, None), (20, 0, 0), Builder(8, 1))[0].shuffle_index
    )
    with pytest.raises(ValueError, match="--valid-data-path: expected a weight, got 'x'"):
        build_separate_datasets(([a], ["x", "1"], None), (20, 10, 0), Builder(8, 1))


def test_a_run_reads_a_path_for_each_split(two):
    a, b = two
    words = (
        "--recipe demo --vocab-size 200000 --seq-length 8 --train-iters 2 --legacy-split "
        f"--train-data-path {a}"
    ).split()
    arguments = parse([*words, "--valid-data-path", b, "--test-data-path", "x", "y"])
    assert [note.split(":")[0] for note in arguments.notes] == [
        "--test-data-path",
        "--legacy-split has no effect without --data-path",
    ]
    train, valid = data_of(arguments.run)
    assert train.indexed.prefix == a and valid.indexed.prefix == b
    assert data_of(parse(words).run)[1] is None
