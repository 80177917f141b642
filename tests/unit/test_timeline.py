"""The walk through the lists: small cases by hand, and the bubbles that the papers state."""

from __future__ import annotations

import pytest

from fugaku_megatron.pipeline.parts import BACKWARD, FORWARD, RECV_BACKWARD, RECV_FORWARD
from fugaku_megatron.pipeline.schedule import build
from fugaku_megatron.pipeline.timeline import Costs, Span, spans, walk


def slots(name: str, stages: int, chunks: int, microbatches: int) -> float:
    """Slots of an iteration with F = I = W = 1 for all chunks of a stage, B = 2 and messages that take no time."""
    schedule = build(name, stages, chunks, microbatches)
    return walk(schedule, Costs.alike(schedule))


def test_spans_of_a_small_case():
    schedule = build("1f1b", 2, 1, 1)
    costs = Costs({FORWARD: [[1.0], [2.0]], BACKWARD: [[3.0], [4.0]]}, transfer=0.5)
    assert spans(schedule, costs) == [
        Span(0, FORWARD, 0, 0, 0.0, 1.0), Span(1, RECV_FORWARD, 0, 0, 1.0, 1.5), Span(1, FORWARD, 0, 0, 1.5, 3.5),
        Span(1, BACKWARD, 0, 0, 3.5, 7.5), Span(0, RECV_BACKWARD, 0, 0, 7.5, 8.0), Span(0, BACKWARD, 0, 0, 8.0, 11.0)]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (4, 8), (8, 16), (8, 40)])
def test_bubbles(stages, microbatches):
    p, m = stages, microbatches
    assert slots("1f1b", p, 1, m) == 3 * (m + p - 1)
    assert slots("interleaved", p, 3, -(-m // p) * p) == pytest.approx(3 * -(-m // p) * p + (p - 1))  # a third of 1F1B's
    assert slots("zb-h1", p, 1, m) == 3 * m + (p - 1)  # a third of 1F1B's
    assert slots("zbv", p, 2, m) == 3 * m + (p - 1) / 2  # none, but that the last stage begins (p - 1) half slots late


@pytest.mark.parametrize(("name", "chunks", "gain"), [("interleaved", 5, 1.5), ("zb-h1", 1, 1.4), ("zbv", 2, 1.6)])
@pytest.mark.parametrize(("stages", "microbatches"), [(8, 7), (16, 16)])
def test_few_microbatches_gain_most(name, chunks, gain, stages, microbatches):
    assert slots("1f1b", stages, 1, microbatches) >= gain * slots(name, stages, chunks, microbatches)


@pytest.mark.parametrize("microbatches", [1, 3, 5, 9, 11, 13, 19, 23])
def test_any_number_of_microbatches_is_interleaved_sensibly(microbatches):
    """No longer than the next multiple of the stages would take, and never longer than 1F1B."""
    padded = -(-microbatches // 4) * 4
    assert slots("interleaved", 4, 2, microbatches) <= min(slots("1f1b", 4, 1, microbatches), slots("interleaved", 4, 2, padded))
