"""Remedies for a model of Hugging Face that is named in place of a checkpoint, or of a directory."""

from __future__ import annotations

import os
import re

from .named_files import StrPath

# gpt2, or OWNER/MODEL, without the ending of a file
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.model)(?<!\.json)")


def is_hugging_face(directory: StrPath) -> bool:
    return os.path.isfile(os.path.join(directory, "config.json"))


def conversion(directory: StrPath) -> str:
    return f"convert it with fugaku-megatron convert --from-hf {directory} --save NEW, and pass NEW"


def hub_note(directory: StrPath) -> str:
    """Return the end of a message about a missing directory whose name the Hugging Face Hub could have."""
    name = os.fspath(directory)
    if os.path.lexists(name) or not _HUB_NAME.fullmatch(name):
        return ""
    return (
        f"; nothing is downloaded: on a machine with a network, hf download {name} --local-dir DIR "
        "writes the directory of a model of the Hugging Face Hub"
    )


def no_checkpoint(directory: StrPath, remedy: str | None = None) -> str:
    """Return the reason why a directory is no checkpoint.

    remedy: for a model of Hugging Face (default: the conversion)
    """
    if is_hugging_face(directory):
        return f"holds a model of Hugging Face and no checkpoint: {remedy or conversion(directory)}"
    if not os.path.lexists(directory):
        return f"holds no checkpoint: there is no such directory{hub_note(directory)}"
    return "holds no checkpoint"
