"""GPT training on CPU clusters over MPI, with Megatron-LM's interface.

    import fugaku_megatron as fm

    fm.Config         what a run is: the flags of fugaku-megatron train as keywords
    fm.Trainer        a run on this process, or on the ranks that mpiexec started
    fm.load           a model in memory, which generates text and scores it
    fm.on_first_rank  work that one rank does for all
    fm.init           threads, memory and signals of the process, which nothing else here touches
    fm.accelerate     a model of transformers, which then computes with our kernels

Importing the package loads none of its modules; torch is loaded when Trainer, load or accelerate is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.config import Config as Config
    from .api.model import Model as Model
    from .api.model import load as load
    from .api.trainer import ReplicasDiffer as ReplicasDiffer
    from .api.trainer import Step as Step
    from .api.trainer import Trainer as Trainer
    from .api.trainer import init as init
    from .api.trainer import on_first_rank as on_first_rank
    from .torch_backend.accelerate import accelerate as accelerate

__version__ = "0.2.0"
__all__ = [
    "Config",
    "Model",
    "ReplicasDiffer",
    "Step",
    "Trainer",
    "__version__",
    "accelerate",
    "init",
    "load",
    "on_first_rank",
]
_MODULES = {
    "Config": "api.config",
    "Model": "api.model",
    "ReplicasDiffer": "api.trainer",
    "Step": "api.trainer",
    "Trainer": "api.trainer",
    "accelerate": "torch_backend.accelerate",
    "init": "api.trainer",
    "load": "api.model",
    "on_first_rank": "api.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
