"""The plan of runs that need hundreds and thousands of ranks, made in one process: figures by hand, and in time."""

import pytest

from fugaku_megatron.cli.arguments import make_run, parse
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.costs.stages import model_parameters, stage_parameters
from fugaku_megatron.observe.log import schedule_plot
from fugaku_megatron.planner import plan_text
from fugaku_megatron.run.dry_run import plan_stage, report
from fugaku_megatron.run.limits import modelled_system
from fugaku_megatron.run.train_command import print_plan
from tests.checks.topology import SERVERS, tree
from tests.helpers import small_run
from tests.time_limit import time_limit

pytestmark = pytest.mark.unit


def test_30b_on_12288_ranks():
    run = make_run(
        "30b", {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 48, "bf16": True}
    )
    text = report(run, 12288)
    lines = text.splitlines()
    assert lines[0].startswith("world size 12288 = DP 64 x PP 48 x TP 4 ")
    by_hand = (50304 + 2048) * 7168 + 48 * (12 * 7168**2 + 13 * 7168) + 2 * 7168
    assert lines[1] == f"parameters {by_hand / 1e6:.1f} M, padded vocabulary 50688"
    assert "global batch size 1536, micro-batch size 1, 24 micro-batches per iteration" in lines[2]
    assert f"schedule 1f1b, bubble {47 / (24 + 47):.1%}" in lines[3]
    layer = (
        12 * 7168**2 + 7 * 7168
    ) // 4 + 6 * 7168  # matrices and their split biases / TP; norms and output biases whole
    assert f"{layer / 1e6:.2f}" in text
    assert stage_parameters(run, 5) == layer
    layout = Layout.from_run(run, 12288)
    seconds = plan_text.modelled(run, layout, modelled_system(layout))[3]
    assert (
        lines[7]
        == f"an iteration takes {seconds:.4g} s on 12288 nodes of a64fx, 1 rank a node (model)"
    )
    assert (
        lines[8]
        == "a bubble of 66.2% is large: fugaku-megatron plan --nodes N searches layouts for one that is faster"
    )
    rows = [line for line in lines if line.count("|") > 5]
    assert len(rows) == 1 + 1 + 1 + 23, (
        "head, embedding, stages 1 to 24 alike, 25 to 47 with fewer in flight"
    )


def test_the_cores_of_a_machine_that_is_not_here(tmp_path):
    node = tree(tmp_path, **SERVERS["Xeon 2 x 56, SNC-4"][0])
    run = make_run("124m", {"micro_batch_size": 1, "global_batch_size": 16})
    lines = report(run, 16, sys_root=str(node)).splitlines()[-9:]
    assert lines[0] == (
        f"a node of {node}: 2 sockets, 8 NUMA domains of 14 cores and 63 GiB, 2 hardware threads a core; 16 ranks: "
        "2 nodes, 8 ranks a node"
    )
    assert lines[8] == "  rank 7: 14 threads pinned to cores 98-111 (domain 7)"
    two = report(run, 2, sys_root=str(node)).splitlines()[-4:]
    assert two[0].endswith("; 2 ranks: mpiexec -n 2")
    assert (
        two[2] == "  rank 1: 56 threads pinned to cores 56-111 (domains 4-7)"
        and "this node suits 8 ranks" in two[3]
    )


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_plan_fits_every_layout(world_size):
    run = small_run(
        pipeline_model_parallel_size=min(world_size, 4),
        tensor_model_parallel_size=max(1, world_size // 4),
    )
    layout = Layout.from_run(run, world_size)
    plans = [plan_stage(Plan(run, layout), stage) for stage in range(layout.pp)]
    assert [[len(layers) for layers in p.layers] for p in plans] == [
        [4 // layout.pp] for _ in plans
    ]
    assert [p.in_flight for p in plans] == [(n,) for n in range(layout.pp, 0, -1)]
    assert f"PP {layout.pp} x TP {layout.tp}" in report(run, world_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocabulary size is unknown"),
        ({"train_iters": None}, "--train-iters or --train-samples"),
    ],
)
def test_a_plan_needs_a_vocabulary_and_a_length(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        report(small_run(**changes), 1)
    assert "\n" not in str(caught.value)


def test_the_program_reads_the_vocabulary(tmp_path, capsys):
    from tests.checks.generation import write_tokenizer

    flags = write_tokenizer(tmp_path)
    print_plan(parse(["--recipe", "demo", "--dry-run", "--world-size", "4", *flags]), SoloComm())
    text = capsys.readouterr().out
    assert "world size 4 = DP 4" in text and "padded vocabulary 320" in text
    print_plan(parse(["--recipe", "demo", "--dry-run", "--mock-data"]), SoloComm())
    # GPT-2's, which predict and plan assume as well
    assert "padded vocabulary 50304" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--vocab-file"):
        print_plan(parse(["--recipe", "demo", "--dry-run"]), SoloComm())


@pytest.mark.parametrize(
    ("recipe", "changes", "world_size"),
    [
        ("124m", {"global_batch_size": 2**24}, 1),
        ("124m", {"num_layers": 1024}, 1),
        (
            "124m",
            {
                "num_layers": 1_000,
                "pipeline_model_parallel_size": 1_000,
                "global_batch_size": 2**20,
            },
            1_000,
        ),
        (
            "124m",
            {
                "global_batch_size": 2,
                "rampup_batch_size": (1, 1, 2**31 - 1),
                "train_samples": 2**40,
            },
            1,
        ),
        ("demo", {"hidden_size": 2**20, "seq_length": 2**22, "global_batch_size": 2}, 1),
    ],
)
def test_the_largest_values_are_planned_in_time(recipe, changes, world_size):
    with time_limit():
        assert report(make_run(recipe, {"vocab_size": 50257, **changes}), world_size)
        with pytest.raises(
            ValueError, match="--global-batch-size 1024 is not divisible by .*1000000000000"
        ):
            report(make_run("124m", {"vocab_size": 50257}), 10**12)


def test_the_picture_shows_the_schedule_and_the_memory(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(schedule_plot, "draw", lambda *given: drawn.append(given))
    flags = "--recipe demo --mock-data --dry-run --world-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule zbv"
    print_plan(parse(flags.split()), SoloComm(), str(tmp_path / "p.png"))
    ((file, spans, memory, heading),) = drawn
    run = make_run(
        "demo", {"vocab_size": 50257, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}
    )
    assert (
        len([s for s in spans if s.op in ("forward", "backward_input", "backward_weight")])
        == 3 * 2 * 2 * 2
    )
    plans = [plan_stage(Plan(run, Layout.from_run(run, 4)), stage) for stage in range(2)]
    assert memory == [plan.memory.total / 2**20 for plan in plans]
    assert file.endswith("p.png") and heading.startswith(
        "zbv, 2 chunks of layers a stage, all 2 micro-batches, recompute none; "
    )
    assert heading.endswith("(model, a64fx)")


def test_frozen_weights_of_a_node_are_said_to_be_shared():
    run = make_run("124m", {"lora_rank": 8, "vocab_size": 50257})
    line = next(line for line in report(run, 2).splitlines() if line.startswith("frozen weights"))
    mib = 4 * model_parameters(make_run("124m", {"vocab_size": 50257})) / 2**20
    assert f"k of them need (k - 1) x {mib:.0f} MiB less" in line
    assert "frozen weights" not in report(run, 1)
    shared = make_run("124m", {"lora_rank": 8, "vocab_size": 50257, "context_parallel_size": 2})
    # one replica of the data, two ranks with the same weights
    assert "frozen weights" in report(shared, 2)
