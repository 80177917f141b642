"""Audits of right ranks, over kernels, formats, layouts and threads: none may find a difference."""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from typing import Any

import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.observe.numbers.audit import Audit, watch_numbers
from fugaku_megatron.optim.update_audit import PARTS
from tests.campaigns.audits.trial import ROUTED
from tests.checks.moments import BF16_MOMENTS, EIGHT
from tests.helpers import DROPOUT, lay_out, make_trainer
from tests.threads import ThreadWorld

ITERATIONS = PARTS + 1  # of a run, each audited: all parts of an update
LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp4", {}),
    ("dp4 overlap", {}),
    ("tp2 dp2 zero sequence full", {}),
    ("pp2 dp2", {}),
    ("pp2 dp2 zbv num_layers=4", {}),
    ("cp2 dp2 p2p", {}),
    ("dp4 ep2 zero", ROUTED),
    ("dp4 zero", EIGHT),
    ("dp4 zero", BF16_MOMENTS),
    ("dp1", {}),
)
FORMATS = ("", "bf16", "bf16 int8", "fp16", "torch", "torch bf16")
THREADS = (1, 2)


def _audited(world: Comm, run: RunConfig, threads: int) -> list[str]:
    """Train with an audit in every iteration; return what it reports."""
    said: list[str] = []
    with closing(make_trainer(world, run)) as trainer:
        torch.set_num_threads(threads)
        watch_numbers(trainer, lambda iteration, text: said.append(text))
        assert isinstance(trainer.audit, Audit)
        trainer.audit.parts = 1
        try:
            for _ in range(ITERATIONS):
                trainer.train_step()
        except RuntimeError as error:
            said.append(str(error))
    return said


def audit_right_ranks(count: int) -> str:
    """Return a line about `count` audits at least: of each rank and iteration."""
    begin = time.monotonic()
    audits = 0
    alarms: list[str] = []
    runs = itertools.cycle(itertools.product(LAYOUTS, FORMATS, THREADS))
    for seed, ((layout, model), form, threads) in enumerate(runs):
        if audits >= count:
            break
        flags = {"num_layers": 2, "audit_interval": 1, "seed": seed + 1, **DROPOUT, **model}
        try:
            run, ranks = lay_out(f"{layout} {form}", flags)
        except ValueError:  # such as 8-bit moments without BF16
            continue
        found = ThreadWorld(ranks).run(_audited, run, threads)
        audits += ranks * ITERATIONS
        alarms += [f"{layout} {form}, {threads} threads: {each}" for each in found[0]]
    seconds = time.monotonic() - begin
    lines = [f"{audits} audits of right ranks, {len(alarms)} alarms ({seconds:.0f} s)", *alarms]
    return "\n".join(lines)
