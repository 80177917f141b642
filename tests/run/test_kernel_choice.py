"""--kernels auto: both choices are timed on the run's shapes and the faster one is named."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.nn.ops import FAMILIES as OPERATIONS
from fugaku_megatron.run import kernel_timing
from fugaku_megatron.run.kernel_choice import choose_kernels
from tests.helpers import small_run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_family_is_timed_both_ways(bf16, tp):
    run = small_run(
        hidden_dropout=0.1, attention_dropout=0.1, tensor_model_parallel_size=tp, bf16=bf16
    )
    timings = kernel_timing.measure_kernels(run)
    assert [t.family for t in timings] == list(OPERATIONS)
    assert all(t.native > 0 and t.torch > 0 for t in timings)


def test_the_faster_one_is_used():
    timings = [kernel_timing.Timing("gemm", 1.0, 2.0), kernel_timing.Timing("attention", 2.0, 1.0)]
    assert [t.faster for t in timings] == ["native", "torch"]
    assert kernel_timing.kernel_table(timings)[1].split() == [
        "gemm",
        "1000.00",
        "2000.00",
        "native",
    ]


class UnitForBf16(TorchDispatchMode):
    """A CPU with a unit for BF16 such as AMX, which torch's matmuls use: a case with one takes a second, another one two."""

    def __init__(self):
        super().__init__()
        self.matmuls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        self.matmuls += function.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
        ) and all(x.dtype == torch.bfloat16 for x in tensors)
        return function(*args, **(kwargs or {}))

    def seconds(self, case, ops):
        before = self.matmuls
        with self:
            case(ops)
        return 1.0 if self.matmuls > before else 2.0


@pytest.mark.parametrize("bf16, gemm", [(True, "torch"), (False, "native")])
def test_torchs_matmuls_are_taken_where_they_are_faster_whatever_the_cpu_says(
    monkeypatch, bf16, gemm
):
    unit = UnitForBf16()
    run = small_run(bf16=bf16)
    monkeypatch.setattr(kernel_timing, "_seconds", unit.seconds)
    choice = choose_kernels(Plan(run, Layout.from_run(run, 1)), SoloComm())
    assert (choice.backends["gemm"], choice.backends["rowwise"]) == (gemm, "native")
    line = next(line.split() for line in choice.lines if line.split()[0] == "gemm")
    assert line == ["gemm", "2000.00", "1000.00" if bf16 else "2000.00", gemm]
