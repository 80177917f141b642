"""The plain PyTorch program examples/train_with_pytorch.py with PyTorch's kernels and with ours: losses, and operators served.

    .arm/python tests/arm/train_with_pytorch.py RESULT.json

It is one process, because the emulated torch import takes as long as the training. See test_pytorch.py.
"""

import contextlib
import io
import json
import platform
import re
import runpy
import sys
from pathlib import Path

import fugaku_megatron.torch_backend as torch_backend
from fugaku_megatron.host import kernels
from fugaku_megatron.torch_backend import build, operators

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "train_with_pytorch.py"
# Small, as matmuls cost most under emulation.
ARGUMENTS = "--iterations 2 --batch-size 2 --width 64".split()


def losses(kernel: str) -> list[float]:
    """Return the losses that the program prints."""
    printed = io.StringIO()
    sys.argv[1:] = ARGUMENTS
    with torch_backend.enabled(kernels=kernel), contextlib.redirect_stdout(printed):
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return [float(value) for value in re.findall(r"loss (\S+)", printed.getvalue())]


def main() -> None:
    """Write the result of both runs."""
    output = Path(sys.argv[1])
    dispatch = build.load()
    result = {"machine": platform.machine(), "target": kernels.active(), "torch": losses("torch")}
    dispatch.count(True)
    with operators.every_size(dispatch):
        result["native"] = losses("native")
    result["served"] = {name: served for name, _, served, _, _ in dispatch.counts()}
    output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
