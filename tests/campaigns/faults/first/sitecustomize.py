"""On the path of MPI jobs in tests: no pictures, and a gradient that goes wrong where FAULT_GRADIENT asks for it.

The process that draws the losses after a save takes longer than a run. It ends at once, unless PICTURES is set. FAULT_GRADIENT is
rank,call,element,mark: that call of attention's backward on that rank leaves a NaN in its result, and creates the file `mark`.
"""

import importlib.util
import os
import sys
from pathlib import Path

KERNELS = "fugaku_megatron._kernels"


class FaultyKernels:
    """Finds the kernels' module and changes it once it is loaded."""

    def __init__(self, call, element, mark):
        self.left, self.element, self.mark = int(call), int(element), Path(mark)

    def find_spec(self, name, path=None, target=None):
        if name != KERNELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), self.change(module))
        return spec

    def change(self, module):
        right = module.attention_backward

        def attention_backward(*args, **kwargs):
            right(*args, **kwargs)
            self.left -= 1
            if self.left == 0:
                gradient = args[4].view(-1)
                gradient[self.element % gradient.numel()] = float("nan")
                self.mark.touch()

        module.attention_backward = attention_backward


if {"fugaku_megatron.logs.plot", "loss"} <= {*sys.orig_argv} and "PICTURES" not in os.environ:
    os._exit(0)
rank, _, fault = os.environ.get("FAULT_GRADIENT", "").partition(",")
if fault and os.environ.get("PMI_RANK") == rank:
    sys.meta_path.insert(0, FaultyKernels(*fault.split(",")))
