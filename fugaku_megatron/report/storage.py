"""Report section that saves and loads a checkpoint."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

from ..cli.arguments import make_run
from ..comm.base import Comm
from ..host.cgroup import read_text
from ..host.timing import seconds
from ..text.named_files import JsonObject
from .context import Context
from .training import PLAIN, trainer_of

SAVED = {"num_layers": 2, "vocab_size": 8192}  # of 124M: 250 MB in a checkpoint


def storage_section(context: Context) -> JsonObject:
    """Measure GB/s of a checkpoint: all ranks in --save, or one node's in a temporary directory."""
    shared = context.save is not None
    comm = context.world if shared else context.nodes.ranks
    result = saved(context, comm) if shared or context.nodes.number == 0 else None
    agreed: JsonObject = context.agreed(result)
    return agreed


def saved(context: Context, comm: Comm) -> JsonObject:
    """Save twice, replacing the first, and load. Collective over `comm`."""
    run = make_run(
        "124m",
        {
            **PLAIN,
            **SAVED,
            **context.scale.model,
            "global_batch_size": comm.size,
            "seq_length": 32,
            "keep_last": 1,
        },
    )
    with contextlib.ExitStack() as stack:
        folder = None
        if comm.rank == 0:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="report-", dir=context.save)
            )
        folder = comm.broadcast_object(folder)
        trainer = stack.enter_context(
            trainer_of(replace(run, output=replace(run.output, save=folder)), comm)
        )
        trainer.train_step()
        trainer.save(folder)
        trainer.train_step()
        comm.barrier()
        written = seconds(lambda: trainer.save(folder))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        read = seconds(lambda: trainer.load(folder))
        comm.barrier()
    return {
        "place": "--save" if context.save else "temporary folder",
        "file_system": file_system(context.save or Path(tempfile.gettempdir())),
        "ranks": comm.size,
        "bytes": size,
        "write_gbs": size / written / 1e9,
        "read_gbs": size / read / 1e9,
        "note": "what was just written may be read from the node's memory",
    }


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    longest = ""
    found = "unknown"
    for line in (read_text(mounts) or "").splitlines():
        point, kind = line.split()[1:3]
        if folder.resolve().is_relative_to(point) and len(point) > len(longest):
            longest = point
            found = kind
    return found
