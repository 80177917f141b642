"""The calibrate command over real MPI processes writes a machine that predict can load."""

import pytest

from fugaku_megatron.perf import machine

pytestmark = pytest.mark.mpi
# The command on vectors and products that fit into caches: their rates say nothing of a machine, and take a tenth of the time.
SMALL = """
import sys
from fugaku_megatron import cli
from fugaku_megatron.calibration import calibrate, host_kernels
calibrate.SIZES, calibrate.TRIAD_ELEMENTS, calibrate.REDUCED = (64, 128, 256), 1 << 18, 1 << 20
host_kernels.COLD_BYTES, host_kernels.ELEMENTS, host_kernels.LENGTHS = 1 << 20, 1 << 18, (128, 256)
sys.exit(cli.main(["calibrate", *sys.argv[1:]]))
"""


def test_the_command_measures_this_host(mpich, tmp_path):
    job = mpich.run(2, "-c", SMALL, "--output", str(tmp_path / "host.json"))
    assert job.returncode == 0, job.stderr
    host = machine.load(str(tmp_path / "host.json"))
    assert host.ranks_per_node == 2 and host.peak_tflops["fp32"] > 0 and host.intra_gbs > 0 and host.intra_alpha_us > 0


def test_one_rank_is_refused(mpich, tmp_path):
    job = mpich.run(1, "-m", "fugaku_megatron", "calibrate", "--output", str(tmp_path / "host.json"))
    assert job.returncode == 2 and "mpiexec -n 2" in job.stderr and not (tmp_path / "host.json").exists()
