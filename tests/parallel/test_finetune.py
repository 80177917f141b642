"""--finetune and --pretrained-checkpoint: a run that begins with the weights of a checkpoint, and with nothing else of it."""

from __future__ import annotations

import shutil

import pytest
import torch

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config.arguments import parse
from fugaku_megatron.convert.own import open_own, save_own
from fugaku_megatron.training.resume import find_checkpoint, resume_training
from tests.helpers import make_trainer, small_run, whole_tensors
from tests.threads import ThreadWorld

PARALLEL = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory of a checkpoint after two iterations, its weights by name, that of its weights alone in BF16)."""
    directory = tmp_path_factory.mktemp("finetune")
    trainer = make_trainer(SoloComm(), small_run())
    for _ in range(2):
        trainer.train_step()
    trainer.save(str(directory / "run"))
    trainer.close()
    save_own(open_own(str(directory / "run")).cast(torch.bfloat16), directory / "alone")
    return str(directory / "run"), whole_tensors(trainer, "weight"), str(directory / "alone")


def started(world, **changes):
    """(a trainer that has begun as the flags say, the log's lines)."""
    run = small_run(**changes)
    trainer, resume = make_trainer(world, run), find_checkpoint(run, world)
    assert (resume.iteration, resume.state) == (None, {}), "nothing of the saved state is left to anybody"
    return trainer, resume_training(trainer, resume)


def test_the_weights_are_those_of_the_checkpoint_and_all_else_begins(trained):
    directory, weights, _ = trained
    trainer, lines = started(SoloComm(), load=directory, finetune=True, lr=0.5)
    assert lines == [f"starting from the weights of {directory}, iteration 2: iteration 0, a fresh optimizer, data from the start"]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole_tensors(trainer, "weight").items())
    assert trainer.progress.iteration == trainer.progress.consumed_samples == trainer.optimizer.steps == 0
    assert not any(part.exp_avg.any() or part.exp_avg_sq.any() for part in trainer.optimizer.parts)
    fresh = make_trainer(SoloComm(), small_run(lr=0.5))
    assert trainer.train_step().learning_rate == fresh.train_step().learning_rate
    trainer.close(), fresh.close()


@pytest.mark.parametrize("changes", [{}, PARALLEL, {**PARALLEL, "zero_stage": 1}])
def test_weights_alone_of_another_dtype_load_into_any_layout(trained, changes):
    _, weights, alone = trained

    def loaded(world):
        trainer, _ = started(world, load=alone, finetune=True, **changes)
        trainer.close()
        return whole_tensors(trainer, "weight")

    for name, tensor in ThreadWorld(8).run(loaded)[0].items() if changes else loaded(SoloComm()).items():
        expected = weights[name if name in weights else "embedding.word_embeddings.weight"].bfloat16().float()
        assert torch.equal(tensor, expected), name


def test_files_that_came_with_the_model_go_on_with_it(trained, tmp_path):
    source, own = shutil.copytree(trained[2], tmp_path / "source"), tmp_path / "own"
    (source / "hugging_face").mkdir()
    (source / "hugging_face" / "tokenizer.json").write_text("{}")
    trainer, _ = started(SoloComm(), load=str(source), save=str(own), finetune=True)
    trainer.close()
    assert (own / "hugging_face" / "tokenizer.json").read_text() == "{}"


def test_weights_alone_are_no_run_to_go_on_with(trained):
    with pytest.raises(ValueError, match=f"--load {trained[2]} holds weights alone.*: give --finetune to start from them"):
        find_checkpoint(small_run(load=trained[2]), SoloComm())


def test_another_model_is_refused(trained):
    with pytest.raises(ValueError, match=r"holds another model, with --hidden-size 32 \(this run: 64\)"):
        started(SoloComm(), load=trained[2], finetune=True, hidden_size=64)


def test_the_pretrained_checkpoint_counts_until_the_run_has_its_own(trained, tmp_path):
    own, flags = str(tmp_path / "own"), {"pretrained_checkpoint": trained[2]}
    trainer, lines = started(SoloComm(), load=own, save=own, **flags)
    assert len(lines) == 1 and lines[0].startswith(f"starting from the weights of {trained[2]}, iteration 0:")
    trainer.train_step()
    trainer.save(own)
    trainer.close()
    assert find_checkpoint(small_run(load=own, save=own, **flags), SoloComm()).iteration == 1


def test_flags():
    words = ["--recipe", "demo", "--mock-data"]
    assert parse([*words, "--finetune"]).notes == ("--finetune has no effect without --load",)
    for more, message in [(["--load", "a", "--save", "a", "--finetune"], "--finetune starts at iteration 0, and would replace"),
                          (["--load", "a", "--finetune", "--pretrained-checkpoint", "b"], "exclude each other"),
                          (["--pretrained-checkpoint", ""], "--pretrained-checkpoint is empty")]:
        with pytest.raises(ValueError, match=message):
            parse([*words, *more])
