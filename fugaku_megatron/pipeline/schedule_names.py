"""Names and requirements of the pipeline schedules."""

from __future__ import annotations

ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved"
ZB_H1 = "zb-h1"
ZBV = "zbv"
NAMES = (ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV)
AUTO = "auto"  # chosen at the start of a run
CHUNKED = (INTERLEAVED, ZB_H1)  # any number of model chunks per stage
SPLITS_BACKWARD = (ZB_H1, ZBV)  # into input gradients and weight gradients


def receives_ahead(name: str) -> int:
    """Return the receives of each kind that a stage posts ahead, so that blocking sends cannot deadlock.

    One suffices, except for schedules made for virtual stages of different costs.
    """
    return 2 if name in SPLITS_BACKWARD else 1
