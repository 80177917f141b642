"""Hugging Face folders of --save-hf-interval, which `convert` writes from finished checkpoints while training continues."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.model import ModelConfig
from ..convert.hugging_face.config_json import architecture_of
from ..start.child_program import start_module


def check_exportable(model: ModelConfig) -> None:
    """Raise ValueError for a model that Hugging Face has no architecture for, at least without MTP modules."""
    try:
        architecture_of(replace(model, mtp_num_layers=None), {})
    except ValueError as error:
        raise ValueError(f"--save-hf-interval: {error}: leave it out") from None


@dataclass
class HfExport:
    """A process that writes the folder of one checkpoint.

    folder: complete or absent, next to --save
    """

    folder: Path
    process: subprocess.Popen[Any]

    @staticmethod
    def begin(save: str, iteration: int) -> HfExport | None:
        """Start to export a checkpoint in `save`; None if its folder is there, from a run that this one repeats."""
        folder = Path(f"{Path(save)}_hf") / f"iter_{iteration:07d}"
        if folder.is_dir():
            return None
        words = ["--load", save, "--ckpt-step", str(iteration), "--to-hf", os.fspath(folder)]
        process = start_module(
            "__main__", "convert", *words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        return HfExport(folder, process)

    def finish(self) -> str:
        """Wait for the process, and return the log's line."""
        _, errors = self.process.communicate()
        if self.process.returncode == 0:
            return f"saved {self.folder} for Hugging Face"
        reason = errors.decode(errors="replace").strip().splitlines()[-1:]
        why = "".join(reason) or f"exit code {self.process.returncode}"
        return f"warning: --save-hf-interval: {self.folder} is not written, and training continues: {why:.300}"
