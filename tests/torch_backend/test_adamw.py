"""Default steps of Adam and AdamW and the gradient of an embedding's table against PyTorch's own kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import adam as torch_adam

from fugaku_megatron import torch_backend
from fugaku_megatron.torch_backend import build, operators
from tests.checks.torch_backend import counting, serving

pytestmark = pytest.mark.unit


def trained(
    optimizer: type[torch.optim.Adam], dtype: torch.dtype, **options: object
) -> list[Tensor]:
    """Return parameters and moments after five steps."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(300, 70), (7,), (0,)]
    params = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    ]
    steps = optimizer(params, **{"lr": 1e-2, **options})
    for _ in range(5):
        for each in params:
            each.grad = torch.randn(each.shape, generator=generator).to(dtype)
        steps.step()
    moments = [steps.state[each][name] for each in params for name in ("exp_avg", "exp_avg_sq")]
    return [*(each.detach() for each in params), *moments]


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"amsgrad": True}])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_default_step(
    optimizer: type[torch.optim.Adam], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default step is fused in FP32, on the CPU, with a number as the learning rate."""
    calls = []
    fused = torch_adam._fused_adam
    monkeypatch.setattr(
        torch_adam, "_fused_adam", lambda *a, **k: (calls.append(1), fused(*a, **k))
    )
    with torch_backend.enabled(False):
        expected = trained(optimizer, torch.float32, **options)
    assert not calls
    with serving():
        values = trained(optimizer, torch.float32, **options)
        assert len(calls) == 5
        trained(optimizer, torch.bfloat16, **options)
        trained(optimizer, torch.float32, lr=torch.tensor(1e-2))
    assert len(calls) == 5
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value, reference)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("integer", [torch.int64, torch.int32])
def test_embedding_gradient(integer: torch.dtype, dtype: torch.dtype, padding: int | None) -> None:
    tokens = torch.randint(0, 50, (4, 64)).to(integer)
    tokens[0, :5] = 3
    table = torch.randn(50, 24, dtype=dtype, requires_grad=True)
    gradient = torch.randn(4, 64, 24, dtype=dtype)
    with torch_backend.enabled(False):
        exact = F.embedding(tokens, table.double(), padding)
        (expected,) = torch.autograd.grad(exact, table, gradient.double())
    with serving():
        (value,) = torch.autograd.grad(F.embedding(tokens, table, padding), table, gradient)
    torch.testing.assert_close(value, expected)


def test_short_tensors_and_large_bf16_tables_stay_with_torch() -> None:
    many = [torch.nn.Parameter(torch.zeros(1 << 10)) for _ in range(1 << 9)]
    long = [torch.nn.Parameter(torch.zeros(1 << 18))]
    table = torch.zeros(300, 8, dtype=torch.bfloat16, requires_grad=True)
    served: dict[str, int] = {}
    with torch_backend.enabled(kernels="native"), counting(served):
        for params in (many, long):
            for each in params:
                each.grad = torch.ones_like(each)
            torch.optim.AdamW(params, fused=True).step()
        with operators.every_size(build.load()):
            F.embedding(torch.arange(299), table).sum().backward()
            F.embedding(torch.arange(301) % 300, table).sum().backward()
    assert served["_fused_adamw_"] == 1
    assert served["embedding_dense_backward"] == 1
