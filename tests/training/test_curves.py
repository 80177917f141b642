"""Losses of small runs stay what they were: to the last bit with the portable kernels alone, within a tolerance with others.

A change that moves a curve names it in CHANGELOG.md, and `python -m tests.recorded.curves --write` records it.
"""

import pytest

from fugaku_megatron.host import kernels
from tests.recorded import curves

pytestmark = pytest.mark.parallel

RECORDED = curves.recorded()
EMULATED = set(kernels.runnable_targets(emulated=True)) - set(kernels.runnable_targets())
TARGETS = [kernels.active(), *sorted(EMULATED)]


@pytest.mark.parametrize("name", curves.CURVES)
def test_a_curve_stays(name, tmp_path):
    curves.write_data(tmp_path)
    with kernels.target(curves.PORTABLE):
        found = curves.curve(name, tmp_path)
    before = RECORDED[name]
    assert found == before.losses or name in curves.OF_TORCH
    assert curves.difference(found, before.losses) <= before.tolerance


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", curves.CURVES)
def test_a_curve_is_that_of_other_kernels(name, target, tmp_path):
    """Kernels are those in use, for which make test-targets tries all, and those that emulate instructions."""
    curves.write_data(tmp_path)
    with kernels.target(target):
        found = curves.curve(name, tmp_path)
    before = RECORDED[name]
    assert curves.difference(found, before.losses) <= before.tolerance
