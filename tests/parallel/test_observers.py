"""A heartbeat says which instruction, collective or reading a rank of a real layout is in."""

from __future__ import annotations

import torch

from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.host.observed import Phases
from fugaku_megatron.training.observers import Heartbeats, Observers, listed
from fugaku_megatron.training.train import Trainer
from fugaku_megatron.watchdog.heartbeat import Heartbeat
from tests.helpers import grid_groups, mock, small_run
from tests.threads import ThreadWorld


class Spoken(Heartbeat):
    """Keeps all that it said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        super().__init__()

    def enter(self, what: str) -> str:
        self.said.append(what)
        return super().enter(what)


def spoken(world) -> list[str]:
    torch.set_num_threads(1)
    run = small_run(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, global_batch_size=8)
    heart = Spoken()
    observers = Observers(Phases(), Heartbeats(heart, Grid(world.size, 2, 2), world.rank), None)
    trainer = Trainer(run, world, observers.groups(grid_groups(world, run)), mock(run), waiting_for_data=observers.reading,
                      watch=observers.watch)
    with heart.iteration(1):
        trainer.train_step()
    trainer.close()
    assert heart.what == "start"  # every phase was left
    return heart.said


def test_a_step_says_instructions_messages_collectives_and_reading():
    first, *_, last = ThreadWorld(8).run(spoken)
    assert {"forward of micro-batch 1", "backward of micro-batch 0", "reading data"} <= set(first)
    assert "send_forward of micro-batch 1 to rank 2" in first and "recv_backward of micro-batch 0 from rank 2" in first
    assert "recv_forward of micro-batch 0 from rank 5" in last and "send_backward of micro-batch 1 to rank 5" in last
    assert "all_reduce over data-parallel ranks 0, 4" in first and "all_reduce over data-parallel ranks 3, 7" in last
    assert "all_reduce over tensor-parallel ranks 0, 1 in forward of micro-batch 0" in first
    assert not [said for said in first if said.startswith(("isend", "irecv"))]


def test_long_groups_are_cut():
    assert listed(range(5)) == "0, 1, 2, 3, 4" and listed(range(0, 98304, 8)) == "0, 8, 16, 24 ... 98296"
