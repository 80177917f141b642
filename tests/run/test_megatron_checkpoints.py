"""Megatron-LM's flags of checkpoints and evaluations."""

from __future__ import annotations

import re
from contextlib import closing

import numpy as np
import pytest
import torch

from fugaku_megatron.checkpoint.manifest import list_iterations
from fugaku_megatron.cli.arguments import build_parser, interpret, parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.architecture import architecture
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.data.token_arrays import TokenArrays
from fugaku_megatron.observe.export.metrics_writer import MetricsWriter
from fugaku_megatron.run import data as data_module
from fugaku_megatron.run.checks import check_early, with_listed_data
from fugaku_megatron.run.loop import Session
from fugaku_megatron.run.resume import resume_training
from fugaku_megatron.run.sources import Sources
from fugaku_megatron.run.train_command import with_checkpoint_model
from tests.helpers import (
    find_checkpoint,
    grid_groups,
    make_trainer,
    one_error,
    parse_layout,
    run_layout,
    small_run,
    whole_tensors,
)
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


def trained(world, tmp_path, iterations, **changes):
    """A session of the small model with one layer per stage, run to its end."""
    torch.set_num_threads(1)
    run = small_run(num_layers=2, train_iters=iterations, save=str(tmp_path), **changes)
    trainer = make_trainer(world, run)
    resume_training(trainer, find_checkpoint(run, world))
    writer = MetricsWriter(iterations, 100, printing=world.rank == 0)
    session = Session(trainer, writer, iterations, (4096,) if changes.get("eval_iters") else ())
    session.run()
    trainer.close()
    return trainer


@pytest.mark.parametrize(("retain", "kept"), [(None, [2, 4, 6, 8, 9]), (4, [4, 8, 9])])
def test_checkpoints_between_those_to_retain_are_removed(tmp_path, retain, kept):
    trained(SoloComm(), tmp_path, 9, save_interval=2, save_retain_interval=retain)
    assert list_iterations(tmp_path) == kept


@pytest.mark.parametrize("background", [{}, {"async_save": True}])
def test_a_checkpoint_without_the_optimizer_is_small_and_needs_a_flag(tmp_path, background):
    layout = {"tensor_model_parallel_size": 2, "zero_stage": 1}

    def work(world):
        trainer = trained(world, tmp_path, 3, no_save_optim=True, **layout, **background)
        weights = whole_tensors(trainer, "weight")
        run = small_run(num_layers=2, train_iters=5, load=str(tmp_path), **layout)
        with pytest.raises(
            ValueError,
            match="saved with --no-save-optim, .*: pass --no-load-optim to continue, or --finetune",
        ):
            find_checkpoint(run, world)
        again = make_trainer(
            world,
            small_run(
                num_layers=2, train_iters=5, load=str(tmp_path), no_load_optim=True, **layout
            ),
        )
        lines = resume_training(again, find_checkpoint(again.run, world))
        assert "at iteration 3" in lines[0]
        loaded = whole_tensors(again, "weight")
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())
        assert all(part.exp_avg.abs().max() == 0 for part in again.optimizer.shards)
        return True

    assert all(ThreadWorld(2).run(work))
    saved = sum(
        path.stat().st_size
        for path in tmp_path.rglob("*")
        if path.is_file() and "iter_" in str(path)
    )
    parameters = sum(
        p.numel()
        for p in make_trainer(SoloComm(), small_run(num_layers=2)).optimizer.flat.parameters
    )
    assert saved < 4 * parameters * 1.5


def test_a_missing_checkpoint_ends_the_run_where_that_is_asked_for(tmp_path):
    run = small_run(load=str(tmp_path), save=str(tmp_path))
    assert find_checkpoint(run, SoloComm()).checkpoint is None
    with pytest.raises(
        ValueError, match="holds no checkpoint, and --exit-on-missing-checkpoint ends the run"
    ):
        find_checkpoint(
            small_run(load=str(tmp_path), save=str(tmp_path), exit_on_missing_checkpoint=True),
            SoloComm(),
        )


def test_an_evaluation_has_its_own_batch_size_and_first_iteration(tmp_path, monkeypatch):
    """megatron/training/training.py: the first evaluation begins at the first sample, and each takes eval_iters batches."""
    found = []
    monkeypatch.setattr(
        "fugaku_megatron.training.trainer.Trainer.evaluate",
        lambda self, dataset, first, iterations: (
            found.append((self.progress.iteration, first, iterations)) or 1.0
        ),
    )
    trained(
        SoloComm(),
        tmp_path,
        7,
        eval_interval=2,
        eval_iters=3,
        eval_global_batch_size=4,
        start_eval_at_iter=4,
    )
    assert found == [(4, 0, 3), (6, 12, 3), (7, 24, 3)]


def test_the_loss_of_an_evaluation_is_the_mean_over_its_own_batches():
    losses = []
    for size, count in ((16, 3), (4, 12), (2, 24)):
        trainer = make_trainer(SoloComm(), small_run(num_layers=1, eval_global_batch_size=size))
        losses.append(trainer.evaluate(trainer.valid, 0, count))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("layout", ["tp1", "dp2", "tp2 pp2"])
def test_an_evaluation_has_its_own_micro_batch_size(layout):
    def work(world, run, size):
        shapes = []
        with closing(make_trainer(world, run)) as trainer:
            loss = trainer.evaluate(trainer.valid, 0, 2)
            execute = trainer.groups.tp.broadcast
            trainer.groups.tp.broadcast = lambda samples: (
                shapes.append(samples.shape[1]),
                execute(samples),
            )[1]
            trainer.evaluate(trainer.valid, 0, 1)
            trained = trainer.train_step().loss  # its micro-batches have two samples
            evaluated = shapes[: shapes.index(2)] if size else ()
            return loss, trained, set(evaluated)

    flags = {"num_layers": 2, "eval_global_batch_size": 8}
    plain, *others = (
        run_layout(layout, work, {**flags, "eval_micro_batch_size": size}, size)
        for size in (None, 1, 4)
    )
    for size, other in zip((1, 4), others):
        assert [found[:2] for found in other] == [
            pytest.approx(found[:2], rel=1e-6) for found in plain
        ]
        assert all(found[2] <= {size} for found in other) and other[0][2] == {size}


def documents(name: str) -> TokenArrays:
    """About 38 samples of 16 tokens, by the name."""
    seed = ord(name) - ord("a") + 1
    return TokenArrays(np.random.default_rng(seed).integers(96, size=(7, 84 + 2 * seed)), name)


def evaluated(
    world, sets: tuple[str, ...] | None, data: dict, changes: dict
) -> tuple[list[str], tuple[int, ...]]:
    """Return log lines for two evaluations, and the validation sets' sizes."""
    changes = {"mock_data": not data, **data, "full_validation": True, **changes}
    run = small_run(num_layers=2, train_iters=9, multiple_validation_sets=bool(sets), **changes)
    layout = Layout.from_run(run, world.size)
    arrays = {name: documents(name) for name in "abc"}
    valid = data_module.open_data(
        Plan(run, layout),
        grid_groups(world, run),
        Sources(arrays=arrays, samples=(64, Plan(run, layout).valid_samples(5))),
    )[1]
    sizes = data_module.valid_sizes(Plan(run, layout), valid, world)
    with closing(make_trainer(world, run)) as trainer:
        trainer.valid = valid
        lines = []
        writer = MetricsWriter(9, 100)
        writer.print = lines.append
        session = Session(trainer, writer, 9, sizes)
        session.evaluate_only()
        trainer.progress.iteration = 4
        session._print_validation(3)  # of a resumed run: the same samples again
    return lines, sizes


@pytest.mark.parametrize("layout", ["tp1", "dp3 global_batch_size=18", "tp2 pp2"])
@pytest.mark.parametrize(
    ("sets", "data", "sizes"),
    [
        (None, {"train_data_path": ("a",), "valid_data_path": ("b", "c")}, (77,)),
        (None, {"data_path": ("a",), "split": "4,3,0"}, (16,)),
        (
            ("b", "c"),
            {"train_data_path": ("0.5", "a", "0.5", "b"), "valid_data_path": ("b", "c")},
            (38, 39),
        ),
        (None, {}, (32,)),
    ],
)
def test_an_evaluation_takes_the_whole_validation_data(layout, sets, data, sizes):
    """megatron/training/training.py, evaluate_and_print_results: one numbered line for each set."""
    ranks, flags = parse_layout(layout)
    batch = 6 if ranks == 3 else 4
    changes = {
        **flags,
        "eval_global_batch_size": batch,
        "eval_iters": 32 // batch if not data else 0,
    }
    lines, found = ThreadWorld(ranks).run(evaluated, sets, data, changes)[0]
    assert found == (sizes if data else (32 // batch * batch,))
    run = small_run(num_layers=2, global_batch_size=1, micro_batch_size=1)
    alone = make_trainer(SoloComm(), run)
    evaluated_run = small_run(
        **{
            "mock_data": not data,
            **data,
            "full_validation": True,
            "eval_iters": 32,
            "multiple_validation_sets": bool(sets),
            "global_batch_size": 2,
        }
    )
    whole = data_module.open_data(
        Plan.of(evaluated_run, 1),
        grid_groups(SoloComm(), run),
        Sources(
            arrays={name: documents(name) for name in "abc"}, samples=(64, None if data else 32)
        ),
    )[1]
    losses = [alone.evaluate([whole[i]], 0, 1) for i in range(len(whole))]
    first = 0
    expected = []
    for index, size in enumerate(found):
        mean = sum(losses[first : first + size // batch * batch]) / (size // batch * batch)
        expected.append((f"-{index}" if sets else "", mean))
        first += size
    told = [
        re.match(r" validation(-\d)? loss at iteration \d \| lm loss value: (\S+)", line)
        for line in lines
    ]
    told = [(match[1] or "", float(match[2])) for match in told if match]
    assert [name for name, _ in told] == [name for name, _ in expected * 2]
    assert [value for _, value in told] == pytest.approx(
        [mean for _, mean in expected * 2], rel=1e-5
    )


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        (
            {"data_path": ("0.3", "a", "0.7", "b"), "split": "1,1,0"},
            {},
            "reads every sample .* once, and a has a weight: leave the",
        ),
        (
            {"train_data_path": ("a",), "valid_data_path": ("b", "c")},
            {"eval_global_batch_size": 40},
            "validation set 0 has 38 samples, and a batch of an evaluation has 40: pass a smaller --eval-global-batch-size",
        ),
    ],
)
def test_mistakes_of_a_whole_evaluation(data, changes, message):
    assert re.search(message, one_error(2, lambda world: evaluated(world, ("b",), data, changes)))


def test_files_that_list_the_data(tmp_path):
    """megatron/training/utils/common_utils.py, get_blend_and_blend_per_split."""
    (tmp_path / "words").write_text("0.3 a\n0.7 b")
    (tmp_path / "split.json").write_text(
        '{"train": [1, "a"], "valid": "0.5 b 0.5 c", "test": null}'
    )
    for flags, expected in (
        (["--data-args-path", "words"], [("0.3", "a", "0.7", "b"), None, None]),
        (
            ["--per-split-data-args-path", "split.json"],
            [None, ("1", "a"), ("0.5", "b", "0.5", "c")],
        ),
    ):
        run = parse(["--recipe", "demo", flags[0], str(tmp_path / flags[1])]).run
        check_early(run, 1)
        data = with_listed_data(run, SoloComm()).data
        assert [data.data_path, data.train_data_path, data.valid_data_path] == expected
    (tmp_path / "bad").write_text("[3]")
    for name, message in (
        ("bad", "not a JSON object with lists"),
        ("none", "No such file"),
        ("words", "not a JSON object"),
    ):
        run = parse(f"--recipe demo --per-split-data-args-path {tmp_path / name}".split()).run
        with pytest.raises(ValueError, match=message):
            with_listed_data(run, SoloComm())


def test_the_model_of_the_checkpoint_wins_where_that_is_asked_for(tmp_path):
    saved = trained(
        SoloComm(),
        tmp_path,
        1,
        squared_relu=True,
        position_embedding_type="rope",
        kv_channels=12,
        attention_dropout=0.0,
        hidden_dropout=0.25,
    ).run.model
    words = (
        "--micro-batch-size 1 --seq-length 8 --num-layers 7 --swiglu "
        f"--use-checkpoint-args --load {tmp_path} --train-iters 3 --mock-data"
    ).split()
    parser = build_parser()
    found = interpret(with_checkpoint_model(vars(parser.parse_args(words)))).run.model
    assert architecture(found) == architecture(saved) and found.seq_length == 8
    assert (found.attention_dropout, found.hidden_dropout) == (0.0, 0.25)
    noted = parser.parse_args([*words, "--z-loss-strength", "0.5"])
    notes = interpret(with_checkpoint_model(vars(noted)), passed=vars(noted)).notes
    assert notes == ("--z-loss-strength has no effect without --use-z-loss",)
    with pytest.raises(ValueError, match="--hidden-size, --num-attention-heads must be passed"):
        interpret(
            with_checkpoint_model(
                vars(parser.parse_args([*words, "--load", str(tmp_path / "none")]))
            )
        )
