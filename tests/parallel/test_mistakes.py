"""Flags that no run can have together, each refused with one line that names them and a remedy."""

import pytest

from fugaku_megatron.cli.arguments import make_run, parse
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.sample_rules import Skips
from fugaku_megatron.pipeline.schedule_names import AUTO
from tests.helpers import PP2, TP2

SEQUENCE, FULL = {**TP2, "sequence_parallel": True}, {"recompute_granularity": "full"}


def sizes(tp: int, pp: int) -> dict[str, int]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        (
            10,
            sizes(2, 4),
            "^world size 10 .*--tensor-model-parallel-size 2 .*--pipeline-model-parallel-size 4.*start 8 or 16 ranks",
        ),
        (3, sizes(2, 4), "start 8 ranks"),
        (4, sizes(0, 1), "--tensor-model-parallel-size is 0"),
        (4, sizes(1, -1), "--pipeline-model-parallel-size is -1"),
        (
            10,
            {**sizes(1, 5), "pipeline_split": "even"},
            "--num-layers 12 is not divisible by --pipeline-model-parallel-size 5",
        ),
        (26, sizes(1, 13), "--num-layers 12 is below --pipeline-model-parallel-size 13"),
        (
            4,
            {**PP2, "pipeline_split": "9,4"},
            "--pipeline-split 9,4 has 2 stages and 13 layers, .* pass 2 numbers that sum to 12",
        ),
        (4, {**PP2, "pipeline_split": "4,4,4"}, "has 3 stages and 12 layers"),
        (
            2,
            {**SEQUENCE, "seq_length": 1023},
            "^--seq-length 1023 is not divisible by --tensor-model-parallel-size 2, into which "
            "--sequence-parallel cuts it: change one, or leave the flag out$",
        ),
        (
            4,
            {"group_query_attention": True, "num_query_groups": 2, "tensor_model_parallel_size": 4},
            "^--num-query-groups 2 is not divisible by --tensor-model-parallel-size 4: change one of",
        ),
        (
            2,
            {"micro_batch_size": 2, "global_batch_size": 7},
            "^--global-batch-size 7 is not divisible by --micro-batch-size 2 x data-parallel size 2 = 4: use 4 or 8$",
        ),
        (
            2,
            {"micro_batch_size": 2, "global_batch_size": 16, "rampup_batch_size": (2, 2, 100)},
            "^--rampup-batch-size 2 2 100: its batch size 2 is not divisible by .* = 4: pass .* multiples of 4$",
        ),
        (
            2,
            {"micro_batch_size": 2, "global_batch_size": 16, "rampup_batch_size": (4, 6, 100)},
            "^--rampup-batch-size 4 6 100: its batch size 10 is not divisible",
        ),
        (
            1,
            {"overlap_param_gather": True, "zero_stage": 1},
            "--overlap-param-gather needs --overlap-grad-reduce: pass both",
        ),
        (
            1,
            {"overlap_param_gather": True, "overlap_grad_reduce": True},
            "needs --use-distributed-optimizer, and --zero-stage is 0",
        ),
        (1, {"ddp_bucket_size": 0}, "--ddp-bucket-size is 0: pass a number above 0"),
        (
            1,
            {"recompute_auto": True, **FULL},
            "--recompute-auto and --recompute-granularity full exclude",
        ),
        (1, {"recompute_auto": True, "memory_per_rank": 0}, "--memory-per-rank is 0"),
        (
            2,
            {**PP2, "recompute_part_layers": (1, 0)},
            "--recompute-part-layers 1 0 needs --recompute-granularity full, and it is None",
        ),
        (
            2,
            {**PP2, **FULL, "recompute_part_layers": (1, -1)},
            "--recompute-part-layers 1 -1: pass 0 or more",
        ),
        (
            2,
            {**PP2, **FULL, "recompute_part_layers": (1, 1), "recompute_method": "block"},
            "--recompute-method block",
        ),
        (
            2,
            {**PP2, **FULL, "recompute_part_layers": (1, 1, 1)},
            "has 3 numbers .* makes 2 parts: pass 2",
        ),
        (
            2,
            {**PP2, "pipeline_schedule": AUTO, "num_virtual_stages_per_pipeline_rank": 2},
            "rank 2 is for --pipeline-schedule interleaved and zb-h1, not auto",
        ),
        (
            2,
            {**PP2, "pipeline_schedule": AUTO, "zero_bubble_max_pending_backward": 3},
            "--zero-bubble-max-pending-backward 3 is for --pipeline-schedule zb-h1 and zbv, not auto",
        ),
        (1, {"abft": ("-1",)}, "^--abft -1: pass numbers of layers, from 0, or all$"),
        (
            1,
            {"abft": ("0", "12")},
            "^--abft 12: the model has layers 0 to 11: pass some of them, or all$",
        ),
        (1, {"abft": ("all",), "kernels": "torch"}, "^--abft is for the C\\+\\+ kernels"),
        (
            1,
            {"abft": ("all",), "fp16": True, "fp16_accumulation_chunk": 64},
            "^--abft is for the C\\+\\+ kernels",
        ),
        *(
            (
                1,
                {"skip_samples": (text,)},
                "^--skip-samples .*(pass FIRST:END|FIRST must be below END)",
            )
            for text in (
                "5",
                ":7",
                "7:5",
                "5:5",
                "-1:5",
                "a:b",
                "1:2:3",
                "1:2,",
                "",
                "0:2000000000000",
                "1.0:2",
                "٣:٥",
            )
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(world, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        Layout.from_run(make_run("124m", changes), world)
    assert "\n" not in str(caught.value)


def test_ranges_of_samples_are_joined():
    run = parse(["--recipe", "demo", "--skip-samples", "10:20,15:30", "2:3"]).run
    assert str(Skips.parse(run.data.skip_samples)) == "2:3,10:30"
