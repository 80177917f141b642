"""The pipeline schedules, a row each."""

from __future__ import annotations

from dataclasses import dataclass

LOOP = "loop"  # round-robin over the stages
V = "v"  # two model chunks, down the stages and up again


@dataclass(frozen=True, kw_only=True)
class ScheduleRow:
    """A pipeline schedule.

    lists: "module:function", (Schedule, stage) -> the stage's instructions in an iteration
    chunks: model chunks per stage; None: as many as the flags say
    needs_chunks: True if these flags are required
    kind: of `Placement`
    splits_backward: I and W are instructions of their own
    receives_ahead: receives of each kind that a stage posts ahead against deadlock; more than one for virtual stages of
        different costs
    has_backward: a stage's neighbours answer, so that it knows when its sends are complete
    is_1f1b: the lists are in 1F1B's order, with the least memory; the planner has formulas for it
    feature: name in `config.features`, without which software lacks the schedule
    tried_chunks, tried_chunks_if_few: model chunks per stage to try in a search; more if there are few micro-batches
    short: name in the planner's table
    """

    lists: str
    chunks: int | None = 1
    needs_chunks: bool = False
    kind: str = LOOP
    splits_backward: bool = False
    receives_ahead: int = 1
    has_backward: bool = True
    is_1f1b: bool = False
    feature: str | None = None
    tried_chunks: tuple[int, ...] = ()
    tried_chunks_if_few: tuple[int, ...] = ()
    short: str | None = None


_LISTS = "fugaku_megatron.pipeline.instruction_lists"
ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved"
ZB_H1 = "zb-h1"
ZBV = "zbv"
ZERO_BUBBLE_RECEIVES = 2  # ahead
SCHEDULES = {
    ONE_F_ONE_B: ScheduleRow(lists=f"{_LISTS}:one_f_one_b", is_1f1b=True, tried_chunks=(1,)),
    INTERLEAVED: ScheduleRow(
        lists=f"{_LISTS}:interleaved",
        chunks=None,
        needs_chunks=True,
        feature="interleaved_schedule",
        tried_chunks=(2, 3, 4, 5, 6, 8),
        short="il",
    ),
    ZB_H1: ScheduleRow(
        lists=f"{_LISTS}:split_backward",
        chunks=None,
        splits_backward=True,
        receives_ahead=ZERO_BUBBLE_RECEIVES,
        feature="zero_bubble_schedule",
        tried_chunks=(1,),
        tried_chunks_if_few=(3, 4, 6),
    ),
    ZBV: ScheduleRow(
        lists=f"{_LISTS}:split_backward",
        chunks=2,
        kind=V,
        splits_backward=True,
        receives_ahead=ZERO_BUBBLE_RECEIVES,
        feature="zero_bubble_schedule",
        tried_chunks=(2,),
    ),
}
AUTO = "auto"  # chosen at the start of a run

FORWARD_ONLY = "forward-only"
_EVALUATION = ScheduleRow(lists=f"{_LISTS}:forward_only", has_backward=False)


def row(name: str) -> ScheduleRow:
    return _EVALUATION if name == FORWARD_ONLY else SCHEDULES[name]


def chunked() -> list[str]:
    return [name for name, each in SCHEDULES.items() if each.chunks is None]


def of_feature(name: str) -> tuple[str, ...]:
    return tuple(schedule for schedule, each in SCHEDULES.items() if each.feature == name)


def splitting_backward() -> list[str]:
    return [name for name, each in SCHEDULES.items() if each.splits_backward]
