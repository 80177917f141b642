"""--profile of several ranks: who records what, one origin of time, one trace."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from fugaku_megatron.host import kernels
from fugaku_megatron.logs.pipeline_plot import read_trace as read
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.training import profile
from fugaku_megatron.training.profile import Profile, profiled_ranks
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, mock, small_run
from tests.threads import ThreadWorld

STEPS = {"profile_step_start": 2, "profile_step_end": 4}


def run_of(folder, **changes):
    return small_run(num_layers=2, profile=True, profile_dir=str(folder), pipeline_model_parallel_size=2, profile_ranks=(0, 3),
                     **{**STEPS, **changes})


def profiled(world, folder, iterations):
    """What is said in a DP2 x PP2 run."""
    torch.set_num_threads(1)
    run, said = run_of(folder), []
    trainer = Trainer(run, world, grid_groups(world, run), mock(run))
    own = Profile(run, trainer.layout, world)
    trainer = Trainer(run, world, own.groups(grid_groups(world, run)), mock(run), watch=own.watch,
                      ops=Ops.build(kernels=own.kernels(kernels)))
    for _ in range(iterations):
        with own.iteration(said.append):
            trainer.train_step()
    own.end(said.append)
    trainer.close()
    return said


def test_one_trace_of_all_ranks_on_one_clock(tmp_path):
    said = ThreadWorld(4).run(profiled, tmp_path, 4)[0]
    assert said[-2:] == [f"trace of 3 ranks: {tmp_path / 'trace.json'} (open it in ui.perfetto.dev)",
                         f"schedule: {tmp_path / 'schedule.png'}"]
    spans = [event for event in read(tmp_path / "trace.json")["traceEvents"] if event["ph"] == "X"]
    tracks = {rank: {span["tid"] for span in spans if span["pid"] == rank} for rank in range(4)}
    assert tracks == {0: {0, 1, 2}, 1: {0}, 2: set(), 3: {0, 1, 2}}  # rank 1 is rank 0's other stage, rank 2 of no interest
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "trace_rank0.json", "trace_rank1.json", "trace_rank3.json",
                                                          "table_rank0.txt", "table_rank3.txt", "schedule.png"}
    sent = {s["args"]["microbatch"]: s["ts"] for s in spans if (s["pid"], s["name"]) == (0, "send_forward")}
    received = {s["args"]["microbatch"]: s["ts"] + s["dur"] for s in spans if (s["pid"], s["name"]) == (1, "recv_forward")}
    assert sent.keys() == received.keys() == set(range(4)) and all(sent[m] < received[m] + 20e3 for m in sent)
    assert all(span["ts"] >= 0 for span in spans)


def test_a_run_that_ends_early_writes_what_it_has(tmp_path):
    assert ThreadWorld(4).run(profiled, tmp_path, 2)[0][-2].startswith("trace of 3 ranks")


def test_a_run_without_a_recorded_iteration_says_so(tmp_path):
    assert ThreadWorld(4).run(profiled, tmp_path, 1)[0] == [
        "note: no profile: this start had 1 iterations, --profile-step-start is 2"]
    assert list(tmp_path.iterdir()) == []


def test_clocks_that_differ_show_one_moment(monkeypatch):
    clocks = threading.local()
    monkeypatch.setattr(profile.time, "perf_counter", lambda: time.monotonic() + clocks.ahead)

    def moment(world):
        clocks.ahead = 1000.0 * world.rank
        return profile.common_moment(world) - clocks.ahead

    first, *others = ThreadWorld(3).run(moment)
    assert others == [pytest.approx(first, abs=0.1)] * 2


@pytest.mark.parametrize(("tp", "pp", "asked", "ranks"), [(1, 2, (3,), [0, 1, 3]), (2, 2, (0,), [0, 2]), (1, 1, (5,), [0, 5])])
def test_the_pipeline_of_rank_0_is_always_there(tp, pp, asked, ranks):
    layout = SimpleNamespace(world_size=8, tp=tp, pp=pp)
    assert profiled_ranks(SimpleNamespace(profile_ranks=asked), layout) == ranks
