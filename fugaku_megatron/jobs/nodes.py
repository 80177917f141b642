"""The nodes of an allocation on which a run is started again: which are used, which are spare, which are lost, what fits on them.

Left out: starting (supervise.py). Test: pytest tests/test_supervise.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..run.arguments import parse
from ..run.checks import check
from ..run.config import RunConfig
from ..run.layout import Layout


@dataclass
class Nodes:
    """hosts: of the whole allocation, in the order in which ranks are placed. spares: how many a run leaves unused.

    Raises ValueError when the run does not fit on the others.
    """

    hosts: Sequence[str]
    ranks_per_node: int
    spares: int
    run: RunConfig
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(0 <= self.spares < len(self.hosts), f"--spare-nodes {self.spares} of {len(self.hosts)} --hosts: give 0 to "
              f"{len(self.hosts) - 1}")
        check(self.ranks_per_node >= 1, f"--ranks-per-node {self.ranks_per_node}: give a number above 0")
        layout = self.layout(len(self.hosts) - self.spares)
        size = layout.global_batch_size(self.run)
        self.run = replace(self.run, batch=replace(self.run.batch, global_batch_size=size))

    def layout(self, nodes: int) -> Layout:
        """The layout on so many nodes. Raises ValueError where the run does not fit."""
        return Layout.from_run(self.run, nodes * self.ranks_per_node)

    @property
    def usable(self) -> list[str]:
        return [host for host in self.hosts if host not in self.lost]

    def choose(self) -> list[str]:
        """The hosts of the next start: as many as at first, or the most on which the run fits; empty where it fits on none."""
        usable = self.usable
        for count in range(min(len(self.hosts) - self.spares, len(usable)), 0, -1):
            try:
                self.layout(count)
            except ValueError:
                continue
            return usable[:count]
        return []

    def find(self, name: str) -> str:
        """The host that a message calls `name`, with or without its domain; "" for none."""
        short = name.partition(".")[0]
        return next((host for host in self.usable if short and host.partition(".")[0] == short), "")

    def lose(self, named: str, used: Sequence[str], answers: Callable[[Sequence[str]], bool]) -> list[str]:
        """Leave out what has failed, and return it.

        A node that a message named is replaced by a spare at once. Without a spare, or a name, the nodes in use are asked with a
        trivial command on each (`answers`), and those without an answer are lost, unless none answers.
        """
        host = self.find(named)
        if host and len(self.usable) > len(used):
            failed = [host]
        else:
            failed = silent(list(used), answers)
            failed = [] if len(failed) == len(used) > 1 else failed
        self.lost += failed
        return failed


def silent(hosts: list[str], answers: Callable[[Sequence[str]], bool]) -> list[str]:
    """The hosts on which a command does not run, found by halving those that do not all answer."""
    if not hosts or answers(hosts):
        return []
    if len(hosts) == 1:
        return hosts
    middle = len(hosts) // 2
    return silent(hosts[:middle], answers) + silent(hosts[middle:], answers)


def flags_of(program: Sequence[str]) -> list[str]:
    """The flags of the trainer in the words that start it. Raises ValueError for a command that is not the trainer."""
    for place, word in enumerate(program):
        name = word.rpartition("/")[2]
        if name == "pretrain_gpt.py" or name == "train" and place and "megatron" in program[place - 1]:
            return list(program[place + 1:])
    raise ValueError(f"{' '.join(program):.80} does not start pretrain_gpt.py or fugaku-megatron train: give the trainer's command")


def run_of(program: Sequence[str]) -> RunConfig:
    """The run that a command starts. Raises ValueError as the trainer would, and where a restart would begin anew."""
    run = parse(flags_of(program)).run
    check(run.output.save is not None and run.output.save == run.output.load,
          f"--save {run.output.save} and --load {run.output.load}: give both the same folder, or a restart would begin anew")
    check(run.output.ckpt_step is None, f"--ckpt-step {run.output.ckpt_step}: every restart would go back to it; leave it out")
    return run
