"""Directories of Hugging Face models, and a checkpoint of this program."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fugaku_megatron.comm.base import SoloComm
from tests.helpers import make_trainer, small_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a checkpoint of this program with a padded vocabulary."""
    from tests.hf_models import VOCABULARY

    directory = tmp_path_factory.mktemp("trained")
    trainer = make_trainer(SoloComm(), small_run(vocab_size=VOCABULARY))
    trainer.train_step()
    trainer.save(str(directory))
    trainer.close()
    return directory


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Return a directory of every model, in one file."""
    from tests.hf_models import MODELS

    directory = tmp_path_factory.mktemp("sources")
    for name, build in MODELS.items():
        build().save_pretrained(directory / name)
    return {name: directory / name for name in MODELS}


@pytest.fixture
def copied(sources, tmp_path) -> Callable[[str], Path]:
    """Copy the directory of a model to `hf`."""
    return lambda name: Path(shutil.copytree(sources[name], tmp_path / "hf"))
