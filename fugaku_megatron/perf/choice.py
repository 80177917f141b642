"""What --pipeline-schedule auto and --recompute-auto choose: of the schedules that fit into memory the fastest one.

    settled(run, layout, system, room) -> run, lines for its log

The choice is a function of its arguments alone, so ranks that share them agree, and so does a dry run. All times are modelled.
Left out: other layouts (`search`), what memory there is (`training.start_choices`).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import NamedTuple

from ..config.layout import Layout, check_split, placement
from ..config.run_config import RunConfig
from ..costs import recompute, run_schedule
from ..costs.memory import stage_memory
from ..pipeline import schedule
from ..pipeline.parts import AUTO, INTERLEAVED, ONE_F_ONE_B, SPLITS_BACKWARD, ZB_H1, ZBV
from ..pipeline.zero_bubble import NoList
from . import memory
from .model import System, step
from .software import Choices, with_schedule

CHUNKS = (2, 3, 4, 5, 6, 8)  # of a stage, tried for interleaved schedules
ZB_CHUNKS = (3, 4, 6)  # for ZB-H1
LONGEST = 512  # stages x micro-batches of zero-bubble lists that are tried in more than one way: each takes long to make
PENDING = (1.5, 2)  # micro-batches for each stage, tried for zero-bubble schedules beside one


class Order(NamedTuple):
    """A schedule to try. chunks: of a stage. pending: see --zero-bubble-max-pending-backward."""

    name: str
    chunks: int
    pending: int | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule that a run could follow. run: with what is recomputed for it; seconds: of an iteration."""

    run: RunConfig
    seconds: float
    fits: bool

    @property
    def name(self) -> str:
        """With the number of chunks where the schedule does not say it, and with what stages hold beyond the least."""
        parallel, chunks = self.run.parallel, placement(self.run).chunks
        pending = parallel.zero_bubble_max_pending_backward
        return (parallel.schedule + f" with {chunks} chunks" * (chunks > 1 and parallel.schedule != ZBV)
                + f" holding {pending} micro-batches" * bool(pending))


def schedules(offered: Choices, stages: int, microbatches: int) -> list[Order]:
    """The schedules that software offers, and that are worth the search.

    ZB-H1 has chunks where micro-batches are few: elsewhere a bubble is small in any schedule. With chunks it idles so little that
    holding more is not tried.
    """
    few = microbatches <= min(2 * stages, LONGEST // stages)
    chunks = {ONE_F_ONE_B: (1,), ZB_H1: (1, *(ZB_CHUNKS if few else ())), ZBV: (2,), INTERLEAVED: CHUNKS}
    return [Order(name, count, pending) for name in offered.schedules for count in chunks[name]
            for pending in (pendings(name, stages, microbatches) if name == ZBV or count == 1 else (None,))]


def pendings(name: str, stages: int, microbatches: int) -> tuple[int | None, ...]:
    """What stages may hold of a schedule: as little as they can, and more where there are micro-batches for it."""
    more = PENDING if name in SPLITS_BACKWARD and stages < microbatches <= LONGEST // stages else ()
    return None, *(math.ceil(each * stages) for each in more)


def candidates(run: RunConfig, layout: Layout, system: System, room: float) -> list[Candidate]:
    """The run in every schedule that its layers can be cut for, best first. room: bytes of a rank's tensors."""
    found, microbatches = [], layout.microbatches(run, layout.global_batch_size(run))
    for order in schedules(system.software.choices, layout.pp, microbatches):
        asked = with_schedule(run, *order)
        try:
            check_split(asked)
        except ValueError:  # too few layers, or layers given for another number of parts
            continue
        with contextlib.suppress(NoList):
            found.append(_judged(asked, layout, system, room))
    return sorted(found, key=lambda candidate: (not candidate.fits, candidate.seconds))


def lists_of(run: RunConfig, layout: Layout) -> schedule.Schedule:
    """The lists of an iteration at the full global batch size."""
    return run_schedule.of_run(run, layout.microbatches(run, layout.global_batch_size(run)))


def _judged(asked: RunConfig, layout: Layout, system: System, room: float) -> Candidate:
    lists = lists_of(asked, layout)
    run = recompute.settled(asked, layout, room, lists.held)
    most = max(stage_memory(run, layout, stage, lists.held(stage)).total for stage in range(layout.pp))
    return Candidate(run=run, seconds=step(run, layout, system, system.parameters).seconds, fits=most <= room)


def settled(run: RunConfig, layout: Layout, system: System, room: float | None = None) -> tuple[RunConfig, list[str]]:
    """The run with nothing left to choose, and lines that say what was chosen and why.

    room: bytes of a rank's tensors; by default what the machine's memory, or --memory-per-rank, leaves for them. Where no schedule
    fits it is 1F1B, which holds least.
    """
    room = memory.tensor_room(run, layout, system.machine, system.software, system.nodes) if room is None else room
    again, lines = run.training.recompute_auto, list[str]()
    if run.parallel.pipeline_schedule == AUTO and layout.pp > 1:
        run, lines = _fastest(candidates(run, layout, system, room), system)
    elif again:
        run = recompute.settled(run, layout, room, lists_of(run, layout).held)
    return run, lines + [recompute.choice_line(run, room)] * again


def _fastest(found: list[Candidate], system: System) -> tuple[RunConfig, list[str]]:
    fitting, tight = ([c for c in found if c.fits == fits] for fits in (True, False))
    best = fitting[0] if fitting else next(c for c in found if c.run.parallel.schedule == ONE_F_ONE_B)
    beside = "".join(f"; {c.name} {c.seconds:.3g} s" for c in fitting[1:])
    without = f"; no memory for {', '.join(c.name for c in tight)}" * bool(tight)
    return best.run, [f"schedule: {best.name}, {best.seconds:.3g} s an iteration{beside}{without} (model, {system.machine.name})"]
