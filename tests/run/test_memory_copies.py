"""Runs that continue from copies in other nodes' memory, and nodes that cannot have copies."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest

from fugaku_megatron.checkpoint.manifest import list_iterations
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.run import checkpoint_source, memory_copies
from fugaku_megatron.run.memory_copies import copy_group, find_in_memory, open_copies
from fugaku_megatron.run.resume import resume_training
from tests.checks.memory_nodes import Cluster
from tests.checks.moments import EIGHT
from tests.checks.session import session
from tests.helpers import lay_out, make_trainer, one_error, small_run
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

PLACES = ["a", "a", "b", "b"]
LAYOUTS = {
    "dp4": {},
    "dp4 zero": {"zero_stage": 1},
    "tp2 dp2 zero": {"zero_stage": 1, "tensor_model_parallel_size": 2},
    "pp2 dp2": {"pipeline_model_parallel_size": 2},
    "cp2 dp2": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)},
    "8-bit": {"bf16": True, "zero_stage": 1, **EIGHT},
}


class Stopped(Exception):
    """A run that is killed."""


class Runs:
    """Runs on emulated nodes. cluster: of the next start"""

    def __init__(self, tmp_path, places=PLACES, **flags):
        self.save = tmp_path / "save"
        self.cluster = Cluster(tmp_path, places)
        self.flags = {"load": str(self.save), "save_memory": 2, "train_iters": 8, **flags}

    def memory_folder(self, run: str):
        return self.cluster.folder(int(threading.current_thread().name.split()[1]))

    def start(self, killed_after: int | None = None) -> tuple[list[float], list[str]]:
        """Train to the end, or until the run is killed; return losses and the log of rank 0."""

        def rank(world):
            made = session(world, self.save, **self.flags)
            trainer = made.trainer
            plan = trainer.plan
            nodes = self.cluster.nodes(world)
            memory = find_in_memory(plan, world, nodes)
            resume = checkpoint_source.find_checkpoint(plan, world, memory=memory)
            group, note = copy_group(plan, world, nodes, resume.iteration is not None)
            lines = [*memory.lines, note] if memory else [note]
            lines += resume_training(trainer, resume)
            made.copies = open_copies(trainer, nodes, group, memory)
            step = trainer.train_step
            losses = []

            def train_step():
                if trainer.progress.iteration == killed_after:
                    raise Stopped
                result = step()
                losses.append(result.loss)
                return result

            trainer.train_step = train_step
            try:
                with closing(trainer):
                    made.run()
            except Stopped:
                made.copying = None
            size = "copies in memory every 2 iterations: "
            return losses, [line for line in lines if line and not line.startswith(size)]

        return ThreadWorld(len(self.cluster.places)).run(rank)[0]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    def make(**flags):
        made = Runs(tmp_path, **flags)
        monkeypatch.setattr(memory_copies, "memory_folder", made.memory_folder)
        return made

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lost_node_costs_no_bit(runs, layout, tmp_path):
    (tmp_path / "straight").mkdir()
    straight = Runs(tmp_path / "straight", **LAYOUTS[layout])
    straight.flags["save_memory"] = None
    expected, _ = straight.start()
    made = runs(**LAYOUTS[layout])
    losses, lines = made.start(killed_after=5)
    assert losses == expected[:5]
    made.cluster.lose("b")
    losses, lines = made.start(killed_after=7)
    assert losses == expected[4:7]
    assert lines == [
        "--save-memory: states of ranks 2, 3 computed from other nodes' copies",
        "resumed from copies in memory (--save-memory) at iteration 4",
    ]
    made.cluster.lose("a")
    losses, lines = made.start()
    assert losses == expected[6:]
    assert list_iterations(made.save) == [8]
    assert not list(made.cluster.root.glob("*/copies")), "a finished run leaves none"


def test_a_lost_node_right_after_a_restart_costs_no_bit(runs):
    """The state that was computed is protected again before the first iteration."""
    made = runs()
    made.start(killed_after=5)
    made.cluster.lose("b")
    made.start(killed_after=5)
    made.cluster.lose("a")
    _, lines = made.start()
    assert lines[-1] == "resumed from copies in memory (--save-memory) at iteration 4"


def test_two_lost_partners_fall_back_to_the_checkpoint(runs):
    made = runs(save_interval=3)
    made.start(killed_after=5)
    made.cluster.lose("a")
    made.cluster.lose("b")
    losses, lines = made.start()
    assert len(losses) == 5 and lines == [f"resumed from {made.save} at iteration 3"]


def test_the_newer_checkpoint_of_a_directory_is_used(runs):
    made = runs(save_interval=5)
    made.start(killed_after=5)
    _, lines = made.start()
    assert lines == [f"resumed from {made.save} at iteration 5"]


def test_another_number_of_ranks_falls_back_to_the_checkpoint(runs, tmp_path):
    made = runs(save_interval=3)
    made.start(killed_after=5)
    made.cluster = Cluster(tmp_path, ["a", "b"])
    losses, lines = made.start()
    assert len(losses) == 5
    assert lines[0] == (
        "note: --save-memory: the copies of iteration 4 are of another layout or number of ranks, and not used"
    )
    assert lines[1] == f"resumed from {made.save} at iteration 3"


def test_a_run_with_one_node_left_continues_without_copies(runs, tmp_path):
    made = runs(save_interval=3)
    made.start(killed_after=5)
    made.cluster = Cluster(tmp_path, ["a", "a"])
    _, lines = made.start()
    assert lines[1].startswith("note: --save-memory: all ranks are on one node")
    assert lines[1].endswith("; this start makes no copies")


def refusal(places, tmp_path, resumed=False, **flags) -> str:
    plan = Plan.of(small_run(save=str(tmp_path), save_memory=10, **flags), len(places))
    cluster = Cluster(tmp_path, places)
    return one_error(
        len(places), lambda world: copy_group(plan, world, cluster.nodes(world), resumed)
    )


def test_nodes_that_cannot_have_copies_are_refused(tmp_path):
    assert refusal(["a", "a"], tmp_path) == (
        "--save-memory 10: all ranks are on one node, and a copy needs the memory of another: start ranks on two nodes or more, "
        "or omit it"
    )
    assert refusal(["a", "b"], tmp_path, save_memory_group=3) == (
        "--save-memory 10: --save-memory-group 3 is above the 2 nodes of the run: pass 2 to 2"
    )
    assert refusal(["a", "a", "a", "b"], tmp_path) == (
        "--save-memory 10: nodes have 1 to 3 ranks: start equally many on each"
    )


def test_too_little_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_copies, "free_bytes", lambda folder: 5 << 20)
    message = refusal(["a", "b"], tmp_path, hidden_size=512)
    assert "MiB on node" in message and "has 5 MiB left" in message
    assert "a larger --save-memory-group" in message


def test_a_start_says_the_size(tmp_path):
    cluster = Cluster(tmp_path, ["a", "b", "c"])
    run = small_run(
        save=str(tmp_path),
        save_memory=10,
        save_memory_group=3,
        hidden_size=512,
        global_batch_size=6,
    )
    plan = Plan.of(run, 3)

    def rank(world):
        return copy_group(plan, world, cluster.nodes(world), resumed=False)

    mib = round(plan.memory[0].copies / 2**20)
    line = f"copies in memory every 10 iterations: {mib} MiB of the largest rank, twice its state with parity of 1/2 of it (model)"
    assert ThreadWorld(3).run(rank) == [(3, line)] * 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"save_memory": 0}, "--save-memory is 0: pass a number above 0"),
        ({"save_memory": 5, "save_memory_group": 1}, "--save-memory-group 1: pass 2 or more nodes"),
    ],
)
def test_wrong_values_are_refused(flags, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        small_run(save=str(tmp_path), **flags)


@pytest.mark.parametrize("layout", ["dp2 zero", "dp2", "tp2 dp2 zero bf16", "dp2 zero bf16"])
def test_the_copies_are_in_the_model(tmp_path, layout):
    run, ranks = lay_out(layout, {"save": str(tmp_path), "save_memory": 2})

    def state_bytes(world):
        with closing(make_trainer(world, run)) as trainer:
            return sum(shard.tensor.nbytes for shard in trainer._shards(weights_only=False))

    state = max(ThreadWorld(ranks).run(state_bytes))
    for group in (2, 3):
        grouped = replace(run, output=replace(run.output, save_memory_group=group))
        memory = Plan.of(grouped, ranks).memory[0]
        bytes_of_slots = 2 * (state + state // (group - 1))
        assert bytes_of_slots <= memory.copies <= 1.05 * bytes_of_slots
    plain = Plan.of(replace(run, output=replace(run.output, save_memory=None)), ranks).memory[0]
    assert memory.total == plain.total + memory.copies and plain.copies == 0
