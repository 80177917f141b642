"""Recent families of transformers in layouts of ranks: losses, gradients, texts and exported bytes of one rank.

One rank's are transformers': tests/convert/test_hugging_face.py.
"""

import contextlib
import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fugaku_megatron.checkpoint.manifest import read_manifest
from fugaku_megatron.comm.base import Comm, SoloComm
from fugaku_megatron.config.run_config import RunConfig, saved_run
from fugaku_megatron.convert.hugging_face.config_json import read_config
from fugaku_megatron.inference.loading import load_model
from tests.checks.documents import RESETS
from tests.checks.generation import tokens_of
from tests.checks.layouts import (
    Trained,
    assert_as_on_one_rank,
    assert_gradients_as_on_one_rank,
    random_tokens,
    texts,
    train,
    train_together,
)
from tests.helpers import make_trainer, parse_layout, run_layout, small_run
from tests.threads import ThreadWorld

pytest.importorskip("transformers")

from tests.hf_models import (  # noqa: E402
    MODELS,
    RECENT,
    VOCABULARY,
    randomized,
    read_hf,
    same,
    tensors,
    write_hf,
)

pytestmark = pytest.mark.parallel

DATA = {"tokens": random_tokens, "texts": texts}
SIZES = {
    "seq_length": 80,  # more than a window, and than a chunk of the delta rule
    "max_position_embeddings": 80,
    "global_batch_size": 4,
    "vocab_size": 96,
    "make_vocab_size_divisible_by": 8,
    "init_method_std": 0.1,
}
LAYOUTS = {  # layout: data
    "tp2 sequence": "tokens",
    "pp2": "tokens",
    "full": "tokens",
    "torch": "tokens",
    "tp2 pp2 full": "texts",
}


def flags_of(config: str) -> dict[str, Any]:
    return asdict(read_config(json.loads(config))[1])


@functools.cache
def flags(family: str) -> dict[str, Any]:
    return {**flags_of(MODELS[family]().config.to_json_string()), **SIZES}


def flags_for(family: str, data: str) -> dict[str, Any]:
    more = RESETS if data == "texts" else {}
    return {**flags(family), **more}


@functools.cache
def one_rank(family: str, data: str) -> Trained:
    return train(SoloComm(), small_run(**flags_for(family, data)), DATA[data])


@pytest.mark.parametrize("family", RECENT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_family_trains_in_layouts_as_on_one_rank(family, layout):
    data = LAYOUTS[layout]
    expected = one_rank(family, data)
    ranks, options = parse_layout(layout)
    alone = flags_for(family, data)
    found = train_together(ranks, {**alone, **options}, DATA[data])
    assert_as_on_one_rank(found, expected, run=small_run(**alone), data=DATA[data], tolerance=1e-5)
    assert_gradients_as_on_one_rank(found.gradients, expected.gradients, 1e-5)


def save_again(world: Comm, run: RunConfig, source: Path, target: Path) -> None:
    with contextlib.closing(make_trainer(world, run)) as trainer:
        trainer.load(str(source), weights_only=True)
        trainer.save(str(target))


def text_of(world: Comm, directory: Path, sizes: tuple[int, int]) -> list[list[int]]:
    manifest = read_manifest(directory, 0)
    loaded = load_model(saved_run(manifest, sizes), world, str(directory), 0, manifest)
    prompt = torch.randint(3, VOCABULARY, (70,), generator=torch.Generator().manual_seed(6))
    return tokens_of(loaded, [prompt.tolist()], 20)


@pytest.mark.parametrize("family", RECENT)
def test_a_family_in_layouts_saves_the_same_bytes_and_writes_the_same_text(family, tmp_path):
    """The prompt is longer than a window, and than a chunk of the delta rule."""
    theirs, ours, saved, back = (tmp_path / name for name in ("theirs", "ours", "saved", "back"))
    model = randomized(MODELS[family])
    model.config.max_position_embeddings = 96
    model.save_pretrained(theirs)
    read_hf(theirs, ours)
    run_layout("tp2 pp2", save_again, flags_of((theirs / "config.json").read_text()), ours, saved)
    write_hf(saved, back, "--hf-files", ours / "hugging_face")
    assert same(tensors(theirs), tensors(back))
    expected = text_of(SoloComm(), ours, (1, 1))
    assert len(expected[0]) == 20
    for sizes in ((2, 1), (1, 2)):
        assert ThreadWorld(2).run(text_of, ours, sizes) == [expected, expected]
