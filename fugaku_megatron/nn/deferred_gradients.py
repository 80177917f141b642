"""Weight gradients that a schedule computes later than the data gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# A backward splits in two (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2): input gradients, for
# which another stage waits, and weight gradients, for which only the optimizer waits. Operations queue weight gradients:
#
#     gradients.add(work)                    runs at once, or
#     with gradients.put_off() as waiting:
#         backward(y, dy)                    computes input gradients alone
#     waiting.run()                          runs the same calls in the same order, so the same bits

Work = Callable[[], object]


class Waiting:
    """Postponed work of one backward, with the tensors that it needs."""

    def __init__(self) -> None:
        self._work: deque[Work] = deque()

    def append(self, work: Work) -> None:
        self._work.append(work)

    @torch.no_grad()  # as autograd calls a backward
    def run(self) -> None:
        while self._work:
            self._work.popleft()()


class WeightGradients:
    """Queue of a rank's weight-gradient work, used by one thread."""

    def __init__(self) -> None:
        self._waiting: Waiting | None = None

    @property
    def waits(self) -> bool:
        """True if added work is postponed: its operands must not change."""
        return self._waiting is not None

    def add(self, work: Work) -> None:
        if self._waiting is None:
            work()
        else:
            self._waiting.append(work)

    @contextmanager
    def put_off(self) -> Iterator[Waiting]:
        """Postpone and return the work that is added inside the block."""
        assert self._waiting is None, "the work of another backward is being put off"
        self._waiting = waiting = Waiting()
        try:
            yield waiting
        finally:
            self._waiting = None
