"""fugaku-megatron on ranks of which rank 1 has a wrong library: `python faulty_library.py kernel|sum ARGUMENTS`.

kernel: a copy of the kernels' library with another constant in its activation
sum: an MPI whose all-reduces have one wrong element
"""

import importlib.util
import os
import struct
import sys
import tempfile
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

KERNELS = "fugaku_megatron._kernels"
# -2 sqrt(2 / pi) log2(e), see GELU_SHARE in kernels_sve/rowwise/activation.h
CONSTANT = struct.pack("<f", -2.3022082)


class WrongKernels:
    """Finder of the kernels' library that loads an altered copy."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != KERNELS:
            return None
        (library,) = Path(path[0]).glob("_kernels*x86_64*.so")
        content = library.read_bytes()
        assert content.count(CONSTANT) >= 1, "the library has another constant"
        copy = Path(tempfile.mkdtemp()) / library.name
        copy.write_bytes(content.replace(CONSTANT, struct.pack("<f", -2.3)))
        loader = ExtensionFileLoader(name, str(copy))
        return importlib.util.spec_from_file_location(name, copy, loader=loader)


def wrong_sums():
    from fugaku_megatron.comm.mpi import MPIComm

    start = MPIComm._all_reduce

    def all_reduce(self, flat, op):
        yield from start(self, flat, op)
        if flat.is_floating_point():
            flat[0] += 1

    MPIComm._all_reduce = all_reduce


if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        if fault == "kernel":
            sys.meta_path.insert(0, WrongKernels)
        else:
            wrong_sums()
    from fugaku_megatron.cli import program

    sys.exit(program.main(arguments))
