"""A value whose calls of some names go through an observer: how a profile and the phases of a rank see what a step does.

Left out: what an observer does (profiler.py, phases.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..comm.grid import Groups

VERBS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "barrier",
         "iall_reduce", "iall_gather", "ireduce_scatter", "isend", "irecv")
NONBLOCKING = VERBS[-5:]  # what computation does not hide of them is spent in `wait`
INSTRUCTIONS = ("forward", "backward", "backward_input", "backward_weight", "recv_forward", "send_forward", "recv_backward",
                "send_backward")

Observer = Callable[[str, Callable[..., Any], tuple, dict], Any]  # name, function, args, kwargs -> what the function returns


class Observed:
    """`inner`, with calls of `names` going through observe(name, function, args, kwargs). Groups of one rank stay silent."""

    def __init__(self, inner: Any, names: tuple[str, ...], observe: Observer) -> None:
        self._inner, self._names, self._observe = inner, names, observe
        self._silent = getattr(inner, "size", 2) == 1

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names or self._silent:
            return value
        return lambda *args, **kwargs: self._observe(name, value, args, kwargs)


def observe_groups(groups: Groups, observer: Callable[[str], Observer]) -> Groups:
    """The same groups, their verbs observed. observer: of the group with this name."""
    return Groups(**{f.name: Observed(getattr(groups, f.name), VERBS, observer(f.name)) for f in fields(groups)})
