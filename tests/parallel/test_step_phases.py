"""Where the time of a rank's iteration goes."""

import time
from types import SimpleNamespace

import pytest

from fugaku_megatron.comm.grid import Groups
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.host.observed import PHASES, Phases
from tests.helpers import grid_groups, make_trainer, mock, small_run
from tests.threads import ThreadWorld

PAUSE = 0.02


class Slow:
    """A group of two ranks, and an executor, whose calls take PAUSE seconds."""

    size, rank = 2, 0

    def __getattr__(self, name):
        def call(*args):
            time.sleep(PAUSE)
            return SimpleNamespace(wait=lambda: time.sleep(PAUSE))
        return call


def slow_groups(phases):
    return phases.groups(Groups(Slow(), Slow(), Slow(), Slow(), Slow()))


def seconds(phases, total=1.0):
    return dict(zip(PHASES, phases.of_iteration(total), strict=True))


@pytest.mark.parametrize(("instruction", "phase"), [
    ("recv_forward", "previous stage"), ("send_backward", "previous stage"), ("recv_backward", "next stage"),
    ("send_forward", "next stage")])
def test_waiting_for_a_stage(instruction, phase):
    phases = Phases()
    getattr(phases.watch(Slow()), instruction)(None)
    spent = seconds(phases)
    assert PAUSE <= spent.pop(phase) < 1 and spent.pop("computation") <= 1 - PAUSE and not any(spent.values())


def test_sums_count_where_they_are_waited_for():
    phases = Phases()
    groups = slow_groups(phases)
    groups.tp.all_reduce(None)
    handle = groups.dp.iall_reduce(None)
    started = seconds(phases)["reductions"]
    assert 2 * PAUSE <= started
    handle.wait()
    assert seconds(phases)["reductions"] >= started + PAUSE


def test_what_waits_inside_a_wait_counts_once():
    phases = Phases()
    groups, executor = slow_groups(phases), Slow()
    executor.recv_forward = lambda instruction: groups.pp.recv(None)
    phases.watch(executor).recv_forward(None)
    with phases.waiting_for_data():
        groups.tp.broadcast(None)
    spent = seconds(phases)
    assert spent["reductions"] == 0 and min(spent["previous stage"], spent["data"]) >= PAUSE
    assert sum(spent.values()) == pytest.approx(1.0)


def test_computation_is_the_rest_and_an_iteration_begins_anew():
    phases = Phases()
    phases.watch(Slow()).forward(None)
    assert seconds(phases)["computation"] == 1.0
    phases.watch(Slow()).recv_forward(None)
    phases.begin()
    assert seconds(phases)["computation"] == 1.0


def test_a_group_of_one_rank_waits_for_nobody():
    phases, run = Phases(), small_run()
    phases.groups(grid_groups(SoloComm(), run)).dp.barrier()
    assert seconds(phases)["reductions"] == 0.0


def test_a_trainer_is_observed_and_its_losses_stay():
    run = small_run(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)

    def steps(world, observed):
        phases = Phases()
        trainer = make_trainer(world, run)
        if observed:
            trainer = type(trainer)(run, world, phases.groups(grid_groups(world, run)), mock(run), watch=phases.watch,
                                    waiting_for_data=phases.waiting_for_data)
        losses = [trainer.train_step().loss for _ in range(2)]
        trainer.close()
        return losses, seconds(phases, 100.0)

    expected, observed = ThreadWorld(4).run(steps, False), ThreadWorld(4).run(steps, True)
    assert [losses for losses, _ in observed] == [losses for losses, _ in expected]
    first, last = observed[0][1], observed[3][1]
    assert first["previous stage"] == 0 == last["next stage"]
    assert min(first["next stage"], first["reductions"], first["data"], last["previous stage"], last["data"]) > 0
