"""--check-layout: train small copies in the run's layout and on one rank, and compare every tensor."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import numpy
import torch

from .. import _kernels
from ..comm.agreement import everywhere, find_nodes, ranks_by_value
from ..comm.base import Comm
from ..config.recipes import GPT2_VOCABULARY
from ..config.run_config import RunConfig
from ..costs.plan import Plan
from ..host import kernels
from ..layout_check.check import Files, Report, check_layout
from ..start.exit_codes import ExitCode
from .assemble import build_trainer, configure_process
from .limits import MachineLimits
from .memory_copies import copies_lines


class LayoutDiffers(RuntimeError):
    """Error for a layout that does not train as one rank. Raised on every rank, with one line."""

    exit_code = ExitCode.LAYOUT_DIFFERS
    everywhere = True  # rank 0 alone reports it


def library_versions(world: Comm) -> dict[str, str]:
    """Return the version of each library that computes; the kernels' has a checksum of their file."""
    library = Path(_kernels.__file__)  # type: ignore[attr-defined]  # mypy does not know the extension
    checksum = zlib.crc32(library.read_bytes())
    return {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "kernels": f"{kernels.active()} {checksum:08x}",
        "MPI": getattr(world, "library", "no MPI"),
    }


def differing_libraries(world: Comm) -> list[str]:
    """Return a line for each library whose version is not the same on all ranks. Collective."""
    everyone = world.all_gather_object(library_versions(world))
    lines = []
    for library in everyone[0]:
        ranks = ranks_by_value(versions[library] for versions in everyone)
        if len(ranks) > 1:
            each = "; ".join(
                f"{name} on rank {' '.join(map(str, some))}" for name, some in ranks.items()
            )
            lines.append(f"the ranks have different libraries: {library} {each}")
    return lines


def check_run_layout(run: RunConfig, world: Comm, files: Files) -> Report:
    """Check a run's layout, and print the report on rank 0. Collective.

    The temporary checkpoint is written into --save, or the closest directory above it that exists.
    Raises LayoutDiffers.
    """
    nodes = find_nodes(world)
    # No file of the run is read, so the vocabulary's size may be unknown.
    vocabulary = run.model.vocab_size or GPT2_VOCABULARY
    known = replace(run, model=replace(run.model, vocab_size=vocabulary))
    with everywhere():
        plan = MachineLimits(world, nodes).resolve(Plan.of(known, world.size))
    configure_process(plan, world, nodes)
    libraries = differing_libraries(world)
    folder = None
    if run.output.save:
        save = Path(run.output.save).absolute()
        folder = next(each for each in (save, *save.parents) if each.is_dir())
    with everywhere():
        report = check_layout(
            plan,
            world,
            build=build_trainer,
            files=files._replace(folder=folder),
        )
    if world.rank == 0:
        print(*libraries, *copies_lines(plan), *report.lines[:-1], sep="\n", flush=True)
    if not report.agrees:
        raise LayoutDiffers(report.lines[-1])
    if world.rank == 0:
        print(report.lines[-1], flush=True)
    return report
