"""Recent families of transformers in layouts of ranks: losses, gradient norms, counts and gradients of one rank.

One rank's are transformers': tests/unit/test_convert_hf.py.
"""

import functools
import json
from dataclasses import asdict
from typing import Any

import pytest

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.convert.hugging_face import read_config
from tests.checks.documents import RESETS
from tests.checks.layouts import Trained, random_tokens, texts, train, train_together
from tests.helpers import assert_near, parse_layout, small_run

pytest.importorskip("transformers")

from tests.hf_models import MODELS, RECENT  # noqa: E402

DATA = {"tokens": random_tokens, "texts": texts}
SIZES = {
    "seq_length": 80,  # more than a window, and than a chunk of the delta rule
    "max_position_embeddings": 80,
    "global_batch_size": 4,
    "vocab_size": 96,
    "make_vocab_size_divisible_by": 8,
    "init_method_std": 0.1,
}
DECAYS = ("dt_bias", "A_log")  # their gradients are small differences of long FP32 sums
LAYOUTS = {  # layout: data
    "tp2 sequence": "tokens",
    "pp2": "tokens",
    "full": "tokens",
    "torch": "tokens",
    "tp2 pp2 full": "texts",
}


@functools.cache
def flags(family: str) -> dict[str, Any]:
    config = json.loads(MODELS[family]().config.to_json_string())
    return {**asdict(read_config(config)[1]), **SIZES}


@functools.cache
def one_rank(family: str, data: str) -> Trained:
    more = RESETS if data == "texts" else {}
    return train(SoloComm(), small_run(**flags(family), **more), DATA[data])


@pytest.mark.parametrize("family", RECENT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_family_trains_in_layouts_as_on_one_rank(family, layout):
    data = LAYOUTS[layout]
    expected = one_rank(family, data)
    ranks, options = parse_layout(layout)
    more = RESETS if data == "texts" else {}
    found = train_together(ranks, {**flags(family), **options, **more}, DATA[data])
    assert found.figures == pytest.approx(expected.figures, rel=1e-5, abs=1e-8)
    for name, gradient in expected.gradients.items():
        tolerance = 1e-4 if name.endswith(DECAYS) else 1e-5
        assert_near(found.gradients, {name: gradient}, tolerance)
