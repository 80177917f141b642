"""The C++ kernels, imported in the right order: torch first, because the extension uses torch's OpenMP runtime.

    from fugaku_megatron import kernels
    kernels.squared_norm(x)                        every function of the extension
    with kernels.target("portable"): ...           another build of the same kernels, process-wide, for the block

Left out: formulas (kernels_sve/*.h) and autograd (nn/ops.py). Tested by tests/kernels/.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch  # noqa: F401

try:
    from .. import _kernels
except ModuleNotFoundError as error:
    raise ImportError("the C++ kernels are not built: run python setup.py build_ext --inplace") from error
except ImportError as error:
    if "FUGAKU_MEGATRON_TARGET" not in str(error):
        raise
    raise ValueError(str(error)) from error  # the user's, see comm/launch.py

from .._kernels import *  # noqa: F403


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
    """Use the target `name` (see targets()) inside the block. Raises what use() raises."""
    before = _kernels.active()
    _kernels.use(name)
    try:
        yield
    finally:
        _kernels.use(before)


@contextlib.contextmanager
def observed(observe: Callable[[str, Callable[..., Any], tuple, dict], Any]) -> Iterator[None]:
    """Inside the block every call of this module's kernels by name goes through observe(name, function, args, kwargs)."""
    names = [name for name, value in vars(_kernels).items() if callable(value) and not name.startswith(("_", "bench_"))]
    originals = {name: globals()[name] for name in names}
    for name, function in originals.items():
        globals()[name] = lambda *args, _name=name, _function=function, **kwargs: observe(_name, _function, args, kwargs)
    try:
        yield
    finally:
        globals().update(originals)


def runnable_targets() -> list[str]:
    """Names of the vector targets that this CPU can run, the default last; without the scalar reference."""
    return [row["name"] for row in _kernels.targets() if row["runnable"] and row["name"] != "reference"]
