"""A report of a machine without faults."""

from __future__ import annotations

import json

from fugaku_megatron.report import (
    findings,
    layers,
    record,
)
from tests.helpers import RECORDED

# Sections of a report on a node without faults
HEALTHY = json.loads((RECORDED / "report.json").read_text())


def report(sections=HEALTHY, complete=True, **more):
    data = {
        "format": record.FORMAT,
        "version": record.VERSION,
        "program": "0",
        "complete": complete,
        "seconds": 65.0,
        "ended": "finished" if complete else "ended by SIGTERM",
        "date": "2026-01-01",
        "minutes": 10.0,
        "sections": sections,
    }
    return {
        **data,
        "findings": findings.findings(sections),
        "hours": layers.hours(sections),
        **more,
    }
