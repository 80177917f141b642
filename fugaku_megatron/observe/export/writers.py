"""Writers of a run's metrics: TensorBoard, Weights & Biases, the history. OTLP: telemetry.py.

A new writer is a class and a row of WRITERS.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ...config.fields import check, flag
from ...config.run_config import RunConfig
from ...text.written_files import make_folder
from .history import HISTORY, History
from .writer import Writer

SERVER = "https://api.wandb.ai"  # unless WANDB_BASE_URL names another
REACHED_WITHIN = 3.0  # s
Say = Callable[[str], None]


class TensorBoard(Writer):
    """Event files of TensorBoard."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds

        self._events = SummaryWriter(log_dir=directory)

    def scalar(
        self, tag: str, value: float, iteration: int, consumed_samples: int | None = None
    ) -> None:
        self._events.add_scalar(tag, value, iteration)
        if consumed_samples is not None:
            self._events.add_scalar(f"{tag} vs samples", value, consumed_samples)

    def close(self) -> None:
        self._events.close()


class WandbRun(Writer):
    """A run of Weights & Biases; without one, with a note, if wandb refuses it."""

    def __init__(self, run: RunConfig, say: Say) -> None:
        import wandb  # takes seconds

        output = run.output
        directory = output.wandb_save_dir or output.save
        self._run: Any = None
        # wandb checks WANDB_MODE
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _reachable() else "offline")
        if mode == "offline":
            say(
                "note: --wandb-project: offline, because the server is not reachable or WANDB_MODE says so: send the files later "
                "with `wandb sync`"
            )
        try:
            if directory:
                make_folder(Path(directory))
            self._run = wandb.init(
                project=output.wandb_project,
                name=output.wandb_exp_name,
                entity=output.wandb_entity,
                dir=directory,
                config=asdict(run),
                mode=mode,
            )
        except Exception as error:  # wandb's own errors have no common class
            reason = [*str(error).splitlines(), type(error).__name__][0]
            say(
                f"note: --wandb-project {output.wandb_project}: {reason}; the run continues without it"
            )

    def scalar(
        self, tag: str, value: float, iteration: int, consumed_samples: int | None = None
    ) -> None:
        if self._run is not None:
            self._run.log({tag: value}, step=iteration)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _reachable() -> bool:
    address = urlsplit(os.environ.get("WANDB_BASE_URL", SERVER))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname, port), REACHED_WITHIN).close()
    except OSError:
        return False
    return True


class WriterRow(NamedTuple):
    """A row of WRITERS.

    field: of OutputConfig, whose flag asks for the writer
    open: (run, first iteration, function that prints a line) -> writer, on the printing rank
    package, extra: needed; "": none
    """

    field: str
    open: Callable[[RunConfig, int, Say], Writer]
    package: str = ""
    extra: str = ""


WRITERS = (
    WriterRow(
        "save",
        lambda run, start_iteration, say: History(
            Path(run.output.save or "") / HISTORY, start_iteration
        ),
    ),
    WriterRow(
        "tensorboard_dir",
        lambda run, start_iteration, say: TensorBoard(run.output.tensorboard_dir or ""),
        package="tensorboard",
        extra="log",
    ),
    WriterRow(
        "wandb_project",
        lambda run, start_iteration, say: WandbRun(run, say),
        package="wandb",
        extra="wandb",
    ),
)


def open_writers(run: RunConfig, start_iteration: int, printing: bool, say: Say) -> list[Writer]:
    """Open the writers that the run's flags ask for. ValueError on every rank for a missing package.

    start_iteration: the run resumes here; later records of the history are dropped
    """
    writers = []
    for row in WRITERS:
        value = getattr(run.output, row.field)
        if value is None:
            continue
        check(
            not row.package or importlib.util.find_spec(row.package) is not None,
            f"{flag(row.field)} {value}: a package is missing: pip install {row.package}, or this package with its extra "
            f"[{row.extra}]",
        )
        if printing:
            writers.append(row.open(run, start_iteration, say))
    return writers
