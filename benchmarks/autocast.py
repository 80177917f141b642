"""A PyTorch program under BF16 autocast on the CPU, which nanoGPT's train.py leaves out there.

    python -m benchmarks programs --directory nanoGPT --autocast train.py --device=cpu

On a CPU train.py runs its model inside contextlib.nullcontext(), whatever its --dtype says. The first one that the program makes is
torch.autocast here, for all sides alike.
"""

from __future__ import annotations

import contextlib
import runpy
import sys

import torch
import torch._dynamo  # takes contextlib.nullcontext as a base class while it is loaded

_NULL_CONTEXT = contextlib.nullcontext


def _autocast() -> torch.autocast:
    contextlib.nullcontext = _NULL_CONTEXT  # type: ignore[misc]
    return torch.autocast("cpu", torch.bfloat16)


def main() -> None:
    """Run the program of the command line."""
    contextlib.nullcontext = _autocast  # type: ignore[misc, assignment]
    del sys.argv[0]
    sys.path[0] = ""
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
