"""Names of the pipeline schedules, and what each needs."""

from __future__ import annotations

ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV = NAMES = (
    "1f1b",
    "interleaved",
    "zb-h1",
    "zbv",
)  # of schedules


AUTO = "auto"  # the schedule is chosen when the run starts


CHUNKED = INTERLEAVED, ZB_H1  # schedules whose stages may have any number of chunks


SPLITS_BACKWARD = ZB_H1, ZBV  # into gradients of inputs and gradients of weights


def receives_ahead(name: str) -> int:
    """How many receives of each kind a stage has posted before it comes to them in its list, so that even blocking sends go on.

    One is enough for every list but those with more freedom: made for parts that cost different amounts.
    """
    return 2 if name in SPLITS_BACKWARD else 1
