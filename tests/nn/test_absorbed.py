"""Projections between heads and latents against the formula."""

import pytest
import torch

from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.nn.parameter import ModelParameter, Q8Weight

pytestmark = pytest.mark.unit

LATENTS = 72


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("few_rows", [0, 16])
@pytest.mark.parametrize("in_eight_bits", [False, True])
@pytest.mark.parametrize(("rows", "heads", "fixed", "values"), [(3, 4, 8, 8), (1, 3, 12, 8)])
def test_projections(backend, few_rows, in_eight_bits, rows, heads, fixed, values):
    torch.manual_seed(0)
    ops = Ops.build(backend, few_rows=few_rows)
    weight = ModelParameter(torch.randn(heads * (fixed + values), LATENTS), requires_grad=False)
    exact = weight.data
    if in_eight_bits:
        q8 = Q8Weight.of(weight.data)
        exact = q8.dequantize()
        weight = ModelParameter(q8.values, requires_grad=False)
        weight.scales = q8.scales
    of_keys, of_values = exact.view(heads, fixed + values, LATENTS).split((fixed, values), 1)
    queries = torch.randn(rows, heads, fixed + 4)[..., :fixed]
    context = torch.randn(rows, heads, LATENTS)
    absorbed = ops.absorb_queries(queries, weight)
    expected = torch.einsum("rnf,nfl->rnl", queries, of_keys)
    torch.testing.assert_close(absorbed, expected, rtol=1e-5, atol=1e-5)
    found = ops.latents_to_values(context, weight, fixed)
    expected = torch.einsum("rnl,nvl->rnv", context, of_values)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
