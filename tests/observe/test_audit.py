"""Audits: silent faults on one of several ranks are found and named, no checkpoint with wrong bits is trusted, and right ranks agree."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.observe.numbers.audit import Audit, watch_numbers
from fugaku_megatron.optim.update_audit import PARTS
from tests.campaigns.audits.trial import KINDS, LAYOUTS, ROUTED, Fault, attempt
from tests.checks.moments import BF16_MOMENTS, EIGHT
from tests.helpers import DROPOUT, make_trainer, run_layout, train

pytestmark = pytest.mark.parallel


def audited(world, run: RunConfig, iterations: int = 2) -> list[float]:
    """Train with an audit in every iteration; return the losses."""
    with closing(make_trainer(world, run)) as trainer:
        watch_numbers(trainer, lambda iteration, text: pytest.fail(text))
        assert isinstance(trainer.audit, Audit)
        trainer.audit.parts = 1
        losses = [trainer.train_step().loss for _ in range(iterations)]
        assert trainer.find_difference() is None
        assert trainer.audit.clean == iterations
        return losses


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp1", {}),
        ("dp3 global_batch_size=12", {}),
        ("dp2 overlap bf16", {}),
        ("tp2 dp2 zero sequence full", {}),
        ("tp2 dp2 sequence blocks selective", {}),
        ("pp2 dp2 zbv overlap", {}),
        ("pp2 full", {}),
        ("cp2 dp2 p2p", {}),
        ("dp2 torch zero", {}),
        ("dp2 zero", EIGHT),
        ("dp2 zero", BF16_MOMENTS),
        ("dp2 zero optimizer=muon", {}),
        ("dp2", ROUTED),
        ("dp4 ep2 zero", ROUTED),
        ("dp2 ep2", ROUTED),
        ("tp2 dp4 ep2 etp1 sequence", ROUTED),
    ],
)
def test_right_ranks_agree_and_an_audit_changes_no_bit(layout, model):
    flags = {"num_layers": 4 if "zbv" in layout else 2, "audit_interval": 1, **DROPOUT, **model}
    losses = run_layout(layout, audited, flags)
    assert losses == [
        [step.loss for step in steps] for steps in run_layout(layout, train, flags, 2)
    ]


def test_padding_at_the_end_of_a_shard_is_no_fault(monkeypatch):
    """No update writes it. The last of the audited parts has it, in memory that may hold anything."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *args, **more: new_empty(x, *args, **more).fill_(7)
    )
    flags = {"num_layers": 2, "audit_interval": 1}
    run_layout("dp3 zero bf16 global_batch_size=12", audited, flags, PARTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_is_found_and_named(layout, kind):
    outcome = attempt(Fault(3, layout, kind, rank=2, onset=4))
    assert outcome.found is not None and outcome.trusted, outcome
    # A wrong activation of one tensor-parallel rank reaches both replicas' replicated weights, which are compared before saves.
    spread = (layout, kind) == ("DP 2 x TP 2", "activation")
    assert outcome.named or outcome.among or spread, outcome
    if kind in ("weight", "moment"):
        assert outcome.found == outcome.onset, outcome
