"""Names of our implementations in transformers, registered as soon as a program imports transformers' models."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODELS = "transformers.modeling_utils"


class _AfterImport(MetaPathFinder):
    """Registers the names once, after transformers' models are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module by the other finders."""
        if fullname != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Register the names now."""
    from . import attention_interface, experts

    attention_interface.register()
    experts.register()


def register_after_import() -> None:
    """Register the names if the program has imported transformers' models, else when the program does."""
    if MODELS in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _AfterImport())
