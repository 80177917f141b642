"""Loading the checkpoints of `checkpoint.save`, in the parallel layout that saved them; ZeRO-1 may have cut its shards elsewhere.

Every public function is collective, and fails on all ranks or on none. Left out: loading into another parallel layout, which
weights.py does for the weights alone. Test: pytest tests/test_checkpoint.py
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..comm.agreement import agree, on_root
from ..comm.base import Comm
from .manifest import TRACKER, iteration_path, join, latest_iteration, list_iterations, read_manifest, unsigned_note, verify_file
from .shards import Plan, Shard, check_layout, check_model, make_plan


def load_checkpoint(directory: str | os.PathLike, shards: list[Shard], comm: Comm, layout: dict[str, int],
         iteration: int | None = None, model: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Fill the tensors of `shards` in place from the latest checkpoint, or from `iteration`. Collective.

    Returns (iteration, state). A shard may lie in another rank's file. No rank copies anything before every rank has verified
    the files that it needs. `model`: values that the saved config's "model" must have too. Raises ValueError on all ranks when
    there is no tracker, when the manifest is missing or of another program, when the layout or the model differs, when a file
    is missing, truncated or altered, and when a tensor is missing or has another shape or dtype.
    """
    directory = Path(directory)
    prefix = f"--load {directory}: "
    iteration = on_root(comm, lambda: _iteration_to_load(directory, iteration), prefix)
    others = partial(_other_iterations, directory, iteration)
    manifest = _manifest(directory, iteration, comm)
    path = on_root(comm, lambda: iteration_path(directory, iteration))
    if comm.rank == 0 and (note := unsigned_note(manifest, path)):
        print(note)
    on_root(comm, lambda: check_model(manifest["config"].get("model", {}), model or {}, path), prefix)
    on_root(comm, lambda: check_layout(manifest["layout"], layout, path), prefix)
    plan: Plan = {}
    agree(comm, lambda: plan.update(make_plan(manifest, shards, path)), prefix)
    agree(comm, lambda: [verify_file(path / name, manifest["files"][name]) for name in plan], prefix, others)
    agree(comm, lambda: [_read_shards(path / name, plan[name]) for name in plan], prefix, others)
    return iteration, manifest["state"]


def read_state(directory: str | os.PathLike, iteration: int, comm: Comm) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, config) as they were saved, for a run that has no tensors yet. Collective."""
    manifest = _manifest(Path(directory), iteration, comm, ("state", "config"))
    return manifest["state"], manifest["config"]


def _manifest(directory: Path, iteration: int, comm: Comm, parts: tuple[str, ...] = ()) -> dict[str, Any]:
    """The manifest of `iteration`, or some parts of it, on every rank."""
    def read() -> dict[str, Any]:
        manifest = read_manifest(directory, iteration)
        return {part: manifest[part] for part in parts} if parts else manifest

    return on_root(comm, read, f"--load {directory}: ", partial(_other_iterations, directory, iteration))


def _iteration_to_load(directory: Path, iteration: int | None) -> int:
    iteration = latest_iteration(directory) if iteration is None else iteration
    if iteration is None:
        raise ValueError(f"no checkpoint there: {directory / TRACKER} does not exist")
    return iteration


def _read_shards(path: Path, shards: list[tuple[Shard, int]]) -> None:
    with safe_open(path, framework="pt") as stored:
        for shard, first in shards:
            values = stored.get_tensor(shard.key).view(-1)[first : first + shard.tensor.numel()]
            shard.tensor.detach().copy_(values.view(shard.tensor.shape))


def _other_iterations(directory: Path, damaged: int) -> str:
    others = [iteration for iteration in list_iterations(directory) if iteration != damaged]
    if not others:
        return f". No other checkpoint in {directory} is complete"
    return f". Complete checkpoints: iterations {join(others)}. Use iteration {others[-1]}: --ckpt-step {others[-1]}"
