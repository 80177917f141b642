"""OpenBLAS as numpy brings it: the process that it needs, the name of its kernels, and its FP32 matmul.

It chooses kernels by the CPU's name, or by OPENBLAS_CORETYPE instead if that is set before numpy is imported.
numpy's build has no BF16 matmul.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.config.fields import check
from fugaku_megatron.host import kernels

# A kernel target that the CPU can run -> OpenBLAS's kernels of the same width. Those of later CPUs are the same in FP32.
CORES = {"avx512": "SKYLAKEX", "avx2": "HASWELL"}

# Values of CBLAS.
ROW_MAJOR = 101
AS_IT_LIES = 111
TRANSPOSED = 112


def environment(threads: int) -> dict[str, str]:
    """Return the variables of a process in which OpenBLAS runs on that many threads, with kernels of the CPU's full width."""
    core = next((CORES[target] for target in CORES if target in kernels.runnable_targets()), None)
    return {"OPENBLAS_NUM_THREADS": str(threads), **({"OPENBLAS_CORETYPE": core} if core else {})}


@functools.cache
def _library() -> tuple[ctypes.CDLL, str, str]:
    """Return (numpy's OpenBLAS, the prefix and the suffix of its names). ValueError where numpy has another BLAS."""
    import numpy

    loaded = re.search(r"\S*openblas\S*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    check(loaded is not None, f"numpy {numpy.__version__} is not built with OpenBLAS")
    library = ctypes.CDLL(loaded[0])
    names = [(prefix, suffix) for prefix in ("scipy_", "") for suffix in ("64_", "")]
    found = next(
        (name for name in names if hasattr(library, f"{name[0]}cblas_sgemm{name[1]}")), None
    )
    check(found is not None, f"{loaded[0]} exports no cblas_sgemm")
    return library, *found


def _function(name: str) -> Any:
    library, prefix, suffix = _library()
    return getattr(library, f"{prefix}{name}{suffix}")


def core() -> str:
    """Return the kernels in use. ValueError where numpy has another BLAS."""
    get = _function("openblas_get_corename")
    get.restype = ctypes.c_char_p
    return get().decode()


@functools.cache
def _square() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(768, 768), torch.empty(768, 768)


def work() -> None:
    """Multiply matrices that are large enough for all threads, which takes some milliseconds."""
    square, out = _square()
    sgemm(square, square, out)


def sgemm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """Compute out (m, n) = left (m, k) @ right (k, n), or with `add` out += left @ right; FP32, operands may be transposed views."""
    m, k = left.shape
    n = right.shape[1]
    number = ctypes.c_int64 if _library()[2] else ctypes.c_int
    operands = [
        (TRANSPOSED, x.stride(1)) if x.stride(0) == 1 else (AS_IT_LIES, x.stride(0))
        for x in (left, right)
    ]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (left, right, out)]
    _function("cblas_sgemm")(
        ROW_MAJOR,
        operands[0][0],
        operands[1][0],
        number(m),
        number(n),
        number(k),
        ctypes.c_float(1.0),
        pointers[0],
        number(operands[0][1]),
        pointers[1],
        number(operands[1][1]),
        ctypes.c_float(float(add)),
        pointers[2],
        number(out.stride(0)),
    )
