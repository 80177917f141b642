# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyFugakuMegatron(PythonPackage):
    """GPT training on CPU clusters with Megatron-LM's command line: MPI instead of NCCL,
    SVE and AVX kernels instead of CUDA."""

    homepage = "https://pypi.org/project/fugaku-megatron"
    pypi = "fugaku-megatron/fugaku_megatron-0.2.0.tar.gz"

    license("Apache-2.0")

    # make sdist writes a recipe with the checksum of its archive.
    version("0.2.0")

    depends_on("cxx", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-wheel", type="build")
    depends_on("py-pybind11@2.12:", type="build")

    # The site's torch and MPI: the extension links neither.
    depends_on("py-torch@2.9:~cuda", type="run")
    depends_on("py-mpi4py@3.1:", type="run")
    depends_on("mpi", type="run")
    depends_on("py-numpy", type="run")
    depends_on("py-regex", type="run")
    depends_on("py-psutil", type="run")

    import_modules = ("fugaku_megatron",)

    def test_train(self):
        """train 20 iterations on two ranks and verify the checkpoint"""
        mpiexec = which("mpiexec", required=True)
        program = self.prefix.bin.join("fugaku-megatron")
        words = "train --recipe demo --mock-data --vocab-size 512 --train-iters 20 --eval-iters 0"
        mpiexec("-n", "2", program, *words.split(), "--save", "checkpoint")
        Executable(program)("verify", "checkpoint")
