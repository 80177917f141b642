"""Software as data: the names are complete, counts are there for every phase, unknown software is an error."""

from __future__ import annotations

import pytest

from fugaku_megatron.perf import machine, software

PHASES = ("layer_forward", "layer_backward", "embedding_forward", "embedding_backward", "head_forward", "head_backward")


@pytest.mark.parametrize("name", software.names())
def test_every_software_is_complete(name):
    code = software.load(name)
    assert all("calls" in code.counts[phase] for phase in PHASES)
    assert set(code.machines) <= set(machine.names())
    assert code.fitted.values.gemm_fraction > 0 and code.choices.schedules[0] == "1f1b"


def test_what_is_measured_and_what_is_a_model():
    assert software.load("torch1.10").measured and software.load("megatron-a100").measured
    assert not software.load("fugaku_megatron").measured


def test_this_is_an_alias_of_this_project():
    assert software.load("this") == software.load("fugaku_megatron") and "this" not in software.names()


def test_unknown_software_is_refused():
    with pytest.raises(ValueError, match="--software torch1 is unknown.*did you mean torch1.7"):
        software.load("torch1")
