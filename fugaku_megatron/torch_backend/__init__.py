"""PyTorch's programs on this package's CPU kernels.

    import fugaku_megatron.torch_backend

replaces operators of ATen on the CPU, for the whole process: their large calls in FP32 and BF16 run on the kernels, all
other calls on PyTorch's own. `enabled` switches this off and on; `python -m fugaku_megatron.torch_backend train.py`
needs no change of the program. transformers gets the name "fugaku" of attention and of experts; `accelerate` replaces more of a
model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import build, rendezvous, transformers_names

__all__ = ["enabled", "use"]


def use(kernels: str) -> None:
    """Choose the kernels of the process.

    kernels: "auto", for each shape of a call the faster of both, by the times of the first calls (the default); "native", for the same
        bits in every run; "torch", PyTorch's alone. `torch.use_deterministic_algorithms` makes "auto" as "native".
    """
    build.load().use(kernels)


@contextmanager
def enabled(on: bool = True, kernels: str = "auto") -> Iterator[None]:
    """Use the kernels inside the block, in all threads, or with `on` false PyTorch's alone."""
    dispatch = build.load()
    before = dispatch.in_use()
    dispatch.use(kernels if on else "torch")
    try:
        yield
    finally:
        dispatch.use(before)


def _install() -> None:
    from . import operators  # loads the kernels

    dispatch = build.load()
    if operators.install(dispatch):
        dispatch.use("auto")
    rendezvous.register()
    transformers_names.register_after_import()


try:
    _install()
except (ImportError, ValueError) as error:
    if sys.argv[:1] != ["-m"]:
        raise
    sys.exit(f"{__name__}: {error}")
