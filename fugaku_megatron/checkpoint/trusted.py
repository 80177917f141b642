"""Checkpoints from before a machine fault: records of a save and of a run that ended.

DIR/iter_0000100/manifest.json    state.replicas: AGREED, NOT_COMPARED, or NO_REPLICAS
DIR/machine_fault.json            why the last run ended, and suspect checkpoints
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..text.written_files import write_text
from .manifest import Directory, existing_iteration, join, list_iterations, read_head

FAULT = "machine_fault.json"
REPLICAS = "replicas"  # the field of a checkpoint's state
AGREED = "agreed"
NOT_COMPARED = "not compared"
NO_REPLICAS = "none"


@dataclass(frozen=True)
class Fault:
    """Machine fault that ended a run.

    iteration: last iteration before the fault was found
    trusted: newest checkpoint from before the fault, if any
    suspect: iterations of checkpoints that may be wrong
    """

    iteration: int
    why: str
    trusted: int | None
    suspect: tuple[int, ...]


def record_fault(directory: Directory, iteration: int, why: str, suspect_from: int | None) -> Fault:
    """Write a fault record into a checkpoint directory, if it exists, and return it.

    suspect_from: first iteration with a suspect checkpoint, if any
    """
    present = [number for number in list_iterations(directory) if number <= iteration]
    before = suspects(directory)
    suspect = {number for number in present if number in before}
    if suspect_from is not None:
        suspect.update(number for number in present if number >= suspect_from)
    rest = [number for number in present if number not in suspect]
    trusted = newest_agreed(directory, rest)
    if trusted is None:
        trusted = max(rest, default=None)
    fault = Fault(iteration, why, trusted, tuple(sorted(suspect)))
    if Path(directory).is_dir():
        with contextlib.suppress(OSError):  # a full disk must not hide the fault
            write_text(Path(directory) / FAULT, json.dumps(asdict(fault)) + "\n")
    return fault


def newest_agreed(directory: Directory, numbers: Iterable[int]) -> int | None:
    """Return the newest iteration with replicas that were compared before the save and agreed."""
    for number in sorted(numbers, reverse=True):
        with contextlib.suppress(ValueError, OSError):  # a damaged one is no help
            if read_head(directory, number)["state"].get(REPLICAS) == AGREED:
                return number
    return None


def read_fault(directory: Directory) -> Fault | None:
    """Return the recorded machine fault, or None. Raises ValueError if the record is damaged."""
    path = Path(directory) / FAULT
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        trusted = values["trusted"]
        return Fault(
            int(values["iteration"]),
            str(values["why"]),
            trusted=None if trusted is None else int(trusted),
            suspect=tuple(map(int, values["suspect"])),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}): it named checkpoints that may be wrong; "
            "choose an iteration by "
            "--ckpt-step, or remove the file"
        ) from None


def suspects(directory: Directory) -> tuple[int, ...]:
    try:
        fault = read_fault(directory)
    except ValueError:
        return ()
    return fault.suspect if fault else ()


def refuse_suspect(directory: Directory, iteration: int) -> None:
    """Raise ValueError for a suspect checkpoint not chosen by --ckpt-step."""
    fault = read_fault(directory)
    if fault is None or iteration not in fault.suspect:
        return
    other = (
        f"no checkpoint in {directory} is from before"
        if fault.trusted is None
        else f"--ckpt-step {fault.trusted} continues from the newest checkpoint from before"
    )
    raise ValueError(
        f"the checkpoint of iteration {iteration} is suspect, as those of iterations "
        f"{join(list(fault.suspect))} are: {fault.why}; "
        f"{other}, --ckpt-step {iteration} loads this one"
    )


def iteration_to_load(directory: Directory) -> int | None:
    """Return the tracker's iteration, if any. Raises ValueError for a missing or suspect
    checkpoint.
    """
    iteration = existing_iteration(directory)
    if iteration is not None:
        refuse_suspect(directory, iteration)
    return iteration


def fault_note(directory: Directory, iteration: int) -> str | None:
    fault = read_fault(directory)
    if fault is None or iteration > fault.iteration:
        return None
    kind = "suspect" if iteration in fault.suspect else "not suspect"
    return (
        f"note: an earlier run ended after iteration {fault.iteration}: {fault.why}; "
        f"iteration {iteration} is {kind}"
    )


def forgive(directory: Directory, iteration: int) -> None:
    """Remove `iteration`, just saved, from the suspects; remove the record with the last suspect."""
    path = Path(directory) / FAULT
    if not path.exists():
        return
    rest = [number for number in suspects(directory) if number != iteration]
    fault = read_fault(directory) if rest else None
    if fault is None:
        path.unlink()
    else:
        write_text(path, json.dumps({**asdict(fault), "suspect": rest}) + "\n")


def kept_for_trust(
    directory: Directory, state: dict[str, object], numbers: list[int]
) -> int | None:
    """Return the newest checkpoint with agreeing replicas, exempt from --keep-last and
    --save-retain-interval.

    None if the state just saved agreed or has no replicas.
    """
    if state.get(REPLICAS) != NOT_COMPARED:
        return None
    return newest_agreed(directory, numbers)
