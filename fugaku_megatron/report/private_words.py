"""Names of users, hosts and paths, replaced in a report."""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+~-]+/)+[\w.+~-]*")


def private_words() -> dict[str, str]:
    """Return user, host, home and working directory -> the marks that replace the names."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = ""
    try:
        home = str(Path.home())
    except RuntimeError:  # a user number without an entry in passwd, and no HOME
        home = ""
    host = platform.node()
    found = {
        os.getcwd(): "FOLDER",
        home: "HOME",
        host: "HOST",
        host.split(".")[0]: "HOST",
        user: "USER",
    }
    return {word: mark for word, mark in found.items() if len(word) > 1}


def without_names(value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: without_names(part, words) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_names(part, words) for part in value]
    if not isinstance(value, str):
        return value
    text = PATH.sub("PATH", value)
    for word, mark in words.items():
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", mark, text)
    return text
