"""A communicator that counts the calls and bytes of another, to test the formulas in `costs/`.

    record(groups)      the groups, each counting its calls and bytes

Bytes are the caller's payload: the tensor for all_reduce, broadcast, send and recv; all of this rank's rows for all_to_all; this rank's
shard for all_gather; the whole input for reduce_scatter; 0 for barrier and objects. A nonblocking verb counts as its blocking form.
Traffic on the wire differs: a ring all-reduce of n bytes moves 2 (size - 1) / size * n bytes per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.grid import Groups, subgroup
from fugaku_megatron.host.observed import NONBLOCKING, Observed

# verb -> the place of the tensor whose bytes count among its arguments
TENSOR = {
    "all_reduce": 0,
    "broadcast": 0,
    "send": 0,
    "recv": 0,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
}
OBJECTS = ("barrier", "broadcast_object", "gather_object", "all_gather_object")


class RecordingComm(Observed):
    """The communicator `inner`, as a `comm.base.Comm`, with a log of (group name, verb, bytes) in call order.

    Communicators split from it share the log.
    """

    def __init__(
        self, inner: Comm, name: str = "world", log: list[tuple[str, str, int]] | None = None
    ) -> None:
        super().__init__(inner, (*TENSOR, *OBJECTS, *NONBLOCKING), self._record)
        self.name = name
        self.log = [] if log is None else log

    @property
    def records(self) -> list[tuple[str, int]]:
        """Return (verb, bytes) of every call on this group."""
        return [(verb, size) for name, verb, size in self.log if name == self.name]

    def tally(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return {(group name, verb): (calls, bytes)} for all groups that share the log."""
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for name, verb, size in self.log:
            calls, payload = totals.get((name, verb), (0, 0))
            totals[name, verb] = calls + 1, payload + size
        return totals

    def _record(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        verb = name.removeprefix("i") if name in NONBLOCKING else name
        payload = args[TENSOR[verb]].nbytes if verb in TENSOR else 0
        self.log.append((self.name, verb, payload))
        return function(*args, **kwargs)

    def subgroup(self, ranks: Sequence[int]) -> RecordingComm:
        """Return `comm.grid.subgroup` of the inner communicator, recorded under "<name>/subgroup"."""
        return RecordingComm(subgroup(self._inner, ranks), f"{self.name}/subgroup", self.log)

    def split(self, color: int, key: int) -> RecordingComm:
        return RecordingComm(self._inner.split(color, key), f"{self.name}/split", self.log)


def record(groups: Groups) -> Groups:
    """Return the groups, recorded under their field names ("world", "tp", ...) in one log."""
    log: list[tuple[str, str, int]] = []
    return Groups(
        **{f.name: RecordingComm(getattr(groups, f.name), f.name, log) for f in fields(groups)}
    )
