"""The step model, the schedules that it walks, and the predict command."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.config import features
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.recipes import RECIPES
from fugaku_megatron.config.run_config import ParallelConfig
from fugaku_megatron.config.training import TrainingConfig
from fugaku_megatron.pipeline.timeline import walk
from fugaku_megatron.planner import model, plan_text, search
from fugaku_megatron.planner.model import outside, predict, step
from fugaku_megatron.planner.software import fitted, with_schedule
from fugaku_megatron.planner.system import System
from fugaku_megatron.reproduction.rows import load, predict_row

pytestmark = pytest.mark.unit

AC = TrainingConfig(recompute_granularity="full")
RUN_30B = replace(
    RECIPES["30b"](),
    training=AC,
    parallel=ParallelConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=48),
)
RUN_124M = replace(RECIPES["124m"](), training=AC)


def test_the_breakdown_adds_up():
    for run, nodes in ((RUN_30B, 384), (RUN_124M, 1), (RUN_124M, 64)):
        made = predict(run, System.from_names("a64fx", "torch1.10", nodes))
        assert sum(made.breakdown.values()) == pytest.approx(made.seconds)
        assert made.lower < made.seconds < made.upper and min(made.breakdown.values()) >= 0


def test_what_must_be_faster_is():
    assert predict(
        RUN_30B, System.from_names("a64fx", "torch1.10", 6144)
    ).bubble_fraction == pytest.approx(47 / 95, abs=0.15)
    assert (
        seconds("fugaku_megatron")
        < seconds("torch1.10+tcmalloc")
        < seconds("torch1.10")
        < seconds("torch1.7")
    )
    assert seconds("torch1.10", ghz=2.2) == pytest.approx(
        seconds("torch1.10", ghz=2.0) / 1.10, rel=1e-3
    )
    assert seconds("torch1.10", run=RECIPES["124m"]()) < seconds("torch1.10")
    assert 2 * seconds("torch1.10", nodes=2) / seconds("torch1.10") > 1.15
    assert 2 * seconds("torch1.10+tcmalloc", nodes=2) / seconds("torch1.10+tcmalloc") < 1.02
    system = System.from_names("a64fx", "torch1.10", 192)
    layout = Layout(192, 4, 48, 1)
    values = fitted("a64fx").values
    whole, less = (
        step(RUN_30B, layout, system, values, without=cause) for cause in ("", "tensor_parallel")
    )
    assert (
        less.slowest.tensor_parallel == 0 < whole.slowest.tensor_parallel
        and less.seconds < whole.seconds
    )


def seconds(software: str, nodes: int = 1, ghz: float | None = None, run=RUN_124M) -> float:
    return predict(run, System.from_names("a64fx", software, nodes, ghz=ghz)).seconds


def test_rows_of_the_tables_go_through():
    for row in [r for r in load() if r.problem() is None and r.line % 14 == 0]:
        made = predict_row(row)
        assert made.seconds > 0 and made.memory_mib_max > 0, (row.table.id, row.line)


def test_what_is_outside_the_fit_or_impossible_is_said():
    row = next(r for r in load() if r.status == "impossible")
    with pytest.raises(ValueError, match="= 128 ranks, but the row has 64"):
        predict_row(row)
    assert list(outside({"nodes": (1, 64)}, {"nodes": 128})) == [
        "nodes 128 is outside the fitted 1 to 64"
    ]
    large = predict(RUN_30B, System.from_names("a64fx", "torch1.10", 12288))
    assert any("nodes 12288" in w for w in large.warnings)
    carried_over = predict(RUN_124M, System.from_names("fx700", "fugaku_megatron", 1))
    assert any("never measured on fx700" in w for w in carried_over.warnings)
    assert any("not fitted" in w for w in carried_over.warnings)


SYSTEM = System.from_names("a64fx", "fugaku_megatron", 13824, 1)
LAYOUT = Layout(13824, 6, 8, 288)
RUN = replace(
    RECIPES["13b"](),
    parallel=ParallelConfig(
        tensor_model_parallel_size=6, pipeline_model_parallel_size=8, zero_stage=1
    ),
)
KINDS = [
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 5),
    ("zb-h1", 1),
    ("zb-h1", 5),
    ("zbv", 2),
]
HELD = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "micro_batch_size",
        "ranks_per_node",
        "recompute_granularity",
        "zero_stage",
        "sequence_parallel",
    }
)


def stepped(name: str, chunks: int) -> model.Step:
    run = with_schedule(RUN, name, chunks)
    return model.step(run, LAYOUT, SYSTEM, SYSTEM.parameters)


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_the_pipeline_is_the_schedules_own_list(name, chunks):
    step = stepped(name, chunks)
    assert (
        step.schedule.name,
        step.schedule.placement.model_chunks,
        step.schedule.microbatches,
    ) == (
        name,
        chunks,
        7,
    )
    assert step.pipeline == pytest.approx(walk(step.schedule, step.costs), rel=1e-9)
    assert step.least_seconds <= step.seconds and stepped(
        "1f1b", 1
    ).least_seconds <= step.seconds * (1 + 1e-9)


def found(held: frozenset[str] = HELD, run=RUN, system: System = SYSTEM) -> search.Search:
    return search.search(run, system, held)


def test_the_search_tries_every_schedule_that_fits_in_memory():
    plans = found().plans
    tried = {
        (p.run.parallel.schedule, p.run.parallel.num_virtual_stages_per_pipeline_rank)
        for p in plans
    }
    chunked = {*(("interleaved", v) for v in (2, 3, 4, 5)), *(("zb-h1", v) for v in (3, 4))}
    assert tried == {("1f1b", None), ("zb-h1", None), ("zbv", None)} | chunked
    assert (
        plans[0].seconds == min(p.seconds for p in plans)
        and plans[0].run.parallel.schedule == "zb-h1"
    )
    assert (
        plan_text.schedule_name(plans[0].run)
        == f"zb-h1 {plans[0].run.parallel.num_virtual_stages_per_pipeline_rank}"
    )


def test_a_schedule_that_is_given_or_not_built_limits_the_search():
    run = with_schedule(RUN, "zbv", 2)
    assert {p.run.parallel.schedule for p in found(HELD | {"pipeline_schedule"}, run).plans} == {
        "zbv"
    }
    assert {p.run.parallel.schedule for p in found(HELD | {"pipeline_schedule"}).plans} == {"1f1b"}
    code = SYSTEM.software.without(features.INTERLEAVED)
    assert "interleaved" not in {
        p.run.parallel.schedule for p in found(system=replace(SYSTEM, software=code)).plans
    }
    bare = replace(SYSTEM, software=code.without(features.ZERO_BUBBLE))
    assert {p.run.parallel.schedule for p in found(system=bare).plans} == {"1f1b"}
    assert bare.software.cut(with_schedule(RUN, "zbv", 2)).parallel.schedule == "1f1b"


EXAMPLE = (
    "predict --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 1024 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --checkpoint-activations "
    "--machine a64fx --ghz 2.0 --software torch1.10 --nodes 16 --ranks-per-node 1"
)
KEYS = {
    "seconds_per_iteration",
    "lower",
    "upper",
    "slow_network",
    "tflops_per_node",
    "memory_mib_max",
    "oom",
    "bubble_fraction",
    "breakdown",
    "warnings",
}


def run_json(command: str, capsys) -> dict:
    assert program.main([*command.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.system
def test_json_alone_on_stdout():
    command = [sys.executable, "-m", "fugaku_megatron", *EXAMPLE.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    prediction = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == "" and set(prediction) == KEYS
    assert (
        prediction["lower"] < prediction["seconds_per_iteration"] < prediction["upper"]
        and prediction["oom"] is False
    )


def test_flags_mean_what_they_mean_to_the_trainer(capsys):
    plain = run_json(EXAMPLE, capsys)
    assert (
        run_json(
            EXAMPLE + " --data-path somewhere_text_document --lr 1e-4 --no-cuda --save checkpoints",
            capsys,
        )
        == plain
    )
    assert (
        run_json(
            EXAMPLE.replace("--checkpoint-activations", "--recompute-granularity full"), capsys
        )
        == plain
    )
    assert (
        run_json(EXAMPLE + " --vocab-size 250000", capsys)["seconds_per_iteration"]
        > plain["seconds_per_iteration"]
    )
    prediction = run_json(
        "predict --recipe 30b --software torch1.10 --nodes 192 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 48 --checkpoint-activations",
        capsys,
    )
    assert (
        prediction["seconds_per_iteration"] == pytest.approx(3535, rel=0.06)
        and not prediction["oom"]
    )


def test_the_text_names_machine_layout_and_causes(capsys):
    assert program.main(EXAMPLE.split()) == 0
    printed = capsys.readouterr().out
    assert "DP 16 x TP 1 x PP 1" in printed and "page_faults" in printed and "model" in printed
    assert "nobody has run" not in printed
    command = "predict --recipe 30b --nodes 192 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 48"
    assert program.main(command.split()) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count("bubble") == 1
        and "bubble 30.8% (mean over the stages)" in printed
        and "slowest_stage_waits" in printed
    )
    assert (
        "warning: nobody has run fugaku_megatron on an A64FX: its figures come from this model and from emulation\n"
        in printed
    )
    command = (
        "predict --recipe 30b --nodes 384 --software torch1.10 --tensor-model-parallel-size 8 "
        "--pipeline-model-parallel-size 48"
    )
    assert run_json(command, capsys)["oom"] is True
    assert program.main(command.split()) == 0 and "OUT OF MEMORY" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--kernels torch", "without --kernels torch, which is not modelled"),
        ("--allocator stock", "without --allocator stock"),
        ("--cache-packed-weights", "without --cache-packed-weights"),
        ("--fp16 --fp16-accumulation", "without --fp16-accumulation-chunk"),
        (
            "--cpu-frequency 2.2",
            "--cpu-frequency 2.2 is not the clock of this time, 2.0: pass --ghz",
        ),
        ("--software torch1.10 --zero-stage 1", "software torch1.10 has no --zero-stage 1"),
        (
            "--software torch1.10 --recompute-activations",
            "software torch1.10 has no selective recompute",
        ),
        (
            "--seq-length 65536 --checkpoint-activations --attention-dropout 0",
            "TFLOPs are above the 6.144 of the machine",
        ),
    ],
)
def test_a_flag_that_the_time_leaves_out_is_said(flags, message, capsys):
    assert not any(
        message in w
        for w in run_json("predict --recipe 124m --nodes 4 --cpu-frequency 2.0", capsys)["warnings"]
    )
    assert any(
        message in w
        for w in run_json(f"predict --recipe 124m --nodes 4 {flags}", capsys)["warnings"]
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--nodes 16 --ranks-per-node 1 --tensor-model-parallel-size 8", "nodes, which have 1,"),
        ("--nodes 8 --ranks-per-node 2 --tensor-model-parallel-size 16", "-size 2 or a divisor"),
        ("--nodes 8 --ranks-per-node 4 --tensor-model-parallel-size 4", None),
        ("--nodes 1 --ranks-per-node 4 --tensor-model-parallel-size 4", None),
        ("--nodes 16 --ranks-per-node 1 --pipeline-model-parallel-size 8", None),
    ],
)
def test_tensor_parallelism_between_nodes_is_named_with_its_share(flags, named, capsys):
    found = run_json(f"predict --machine a64fx --recipe 1.3b {flags}", capsys)
    share = found["breakdown"]["tensor_parallel"] / found["seconds_per_iteration"]
    (line,) = [w for w in found["warnings"] if w.startswith("tensor parallelism over")] or [None]
    assert (line is None) == (named is None)
    if named:
        assert named in line and f"takes {share:.0%} of the time: keep it inside a node" in line
