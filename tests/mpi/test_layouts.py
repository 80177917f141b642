"""Every parallel layout on real MPI processes equals one rank, under every MPI that is installed."""

from pathlib import Path

import pytest

from tests.mpi import layouts

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_layouts_equal_one_rank(mpi, level, tmp_path):
    iterations = 10 if (mpi.name, level) == ("mpich", "serialized") else 3  # what an MPI or a level breaks, it breaks in the first
    job = mpi.run(8, str(Path(layouts.__file__)), str(iterations), str(tmp_path), timeout=500,
                  FUGAKU_MEGATRON_MPI_THREAD_LEVEL=level)
    assert job.returncode == 0, job.stderr
    assert f"MPI_THREAD_{level.upper()}" in job.stdout
    assert job.stdout.count("ok ") == sum(len(layouts.variants(name)) for name in layouts.SIZES)
