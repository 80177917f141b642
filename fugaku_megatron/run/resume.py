"""Resume training from a checkpoint, or start from its weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.load import Checkpoint
from ..checkpoint.manifest import CARRIED
from ..comm.agreement import on_root
from ..comm.base import Comm
from ..data.unchanged import other_files
from ..text.written_files import make_folder
from ..training.trainer import Trainer
from .checkpoint_source import Resume
from .resume_notes import (
    angle_note,
    copies_note,
    differences,
    layout_notes,
    machine_fault_note,
    mask_notes,
    moment_notes,
    order_note,
    schedule_note,
    skip_notes,
    tracker_note,
)


def resume_training(trainer: Trainer, resume: Resume) -> list[str]:
    """Load the checkpoint; return the log's lines. Collective."""
    if resume.base is None:
        return _resume(trainer, resume)
    saved = None if resume.checkpoint is None else resume.checkpoint.state.get("lora")
    trainer.load_base(resume.base, saved)
    return [*_resume(trainer, resume), *copies_note(trainer)]


def _resume(trainer: Trainer, resume: Resume) -> list[str]:
    run = trainer.run
    if resume.checkpoint is None:
        if not run.output.load:
            return []
        return [f"no checkpoint in --load {run.output.load}: starting anew"]
    if resume.finetune:
        return _start_from_weights(trainer, resume.checkpoint, resume)
    requested = trainer.param_schedule
    checkpoint = resume.checkpoint
    trainer.load(checkpoint)
    _carry(trainer, checkpoint)
    source = checkpoint.node or run.output.load
    adapting = f", adapters of {resume.base.directory}" if resume.base else ""
    lines = [
        f"resumed from {source} at iteration {trainer.progress.iteration}{adapting}",
        *machine_fault_note(trainer, checkpoint),
        *tracker_note(trainer, checkpoint),
        *checkpoint.head.get("notes", ()),
    ]
    lines += [
        f"note: {phrase}: the loss curve changes from here on"
        for phrase in differences(run, resume.config)
    ]
    lines += layout_notes(trainer, checkpoint) + moment_notes(run, resume)
    lines += order_note(run, resume)
    lines += other_files(resume.state.get("data_files") or (), trainer.data_files)
    return lines + skip_notes(trainer, resume) + schedule_note(requested, trainer, resume)


def _carry(trainer: Trainer, checkpoint: Checkpoint) -> None:
    save = trainer.run.output.save
    if save:
        carry_files(checkpoint.directory / CARRIED, save, trainer.world)


def carry_files(
    source: Path, save: str, world: Comm, copy: Callable[[Path, Path], object] = shutil.copytree
) -> None:
    """Copy a model's tokenizer files to a checkpoint directory that has none. Collective.

    copy: from `source`, a directory, to a directory that does not exist
    """
    target = Path(save) / CARRIED

    def carry() -> None:
        if source.is_dir() and not target.exists():
            make_folder(target.parent)
            copy(source, target)

    on_root(world, carry, f"--save {save}: ")


def _start_from_weights(trainer: Trainer, checkpoint: Checkpoint, resume: Resume) -> list[str]:
    """Load the weights; return the log's lines. Collective."""
    if checkpoint is not resume.base:
        trainer.load(checkpoint, weights_only=True)
    _carry(trainer, checkpoint)
    source = f"{checkpoint.directory}, iteration {checkpoint.iteration}"
    what = "new adapters of" if checkpoint is resume.base else "starting from the weights of"
    return [
        f"{what} {source}: iteration 0, a fresh optimizer, data from the start",
        *mask_notes(trainer.run, checkpoint),
        *angle_note(trainer.run, checkpoint.config["model"]),
        *tracker_note(trainer, checkpoint),
    ]
