"""Flags of the command train in the library: the same losses to the last digit, or refused."""

from __future__ import annotations

from typing import Any

import pytest

import fugaku_megatron as fm
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.run_config import GROUPS, RunConfig
from fugaku_megatron.training import trainer as trainer_module
from tests.checks import library_and_command
from tests.checks.library import documents, write
from tests.checks.library_and_command import (
    FEATURES,
    HALF,
    RUN,
    VALUES,
    command,
    library,
    trainer_of,
)
from tests.helpers import rows
from tests.threads import ThreadWorld

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # notes of runs
in_this_process = library_and_command.in_this_process


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Any]:
    return {"data_path": (str(write(tmp_path_factory.mktemp("data") / "data", documents())),)}


LONG = {
    "interval": 4,
    "all layers frozen": 5,
    "duration": 2,
}  # numbers found, where not of all four steps


RARE = (
    "interleaved by stages",
    "last stage",
    "split stages",
    "fixed scale",
    "recompute by memory",
    "warm-up",
    "wsd by samples",
    "old split",
    "late validation",
    "batches of validation",
    "spikes",
)


@pytest.mark.parametrize("feature", rows(FEATURES, RARE))
def test_the_losses_are_those_of_the_command(feature, data):
    ranks, flags = FEATURES[feature]

    def both(world):
        return command(world, **{**data, **flags}), library(world, **{**data, **flags})

    for expected, found in ThreadWorld(ranks).run(both):
        assert found == expected and len(set(expected)) >= LONG.get(feature, 7)


def test_the_run_reaches_the_trainer_as_it_reaches_the_command_s(data, monkeypatch):
    """Flags for the model, Muon and the kernels need no loss each, therefore."""
    flags = {
        **data,
        "mask_vocab_padding": "yes",
        "window_size": "7,0",
        "muon_scale_mode": "unit_rms_norm",
    }
    runs: list[RunConfig] = []
    monkeypatch.setattr(
        trainer_module.Trainer, "train_step", lambda trainer: runs.append(trainer.run)
    )
    for start in (command, library):
        with pytest.raises(AttributeError):  # of no result
            start(SoloComm(), **flags)
    expected, found = runs
    for group in GROUPS:
        assert group == "output" or getattr(expected, group) == getattr(found, group), group


def test_evaluations_beyond_the_run_are_refused(data):
    trainer = trainer_of(SoloComm(), **{**data, **HALF})
    for number in (-1, 3):
        with pytest.raises(ValueError, match="the run has evaluations 0 to 2: pass one of these"):
            trainer.evaluate(number)
    first = trainer.evaluate()
    second = trainer.evaluate(1)
    assert first == trainer.evaluate(0) != second
    alone = trainer_of(SoloComm(), **{**data, **HALF, "eval_interval": None})
    alone.evaluate()
    with pytest.raises(ValueError, match="the run has evaluations 0 to 0"):
        alone.evaluate(1)


NEEDED = {
    "wandb_project": {"wandb_exp_name": "b"},
    "multiple_validation_sets": {"full_validation": True},
}


@pytest.mark.parametrize("name", VALUES)
def test_what_the_command_alone_does_is_refused(name, data):
    more = NEEDED.get(name, {})
    with pytest.raises(ValueError) as caught:
        trainer_of(SoloComm(), **data, **{name: VALUES[name]}, **more)
    message = str(caught.value)
    assert "has no effect on Trainer: " in message and "\n" not in message
    assert message.startswith(f"--{name.replace('_', '-')} ")


def test_asking_for_nothing_is_not_refused(data):
    nothing = {"save": None, "skip_train": False, "save_interval": None, "profile": False}
    config = fm.Config(**{**RUN, **data, **nothing})
    assert next(fm.Trainer(config).steps(1)).iteration == 1
