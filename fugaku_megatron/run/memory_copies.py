"""Copies of --save-memory: those from which a run continues, checks of the nodes, and the copies that a run makes."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..checkpoint.load import Checkpoint
from ..checkpoint.memory_copy import FLAG, MemoryCopies
from ..checkpoint.memory_rebuild import Found, find_copies, rebuild
from ..checkpoint.memory_slot import free_bytes, memory_folder
from ..checkpoint.node_copy import open_copy, run_name
from ..comm.agreement import Nodes, agree, everywhere
from ..comm.base import Comm
from ..comm.grid import Grid
from ..config.fields import as_tuples, check
from ..config.parallel import ParallelConfig
from ..costs.plan import Plan
from ..start.environment import SHARED_MEMORY
from ..text.named_files import JsonObject
from ..training.checkpoints import layout_record
from ..training.trainer import Trainer


def fits_layout(plan: Plan, run: str) -> Callable[[JsonObject], bool]:
    """Return a function that is true for the manifest of a node's copy of this run in this layout.

    An older version's copy lacks newer flags, which then have their defaults.
    """
    expected = (run, layout_record(plan), asdict(plan.config.parallel))
    defaults = asdict(ParallelConfig())

    def fits(head: JsonObject) -> bool:
        saved = as_tuples(head["config"].get("parallel", {}))
        return (head["state"].get("run"), head["layout"], {**defaults, **saved}) == expected

    return fits


@dataclass
class InMemory:
    """Copies of an earlier start in the memory of this run's nodes.

    used: the run continues from them
    """

    folder: Path
    nodes: Nodes
    found: Found
    used: bool = False

    def open(self, world: Comm) -> Checkpoint | None:
        """Open the copies after states were moved or computed; None if their checksums are wrong then. Collective."""
        if not rebuild(self.found, self.folder, world, self.nodes):
            return None
        self.used = True
        return open_copy(self.folder, world, self.found.iteration, FLAG)

    @property
    def lines(self) -> list[str]:
        """The log's lines."""
        text = self.found.text() if self.used else ""
        return [line for line in (self.found.note, text) if line]


def find_in_memory(plan: Plan, world: Comm, nodes: Nodes) -> InMemory | None:
    """Find copies of this run. None without --save-memory, or for a start from another checkpoint. Collective."""
    output = plan.config.output
    if not output.save_memory or output.load != output.save or output.ckpt_step or output.finetune:
        return None
    name = run_name(output.load or "", world)
    if name is None:
        return None
    folder = memory_folder(name)
    return InMemory(folder, nodes, find_copies(folder, world, nodes, fits_layout(plan, name)))


def copies_lines(plan: Plan) -> list[str]:
    """Return the log's line about the memory of copies, if the run makes any."""
    output = plan.config.output
    if not output.save_memory:
        return []
    largest = max(memory.copies for memory in plan.memory) / 2**20
    return [
        f"copies in memory every {output.save_memory} iterations: {largest:.0f} MiB of the largest rank, twice its state with parity "
        f"of 1/{output.save_memory_group - 1} of it (model)"
    ]


def copy_group(plan: Plan, world: Comm, nodes: Nodes, resumed: bool) -> tuple[int, str]:
    """Return the nodes of a group, 0 for no copies, and a line for the log. Collective.

    Raise ValueError if the nodes cannot have copies. A resumed run, which may have lost nodes, continues without them.
    """
    output = plan.config.output
    size = output.save_memory_group
    if not output.save_memory:
        return 0, ""
    fewest, negated = world.all_reduce(torch.tensor([nodes.ranks.size, -nodes.ranks.size]), "min")
    problem = ""
    if nodes.count == 1:
        problem = "all ranks are on one node, and a copy needs the memory of another: start ranks on two nodes or more, or omit it"
    elif int(fewest) != -int(negated):
        problem = f"nodes have {int(fewest)} to {-int(negated)} ranks: start equally many on each"
    elif size > nodes.count and not resumed:
        problem = f"--save-memory-group {size} is above the {nodes.count} nodes of the run: pass 2 to {nodes.count}"
    if problem and resumed:
        return 0, f"note: {FLAG}: {problem}; this start makes no copies"
    with everywhere():
        check(not problem, f"{FLAG} {output.save_memory}: {problem}")
    check_room(plan, world, nodes)
    (line,) = copies_lines(plan)
    return min(size, nodes.count), line


def check_room(plan: Plan, world: Comm, nodes: Nodes) -> None:
    """Raise ValueError if a node's shared memory has too little room for the copies. Collective."""
    output = plan.config.output
    stage = Grid(*plan.layout.sizes).coords(world.rank)[1]
    needed = int(nodes.ranks.all_reduce(torch.tensor(plan.memory[stage].copies)))
    folder = memory_folder(run_name(output.save or "", world, make=True) or "")

    def has_room() -> None:
        has = free_bytes(folder)
        check(
            needed <= has,
            f"{FLAG} {output.save_memory}: the copies need {needed / 2**20:.0f} MiB on node {platform.node()} and {SHARED_MEMORY} "
            f"has {has / 2**20:.0f} MiB left: remove copies of ended jobs ({folder.parent}/fugaku_megatron_memory_*), pass a larger "
            "--save-memory-group, start fewer ranks on a node, or omit the flag",
        )

    agree(world, has_room, name_rank=False)


def open_copies(
    trainer: Trainer, nodes: Nodes, size: int, memory: InMemory | None
) -> MemoryCopies | None:
    """Return the copies that a run makes, without those of earlier starts that it does not use. Collective.

    size: of a group; 0: the run makes no copies
    """
    save = trainer.run.output.save
    if not size or save is None:
        return None
    name = run_name(save, trainer.world, make=True) or ""
    found = memory.found if memory is not None and memory.used else Found()
    return MemoryCopies(
        memory_folder(name),
        trainer.world,
        nodes,
        size=size,
        run=name,
        iteration=found.iteration,
        attempt=None if found.is_whole else found.version[1],
    )
