"""Every parallel layout on real MPI processes equals one rank, under every MPI that is installed."""

from pathlib import Path

import pytest

from tests.mpi import layouts

pytestmark = pytest.mark.mpi


def test_layouts_equal_one_rank(mpi):
    job = mpi.run(8, str(Path(layouts.__file__)), timeout=500)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("ok ") == len(layouts.SIZES) * len(layouts.VARIANTS)
