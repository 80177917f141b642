"""The nodes of the allocation of a supervised run: which nodes are used, spare or lost, and whether the run fits on them.

Left out: starting the run (supervise.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..config.arguments import parse
from ..config.checks import check
from ..config.layout import Layout
from ..config.run_config import RunConfig


@dataclass
class Nodes:
    """hosts: of the whole allocation, in the order in which ranks are placed. spares: how many of them the run leaves unused.

    Raises ValueError if the run does not fit on the others.
    """

    hosts: Sequence[str]
    ranks_per_node: int
    spares: int
    run: RunConfig
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(0 <= self.spares < len(self.hosts), f"--spare-nodes {self.spares} of {len(self.hosts)} --hosts: pass 0 to "
              f"{len(self.hosts) - 1}")
        check(self.ranks_per_node >= 1, f"--ranks-per-node {self.ranks_per_node}: pass a number above 0")
        layout = self.layout(len(self.hosts) - self.spares)
        size = layout.global_batch_size(self.run)
        self.run = replace(self.run, batch=replace(self.run.batch, global_batch_size=size))

    def layout(self, nodes: int) -> Layout:
        """The layout on this number of nodes. Raises ValueError if the run does not fit."""
        return Layout.from_run(self.run, nodes * self.ranks_per_node)

    @property
    def usable(self) -> list[str]:
        return [host for host in self.hosts if host not in self.lost]

    def choose(self) -> list[str]:
        """The hosts of the next start: as many as at first, otherwise the most on which the run fits; empty if there are none."""
        usable = self.usable
        for count in range(min(len(self.hosts) - self.spares, len(usable)), 0, -1):
            try:
                self.layout(count)
            except ValueError:
                continue
            return usable[:count]
        return []

    def find(self, name: str) -> str:
        """The host with this name, with or without a domain; "" if there is none."""
        short = name.partition(".")[0]
        return next((host for host in self.usable if short and host.partition(".")[0] == short), "")

    def lose(self, named: str, used: Sequence[str], answers: Callable[[Sequence[str]], bool]) -> list[str]:
        """Mark the nodes that have failed as lost, and return them.

        A node that a message named is replaced by a spare node at once. Without a spare node, or without a name, a trivial command
        is run on the nodes in use (`answers`). Those on which it fails are lost, unless it fails on all of them.
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
    """The hosts on which a command does not run, found by halving the groups that do not all answer."""
    if not hosts or answers(hosts):
        return []
    if len(hosts) == 1:
        return hosts
    middle = len(hosts) // 2
    return silent(hosts[:middle], answers) + silent(hosts[middle:], answers)


def flags_of(program: Sequence[str]) -> list[str]:
    """The training flags in a command. Raises ValueError for a command that does not start the trainer."""
    for place, word in enumerate(program):
        name = word.rpartition("/")[2]
        if name == "pretrain_gpt.py" or name == "train" and place and "megatron" in program[place - 1]:
            return list(program[place + 1:])
    raise ValueError(f"{' '.join(program):.80} does not start pretrain_gpt.py or fugaku-megatron train: pass its "
                     "command")


def run_of(program: Sequence[str]) -> RunConfig:
    """The run that a command starts. Raises ValueError as the trainer would, and if a restart would not continue."""
    run = parse(flags_of(program)).run
    check(run.output.save is not None and run.output.save == run.output.load,
          f"--save {run.output.save} and --load {run.output.load}: pass the same folder to both, "
          "otherwise a restart would begin from the start")
    check(run.output.ckpt_step is None, f"--ckpt-step {run.output.ckpt_step}: every restart would go back to it: omit the flag")
    return run
