"""Weights of any supported format, opened by the files of a directory."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from ..checkpoint.manifest import (
    MEGATRON_FILES,
    MEGATRON_LEGACY,
    RELEASE,
    TORCH_DIST,
    TRACKER,
    iteration_name,
    own_checkpoint,
)
from ..config.fields import check
from ..text.foreign_models import hub_note
from ..text.named_files import about
from .hugging_face.conversion import open_hugging_face
from .hugging_face.rules import FILE
from .hugging_face.tensor_directory import ADAPTER_CONFIG
from .own_checkpoint import BASE_FLAG, open_own
from .weights import Weights


def open_megatron(
    directory: str,
    iteration: int | None,
    vocab_size: int | None,
    ignored: Collection[str] = (),
    source: str = "--from-megatron",
) -> Weights:
    """Open the latest checkpoint in `directory`, or `iteration`, or raise ValueError.

    vocab_size: number of tokens, if the checkpoint does not state it
    ignored: saved arguments that do not change the model
    source: flags before the directory in a message
    """
    # with torch.distributed, which takes a second to load and which no other format needs
    from .megatron.dist import open_dist
    from .megatron.legacy import open_legacy

    with about(f"{source} {directory}"):
        path = _iteration(Path(directory), iteration)
        if (path / TORCH_DIST).exists():
            return open_dist(path, vocab_size, ignored)
        check(
            any(path.glob(MEGATRON_LEGACY)),
            f"{path} holds neither {MEGATRON_LEGACY} nor {TORCH_DIST}",
        )
        return open_legacy(path, vocab_size, ignored)


def _iteration(directory: Path, iteration: int | None) -> Path:
    check(directory.is_dir(), "is not a directory")
    if iteration is not None:
        return directory / iteration_name(iteration)
    if (directory / TORCH_DIST).exists() or any(directory.glob(MEGATRON_LEGACY)):
        return directory
    tracker = directory / TRACKER
    check(
        tracker.is_file(),
        f"{TRACKER} is not there: pass the directory that holds it, or that of an iteration",
    )
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    check(
        text == RELEASE or text.isdecimal(),
        f"{tracker} should hold an iteration or release, it holds {text!r:.40}",
    )
    return directory / (text if text == RELEASE else iteration_name(int(text)))


def open_weights(
    directory: str,
    iteration: int | None = None,
    vocab_size: int | None = None,
    base: str | None = None,
    ignored: Collection[str] = (),
) -> Weights:
    """Open weights in any supported format; arguments as `open_megatron` and `open_own`.

    Raise ValueError for another directory, and for missing or damaged parts.
    """
    path = Path(directory)
    check(
        path.is_dir(),
        f"{directory} is not a directory: pass a checkpoint of this program or of Megatron-LM, or a directory of "
        f"Hugging Face{hub_note(directory)}",
    )
    try:
        if own := own_checkpoint(directory, iteration):
            return open_own(*own, base, open_weights)
        check(base is None, f"{directory} holds no adapters: leave {BASE_FLAG} {base} out")
        if (path / FILE).is_file() or (path / ADAPTER_CONFIG).is_file():
            return open_hugging_face(directory)
        kinds = (TRACKER, *MEGATRON_FILES, "iter_*")
        check(
            any(any(path.glob(kind)) for kind in kinds),
            f"{directory} holds no checkpoint of this program or of Megatron-LM "
            f"({TRACKER} is not there) and no model of Hugging Face ({FILE} is not there)",
        )
        return open_megatron(directory, iteration, vocab_size, ignored)
    except ValueError as error:
        raise ValueError(re.sub("^--(load|from-hf|from-megatron) ", "", str(error))) from error
