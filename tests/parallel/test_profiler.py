"""--profile: events, table, trace."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.host import kernels
from fugaku_megatron.host.observed import Event, Profiler
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.training.train import Trainer
from tests.helpers import mock, small_run
from tests.threads import ThreadWorld


@pytest.fixture
def profiled(monkeypatch):
    """A profiler after three steps of a two-stage run, of which the second was recorded, and the run."""
    run = small_run(pipeline_model_parallel_size=2)

    def steps(comm):
        torch.set_num_threads(1)
        profiler = Profiler() if comm.rank == 0 else None
        groups = Grid(2, 1, 2).groups(comm)
        observed = {"watch": profiler.watch, "ops": Ops.build(kernels=profiler.kernels(kernels))} if profiler else {}
        trainer = Trainer(run, comm, profiler.groups(groups) if profiler else groups, mock(run), **observed)
        for recorded in (False, True, False):
            if profiler:
                with profiler.step(recorded):
                    trainer.train_step()
            else:
                trainer.train_step()
        trainer.close()
        return profiler

    return ThreadWorld(2).run(steps)[0], run


def test_a_recorded_step_holds_every_instruction_kernel_and_message(profiled):
    profiler, run = profiled
    names = [e.name for e in profiler.events if e.track == "schedule"]
    microbatches = run.batch.global_batch_size // run.batch.micro_batch_size
    assert names.count("forward") == names.count("backward") == names.count("send_forward") == microbatches
    assert sum(e.name == "pp isend" for e in profiler.events) == microbatches
    assert {"linear_forward", "attention_backward", "adamw"} <= {e.name for e in profiler.events if e.track == "kernels"}
    assert len(profiler.steps) == 1 and all(e.seconds >= 0 for e in profiler.events)


def test_the_table_accounts_for_the_whole_step():
    profiler = Profiler()
    profiler.peak_gflops, profiler.steps = 100.0, [1.0, 3.0]
    profiler.events = [Event("schedule", "forward", 0.0, 4.0), Event("kernels", "linear_forward", 0.0, 1.0, 40e9),
                       Event("kernels", "linear_forward", 1.0, 1.0, 60e9), Event("communication", "dp all_reduce", 2.0, 0.5)]
    head, _, *rows = [line.split() for line in profiler.table()]
    assert "2.000" in head and "100" in head
    assert rows == [["linear_forward", "1", "1.0000", "50.0", "50.0", "50.0"], ["dp", "all_reduce", "0", "0.2500", "12.5"],
                    ["Python,", "autograd", "and", "the", "rest", "0.7500", "37.5"]]


def test_the_trace_is_chromes_format(profiled, tmp_path):
    profiler, _ = profiled
    profiler.write_trace(tmp_path / "trace.json", 3)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(profiler.events) and all(e["pid"] == 3 and e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"schedule", "kernels", "communication"}


def test_flops_of_the_products():
    x, weight, dy = torch.zeros(5, 3), torch.zeros(7, 3), torch.zeros(5, 7)
    with FlopCounterMode(display=False) as counter:
        torch.mm(x, weight.t())
    count = counter.get_total_flops()
    assert kernels.table.flops("linear_forward", x, weight) == count
    assert kernels.table.flops("linear_data_gradient", dy, weight) == count
    assert kernels.table.flops("linear_weight_gradient", dy, x) == count
    qkv, out, lse = torch.zeros(8, 2, 3 * 3 * 4), torch.zeros(8, 2, 12), torch.zeros(2, 3, 8)
    whole_square = 2 * 2 * (2 * 3) * 8 * 8 * 4
    assert kernels.table.flops("attention_forward", qkv, out, lse) == whole_square / 2
    assert kernels.table.flops("dropout", x, x, 0.1, 1, 1, 0, 1, 0) == 0
