"""Importing torch without Python's garbage collector, which takes a seventh of that time and finds nothing.

Needs neither torch nor MPI.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collection within; afterwards the collector is as it was. What an import creates stays, so that it has nothing to find."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
