"""Weights & Biases run."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...text.written_files import make_folder

SERVER = "https://api.wandb.ai"  # unless WANDB_BASE_URL names another
REACHED_WITHIN = 3.0  # s


@dataclass(frozen=True)
class WandbRun:
    """Description of a Weights & Biases run, which `start` opens."""

    project: str
    name: str
    entity: str | None = None
    directory: str | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def check_installed(self) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"--wandb-project {self.project}: a package is missing: pip install wandb, or this package with "
                "its extra [wandb]"
            )

    def start(self, say: Callable[[str], None]) -> Any:
        """Return the open run; None, with a note, if refused."""
        import wandb  # takes seconds

        mode = os.environ.get("WANDB_MODE") or ("online" if _reachable() else "offline")
        if mode == "offline":
            say(
                "note: --wandb-project: offline, because the server is not reachable or WANDB_MODE says so: send the files later "
                "with `wandb sync`"
            )
        try:
            if self.directory:
                make_folder(Path(self.directory))
            return wandb.init(
                project=self.project,
                name=self.name,
                entity=self.entity,
                dir=self.directory,
                config=self.config,
                mode=mode,  # type: ignore[arg-type]  # wandb checks WANDB_MODE
            )
        except Exception as error:  # wandb's own errors have no common class
            reason = [*str(error).splitlines(), type(error).__name__][0]
            say(f"note: --wandb-project {self.project}: {reason}; the run continues without it")
            return None


def _reachable() -> bool:
    address = urlsplit(os.environ.get("WANDB_BASE_URL", SERVER))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname, port), REACHED_WITHIN).close()
    except OSError:
        return False
    return True
