"""tools.gemm_error: its errors against what the formats promise, its table, its refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fugaku_megatron.host import kernels
from tools import gemm_error

CASE = gemm_error.Case(name="c", left=1.0, right=0.02)


@pytest.fixture
def portable():
    with kernels.target("portable"):
        yield


def test_errors_are_those_of_the_formats(portable):
    errors = gemm_error.measure(CASE, 24, 512, (1, 16, 256))
    # A rounding to p bits has a relative error below 2^-p, its root mean square is about 0.4 of that.
    assert 0.3 * 2**-11 < errors.fp16_result < 0.6 * 2**-11
    assert errors.bf16_operands == pytest.approx(8 * errors.fp16_operands, rel=0.2)
    assert errors.fp32_sums < 1e-6
    assert errors.fp16_result < errors.chunks[1] * 2 and errors.chunks[1] < errors.chunks[16] < errors.chunks[256] < 2**-7
    assert errors.overflows == set()


def test_overflow_is_named(portable):
    errors = gemm_error.measure(gemm_error.CASES[-1], 8, 128, (16,))
    assert errors.overflows == {16}
    assert gemm_error.table([errors], (16,))[2].endswith("| overflow |")


def test_program_prints_a_row_per_case():
    command = [sys.executable, "-m", "tools.gemm_error", "--rows", "4", "--depth", "40", "--chunks", "8"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(printed) == 3 + len(gemm_error.CASES) and "4 x 4 sums of 40 terms" in printed[0]
    for chunk, message in (("0", "give numbers above 0"), ("70000", "--chunks 70000: give numbers from 1 to 65536")):
        wrong = subprocess.run([*command, chunk], capture_output=True, text=True)
        assert wrong.returncode == 2 and wrong.stderr.splitlines()[-1].endswith(message)
