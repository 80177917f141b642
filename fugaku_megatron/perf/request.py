"""The flags of predict and plan: pretrain_gpt.py's flags describe the run, and flags of their own the system."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config import arguments
from ..config.checks import check
from ..config.recipes import GPT2_VOCABULARY
from ..config.run_config import RunConfig
from . import machine, software
from .model import System

OWN = ("machine", "ghz", "eco_state", "software", "nodes", "ranks_per_node", "json")  # names of the system's flags
DEFAULT_SOFTWARE = {"a100": "megatron-a100", "a100-before-0225": "megatron-a100"}


def add_system_arguments(parser: argparse.ArgumentParser) -> None:
    """Machine, clock, software and nodes, and every flag of pretrain_gpt.py."""
    group = parser.add_argument_group("system")
    group.add_argument("--machine", default="a64fx",
                       help=f"{', '.join(machine.names())}, or a file of fugaku-megatron calibrate (default: a64fx)")
    group.add_argument("--ghz", type=float, help="clock (default: the machine's nominal one)")
    group.add_argument("--eco-state", type=int, default=0, choices=(0, 2), help="2: one floating-point pipe (A64FX)")
    group.add_argument("--software", help=f"{', '.join(software.names())} (default: {software.THIS_PROJECT}, on a100 "
                                          "megatron-a100)")
    group.add_argument("--nodes", type=int, required=True, help="nodes of the job")
    group.add_argument("--ranks-per-node", type=int, help="default: 1 on a64fx, 8 on a100")
    group.add_argument("--json", action="store_true", help="print JSON alone")
    arguments.add_train_flags(parser)


def run_of(args: argparse.Namespace, system: System, own: Sequence[str] = (), defaults: dict[str, Any] | None = None) -> RunConfig:
    """The run that pretrain_gpt.py's flags describe. Raises ValueError, one line, for flags that do not fit together.

    own: names of further flags that do not belong to the run. defaults: values of flags that are not on the command line.
    """
    values = {name: value for name, value in vars(args).items() if name not in (*OWN, *own)}
    if values.get("recipe") is None:
        values = {**(defaults or {}), **values}
    world_size = values["world_size"]
    check(world_size is None or world_size == system.world_size, f"--world-size {world_size} is not --nodes {system.nodes} x "
          f"--ranks-per-node {system.ranks_per_node} = {system.world_size}: leave it out")
    run = arguments.interpret({**values, "world_size": None}).run
    if run.model.vocab_size is None:
        run = replace(run, model=replace(run.model, vocab_size=GPT2_VOCABULARY))
    return run


def system_of(args: argparse.Namespace) -> System:
    """The system that the flags describe. Raises ValueError for unknown names and impossible numbers."""
    code = args.software or DEFAULT_SOFTWARE.get(args.machine, software.THIS_PROJECT)
    return System.from_names(args.machine, code, args.nodes, args.ranks_per_node, args.ghz, args.eco_state == 2)
