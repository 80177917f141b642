"""Parallel layouts on real MPI processes equal one rank."""

import pytest

from tests.mpi import layouts
from tests.mpi.launch import words

pytestmark = [pytest.mark.system, pytest.mark.mpi]


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.full)])
def test_layouts_equal_one_rank(mpi, ranks, tmp_path):
    level = {"mpich": "serialized", "openmpi": "funneled"}[mpi.name]
    variables = {"FUGAKU_MEGATRON_MPI_THREAD_LEVEL": level}
    job = mpi.run(ranks, *words(layouts.__file__, 2, tmp_path), timeout=500, **variables)
    assert f"MPI_THREAD_{level.upper()}" in job.stdout
    tried = len(layouts.layouts(ranks)) + len(layouts.divided(ranks))
    assert tried > 7 and job.stdout.count("ok ") == tried
