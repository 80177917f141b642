"""A directory of Megatron-LM's checkpoints: which iteration, in which of its formats."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.manifest import TRACKER, iteration_name
from ..run.checks import check
from .megatron_dist import METADATA, open_dist
from .megatron_legacy import open_legacy
from .weights import Weights

LEGACY = "mp_rank_*"


def open_megatron(directory: str, iteration: int | None, vocab_size: int | None) -> Weights:
    """The weights of the latest checkpoint in `directory`, or of `iteration`.

    vocab_size: tokens, where the checkpoint does not say how many of the embedding's rows are no padding. ValueError, one line, for
    what is missing, damaged or not built here.
    """
    try:
        path = _iteration(Path(directory), iteration)
        if (path / METADATA).exists():
            return open_dist(path, vocab_size)
        check(any(path.glob(LEGACY)), f"{path} holds neither {LEGACY} nor {METADATA}")
        return open_legacy(path, vocab_size)
    except ValueError as error:
        raise ValueError(f"--from-megatron {directory}: {error}") from error


def _iteration(directory: Path, iteration: int | None) -> Path:
    """The directory of an iteration; it may be given itself."""
    check(directory.is_dir(), "is no directory")
    if iteration is not None:
        return directory / iteration_name(iteration)
    if (directory / METADATA).exists() or any(directory.glob(LEGACY)):
        return directory
    tracker = directory / TRACKER
    check(tracker.is_file(), f"{TRACKER} is not there: give the directory that holds it, or that of an iteration")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    check(text == "release" or text.isdecimal(), f"{tracker} should hold an iteration or release, it holds {text!r:.40}")
    return directory / (text if text == "release" else iteration_name(int(text)))
