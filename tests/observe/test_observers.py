"""Observers of a training step: heartbeats, phases and profiler."""

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fugaku_megatron.comm.grid import Grid, Groups
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.host import kernels, observed
from fugaku_megatron.host.observed import PHASES, Event, Phases, Profiler
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.observe.hang.heartbeat import Heartbeat
from fugaku_megatron.observe.observers import Heartbeats, Observers, listed
from fugaku_megatron.observe.profile import profile
from fugaku_megatron.observe.profile.profile import Profile, profiled_ranks
from fugaku_megatron.observe.profile.trace import read_trace as read
from tests.helpers import (
    CP2,
    P2P,
    PP2,
    TP2PP2,
    build_trainer,
    grid_groups,
    make_trainer,
    mock,
    small_run,
)
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


class Spoken(Heartbeat):
    """A heartbeat that records its phases."""

    def __init__(self) -> None:
        self.said: list[str] = []
        super().__init__()

    def enter(self, what: str) -> str:
        self.said.append(what)
        return super().enter(what)


def spoken(world, **flags) -> list[str]:
    torch.set_num_threads(1)
    run = small_run(**flags, global_batch_size=8)
    heart = Spoken()
    observers = Observers(
        Phases(), Heartbeats(heart, Grid(*Layout.from_run(run, world.size).sizes), world.rank), None
    )
    trainer = build_trainer(
        run,
        world,
        mock(run),
        groups=observers.groups(grid_groups(world, run)),
        waiting_for_data=observers.reading,
        watch=observers.watch,
    )
    with heart.iteration(1):
        trainer.train_step()
    trainer.close()
    assert heart.what == "start"  # every phase was left
    return heart.said


def test_a_step_says_instructions_messages_collectives_and_reading():
    first, *_, last = ThreadWorld(8).run(partial(spoken, **TP2PP2))
    assert {"forward of micro-batch 1", "backward of micro-batch 0", "reading data"} <= set(first)
    assert (
        "send_forward of micro-batch 1 to rank 2" in first
        and "recv_backward of micro-batch 0 from rank 2" in first
    )
    assert (
        "recv_forward of micro-batch 0 from rank 5" in last
        and "send_backward of micro-batch 1 to rank 5" in last
    )
    assert (
        "all_reduce over data-parallel ranks 0, 4" in first
        and "all_reduce over data-parallel ranks 3, 7" in last
    )
    assert "all_reduce over tensor-parallel ranks 0, 1 in forward of micro-batch 0" in first
    assert not [said for said in first if said.startswith(("isend", "irecv"))]


def test_long_groups_are_cut():
    assert (
        listed(range(5)) == "0, 1, 2, 3, 4"
        and listed(range(0, 98304, 8)) == "0, 8, 16, 24 ... 98296"
    )


PAUSE = 0.125


class Slow:
    """A group of two ranks, and an executor. Calls take PAUSE seconds on a mock clock."""

    size = 2
    rank = 0

    def __init__(self):
        self.now = 0.0

    def pause(self):
        self.now += PAUSE

    def __getattr__(self, name):
        def call(*args):
            self.pause()
            return SimpleNamespace(wait=self.pause)

        return call


@pytest.fixture
def slow(monkeypatch):
    slow = Slow()
    monkeypatch.setattr(observed, "time", SimpleNamespace(perf_counter=lambda: slow.now))
    return slow


def slow_groups(phases, slow):
    return phases.groups(Groups(slow, slow, slow, slow, slow))


def seconds_of(phases, total=1.0):
    return dict(zip(PHASES, phases.of_iteration(total), strict=True))


@pytest.mark.parametrize(
    ("instruction", "phase"),
    [
        ("recv_forward", "previous stage"),
        ("send_backward", "previous stage"),
        ("recv_backward", "next stage"),
        ("send_forward", "next stage"),
    ],
)
def test_waiting_for_a_stage(slow, instruction, phase):
    phases = Phases()
    getattr(phases.watch(slow), instruction)(None)
    spent = seconds_of(phases)
    assert (
        spent.pop(phase) == PAUSE
        and spent.pop("computation") == 1 - PAUSE
        and not any(spent.values())
    )


def test_sums_count_where_they_are_waited_for(slow):
    phases = Phases()
    groups = slow_groups(phases, slow)
    groups.tp.all_reduce(None)
    handle = groups.dp.iall_reduce(None)
    assert seconds_of(phases)["reductions"] == 2 * PAUSE
    handle.wait()
    assert seconds_of(phases)["reductions"] == 3 * PAUSE


def test_what_waits_inside_a_wait_counts_once(slow):
    phases = Phases()
    groups = slow_groups(phases, slow)
    executor = Slow()
    executor.recv_forward = lambda instruction: groups.pp.recv(None)
    phases.watch(executor).recv_forward(None)
    with phases.waiting_for_data():
        groups.tp.broadcast(None)
    spent = seconds_of(phases)
    assert spent["reductions"] == 0 and spent["previous stage"] == spent["data"] == PAUSE
    assert sum(spent.values()) == 1.0


def test_computation_is_the_rest_and_an_iteration_begins_anew(slow):
    phases = Phases()
    phases.watch(slow).forward(None)
    assert seconds_of(phases)["computation"] == 1.0
    phases.watch(slow).recv_forward(None)
    phases.begin()
    assert seconds_of(phases)["computation"] == 1.0


def test_a_trainer_is_observed_and_its_losses_stay():
    run = small_run(**TP2PP2)

    def steps(world, observed):
        phases = Phases()
        trainer = make_trainer(world, run)
        if observed:
            trainer = type(trainer)(
                trainer.plan,
                world,
                phases.groups(grid_groups(world, run)),
                mock(run),
                watch=phases.watch,
                waiting_for_data=phases.waiting_for_data,
            )
        losses = [trainer.train_step().loss for _ in range(2)]
        trainer.close()
        return losses, seconds_of(phases, 100.0)

    expected = ThreadWorld(4).run(steps, False)
    observed = ThreadWorld(4).run(steps, True)
    assert [losses for losses, _ in observed] == [losses for losses, _ in expected]
    first = observed[0][1]
    last = observed[3][1]
    assert first["previous stage"] == 0 == last["next stage"]
    assert all(first[name] > 0 for name in ("next stage", "reductions", "data"))
    assert all(last[name] > 0 for name in ("previous stage", "data"))


def test_the_table_accounts_for_the_whole_step():
    profiler = Profiler()
    profiler.peak_gflops = 100.0
    profiler.steps = [1.0, 3.0]
    profiler.events = [
        Event("schedule", "forward", 0.0, 4.0),
        Event("kernels", "linear_forward", 0.0, 1.0, 40e9),
        Event("kernels", "linear_forward", 1.0, 1.0, 60e9),
        Event("communication", "dp all_reduce", 2.0, 0.5),
    ]
    head, _, *rows = [line.split() for line in profiler.table()]
    assert "2.000" in head and "100" in head
    assert rows == [
        ["linear_forward", "1", "1.0000", "50.0", "50.0", "50.0"],
        ["dp", "all_reduce", "0", "0.2500", "12.5"],
        ["Python,", "autograd", "and", "the", "rest", "0.7500", "37.5"],
    ]


def recorded(world, folder, iterations, **changes):
    """Run two stages with a profile; return the printed lines."""
    torch.set_num_threads(1)
    run = small_run(
        num_layers=2,
        profile=True,
        profile_dir=str(folder),
        profile_ranks=(0, 3),
        profile_step_start=2,
        profile_step_end=4,
        **PP2,
        **changes,
    )
    said = []
    own = Profile(run, Layout.from_run(run, world.size), world)
    trainer = build_trainer(
        run,
        world,
        mock(run),
        groups=own.groups(grid_groups(world, run)),
        watch=own.watch,
        ops=Ops.build(kernels=own.kernels(kernels)),
    )
    for _ in range(iterations):
        with own.iteration(said.append):
            trainer.train_step()
    own.end(said.append)
    trainer.close()
    return said


APART = 1000.0  # seconds between the clocks of one rank and of the next


@pytest.fixture
def clocks(monkeypatch):
    """Return a function: seconds between the calling thread's clock and rank 0's."""

    def ahead() -> float:
        name = threading.current_thread().name
        return APART * int(name.removeprefix("rank ")) if name.startswith("rank ") else 0.0

    monkeypatch.setattr(profile.time, "perf_counter", lambda: time.monotonic() + ahead())
    return ahead


def test_one_trace_of_all_ranks_on_one_clock(tmp_path, clocks):
    said = ThreadWorld(4).run(recorded, tmp_path, 4)[0]
    assert said[-2:] == [
        f"trace of 3 ranks: {tmp_path / 'trace.json'} (open it in ui.perfetto.dev)",
        f"schedule: {tmp_path / 'schedule.png'}",
    ]
    spans = [event for event in read(tmp_path / "trace.json")["traceEvents"] if event["ph"] == "X"]
    tracks = {rank: {span["tid"] for span in spans if span["pid"] == rank} for rank in range(4)}
    assert tracks == {
        0: {0, 1, 2},
        1: {0},
        2: set(),
        3: {0, 1, 2},
    }  # rank 1 is rank 0's other stage, rank 2 of no interest
    files = "trace.json trace_rank0.json trace_rank1.json trace_rank3.json table_rank0.txt table_rank3.txt schedule.png"
    assert {path.name for path in tmp_path.iterdir()} == {*files.split()}
    assert {"forward", "backward", "linear_forward", "attention_backward", "adamw", "pp isend"} <= {
        s["name"] for s in spans
    }
    sent, received = (
        {s["args"]["microbatch"]: s for s in spans if (s["pid"], s["name"]) == (rank, name)}
        for rank, name in enumerate(("send_forward", "recv_forward"))
    )
    assert sent.keys() == received.keys() == set(range(4))
    for number, span in received.items():
        assert sent[number]["ts"] < span["ts"] + span["dur"] + 1e6 * APART / 2
    assert all(abs(span["ts"]) < 1e6 * APART / 2 for span in spans)


def test_a_rank_that_waits_for_keys_says_whose():
    said = ThreadWorld(2).run(partial(spoken, **CP2, **P2P))[1]
    for verb in ("recv", "send"):
        assert f"{verb} over context-parallel ranks 0, 1 in forward of micro-batch 0" in said


def test_a_trace_of_ranks_that_share_a_sequence_has_their_stages(tmp_path):
    """Profile two stages with two ranks each: ranks 0 and 1 are the first stage."""
    said = ThreadWorld(4).run(partial(recorded, **CP2), tmp_path, 3)[0]
    events = read(tmp_path / "trace.json")["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {"rank 0, stage 0", "rank 2, stage 1", "rank 3, stage 1"}
    assert "cp all_to_all" in {event["name"] for event in events}
    assert any(line.split()[:2] == ["cp", "all_to_all"] for line in said)


def test_a_run_without_a_recorded_iteration_says_so(tmp_path):
    assert ThreadWorld(4).run(recorded, tmp_path, 1)[0] == [
        "note: no profile: this start had 1 iterations, --profile-step-start is 2"
    ]
    assert list(tmp_path.iterdir()) == []


def test_clocks_that_differ_show_one_moment(clocks):
    first, *others = ThreadWorld(3).run(lambda world: profile.common_moment(world) - clocks())
    assert others == [pytest.approx(first, abs=APART / 2)] * 2


@pytest.mark.parametrize(
    ("tp", "pp", "asked", "ranks"), [(1, 2, (3,), [0, 1, 3]), (2, 2, (0,), [0, 2])]
)
def test_the_pipeline_of_rank_0_is_always_there(tp, pp, asked, ranks):
    layout = Layout(8, tp, pp, 8 // (tp * pp))
    assert profiled_ranks(SimpleNamespace(profile_ranks=asked), layout) == ranks
