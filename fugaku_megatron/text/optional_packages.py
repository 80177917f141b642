"""Packages of the extras in pyproject.toml, imported on demand."""

from __future__ import annotations

import importlib
from types import ModuleType

from .input_errors import NeverSkipped

DISTRIBUTIONS = {"ruamel": "ruamel.yaml"}  # module -> package, if the names differ


class MissingPackage(NeverSkipped):
    """Missing optional package; the message has the pip command."""


def optional_package(name: str, extra: str, user: str) -> ModuleType:
    """Import a package, or raise ValueError with its extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        module = name.split(".")[0]
        package = DISTRIBUTIONS.get(module, module)
        raise MissingPackage(
            f"{user} needs the Python package {package} ({error}): pip install {package}, or this package with its "
            f"extra [{extra}]"
        ) from None
