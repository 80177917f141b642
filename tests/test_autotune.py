"""--kernels auto: both choices are timed on the run's shapes and the faster one is named."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.host.observed import Observed
from fugaku_megatron.nn import autotune
from fugaku_megatron.nn.ops import FAMILIES as OPERATIONS
from fugaku_megatron.nn.ops import Ops
from tests.helpers import small_run
from tests.llama_models import FAMILIES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_family_is_timed_both_ways(dtype, tp):
    timings = autotune.measure(small_run(hidden_dropout=0.1, attention_dropout=0.1), tp, dtype)
    assert [t.family for t in timings] == list(OPERATIONS)
    assert all(t.native > 0 and t.torch > 0 for t in timings)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_the_parts_of_other_blocks_are_timed(family):
    """Those that the model is made of."""
    called = set()
    cases = autotune.cases(small_run(**FAMILIES[family]), 2, torch.float32)
    watched = Observed(Ops.build(), ("gated_mlp", "mlp", "attention", "bias_dropout_add_rms_norm", "bias_dropout_add_layer_norm"),
                       lambda name, function, args, kwargs: called.add(name) or function(*args, **kwargs))
    for case in cases.values():
        case(watched).backward()
    assert called == {"gated_mlp", "attention", "bias_dropout_add_rms_norm"}


def test_the_faster_one_is_used():
    timings = [autotune.Timing("gemm", 1.0, 2.0), autotune.Timing("attention", 2.0, 1.0)]
    assert [t.faster for t in timings] == ["native", "torch"]
    assert autotune.table(timings)[1].split() == ["gemm", "1000.00", "2000.00", "native"]
