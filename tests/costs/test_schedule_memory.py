"""Peak activations of a stage under every schedule: the list's prediction against torch's allocations for a single stage."""

import pytest

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import memory, run_schedule
from tests.checks.allocations import MICROBATCHES, MODEL, STAGES, allocated_peak
from tests.helpers import small_run

pytestmark = pytest.mark.unit

SCHEDULES = {
    "1f1b": {},
    "interleaved": {"num_virtual_stages_per_pipeline_rank": 2},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zbv": {"pipeline_schedule": "zbv"},
    "mtp": {"mtp_num_layers": 2, "position_embedding_type": "rope"},
}


# the last one holds more than ZB-V's own
@pytest.mark.parametrize(
    ("name", "stage", "recompute", "pending"),
    [
        ("mtp", 3, None, None),
        ("mtp", 3, "full", None),
        ("mtp", 0, None, None),
        *(
            (name, stage, kind, None)
            for name in ("1f1b", "zbv")
            for stage, kind in ((0, None), (3, None), (1, "full"), (0, "some"))
        ),
        ("interleaved", 0, None, None),
        ("interleaved", 1, "full", None),
        ("zb-h1", 3, None, None),
        ("zb-h1", 0, "some", None),
        ("zbv", 2, "full", None),
        ("zbv", 0, None, 6),
    ],
)
def test_peak(name, stage, recompute, pending):
    changes = {
        **SCHEDULES[name],
        "recompute_granularity": recompute and "full",
        "zero_bubble_max_pending_backward": pending,
    }
    if recompute == "some":
        changes["recompute_part_layers"] = (1, 3, 2, 0, 2, 0, 1, 1)[
            : small_run(**MODEL, **changes).placement.virtual_stages
        ]
    run = small_run(**MODEL, **changes)
    held = run_schedule.build_schedule(run, MICROBATCHES).in_flight(stage)
    predicted = memory.stage_memory(run, Layout.from_run(run, STAGES), stage, held)
    assert allocated_peak(SoloComm(stage, STAGES), run) == pytest.approx(
        predicted.activations + predicted.logits, rel=0.05
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [2, 6])
def test_gradients_of_one_micro_batch_lie_where_activations_were(layers, tied):
    sizes = {
        "num_layers": layers,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "seq_length": 256,
        "max_position_embeddings": 256,
    }
    changes = {
        **MODEL,
        **sizes,
        "pipeline_model_parallel_size": 1,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "untie_embeddings_and_output_weights": not tied,
        "swiglu": not tied,
        "disable_bias_linear": not tied,
    }
    run = small_run(**changes)
    predicted = memory.stage_memory(
        run, Layout.from_run(run, 1), 0, run_schedule.build_schedule(run, 1).in_flight(0)
    )
    assert predicted.reused > predicted.activations / 4
    both = predicted.gradients + predicted.activations + predicted.logits - predicted.reused
    assert 0.8 * both < allocated_peak(SoloComm(), run) < 1.05 * both, (
        "tensors of head and layers that are never there at once"
    )
