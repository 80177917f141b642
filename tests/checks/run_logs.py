"""Histories of runs."""

import json
from dataclasses import asdict

from fugaku_megatron.observe.log.iteration_metrics import parse_log
from fugaku_megatron.observe.log.run_log import Job, RunLog


def history(text):
    """Return the history file's text for a log's iterations."""
    records = [{"kind": "train", **asdict(iteration)} for iteration in parse_log(text.splitlines())]
    records += [
        {"kind": "event", "iteration": 4, "text": "slow"},
        {"kind": "validation", "iteration": 4, "consumed_samples": 32, "lm_loss": 6.5},
    ]
    return "".join(json.dumps(record) + "\n" for record in records)


def read_log(path, job: Job | None = None, formula: str = "hardware") -> RunLog:
    """Return the whole log. ValueError if it is unreadable or without iterations."""
    log = RunLog(str(path), job, formula)
    log.finish()
    return log
