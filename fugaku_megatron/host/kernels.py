"""The C++ kernels, imported in the right order: torch first, because the extension uses torch's OpenMP runtime.

    from fugaku_megatron.host import kernels
    kernels.squared_norm(x)                        every function of the extension
    with kernels.target("portable"): ...           another build of the same kernels, process-wide, for the block

Left out: formulas (kernels_sve/*.h) and autograd (nn/ops.py). Tested by tests/kernels/.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401

try:
    from .._kernels import *  # noqa: F403
    from .._kernels import active, targets, use
except ModuleNotFoundError as error:
    raise ImportError("the C++ kernels are not built: run make kernels, or python setup.py build_ext --inplace") from error
except ImportError as error:
    if "FUGAKU_MEGATRON_TARGET" not in str(error):
        raise
    raise ValueError(str(error)) from error  # the user's, see comm/launch.py

if TYPE_CHECKING:
    def __getattr__(name: str) -> Any:
        """Every other function of the extension, which is compiled and has no types."""


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
    """Use the target `name` (see targets()) inside the block. Raises what use() raises."""
    before = active()
    use(name)
    try:
        yield
    finally:
        use(before)


def instruction_set() -> str:
    """The target in use for a log line, and what the operating system withholds from the process."""
    refused = [row for row in targets() if row["reason"].startswith("the operating system")]
    return "; ".join([active(), *(f"{row['name']} is not used: {row['reason']}" for row in refused)])


def runnable_targets(emulated: bool = False) -> list[str]:
    """Names of the vector targets that this CPU can run, the default last; without the scalar reference.

    emulated: also those that emulate instructions which the CPU lacks, for tests.
    """
    names = [row["name"] for row in targets() if row["runnable"] and row["name"] != "reference"]
    return [name for name in names if emulated or not name.endswith("_emulated")]
