"""One table has the features of the trainer: its flags, its files and the performance model agree with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_megatron.config import features
from fugaku_megatron.config.arguments import parse
from fugaku_megatron.config.checks import flag
from fugaku_megatron.config.compatibility import COMPATIBILITY_FLAGS
from fugaku_megatron.config.features import FEATURES

PACKAGE = Path(features.__file__).resolve().parents[1]
RUN = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "64", "--micro-batch-size", "1"]


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_has_its_flag_and_its_file(name):
    feature = FEATURES[name]
    assert feature.field is None or features.group_of(feature.field) is not None, f"{name}: the config has no {feature.field}"
    assert feature.field is None or flag(feature.field) not in COMPATIBILITY_FLAGS, f"{name}: its flag is said to do nothing"
    assert (PACKAGE / feature.place).is_file(), f"{name}: {feature.place} is not there"


def test_a_run_uses_what_its_flags_say():
    plain, switched = parse(RUN).run, parse([*RUN, "--use-distributed-optimizer"]).run
    assert not FEATURES[features.ZERO_1].used(plain) and FEATURES[features.ZERO_1].used(switched)
    assert FEATURES[features.BALANCED_SPLIT].used(plain)


def test_the_constants_name_the_rows():
    constants = {value for name, value in vars(features).items() if name.isupper() and isinstance(value, str)}
    assert constants == set(FEATURES)
