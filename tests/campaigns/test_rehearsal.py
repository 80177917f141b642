"""A short rehearsal of faults: every second between the first process and the last line has a cause. The long one: its --help."""

from __future__ import annotations

import random

import pytest

from fugaku_megatron.observe.export.hours import HOURS, read_hours
from fugaku_megatron.observe.log.effective_time import effective_time
from fugaku_megatron.planner.fault_costs import SAVE
from fugaku_megatron.planner.fault_model import TRAINING, Faults, expected, with_intervals
from tests.campaigns.faults import jobs
from tests.campaigns.rehearsal import __main__ as rehearsal
from tests.campaigns.rehearsal.job import Disturbed

pytestmark = [pytest.mark.campaigns, pytest.mark.mpi]

FAULTS = 3


@pytest.mark.full
def test_every_second_of_a_disturbed_job_has_a_cause(tmp_path):
    """Kills of ranks at random moments; the costs that the run measured give an interval and a share."""
    job = Disturbed(
        tmp_path, jobs.write_data(tmp_path), random.Random(5), mtbf=6.0, stops=0.0, save_interval=5
    )
    job.run(FAULTS)
    assert job.faults == FAULTS
    lines = read_hours(job.save / HOURS)
    ends = [line["code"] for line in lines if line["event"] == "end"]
    assert any(ends)  # a fault may come before the first start has a record
    found = effective_time(job.save)
    assert found.total == pytest.approx(lines[-1]["time"] - lines[0]["begun"])
    assert sum(found.seconds.values()) == found.total and min(found.seconds.values()) >= 0
    known = {name for names in rehearsal.CAUSES.values() for name in names}
    assert found.seconds.keys() <= known and 0 < found.share < 1
    costs = rehearsal.costs_of(job.save)
    assert {"iteration", "start", f"wait {SAVE}"} <= costs.measured
    faults = Faults(1, 60.0, {"process": 1.0, "node": 0.0, "wide": 0.0})
    best = with_intervals(costs.strategies()[0], faults, costs.pace)
    assert best[0][0].interval >= 1 and 0 < expected(best, faults, costs.pace)[TRAINING] < 1
