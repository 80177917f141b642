"""The C++ kernels. Import through this module: torch first, because the extension uses torch's
OpenMP runtime.

Formulas: kernels_sve/*.h. Autograd: nn/ops/.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

try:
    from .._kernels import *  # noqa: F403  # bindings of C++
    from .._kernels import active as active
    from .._kernels import table as table
    from .._kernels import targets, use
except ModuleNotFoundError as error:
    raise ImportError(
        "the C++ kernels are not built: run make kernels, or python setup.py build_ext --inplace"
    ) from error
except ImportError as error:
    if "FUGAKU_MEGATRON_TARGET" not in str(error):
        raise
    raise ValueError(str(error)) from error  # a user's mistake, see comm/job.py

torch.get_num_threads()  # the first call sets the number of threads, and would overwrite a later setting

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
    """Use a target of targets() inside the block."""
    before = active()
    use(name)
    try:
        yield
    finally:
        use(before)


def instruction_set() -> str:
    """Return the target in use for a log line, and faster targets that the operating system refuses or the build left out."""
    rows = [row for row in targets() if not row["name"].endswith("_emulated")]
    slower = [row["name"] for row in rows]
    faster = rows[slower.index(active()) + 1 :] if active() in slower else []
    unused = [
        row for row in faster if row["reason"].startswith(("the operating system", "left out"))
    ]
    return "; ".join([active(), *(f"{row['name']} is not used: {row['reason']}" for row in unused)])


def runnable_targets(emulated: bool = False) -> list[str]:
    """Return this CPU's vector targets, the default last.

    emulated: include targets that emulate missing instructions, for tests
    """
    names = [row["name"] for row in targets() if row["runnable"] and row["name"] != "reference"]
    return [name for name in names if emulated or not name.endswith("_emulated")]
