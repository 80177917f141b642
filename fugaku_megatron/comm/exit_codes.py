"""How a job ended, as its exit code: what a job script may decide by.

Codes of `fugaku-megatron train` and of every other command. A launcher adds its own: any other code above 128 means that a signal
ended a rank before it could say anything.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """FINISHED is also an orderly stop: a signal or a time limit came, the run was saved, and the next start continues it."""

    FINISHED = 0
    FAILED = 1  # a bug with its traceback, or memory that the system refuses; of `verify`: something is damaged
    USER_ERROR = 2  # refused in one line; a restart would be refused as well
    DIVERGED = 3  # gradients hold an Inf or NaN; a restart would run into them again
    HANG = 4  # a rank stopped moving
    LOST_RANK = 5  # a rank's process or node is gone
    REPLICAS_DIFFER = 6  # weights of data-parallel replicas; a restart from the last checkpoint that all agreed on goes on
    STORAGE = 7  # a file system failed in a way that may pass: an I/O error, a stale handle, a server that does not answer
    INTERRUPTED = 130  # by Control-C, as shells have it: 128 + SIGINT
    OUTPUT = 141  # standard output takes nothing more: its reader has left (as shells have it: 128 + SIGPIPE), or its disk is full
